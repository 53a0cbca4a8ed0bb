"""`pit stage`, also `pit-stage`: move dataset versions to a node's own disk, verified."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pitools import __version__
from pitools.commands import stage_cache
from pitools.commands.options import format_option
from pitools.commands.stage_options import (
    bytes_of,
    choice_options,
    limit_options,
    place_of_file,
    readers_option,
    seconds_of,
    source,
    stoppable,
    to_option,
)
from pitools.commands.stage_sync import sync
from pitools.core.errors import UsageError
from pitools.core.output import Output

if TYPE_CHECKING:
    from pitools.core.lock import Holder
    from pitools.core.progress import Advance
    from pitools.stage.cache.disk_quota import Limits
    from pitools.stage.fanout.group import Group
    from pitools.stage.plan import Work
    from pitools.stage.resolve import Store
    from pitools.stage.stage import Stage
    from pitools.store.manifest import Manifest

_RUN_COLUMNS = ("dataset", "version", "state", "files", "bytes", "copied_bytes", "wall_s", "path")
_PLAN_COLUMNS = ("dataset", "version", "state", "files", "copy_bytes", "evict_bytes", "free_bytes", "fits", "path")
_EXITS = """Exit codes: 0 done, 1 the answer is no, 2 usage, 3 a file that a human wrote is wrong, 4 refused, 5 data is
not what it claims, 75 no room or another process is at it: try again later."""


@click.group("stage", context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXITS)
@click.version_option(__version__)
def group() -> None:
    """Move datasets to a node's own NVMe, verified; a reader sees a whole dataset or none."""


@group.command(epilog=_EXITS)
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=source)
@to_option(required=True)
@choice_options
@limit_options
@format_option
def plan(
    sources: tuple[str, ...],
    root: Path,
    arrays: tuple[str, ...],
    steps: str,
    episodes: str,
    quota: int | None,
    min_free: int | None,
    form: str,
) -> int:
    """What `run` would copy and evict, and whether it fits then. Exit 1 when it does not.

    SOURCE is <root>/<name>/<version> or its first 6 digits, <root>/<name> for the newest version that is not retired,
    <root>/<name>@TAG, or any Zarr store; s3://, gs:// and az:// of a version or a store.

    \b
      set -o pipefail; pit-stage plan /data/pick --to /nvme/pit | pit-stage run -
    """
    return _plan(list(_work(sources, root, arrays, steps, episodes)), _limits(quota, min_free), form)


def _plan(work: list[Work], limits: Limits, form: str) -> int:
    from pitools.stage import plan as planning

    fits = True
    with Output(form, _PLAN_COLUMNS) as out:
        for record in planning.plan(work, limits):
            out(record)
            fits = fits and record.fits
    return 0 if fits else 1


def _limits(quota: int | None, min_free: int | None) -> Limits:
    from pitools.stage.cache.disk_quota import Limits

    return Limits(quota_bytes=quota, min_free_bytes=min_free or 0)


