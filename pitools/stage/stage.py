"""Stage one version onto this node: copy and verify in one pass, publish by a rename."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import structs

from pitools.core.errors import ClusterError, PitError, TryLater
from pitools.core.fs import from_os_error, fsync_dir
from pitools.core.locks import LockOwner, ReportProgress
from pitools.core.progress import Advance
from pitools.core.record import Record
from pitools.stage.cache import records
from pitools.stage.cache.evict import Eviction
from pitools.stage.cache.inventory import matches_sizes
from pitools.stage.cache.layout import (
    create_root,
    partial_path,
    replace_set,
    require_safe,
    staged_identity,
    staged_path,
    trash,
    version_lock,
)
from pitools.stage.cache.lease import try_lease
from pitools.stage.cache.space import RootLimits
from pitools.stage.copy.copy import CopyOptions, readers_for, syncs_each_file
from pitools.stage.copy.resume import (
    CopyTotals,
    discard_empty_partial,
    discard_partial,
    fill_partial,
    write_manifest_last,
)
from pitools.stage.sources.base import DatasetVersion, Source
from pitools.stage.sources.local import LocalSource
from pitools.stage.verify import matches_content
from pitools.store.publish import fsync_dirs, publish_dir
from pitools.store.version_state import Quarantine

if TYPE_CHECKING:
    from pitools.stage.fanout.group import Group
    from pitools.stage.fanout.session import FanoutSession

StageState = Literal["staged", "present", "repaired"]


class StageResult(Record, frozen=True, kw_only=True, tag="pit.stage-run/1"):
    """The result of staging one version.

    state: `staged` (it was absent), `present` (nothing was copied), `repaired` (a damaged copy was replaced). path: the
    folder to train from. bytes: of all files. copied_bytes: read from the source by this call; peer_bytes: read from
    other nodes; linked_bytes: hard-linked from other versions; resumed_bytes: written by an interrupted call.
    verified_bytes: read and compared with the manifest's digests, or for a plain store with its own checksums.
    """

    dataset: str
    version: str
    source: str
    path: str
    state: StageState
    files: int
    bytes: int
    copied_bytes: int
    verified_bytes: int
    wall_s: float
    node: str
    linked_bytes: int = 0
    resumed_bytes: int = 0
    peer_bytes: int = 0


def stage_version(
    dataset: DatasetVersion,
    root: Path,
    *,
    verify: bool = False,
    known_damaged: tuple[int, int] | None = None,
    readers: int = 0,
    bytes_per_s: float = 0,
    timeout_s: float = 3600,
    limits: RootLimits | None = None,
    shared: bool = False,
    group: Group | None = None,
    advance: Advance = lambda _: None,
    on_file: Callable[[int], None] = lambda _: None,
    on_wait: Callable[[LockOwner], None] = lambda _: None,
    on_evicted: Callable[[Eviction], None] = lambda _: None,
) -> StageResult:
    """Make `<root>/objects/<version>/` hold this version complete. Safe to repeat and to run concurrently.

    A present copy is checked by names and sizes, with `verify` by content. known_damaged: identity of a set that the
    caller has found damaged, which is not read again. readers: threads, 0 for the default.
    bytes_per_s: limit of reading from the source, 0 for none. timeout_s: of waiting for another process that stages
    this version; `on_wait` is called with its LockOwner once a second. limits: of the root. shared: make the root
    readable for all users. group: the nodes that stage this together; each must call this. advance, on_file: called
    with bytes, and with the manifest index of each finished file. on_evicted: called with each eviction for room.

    Forks: from a process with threads run the command instead. Raises DataError (the source differs from its manifest),
    NoSpace, ClusterError (the root is refused), TryLater.
    """
    started = time.monotonic()
    root = root.absolute()
    readers = readers or readers_for(dataset)
    final = staged_path(root, dataset.version)

    is_complete = presence_check(known_damaged, verify=verify, readers=readers, advance=advance)
    require_safe(root, reading=True)
    state: StageState = "present"
    totals = None
    quarantine = records.read_source_quarantine(dataset.source)
    with _leased_source(dataset.source), _join_fanout(dataset, root, group) as session:
        if not is_complete(final, dataset):  # without the lock, so that sets of a read-only root can be used
            create_root(root, shared=shared)
            records.record_quarantine(root, dataset.version, quarantine)
            with version_lock(root, dataset.version, timeout_s=timeout_s, on_wait=on_wait) as report_progress:
                if not is_complete(final, dataset):
                    state = "repaired" if os.path.lexists(final) else "staged"
                    options = _options_for(
                        session, CopyOptions(readers, bytes_per_s, on_file=on_file, on_evicted=on_evicted)
                    )
                    source = session.source if session else dataset.source
                    totals = _copy_and_publish(
                        structs.replace(dataset, source=source),
                        final,
                        root,
                        options,
                        limits or RootLimits(),
                        advance=reporting_advance(report_progress, dataset.manifest.total_bytes, advance),
                        link=not verify,
                        replace=state == "repaired",
                    )
        else:
            _renew_quarantine(root, dataset.version, quarantine)
        if session:
            session.mark_all_done()
            session.serve_until_done()
        return make_result(dataset, final, state, totals, started, session=session, verified=verify)


def _renew_quarantine(root: Path, version: str, quarantine: Quarantine | None) -> None:
    """Record the quarantine of a present version's source; a note is printed where another user owns the root."""
    try:
        records.record_quarantine(root, version, quarantine)
    except ClusterError as error:
        print(f"pit-stage: note: the source's quarantine is not recorded: {error}", file=sys.stderr, flush=True)


