"""Take sets away to make room, the least recently used first, and never one that is needed or cannot come back.

A set stays while a process leases it, stages or repairs it, while it is pinned, where it is not known where it came
from or the plain store that it came from is gone, and for a while after its last use. That a store was written again is
no reason, nor that a version is gone, which `gc` removed: such copies would fill the disk for ever. A set goes with its
lock and its lease file held alone, by a rename: a reader has the whole set or none. Clocks only decide the order and
the while, which is no promise but a courtesy.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Literal, NamedTuple

from pitools.core.errors import TryLater
from pitools.core.fs import from_os_error, fsync_dir
from pitools.core.locks import PROBE_S, lock_within, open_readable_lock_file
from pitools.core.record import Record
from pitools.stage.cache import lease, records
from pitools.stage.cache.inventory import disk_usage, partial_copies, total_bytes
from pitools.stage.cache.layout import (
    LEASES,
    LOCKS,
    OBJECTS,
    QUARANTINE,
    journal_path,
    purge_trash,
    set_path,
    trash,
    try_version_lock,
)
from pitools.stage.sources.open import is_url, is_zarr_store

# Between `pit-stage run` and a job's own lease, or from one step of a job to its next.
GRACE_S = 600.0


class KeptReason(StrEnum):
    """Why something at a staging root was not evicted."""

    LOCKED = "locked"
    LEASED = "leased"
    PINNED = "pinned"
    UNKNOWN_SOURCE = "unknown-source"
    SOURCE_GONE = "source-gone"
    RECENTLY_USED = "recently-used"
    NOT_PRESENT = "not-present"


KEPT_TEXT = {
    KeptReason.LOCKED: "another process stages, repairs or evicts it",
    KeptReason.LEASED: "leased by a running process",
    KeptReason.PINNED: "pinned",
    KeptReason.UNKNOWN_SOURCE: "it is not known where it came from",
    KeptReason.SOURCE_GONE: "the store that it was copied from is gone",
    KeptReason.RECENTLY_USED: "used in the last 10 minutes",
    KeptReason.NOT_PRESENT: "it is not there any more",
}


class Evictable(NamedTuple):
    """What may go: a set, or an unfinished copy that nobody goes on with."""

    version: str
    path: Path

    @property
    def is_complete(self) -> bool:
        """Whether it is a set, not an unfinished copy."""
        return self.path.parent.name == OBJECTS


class Eviction(Record, frozen=True, kw_only=True, tag="pit.stage-eviction/1"):
    """What became of a set or an unfinished copy. state: `evictable` says a dry run. reason: None unless `kept`."""

    version: str
    path: str
    state: Literal["evicted", "evictable", "kept"]
    bytes: int
    reason: KeptReason | None


def eviction_order(root: Path) -> list[Evictable]:
    """Return what stands at a root in the order of eviction: unfinished copies, then sets by last use."""
    partials = [Evictable(path.name.removesuffix(".partial"), path) for path in partial_copies(root)]
    try:
        sets = [Evictable(path.name, path) for path in (root / OBJECTS).iterdir()]
    except OSError as error:
        raise from_os_error(error, root / OBJECTS) from error
    return partials + sorted(sets, key=lambda item: (lease.last_used(root, item.version), item.version))


def evict_item(
    root: Path, item: Evictable, *, grace_s: float = GRACE_S, force: bool = False, dry_run: bool = False
) -> KeptReason | None:
    """Take one thing away; None when it is gone (or would be, with `dry_run`), else why it stays.

    grace_s: how long a set stays after its last use. force: also one of a source that is unknown or gone.

    Raises ClusterError, TryLater.
    """
    if dry_run:
        return _users_of(root, item) or _kept_reason(root, item, grace_s, force=force)
    with _lock_item(root, item) as refused:
        if reason := refused or _kept_reason(root, item, grace_s, force=force):
            touch_last_use(root, item, reason)
            return reason
        if not os.path.lexists(item.path):
            return KeptReason.NOT_PRESENT
        if not item.is_complete:
            journal_path(root, item.version).unlink(missing_ok=True)  # first: it must not say more than is there
        trash(item.path, root)
        if item.is_complete:
            records.remove_stage_record(root, item.version)
    try:
        fsync_dir(item.path.parent)  # after power loss it must not stand again, half removed
    except OSError as error:
        raise from_os_error(error, item.path) from error
    purge_trash(root, item.version)
    return None


def touch_last_use(root: Path, item: Evictable, reason: KeptReason) -> None:
    """Set the last use of a set that stays to now where it is leased, for those who may only read, or where it lies in
    the future: a clock was wrong, now or then, and from here on the set ages.
    """
    if item.is_complete and (reason is KeptReason.LEASED or lease.last_used(root, item.version) > time.time()):
        with contextlib.suppress(OSError):
            os.utime(root / LEASES / item.version)


def evict_version(root: Path, version: str, *, force: bool = False, dry_run: bool = False) -> Iterator[Eviction]:
    """Take away all that stands of a version somebody named, however lately it was used. Raises as `evict`."""
    for item in eviction_order(root):
        if item.version == version:
            n_bytes = total_bytes([disk_usage(item.path)])
            yield make_record(
                item, n_bytes, evict_item(root, item, grace_s=0, force=force, dry_run=dry_run), dry_run=dry_run
            )


def make_record(item: Evictable, n_bytes: int, reason: KeptReason | None, *, dry_run: bool) -> Eviction:
    """Return the record of an eviction, or of why a set was kept."""
    state: Literal["evicted", "evictable", "kept"] = "kept" if reason else "evictable" if dry_run else "evicted"
    return Eviction(version=item.version, path=str(item.path), state=state, bytes=n_bytes, reason=reason)


def quarantine_set(root: Path, version: str) -> Path:
    """Move a damaged set to where nobody takes it for a good one; its new place. Raises TryLater, ClusterError."""
    item = Evictable(version, set_path(root, version))
    to = root / QUARANTINE / f"{version}.{os.urandom(4).hex()}"
    with _lock_item(root, item) as refused:
        if refused:
            raise TryLater(KEPT_TEXT[refused], where=str(item.path))
        try:
            os.rename(item.path, to)
            fsync_dir(item.path.parent)
        except OSError as error:
            raise from_os_error(error, item.path) from error
    return to


@contextmanager
def _lock_item(root: Path, item: Evictable) -> Iterator[KeptReason | None]:
    """Hold a version's lock, and of a set the lease file as well; yields why that cannot be, else None."""
    with try_version_lock(root, item.version) as had:
        if not had or not item.is_complete:
            yield None if had else KeptReason.LOCKED
            return
        path = root / LEASES / item.version
        try:
            descriptor = open_readable_lock_file(path)
        except OSError as error:
            raise from_os_error(error, path) from error
        try:
            yield None if lock_within(descriptor, fcntl.LOCK_EX, timeout_s=PROBE_S) else KeptReason.LEASED
        finally:
            os.close(descriptor)