@group.command(epilog=_EXITS)
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=source)
@to_option(required=False)
@choice_options
@click.option("--dry-run", is_flag=True, help="Only say what would be done, as `plan` does.")
@click.option("--verify", is_flag=True, help="Read a copy that is already there, and replace it if it is damaged.")
@click.option(
    "--fanout",
    is_flag=True,
    help="In a job step, one task a node: read the source once for all nodes, and pass it on between them. "
    "The job's script exports a secret, PIT_NONCE, before srun.",
)
@readers_option
@click.option("--bwlimit", metavar="SIZE", callback=bytes_of, help="The most bytes a second to read, such as 200MiB.")
@limit_options
@click.option(
    "--timeout",
    default="1h",
    show_default=True,
    metavar="TIME",
    callback=seconds_of,
    help="Wait this long for another process that stages the same version: 90s, 30m; a bare number is minutes.",
)
@click.option("--receipt", type=place_of_file, metavar="FILE", help="Also write the records here, when all are staged.")
@format_option
def run(
    sources: tuple[str, ...],
    root: Path | None,
    arrays: tuple[str, ...],
    steps: str,
    episodes: str,
    dry_run: bool,
    verify: bool,
    fanout: bool,
    readers: int | None,
    bwlimit: int | None,
    quota: int | None,
    min_free: int | None,
    timeout: int,
    receipt: Path | None,
    form: str,
) -> int:
    """Copy dataset versions to ROOT/objects/<version>, verified; safe to repeat.

    SOURCE is <root>/<name>/<version> or its first 6 digits, <root>/<name> for the newest version that is not retired,
    <root>/<name>@TAG, or any Zarr store; s3://, gs:// and az:// of a version or a store; or - for `plan`'s records.
    Several are staged in turn, up to the first that cannot be. An
    interrupted copy goes on where it stopped when the same command is run again.

    \b
      pit-stage run /data/pick --to '/nvme/{user}/pit' --min-free 100GiB
      pit-stage run /data/pick --to /nvme/pit --arrays 'action,obs/*_image' --episodes 0-99
      pit-stage run s3://lab/pick.zarr --to /nvme/pit --bwlimit 200MiB
    """
    import msgspec

    from pitools.core.fs import write_atomic
    from pitools.stage.resolve import Store
    from pitools.stage.stage import stage

    work = _work(sources, root, arrays, steps, episodes)
    limits = _limits(quota, min_free)
    if dry_run:
        return _plan(list(work), limits, form)
    group = _group() if fanout else None
    lines = []
    if receipt:
        _make_ready(receipt)
    with stoppable(), _told(), Output(form, _RUN_COLUMNS) as out:
        for what, to, _ in work:
            with _bar(what.manifest) as (advance, finished, waiting):
                how: Any = {
                    "verify": verify,
                    "readers": readers or 0,
                    "bytes_per_s": bwlimit or 0,
                    "timeout_s": timeout,
                    "limits": limits,
                    "advance": advance,
                    "finished": finished,
                    "waiting": waiting,
                }
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


def _make_ready(receipt: Path) -> None:
    """Find out whether it can be written before the copy, which may take an hour."""
    from pitools.core.fs import os_error

    if receipt.is_dir():
        raise UsageError(f"{receipt} is a folder, not a file", where="--receipt", hint=f"{receipt}/stage.jsonl")
    try:
        receipt.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise os_error(error, receipt.parent) from error


@contextmanager
def _told() -> Iterator[None]:
    """Whoever stops it, with Ctrl-C or scancel, reads that nothing is lost."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        _note("stopped; files that were done are kept, and the same command goes on from there")
        raise


@contextmanager
def _bar(manifest: Manifest) -> Iterator[tuple[Advance, Callable[[int], None], Callable[[Holder], None]]]:
    """What shows progress: of bytes, of files, and of another process that is waited for."""
    from pitools.core.lock import who
    from pitools.core.progress import bar

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
    from pitools.stage.unmanaged.stage_store import stage_store

    if group:
        what = "a store without a manifest cannot be passed on between nodes: nothing says what its bytes should be"
        raise UsageError(what, where="--fanout", hint="stage it once to shared storage, then from there")
    return stage_store(store, to, note=_note, **how)


def _note(text: str) -> None:
    click.echo(f"pit-stage: note: {text}", err=True)


def _work(
    sources: tuple[str, ...], root: Path | None, arrays: tuple[str, ...], steps: str, episodes: str
) -> Iterator[Work]:
    """What to stage where, from the command line or from plans on stdin."""
    from pitools.stage import plan as planning
    from pitools.stage.resolve import chosen

    if "-" in sources:
        if len(sources) > 1 or root or arrays or steps or episodes:
            what = "- stands alone, and for `run`: the plans say what goes where"
            raise UsageError(what, where="SOURCE", hint="pit-stage plan … | pit-stage run -")
        for record in planning.read(sys.stdin):
            yield planning.work(record.source, Path(record.root), record.choice, _note)
        return
    if root is None:
        given = f", perhaps --to {sources[-1]}" if len(sources) > 1 else ", such as --to '/nvme/{user}/pit'"
        raise UsageError("where to?", where="--to", hint=f"name the staging folder on this node{given}")
    choice = chosen(arrays, steps, episodes)
    for text in sources:
        yield planning.work(text, root, choice, _note)


for command in (stage_cache.list_, stage_cache.check, stage_cache.pin, stage_cache.unpin, stage_cache.evict, sync):
    group.add_command(command)
