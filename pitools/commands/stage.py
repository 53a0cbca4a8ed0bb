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
    FILE_TYPE,
    SOURCE_TYPE,
    duration_callback,
    limit_options,
    readers_option,
    selection_options,
    size_callback,
    stop_on_signals,
    to_option,
)
from pitools.commands.stage_sync import sync
from pitools.core.errors import UsageError
from pitools.core.output import Output

if TYPE_CHECKING:
    from pitools.core.locks import LockOwner
    from pitools.core.progress import Advance
    from pitools.stage.cache.disk_quota import QuotaLimits
    from pitools.stage.fanout.group import Group
    from pitools.stage.plan import StageRequest
    from pitools.stage.resolve import UnmanagedStore
    from pitools.stage.stage import StageResult
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
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=SOURCE_TYPE)
@to_option(required=True)
@selection_options
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
    """Show what `run` would copy and evict, and whether it fits then. Exit 1 when it does not.

    SOURCE is <root>/<name>/<version> or its first 6 digits, <root>/<name> for the newest version that is not retired,
    <root>/<name>@TAG, or any Zarr store; s3://, gs:// and az:// of a version or a store.

    \b
      set -o pipefail; pit-stage plan /data/pick --to /nvme/pit | pit-stage run -
    """
    return _plan(list(_stage_requests(sources, root, arrays, steps, episodes)), _limits(quota, min_free), form)


def _plan(requests: list[StageRequest], limits: QuotaLimits, form: str) -> int:
    from pitools.stage import plan as planning

    fits = True
    with Output(form, _PLAN_COLUMNS) as out:
        for record in planning.plan_requests(requests, limits):
            out(record)
            fits = fits and record.fits
    return 0 if fits else 1


def _limits(quota: int | None, min_free: int | None) -> QuotaLimits:
    from pitools.stage.cache.disk_quota import QuotaLimits

    return QuotaLimits(quota_bytes=quota, min_free_bytes=min_free or 0)


@group.command(epilog=_EXITS)
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=SOURCE_TYPE)
@to_option(required=False)
@selection_options
@click.option("--dry-run", is_flag=True, help="Only say what would be done, as `plan` does.")
@click.option("--verify", is_flag=True, help="Read a copy that is already there, and replace it if it is damaged.")
@click.option(
    "--fanout",
    is_flag=True,
    help="In a job step, one task a node: read the source once for all nodes, and pass it on between them. "
    "The job's script exports a secret, PIT_NONCE, before srun.",
)
@readers_option
@click.option(
    "--bwlimit", metavar="SIZE", callback=size_callback, help="The most bytes a second to read, such as 200MiB."
)
@limit_options
@click.option(
    "--timeout",
    default="1h",
    show_default=True,
    metavar="TIME",
    callback=duration_callback,
    help="Wait this long for another process that stages the same version: 90s, 30m; a bare number is minutes.",
)
@click.option("--receipt", type=FILE_TYPE, metavar="FILE", help="Also write the records here, when all are staged.")
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
    from pitools.stage.resolve import UnmanagedStore
    from pitools.stage.stage import stage_version

    requests = _stage_requests(sources, root, arrays, steps, episodes)
    limits = _limits(quota, min_free)
    if dry_run:
        return _plan(list(requests), limits, form)
    group = _fanout_group() if fanout else None
    lines = []
    if receipt:
        _check_receipt_writable(receipt)
    with stop_on_signals(), _report_interrupt(), Output(form, _RUN_COLUMNS) as out:
        for source, request_root, _ in requests:
            with _bar(source.manifest) as (advance, finished, waiting):
                settings: Any = {
                    "verify": verify,
                    "readers": readers or 0,
                    "bytes_per_s": bwlimit or 0,
                    "timeout_s": timeout,
                    "limits": limits,
                    "advance": advance,
                    "on_file": finished,
                    "on_wait": waiting,
                }
                record = (
                    _stage_store(source, request_root, group, settings)
                    if isinstance(source, UnmanagedStore)
                    else stage_version(source, request_root, group=group, **settings)
                )
            out(record)
            lines.append(msgspec.json.encode(record) + b"\n")
        if receipt:
            write_atomic(receipt, b"".join(lines))
    return 0


def _check_receipt_writable(receipt: Path) -> None:
    """Find out whether it can be written before the copy, which may take an hour."""
    from pitools.core.fs import from_os_error

    if receipt.is_dir():
        raise UsageError(f"{receipt} is a folder, not a file", where="--receipt", hint=f"{receipt}/stage.jsonl")
    try:
        receipt.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise from_os_error(error, receipt.parent) from error


@contextmanager
def _report_interrupt() -> Iterator[None]:
    """Note on SIGINT or SIGTERM that finished files are kept and the command can be repeated."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        _print_note("stopped; files that were done are kept, and the same command goes on from there")
        raise


@contextmanager
def _bar(manifest: Manifest) -> Iterator[tuple[Advance, Callable[[int], None], Callable[[LockOwner], None]]]:
    """Yield the callbacks of a progress bar: bytes done, file done, and waiting for another process's lock."""
    from pitools.core.locks import describe_owner
    from pitools.core.progress import progress_bar

    shown_pid = 0

    with progress_bar(manifest.name, manifest.total_bytes, parts=len(manifest.files)) as bar:

        def on_wait(holder: LockOwner) -> None:
            nonlocal shown_pid
            if holder.pid != shown_pid and not sys.stderr.isatty():
                click.echo(f"waiting for another process that stages this version: {describe_owner(holder)}", err=True)
                shown_pid = holder.pid
            bar.done = holder.done_bytes
            bar(0)

        def on_file(_: int) -> None:
            bar.add_file()

        yield bar, on_file, on_wait


def _fanout_group() -> Group:
    from pitools.stage.fanout import group as groups

    return groups.find_group(os.environ)


def _stage_store(store: UnmanagedStore, root: Path, group: Group | None, settings: dict[str, Any]) -> StageResult:
    from pitools.stage.unmanaged.stage_store import stage_store

    if group:
        message = "a store without a manifest cannot be passed on between nodes: nothing says what its bytes should be"
        raise UsageError(message, where="--fanout", hint="stage it once to shared storage, then from there")
    return stage_store(store, root, warn=_print_note, **settings)


def _print_note(text: str) -> None:
    click.echo(f"pit-stage: note: {text}", err=True)


def _stage_requests(
    sources: tuple[str, ...], root: Path | None, arrays: tuple[str, ...], steps: str, episodes: str
) -> Iterator[StageRequest]:
    """Yield the requests of the command line, or of plans on stdin."""
    from pitools.stage import plan as planning
    from pitools.stage.resolve import parse_selection

    if "-" in sources:
        if len(sources) > 1 or root or arrays or steps or episodes:
            message = "- stands alone, and for `run`: the plans say what goes where"
            raise UsageError(message, where="SOURCE", hint="pit-stage plan … | pit-stage run -")
        for record in planning.read_plans(sys.stdin):
            yield planning.resolve_request(record.source, Path(record.root), record.selection, _print_note)
        return
    if root is None:
        example = f", perhaps --to {sources[-1]}" if len(sources) > 1 else ", such as --to '/nvme/{user}/pit'"
        raise UsageError("no staging folder", where="--to", hint=f"name the staging folder on this node{example}")
    selection = parse_selection(arrays, steps, episodes)
    for location in sources:
        yield planning.resolve_request(location, root, selection, _print_note)


for command in (
    stage_cache.list_command,
    stage_cache.check,
    stage_cache.pin,
    stage_cache.unpin,
    stage_cache.evict,
    sync,
):
    group.add_command(command)
