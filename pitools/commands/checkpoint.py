"""`pit checkpoint`: list, verify and prune the checkpoints of a run."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands.options import format_option, run_argument, site_option
from pitools.core.errors import DataError, UsageError
from pitools.core.output import Output
from pitools.launch.run_lookup import find_run_dir

_LIST_COLUMNS = ("step", "state", "format", "world_size", "files", "bytes", "reason", "path", "t")
_PRUNE_COLUMNS = ("step", "state", "reason", "path")
_CHECK_COLUMNS = ("checkpoint", "path", "problem", "expected", "got")


@click.group()
def group() -> None:
    """List, check and prune checkpoints. RUN is a run's id or folder, or a folder of checkpoints."""


@group.command("list")
@run_argument()
@site_option
@format_option
def list_command(run: str, site_name: str, form: str) -> None:
    """List checkpoints, newest first: complete, damaged and quarantined ones, and leftovers of killed saves.

    Checks names, sizes and manifests only; `check` reads every byte.
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
@click.option("--step", type=click.IntRange(0), help="Only the checkpoint of this step.")
@click.option(
    "--quarantine",
    is_flag=True,
    help="Move to quarantine/, with the reason, checkpoints that are damaged, or still unreadable after 3 s.",
)
@click.option(
    "--threads", type=click.IntRange(1, 64), help="Files read in parallel (default: one per core, at most 8)."
)
@site_option
@format_option
def check(run: str, step: int | None, quarantine: bool, threads: int | None, site_name: str, form: str) -> int:
    """Compare every byte with the manifests: one record per finding, then a summary. Exit 1 on findings.

    RUN may also be one checkpoint, `…/step_<n>`.
    """
    from pitools.checkpoint.store import layout
    from pitools.checkpoint.store.check_folder import FolderCheck, check_folder

    folder, named_step = _checkpoint_dir(run, site_name)
    if named_step is not None and step not in (None, named_step):
        raise UsageError(f"--step {step} of the checkpoint of step {named_step}", where=run, hint="give one of both")
    steps = layout.listed_steps(folder)
    selected_step = step if named_step is None else named_step
    if selected_step is not None and selected_step not in steps:
        raise UsageError(f"no checkpoint of step {selected_step}", where=str(folder), hint=f"pit checkpoint list {run}")
    summary: FolderCheck | None = None
    with Output(form, _CHECK_COLUMNS, ends_with_reader=not quarantine) as out:
        for record in check_folder(
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
@click.option("--keep-last", type=click.IntRange(1), default=3, show_default=True, help="Keep this many of the newest.")
@click.option("--keep-every", type=click.IntRange(0), default=0, help="Also keep steps that are multiples of this.")
@click.option("--dry-run", is_flag=True, help="Only show the checkpoints that would be removed.")
@site_option
@format_option
def prune(run: str, keep_last: int, keep_every: int, dry_run: bool, site_name: str, form: str) -> int:
    """Remove old checkpoints, and leftovers of killed saves. Keeps the newest good one, after reading its bytes.

    Also keeps checkpoints that a link beside them names (`ln -s step_400 best`), those that another process reads (on
    another node: not on Lustre with localflock, or NFS with nolock), and those newer than the newest good one, which
    are damaged: see `check --quarantine`. Exit 1 if a checkpoint could not be removed; 5, and removes nothing, if none
    is good.
    """
    from pitools.checkpoint.store import check_folder, layout, lookup, retention

    folder, named_step = _checkpoint_dir(run, site_name)
    if named_step is not None:
        raise UsageError("give the run, or the folder of its checkpoints", where=run)
    good = check_folder.newest_good_step(folder)
    kept = {step: "not good" for step in lookup.complete_steps(folder) if good is None or step > good}
    if good is not None:
        kept[good] = "the newest good one"
    elif layout.listed_steps(folder):
        hint = f"for the problems: pit checkpoint check {run}"
        raise DataError("no checkpoint is good: nothing was removed", where=str(folder), hint=hint)
    pruned = retention.prune_checkpoints(folder, keep_last, keep_every, kept_steps=kept, dry_run=dry_run)
    with Output(form, _PRUNE_COLUMNS) as out:
        for record in pruned:
            out(record)
    if not dry_run and (removed := retention.remove_leftovers(folder)):
        click.echo(f"pit: removed the leftovers of {len(removed)} killed save{'s' * (len(removed) > 1)}", err=True)
    return 1 if any(record.state == "failed" for record in pruned) else 0


def _checkpoint_dir(run: str, site_name: str) -> tuple[Path, int | None]:
    """Return the folder of checkpoints, and the step if `run` names one checkpoint."""
    from pitools.checkpoint.store import layout, owner

    path = Path(run).absolute()
    if path.is_dir() and not (path / "plan.json").is_file():
        if (step := layout.step_of(path)) is not None:
            return path.parent, step
        if layout.listed_steps(path) or (path / owner.OWNER_FILE).is_file() or (path / layout.QUARANTINE).is_dir():
            return path, None
        hint = "give a run's id or folder, its checkpoints/, or one step_<n> of them"
        raise UsageError("neither a run nor a folder of checkpoints", where=str(path), hint=hint)
    return find_run_dir(run, site_name) / "checkpoints", None
