"""`pit checkpoint`: what a run could go on from, whether it is good, and how much of it stays."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands.options import format_option, run_argument, site_option
from pitools.commands.run_lookup import find_run_dir
from pitools.core.errors import UsageError
from pitools.core.output import Output

_LIST_COLUMNS = ("step", "state", "format", "world_size", "files", "bytes", "reason", "path", "t")
_PRUNE_COLUMNS = ("step", "state", "reason", "path")
_CHECK_COLUMNS = ("checkpoint", "path", "problem", "expected", "got")


@click.group()
def group() -> None:
    """What a run could go on from: list, check, prune. RUN is a run's id or folder, or a folder of checkpoints."""


@group.command("list")
@run_argument()
@site_option
@format_option
def list_command(run: str, site_name: str, form: str) -> None:
    """List checkpoints, newest first: whole and damaged ones, what is in quarantine, what killed saves left.

    Names, sizes and manifests are looked at; `check` reads the bytes.
    """
    from pitools.checkpoint.store.listing import list_checkpoints

    folder, _ = _checkpoint_dir(run, site_name)
    with Output(form, _LIST_COLUMNS) as out:
        checkpoints = list(list_checkpoints(folder))
        for record in checkpoints:
            out(record)
    if not checkpoints:
        click.echo(f"pit: no checkpoints in {folder}", err=True)


@group.command()
@run_argument()
@click.option("--step", type=click.IntRange(0), help="Only the checkpoint after so many steps.")
@click.option("--quarantine", is_flag=True, help="Move what is damaged to quarantine/, with the reason.")
@click.option("--threads", type=click.IntRange(1, 64), help="Files read at once (default: one per core, 8 at most).")
@site_option
@format_option
def check(run: str, step: int | None, quarantine: bool, threads: int | None, site_name: str, form: str) -> int:
    """Read every byte and compare it with the manifest: one record per finding, then a summary. Exit 1 on findings.

    RUN may also be one checkpoint, `…/step_<n>`.
    """
    from pitools.checkpoint.store import layout
    from pitools.checkpoint.store.check_folder import FolderCheck
    from pitools.checkpoint.store.check_folder import check_folder as judge

    folder, named_step = _checkpoint_dir(run, site_name)
    steps = layout.listed_steps(folder)
    selected_step = step if named_step is None else named_step
    if selected_step is not None and selected_step not in steps:
        raise UsageError(f"no checkpoint of step {selected_step}", where=str(folder), hint=f"pit checkpoint list {run}")
    summary: FolderCheck | None = None
    with Output(form, _CHECK_COLUMNS) as out:
        for record in judge(
            folder, steps if selected_step is None else [selected_step], threads=threads or 0, move_aside=quarantine
        ):
            if isinstance(record, FolderCheck):
                summary = record
            else:
                out(record)
    assert summary is not None
    with Output(form) as out:  # its own table: other columns
        out(summary)
    return 1 if summary.findings else 0


@group.command()
@run_argument()
@click.option("--keep-last", type=click.IntRange(1), default=3, show_default=True, help="So many of the newest stay.")
@click.option("--keep-every", type=click.IntRange(0), default=0, help="And those whose steps this divides.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and change nothing.")
@site_option
@format_option
def prune(run: str, keep_last: int, keep_every: int, dry_run: bool, site_name: str, form: str) -> int:
    """Remove old checkpoints, and what killed saves left. The newest that is good stays: its bytes are read first.

    What another process reads stays too, and what is damaged: see `check --quarantine`. Exit 1 when one that was to go
    could not be removed.
    """
    from pitools.checkpoint.store import check_folder, retention

    folder, named_step = _checkpoint_dir(run, site_name)
    if named_step is not None:
        raise UsageError("give the run, or the folder of its checkpoints", where=run)
    good = check_folder.newest_good_step(folder)
    keep = () if good is None else (good,)
    pruned = retention.prune_checkpoints(folder, keep_last, keep_every, kept_steps=keep, dry_run=dry_run)
    with Output(form, _PRUNE_COLUMNS) as out:
        for record in pruned:
            out(record)
    if not dry_run and (removed := retention.remove_leftovers(folder)):
        click.echo(f"pit: removed what {len(removed)} killed save{'s' * (len(removed) > 1)} left", err=True)
    return 1 if any(record.state == "failed" for record in pruned) else 0


def _checkpoint_dir(run: str, site_name: str) -> tuple[Path, int | None]:
    """The folder of checkpoints, and the step where one of them was named."""
    from pitools.checkpoint.store import layout, owner

    path = Path(run).absolute()
    if path.is_dir() and not (path / "plan.json").is_file():
        if (step := layout.step_of(path)) is not None:
            return path.parent, step
        if layout.listed_steps(path) or (path / owner.FILE_NAME).is_file() or (path / layout.QUARANTINE).is_dir():
            return path, None
        hint = "give a run's id or folder, its checkpoints/, or one step_<n> of them"
        raise UsageError("neither a run nor a folder of checkpoints", where=str(path), hint=hint)
    return find_run_dir(run, site_name) / "checkpoints", None
