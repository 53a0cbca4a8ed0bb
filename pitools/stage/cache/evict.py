"""Evict sets to make room, the least recently used first; never one in use, or whose source is unknown or gone.

A set is kept while a process leases, stages or repairs it, while it is pinned, when its source is unknown, when the
plain store it was copied from is gone, and for a grace period after its last use. A set whose store was rewritten, or
whose version `gc` removed from its source, may be evicted although it cannot be staged again: such copies would fill
the disk. Eviction holds the set's lock and its lease file exclusively and renames the folder, so a reader has the whole
set or none. Clocks decide only the order and the grace period, which is no guarantee.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Literal, NamedTuple

from pitools.core.errors import TryLater
from pitools.core.fs import from_os_error, fsync_dir
from pitools.core.locks import PROBE_S, has_byte_lock, lock_within, open_readable_lock_file
from pitools.core.record import Record
from pitools.stage.cache import lease, records
from pitools.stage.cache.inventory import disk_usage, partial_copies, total_bytes
from pitools.stage.cache.layout import (
    LEASES,
    LOCKS,
    OBJECTS,
    QUARANTINE,
    partial_path,
    purge_trash,
    staged_path,
    trash,
    try_version_lock,
)
from pitools.stage.sources.find import is_url, is_zarr_store

# Covers the time between `pit-stage run` and a job's own lease, or between two of its steps, while that is shorter.
GRACE_S = 600.0
_SOURCE_TIMEOUT_S = 2.0


class KeptReason(StrEnum):
    """Why something at a staging root was not evicted."""

    LOCKED = "locked"
    LEASED = "leased"
    KEPT_FOR_JOB = "kept-for-job"
    PINNED = "pinned"
    UNKNOWN_SOURCE = "unknown-source"
    SOURCE_GONE = "source-gone"
    RECENTLY_USED = "recently-used"
    OTHER_NODE = "other-node"
    OF_OTHERS = "of-others"
    NOT_PRESENT = "not-present"


KEPT_TEXT = {
    KeptReason.LOCKED: "another process stages, repairs or evicts it",
    KeptReason.LEASED: "leased by a running process",
    KeptReason.KEPT_FOR_JOB: "leased for a running job by its prolog",
    KeptReason.PINNED: "pinned",
    KeptReason.UNKNOWN_SOURCE: "its source is unknown",
    KeptReason.SOURCE_GONE: "the store that it was copied from is gone",
    KeptReason.RECENTLY_USED: "used in the last 10 minutes",
    KeptReason.OTHER_NODE: "a copy of another node, which may still write it",
    KeptReason.OF_OTHERS: "staged by others than this policy, or selected by one",
    KeptReason.NOT_PRESENT: "already removed",
}


class EvictionCandidate(NamedTuple):
    """A set, or an abandoned partial copy."""

    version: str
    path: Path

    @property
    def is_complete(self) -> bool:
        """Whether it is a set, not a partial copy."""
        return self.path.parent.name == OBJECTS


class Eviction(Record, frozen=True, kw_only=True, tag="pit.stage-eviction/1"):
    """The result for one set or partial copy. state: `evictable` with a dry run. reason: None unless `kept`.

    bytes: what it takes; of one evicted for room, what that freed, without files that other sets have too.
    """

    version: str
    path: str
    state: Literal["evicted", "evictable", "kept"]
    bytes: int
    reason: KeptReason | None


def eviction_order(root: Path) -> list[EvictionCandidate]:
    """Return a root's contents in the order of eviction: partial copies, then sets by last use."""
    partials = [EvictionCandidate(path.name.partition(".")[0], path) for path in partial_copies(root)]
    try:
        sets = [EvictionCandidate(path.name, path) for path in (root / OBJECTS).iterdir()]
    except OSError as error:
        raise from_os_error(error, root / OBJECTS) from error
    return partials + sorted(sets, key=lambda item: (lease.last_used(root, item.version), item.version))


def evict_item(
    root: Path, item: EvictionCandidate, *, grace_s: float = GRACE_S, force: bool = False, dry_run: bool = False
) -> KeptReason | None:
    """Evict one set or partial copy; return None when it is evicted (or would be, with `dry_run`), else why it is kept.

    grace_s: how long a set is kept after its last use. force: also a set whose source is unknown or gone, and
    a partial copy of another node.

    Raises ClusterError, TryLater.
    """
    if dry_run:
        return _use_reason(root, item) or _kept_reason(root, item, grace_s, force=force)
    with _lock_item(root, item) as lock_reason:
        if reason := lock_reason or _kept_reason(root, item, grace_s, force=force):
            refresh_last_use(root, item, reason)
            return reason
        if not os.path.lexists(item.path):
            return KeptReason.NOT_PRESENT
        if not item.is_complete:
            # First: the journal must never list missing files.
            item.path.with_suffix(".journal").unlink(missing_ok=True)
        trash(item.path, root)
        if item.is_complete:
            records.remove_stage_record(root, item.version)
    try:
        fsync_dir(item.path.parent)  # durable, so that power loss does not bring back a half-removed set
    except OSError as error:
        raise from_os_error(error, item.path) from error
    purge_trash(root, item.version)
    return None