def _users_of(root: Path, item: Evictable) -> KeptReason | None:
    """What `_alone` would yield, found out without making or writing a file. Raises ClusterError."""
    if _is_locked(root / LOCKS / item.version):
        return KeptReason.LOCKED
    return KeptReason.LEASED if item.is_complete and _is_locked(root / LEASES / item.version) else None


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:  # of another user, who alone may evict here
        raise from_os_error(error, path) from error
    try:
        return not lock_within(descriptor, fcntl.LOCK_EX, timeout_s=PROBE_S)
    finally:
        os.close(descriptor)


def _kept_reason(root: Path, item: Evictable, grace_s: float, *, force: bool) -> KeptReason | None:
    if not item.is_complete:
        return None
    record = records.read_stage_record(root, item.version)
    if record.pinned:
        return KeptReason.PINNED
    if not force and not record.source:
        return KeptReason.UNKNOWN_SOURCE
    if not force and record.signature and _is_gone(record.source):
        return KeptReason.SOURCE_GONE
    age_s = time.time() - lease.last_used(root, item.version)
    return KeptReason.RECENTLY_USED if grace_s > 0 and age_s < grace_s else None


def _is_gone(source: str) -> bool:
    """Whether there is no store in a folder any more; False where that cannot be told."""
    try:
        return not is_url(source) and not is_zarr_store(Path(source))
    except OSError:
        return False
