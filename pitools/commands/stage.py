"""`pit stage`, also `pit-stage`: move dataset versions to a node's own disk, verified."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pitools.commands import stage_cache
from pitools.commands.options import format_option
from pitools.commands.stage_options import bytes_of, choice_options, place, readers_option, stoppable, to_option
from pitools.commands.stage_sync import sync
from pitools.core import units
from pitools.core.errors import UsageError
from pitools.core.output import Output

if TYPE_CHECKING:
    from pitools.core.progress import Advance
    from pitools.stage.cache.lock import Holder
    from pitools.stage.choose import Store
    from pitools.stage.fanout.group import Group
    from pitools.stage.plan import Work
    from pitools.stage.run import Stage
    from pitools.store.manifest import Manifest

_RUN_COLUMNS = ("dataset", "version", "state", "files", "bytes", "copied_bytes", "wall_s", "path")
_PLAN_COLUMNS = ("dataset", "version", "state", "files", "copy_bytes", "free_bytes", "fits", "path")


@click.group("stage", context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Move datasets to a node's own NVMe, verified; a reader sees a whole dataset or none."""


@group.command()
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@to_option(required=True)
@choice_options
@format_option
def plan(sources: tuple[str, ...], root: Path, arrays: str, steps: str, episodes: str, form: str) -> int:
    """What `run` would copy, and whether it fits. Exit 1 when it does not.

    SOURCE is as for `run`.
    """
    return _plan(list(_work(sources, root, (arrays, steps, episodes))), form)


def _plan(work: list[Work], form: str) -> int:
    from pitools.stage import plan as planning

    fits = True
    with Output(form, _PLAN_COLUMNS) as out:
        for record in planning.plan(work):
            out(record)
            fits = fits and record.fits
    return 0 if fits else 1


@group.command()
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@to_option(required=False)
@choice_options
@click.option("--dry-run", is_flag=True, help="Only say what would be done, as `plan` does.")
@click.option("--verify", is_flag=True, help="Read a copy that is already there, and replace it if it is damaged.")
@click.option(
    "--fanout",
    is_flag=True,
    help="In a job step, one task a node: read the source once for all nodes, and pass it on between them.",
)
@readers_option
@click.option("--bwlimit", metavar="SIZE", callback=bytes_of, help="The most bytes a second to read, such as 200MiB.")
@click.option(
    "--quota",
    metavar="SIZE",
    callback=bytes_of,
    envvar="PIT_STAGE_QUOTA",
    help="The most that ROOT may hold; the least recently used sets go first.",
)
@click.option(
    "--min-free",
    metavar="SIZE",
    callback=bytes_of,
    envvar="PIT_STAGE_MIN_FREE",
    help="What must stay free on ROOT's disk; the least recently used sets go first.",
)
@click.option("--timeout", default="1h", show_default=True, metavar="TIME", help="Wait for another process this long.")
@click.option("--receipt", type=place, metavar="FILE", help="Also write the records here, when all are staged.")
@format_option
def run(
    sources: tuple[str, ...], root: Path | None, arrays: str, steps: str, episodes: str, dry_run: bool,
    verify: bool, fanout: bool, readers: int | None,
    bwlimit: int | None, quota: int | None, min_free: int | None, timeout: str, receipt: Path | None, form: str,
) -> int:  # fmt: skip
    """Copy dataset versions to ROOT/objects/<version>, verified; safe to repeat.

    SOURCE is <root>/<name>/<version>, or <root>/<name> where there is one version, or any Zarr store; s3://, gs://
    and az:// of these; or - for `plan`'s records. An interrupted copy goes on where it stopped.
    """
    import msgspec

    from pitools.core.files import os_error, write_atomic
    from pitools.stage.cache.space import Limits
    from pitools.stage.choose import Store
    from pitools.stage.run import stage

    work = _work(sources, root, (arrays, steps, episodes))
    if dry_run:
        return _plan(list(work), form)
    timeout_s = units.seconds(timeout)
    limits = Limits(quota_bytes=quota, min_free_bytes=min_free or 0)
    group = _group() if fanout else None
    lines = []
    if receipt:
        try:
            receipt.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # before the copy, which may take an hour
            raise os_error(error, receipt.parent) from error
    with stoppable(), Output(form, _RUN_COLUMNS) as out:
        for what, to, _ in work:
            with _bar(what.manifest) as (advance, finished, waiting):
                how: Any = {
                    "verify": verify, "readers": readers or 0, "bytes_per_s": bwlimit or 0, "timeout_s": timeout_s,
                    "limits": limits, "advance": advance, "finished": finished, "waiting": waiting,
                }  # fmt: skip
                record = (
                    _stage_store(what, to, group, how)
                    if isinstance(what, Store)
                    else stage(what, to, group=group, **how)
                )
            out(record)
            lines.append(msgspec.json.encode(record) + b"\n")
        if receipt:
            write_atomic(receipt, b"".join(lines))
    return 0


@contextmanager
def _bar(manifest: Manifest) -> Iterator[tuple[Advance, Callable[[int], None], Callable[[Holder], None]]]:
    """What shows progress: of bytes, of files, and of another process that is waited for."""
    from pitools.core.progress import bar
    from pitools.stage.cache.lock import who

    told = 0

    with bar(manifest.name, manifest.total_bytes, parts=len(manifest.files)) as shown:

        def waiting(holder: Holder) -> None:
            nonlocal told
            if holder.pid != told and not sys.stderr.isatty():
                click.echo(f"waiting for another process that stages this version: {who(holder)}", err=True)
                told = holder.pid
            shown.done = holder.done_bytes
            shown(0)

        def finished(_: int) -> None:
            shown.part()

        yield shown, finished, waiting


def _group() -> Group:
    from pitools.stage.fanout import group as groups

    return groups.find(os.environ)


def _stage_store(store: Store, to: Path, group: Group | None, how: dict[str, Any]) -> Stage:
    from pitools.stage.plain.run import stage_store

    if group:
        what = "a store without a manifest cannot be passed on between nodes: nothing says what its bytes should be"
        raise UsageError(what, where="--fanout", hint="stage it once to shared storage, then from there")
    return stage_store(store, to, note=_note, **how)


def _note(text: str) -> None:
    click.echo(f"pit-stage: note: {text}", err=True)


def _work(sources: tuple[str, ...], root: Path | None, choice: tuple[str, str, str]) -> Iterator[Work]:
    """What to stage where, from the command line or from plans on stdin."""
    from pitools.stage import plan as planning
    from pitools.stage.choose import Choice, resolve

    arrays, steps, episodes = choice
    if "-" in sources:
        if len(sources) > 1 or root or any(choice):
            raise UsageError("- stands alone: the plans say what goes where", hint="pit-stage plan … | pit-stage run -")
        for record in planning.read(sys.stdin):
            yield planning.Work(resolve(record.source, record.choice, _note), Path(record.root), record.choice)
        return
    if root is None:
        raise UsageError("where to?", where="--to", hint="name the staging folder on this node, such as --to /nvme/pit")
    chosen = Choice(tuple(name for name in arrays.split(",") if name), steps, episodes)
    for text in sources:
        yield planning.Work(resolve(text, chosen, _note), root, chosen)


for command in (stage_cache.list_, stage_cache.check, stage_cache.pin, stage_cache.unpin, stage_cache.evict, sync):
    group.add_command(command)
