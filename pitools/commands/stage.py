"""`pit stage`, also `pit-stage`: move dataset versions to a node's own disk, verified."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pitools import __version__
from pitools.commands import stage_cache
from pitools.commands.options import dataset_argument, format_option
from pitools.commands.stage_options import (
    FILE_TYPE,
    SOURCE_TYPE,
    duration_callback,
    limit_options,
    print_note,
    readers_option,
    report_eviction,
    selection_options,
    size_callback,
    stop_on_signals,
    to_option,
)
from pitools.commands.stage_sync import sync
from pitools.core.errors import ClusterError, NoSpace, TryLater, UsageError
from pitools.core.output import Output

if TYPE_CHECKING:
    from pitools.core.locks import LockOwner
    from pitools.core.progress import Advance
    from pitools.stage.cache.space import RootLimits
    from pitools.stage.fanout.group import Group
    from pitools.stage.request import StageRequest
    from pitools.stage.resolve import PlainStore
    from pitools.stage.stage import StageResult
    from pitools.store.manifest import Manifest

_RUN_COLUMNS = ("dataset", "version", "state", "files", "bytes", "copied_bytes", "wall_s", "path")
_PLAN_COLUMNS = ("dataset", "version", "state", "files", "copy_bytes", "evict_bytes", "free_bytes", "fits", "path")
_EXITS = """Exit codes: 0 done, 1 negative result, 2 usage, 3 wrong configuration file, 4 refused by the system, 5 data
does not match its manifest, 75 no space, or locked by another process: try again later."""


@click.group("stage", context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXITS)
@click.version_option(__version__)
def group() -> None:
    """Copy datasets to a node's local NVMe, verified. A dataset appears there only when complete."""


@group.command(epilog=_EXITS)
@dataset_argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=SOURCE_TYPE)
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
    """Show the bytes that `run` would copy and evict, and whether they fit. Exit 1 if they do not.

    SOURCE is <root>/<name>/<version> or its first 6 digits, <root>/<name> for the newest version that is not retired,
    <root>/<name>@TAG, or any Zarr store; s3://, gs:// and az:// of a version or a store.

    \b
      set -o pipefail; pit-stage plan /data/pick --to /nvme/pit | pit-stage run -
    """
    return _plan(_stage_requests(sources, root, arrays, steps, episodes, _limits(quota, min_free)), form)


def _plan(requests: list[StageRequest], form: str) -> int:
    from pitools.stage import plan as planning

    fits = True
    with Output(form, _PLAN_COLUMNS) as out:
        for record in planning.plan_requests(requests):
            out(record)
            fits = fits and record.fits
    return 0 if fits else 1


def _limits(quota: int | None, min_free: int | None) -> RootLimits:
    from pitools.stage.cache.space import RootLimits

    return RootLimits(quota_bytes=quota, min_free_bytes=min_free or 0)


@group.command(epilog=_EXITS)
@dataset_argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=SOURCE_TYPE)
@to_option(required=False)
@selection_options
@click.option("--dry-run", is_flag=True, help="Only show the plan, as `plan` does.")
@click.option(
    "--verify", is_flag=True, help="Verify an existing copy too, and replace it if it is damaged; link no files."
)
@click.option(
    "--fanout",
    is_flag=True,
    help="In a job step with one task per node: read the source once, and pass the data on between the nodes. "
    "The job's script exports a secret, PIT_JOB_SECRET, before srun.",
)
@readers_option
@click.option(
    "--bwlimit",
    metavar="SIZE",
    callback=size_callback,
    help="Limit of the read rate, in bytes per second, such as 200MiB.",
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
@click.option(
    "--receipt",
    "receipts",
    type=FILE_TYPE,
    multiple=True,
    metavar="FILE",
    help="Also write the records to FILE, when all are staged; or give it once for each source.",
)
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
    receipts: tuple[Path, ...],
    form: str,
) -> int:
    """Copy dataset versions to ROOT/objects/<version>, verified; safe to repeat.

    SOURCE is <root>/<name>/<version> or its first 6 digits, <root>/<name> for the newest version that is not retired,
    <root>/<name>@TAG, or any Zarr store; s3://, gs:// and az:// of a version or a store; or - for `plan`'s records.
    Several sources are all resolved, then staged one after another, up to the first failure. After an interruption, run
    the same command again: files that were whole are kept. Room is needed for 8 MiB more than the set.

    \b
      pit-stage run /data/pick --to '/nvme/{user}/pit' --min-free 100GiB
      pit-stage run /data/pick --to /nvme/pit --arrays 'action,obs/*_image' --episodes 0-99
      pit-stage run s3://lab/pick.zarr --to /nvme/pit --bwlimit 200MiB
    """
    import msgspec

    from pitools.core.fs import write_atomic
    from pitools.stage.cache.lease import leased_set
    from pitools.stage.resolve import PlainStore
    from pitools.stage.stage import stage_version

    requests = _stage_requests(sources, root, arrays, steps, episodes, _limits(quota, min_free), planned_fits=dry_run)
    if dry_run:
        return _plan(requests, form)
    group = _fanout_group() if fanout else None
    lines = []
    if len(receipts) not in (0, 1, len(requests)):
        message = f"{len(receipts)} receipts (expected one, or one for each of the {len(requests)} sources)"
        raise UsageError(message, where="--receipt", hint="give one: it holds all records")
    for receipt in receipts:
        _check_receipt_writable(receipt)
    with stop_on_signals(), _report_interrupt(), ExitStack() as leases, Output(form, _RUN_COLUMNS) as out:
        for source, request_root, _, limits in requests:
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
                    "on_evicted": report_eviction,
                }
                record = (
                    _stage_store(source, request_root, group, settings)
                    if isinstance(source, PlainStore)
                    else stage_version(source, request_root, group=group, **settings)
                )
            with suppress(ClusterError, TryLater):  # a root that cannot be leased can still be read
                # Until the end, when it is touched: the next source must not evict this one.
                leases.enter_context(leased_set(Path(record.path)))
            out(record)
            lines.append(msgspec.json.encode(record) + b"\n")
        texts = lines if len(receipts) > 1 else [b"".join(lines)]
        for receipt, data in zip(receipts, texts, strict=False):
            write_atomic(receipt, data)
    return 0