def refresh_last_use(root: Path, item: EvictionCandidate, reason: KeptReason) -> None:
    """Set the last use of a kept set to now when it is leased: readers of a shared root cannot do so. Also when it
    lies in the future because of a wrong clock, so that the set ages from now on.
    """
    if item.is_complete and (reason is KeptReason.LEASED or lease.last_used(root, item.version) > time.time()):
        with contextlib.suppress(OSError):
            os.utime(root / LEASES / item.version)


def evict_version(root: Path, version: str, *, force: bool = False, dry_run: bool = False) -> Iterator[Eviction]:
    """Evict a named version, regardless of its last use. Raises as `evict_item`."""
    for item in eviction_order(root):
        if item.version == version:
            n_bytes = total_bytes([disk_usage(item.path)])
            yield make_record(
                item, n_bytes, evict_item(root, item, grace_s=0, force=force, dry_run=dry_run), dry_run=dry_run
            )


def make_record(item: EvictionCandidate, n_bytes: int, reason: KeptReason | None, *, dry_run: bool) -> Eviction:
    """Return the record of an eviction, or of why a set was kept."""
    state: Literal["evicted", "evictable", "kept"] = "kept" if reason else "evictable" if dry_run else "evicted"
    return Eviction(version=item.version, path=str(item.path), state=state, bytes=n_bytes, reason=reason)


def evict_quarantined(root: Path, *, dry_run: bool = False) -> Iterator[Eviction]:
    """Remove the damaged sets of `.quarantine`. Raises ClusterError."""
    for path in sorted((root / QUARANTINE).glob("*")):
        item, n_bytes = EvictionCandidate(path.name.partition(".")[0], path), total_bytes([disk_usage(path)])
        if not dry_run:
            trash(path, root)
        yield make_record(item, n_bytes, None, dry_run=dry_run)
    if not dry_run:
        purge_trash(root)


def quarantine_set(root: Path, version: str) -> Path:
    """Move a damaged set to `.quarantine`; return its new path. Raises TryLater, ClusterError."""
    item = EvictionCandidate(version, staged_path(root, version))
    quarantined = root / QUARANTINE / f"{version}.{os.urandom(4).hex()}"
    with _lock_item(root, item) as lock_reason:
        if lock_reason:
            raise TryLater(KEPT_TEXT[lock_reason], where=str(item.path))
        try:
            os.rename(item.path, quarantined)
            fsync_dir(item.path.parent)
        except OSError as error:
            raise from_os_error(error, item.path) from error
    return quarantined


@contextmanager
def _lock_item(root: Path, item: EvictionCandidate) -> Iterator[KeptReason | None]:
    """Lock a version, and of a set also its lease file; yield None, or why that failed."""
    with try_version_lock(root, item.version) as is_locked:
        if not is_locked or not item.is_complete:
            yield None if is_locked else KeptReason.LOCKED
            return
        path = root / LEASES / item.version
        try:
            descriptor = open_readable_lock_file(path)
        except OSError as error:
            raise from_os_error(error, path) from error
        try:
            yield _lease_reason(descriptor)
        finally:
            os.close(descriptor)


def _use_reason(root: Path, item: EvictionCandidate) -> KeptReason | None:
    """Return what `_lock_item` would yield, without creating or writing a file. Raises ClusterError."""
    if _probe(root / LOCKS / item.version):
        return KeptReason.LOCKED
    return _probe(root / LEASES / item.version) if item.is_complete else None


def _probe(path: Path) -> KeptReason | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:  # of another user: only the root's owner may evict
        raise from_os_error(error, path) from error
    try:
        return _lease_reason(descriptor)
    finally:
        os.close(descriptor)


def _lease_reason(descriptor: int) -> KeptReason | None:
    """Lock a lease file exclusively; return why that failed. The prolog of this process's own job does not count."""
    if not lock_within(descriptor, fcntl.LOCK_EX, timeout_s=PROBE_S):
        return KeptReason.LEASED
    own_job = os.environ.get("SLURM_JOB_ID", "")
    is_kept = has_byte_lock(descriptor, except_offset=int(own_job) if own_job.isdecimal() else 0)
    return KeptReason.KEPT_FOR_JOB if is_kept else None


def _kept_reason(root: Path, item: EvictionCandidate, grace_s: float, *, force: bool) -> KeptReason | None:
    if not item.is_complete:  # a lock of another node cannot be tested from here
        return None if force or item.path == partial_path(root, item.version) else KeptReason.OTHER_NODE
    record = records.read_stage_record(root, item.version)
    if record.pinned:
        return KeptReason.PINNED
    if not force and not record.source:
        return KeptReason.UNKNOWN_SOURCE
    if not force and record.store_keys and _is_source_gone(record.source):
        return KeptReason.SOURCE_GONE
    age_s = time.time() - lease.last_used(root, item.version)
    return KeptReason.RECENTLY_USED if grace_s > 0 and age_s < grace_s else None


def _is_source_gone(source: str) -> bool:
    """Whether a source folder no longer holds a store; False when it cannot be read. A file system that does not answer
    counts as gone: callers hold locks that other stagers wait for.
    """
    if is_url(source):
        return False
    is_gone = True

    def look_up() -> None:
        nonlocal is_gone
        try:
            is_gone = not is_zarr_store(Path(source))
        except OSError:
            is_gone = False

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_SOURCE_TIMEOUT_S)
    return is_gone