def presence_check(
    known_damaged: tuple[int, int] | None, *, verify: bool, readers: int, advance: Advance
) -> Callable[[Path, DatasetVersion], bool]:
    """Return a function that tells whether a folder holds this version complete: by names and sizes, with `verify` by
    content. The set is leased meanwhile, and used last at the end; one found damaged is not read again.
    """
    damaged = {None, known_damaged}

    def is_complete(final: Path, dataset: DatasetVersion) -> bool:
        identity = staged_identity(final)
        if identity not in damaged:
            with try_lease(final, touch=True):
                if (
                    matches_content(final, dataset, readers=readers, advance=advance)
                    if verify
                    else matches_sizes(final, dataset)
                ):
                    return True
            damaged.add(identity)
        return False

    return is_complete


def _leased_source(source: Source) -> AbstractContextManager[None]:
    """Lease a source that is a staged set itself: room must not be made by its eviction."""
    return try_lease(source.folder, touch=False) if isinstance(source, LocalSource) else contextlib.nullcontext()


def make_result(
    dataset: DatasetVersion,
    final: Path,
    state: StageState,
    totals: CopyTotals | None,
    started: float,
    *,
    session: FanoutSession | None = None,
    verified: bool = False,
) -> StageResult:
    """Return the record of a staging. started: monotonic time. verified: whether a present set was read."""
    total = dataset.manifest.total_bytes
    copied = totals.copied_bytes if totals else 0
    from_peers = session.received().peer_bytes if session else 0
    return StageResult(
        dataset=dataset.manifest.name,
        version=dataset.version,
        source=dataset.source.label,
        path=str(final),
        state=state,
        files=len(dataset.manifest.files),
        bytes=total,
        copied_bytes=session.received().source_bytes if session else copied,
        verified_bytes=copied if totals else total if verified else 0,
        wall_s=time.monotonic() - started,
        node=os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        linked_bytes=totals.linked_bytes if totals else 0,
        resumed_bytes=totals.resumed_bytes if totals else 0,
        peer_bytes=from_peers,
    )


def _copy_and_publish(
    dataset: DatasetVersion,
    final: Path,
    root: Path,
    options: CopyOptions,
    limits: RootLimits,
    *,
    advance: Advance,
    link: bool,
    replace: bool,
) -> CopyTotals:
    """Copy the version into its partial folder, resuming an interrupted copy, and publish it. A failure keeps the
    finished files: a full disk and a damaged source may both be mended before the next call.
    """
    try:
        totals = fill_partial(dataset, root, options, limits, advance=advance, link=link)
        new = write_manifest_last(partial_path(root, dataset.version), dataset)
        # Before publishing: a set without a record counts as of unknown source, and is never evicted.
        records.write_stage_record(
            root,
            dataset.version,
            source=dataset.source.label,
            n_bytes=dataset.manifest.total_bytes,
        )
        synced = not syncs_each_file(dataset.manifest.files)
        if not publish_new(new, final, root, synced=synced, replace=replace) and not matches_sizes(final, dataset):
            raise TryLater("another process has created this path", where=str(final), hint="run this again")
        discard_partial(root, dataset.version)
    except PitError:
        discard_empty_partial(root, dataset.version)
        raise
    except OSError as error:
        raise from_os_error(error, partial_path(root, dataset.version)) from error
    return totals


def publish_new(new: Path, final: Path, root: Path, *, synced: bool, replace: bool) -> bool:
    """Rename a complete folder to its version's path, with the version's lock held; return False if there is a set.

    replace: that set is damaged, and is replaced. Readers see one of the two at any moment where the file system can
    exchange names; processes that lease the damaged set keep it. synced: names in subfolders are durable already.
    Raises NoSpace, ClusterError.
    """
    if replace and os.path.lexists(final):
        try:
            fsync_dirs(new, recursive=not synced)
            if replace_set(new, final, root):
                fsync_dir(final.parent)
                return True
        except OSError as error:
            raise from_os_error(error, final) from error
        trash(final, root)
    return publish_dir(new, final, synced=synced)


def reporting_advance(report_progress: ReportProgress, total: int, advance: Advance) -> Advance:
    """Return an `advance` that also publishes the progress to processes that wait for this version's lock."""
    done_bytes = 0

    def count_and_report(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        report_progress(done_bytes, total)
        advance(count)

    return count_and_report


@contextmanager
def _join_fanout(dataset: DatasetVersion, root: Path, group: Group | None) -> Iterator[FanoutSession | None]:
    if group is None:
        yield None
        return
    from pitools.stage.fanout.session import join

    folders = [partial_path(root, dataset.version), staged_path(root, dataset.version)]
    source = dataset.source
    if isinstance(source, LocalSource):
        source = structs.replace(source, drop_cache=True)
    with join(source, dataset.manifest.files, dataset.version, folders, group) as session:
        try:
            yield session
        finally:
            if names := session.received().distrusted:
                message = "wrong bytes, read again from the source: run `pit-stage check` there"
                print(f"pit-stage: note: {', '.join(names)}: {message}", file=sys.stderr, flush=True)


def _options_for(session: FanoutSession | None, options: CopyOptions) -> CopyOptions:
    """Return the options of a fan-out: its file order, and finished files marked for other nodes."""
    if session is None:
        return options

    def on_file(index: int) -> None:
        session.mark_done(index)
        options.on_file(index)

    return options._replace(order=session.file_groups(), on_file=on_file)