def _check_receipt_writable(receipt: Path) -> None:
    """Raise before the copy, which may take an hour, if the receipt cannot be written."""
    from pitools.core.fs import from_os_error

    if receipt.is_dir():
        raise UsageError(f"{receipt} is a folder, not a file", where="--receipt", hint=f"{receipt}/stage.jsonl")
    try:
        receipt.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=receipt.parent).close()
    except OSError as error:
        raise from_os_error(error, receipt.parent) from error


@contextmanager
def _report_interrupt() -> Iterator[None]:
    """Note on SIGINT or SIGTERM that finished files are kept and the command can be repeated."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        print_note("stopped; finished files are kept, and the same command resumes the copy")
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


def _stage_store(store: PlainStore, root: Path, group: Group | None, settings: dict[str, Any]) -> StageResult:
    from pitools.stage.plain_store.stage_store import stage_store

    if group:
        message = "a store without a manifest cannot be passed on between nodes: its bytes cannot be verified"
        raise UsageError(message, where="--fanout", hint="stage it once to shared storage, then from there")
    return stage_store(store, root, warn=print_note, **settings)


def _stage_requests(
    sources: tuple[str, ...],
    root: Path | None,
    arrays: tuple[str, ...],
    steps: str,
    episodes: str,
    limits: RootLimits,
    *,
    planned_fits: bool = True,
) -> list[StageRequest]:
    """Return the requests of the command line, or of plans on stdin. All are resolved before any is staged.

    planned_fits: accept plans that do not fit.
    """
    from pitools.stage import plan as planning
    from pitools.stage.request import resolve_request
    from pitools.stage.resolve import parse_selection

    if "-" not in sources:
        if root is None:
            example = f", perhaps --to {sources[-1]}" if len(sources) > 1 else ", such as --to '/nvme/{user}/pit'"
            hint = f"name the staging folder on this node{example}"
            raise UsageError("staging folder: missing", where="--to", hint=hint)
        selection = parse_selection(arrays, steps, episodes)
        return [resolve_request(location, root, selection, limits, print_note) for location in sources]
    if len(sources) > 1 or root or arrays or steps or episodes:
        message = "- must be the only source, and for `run`: its plans name the targets"
        raise UsageError(message, where="SOURCE", hint="pit-stage plan … | pit-stage run -")
    plans = planning.read_plans(sys.stdin)
    for record in plans if not planned_fits else ():
        if not record.fits:
            message = f"{record.dataset}: the plan does not fit (bytes to copy: {record.copy_bytes})"
            raise NoSpace(message, where=record.root, hint="make room, then plan again: pit-stage evict")
    return [
        resolve_request(record.source, Path(record.root), record.selection, record.limits.stricter(limits), print_note)
        for record in plans
    ]


for command in (
    stage_cache.list_command,
    stage_cache.check,
    stage_cache.pin,
    stage_cache.unpin,
    stage_cache.evict,
    sync,
):
    group.add_command(command)
