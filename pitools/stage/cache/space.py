"""Make room for a set before its first byte: check quota and free space, evict old sets, reserve the space.

The reservation is an unnamed file (O_TMPFILE) with allocated blocks: every process and user sees that they are taken,
and the kernel frees them when the process ends. The total that each stager will write is in
`.locks/<version>.reservation`, which is valid while its flock is held.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from pitools.core.errors import ClusterError, NoSpace
from pitools.core.fs import from_os_error
from pitools.core.locks import lock_within, publish_owner
from pitools.core.record import decode_json
from pitools.core.units import format_size
from pitools.stage.cache.evict import (
    GRACE_S,
    KEPT_TEXT,
    Eviction,
    EvictionCandidate,
    KeptReason,
    evict_item,
    eviction_order,
    make_record,
    refresh_last_use,
)
from pitools.stage.cache.inventory import DiskUsage, disk_usage, total_bytes
from pitools.stage.cache.layout import LOCKS, QUARANTINE, free_bytes, partial_path, purge_trash, root_lock
from pitools.stage.cache.reservation import DiskReservation
from pitools.store.publish import BUILD_DIR

# Bytes being written must no longer be reserved, or they would count twice.
_IN_FLIGHT_BYTES = 256 << 20
# Some file systems, such as XFS, free the blocks of removed files a little later.
_SETTLE_S = 2.0
# Under the version's lock only probes, and workers of a stager that was just killed, can hold this file.
_KILLED_STAGER_S = 1.0
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Usages = dict[Path, DiskUsage]


class RootLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a root. quota_bytes: of all its contents. min_free_bytes: to keep free on the disk. evictable: the only
    sets that may be evicted for room, by version; None for any.
    """

    quota_bytes: int | None = None
    min_free_bytes: int = 0
    evictable: frozenset[str] | None = None

    def stricter(self, other: RootLimits) -> RootLimits:
        """Return the limits that keep to both."""
        quotas = [limits.quota_bytes for limits in (self, other) if limits.quota_bytes is not None]
        return RootLimits(
            quota_bytes=min(quotas, default=None), min_free_bytes=max(self.min_free_bytes, other.min_free_bytes)
        )


class ReservedSpace(msgspec.Struct, frozen=True, kw_only=True):
    """bytes: of a stager's partial copy when complete. unbacked_bytes: upper bound of those that are neither written
    nor allocated on the disk.
    """

    bytes: int
    unbacked_bytes: int


class Shortfall(NamedTuple):
    """Missing bytes, of the root's quota and of the disk; none missing where 0 or less."""

    quota: int
    disk: int

    @property
    def bytes(self) -> int:
        """Return the bytes to evict."""
        return max(0, *self)


class EvictionResult(NamedTuple):
    """The result of making room. missing_bytes: still missing. kept_reasons: number of kept sets by reason."""

    evicted: list[tuple[EvictionCandidate, int]]
    missing_bytes: int
    kept_reasons: Counter[KeptReason]


@contextmanager
def reserve(
    root: Path,
    version: str,
    needed: int,
    limits: RootLimits,
    *,
    in_flight: int = _IN_FLIGHT_BYTES,
    grace_s: float = GRACE_S,
    timeout_s: float = 600,
    on_evicted: Callable[[Eviction], None] = lambda _: None,
) -> Iterator[Callable[[int], None]]:
    """Reserve `needed` bytes at a root while a version is copied; yield `used(n)`, to be called when n more are
    written.

    Evicts partial copies, then sets, until the limits are met; evicts nothing if all of them would not suffice. Call
    with the version's lock held, and leave before the set is published. in_flight: most bytes written or allocated
    before `used` is called for them. timeout_s: of waiting for other processes that make room. on_evicted: called with
    each eviction, and the bytes that it has freed.

    Raises NoSpace, TryLater, ClusterError.
    """
    reservation_file = root_lock(
        root, f"{version}.reservation", activity="has reserved room for this version", timeout_s=_KILLED_STAGER_S
    )
    with reservation_file as descriptor, ExitStack() as stack:
        os.ftruncate(descriptor, 0)
        # One stager at a time measures, evicts and reserves.
        with (
            root_lock(root, ".space", activity="makes room at this root", timeout_s=timeout_s) as quota_descriptor,
            publish_owner(quota_descriptor),
        ):
            _require_space(root, version, needed, limits, grace_s, on_evicted)
            reservation = DiskReservation(root, needed, in_flight)
            stack.callback(reservation.release)
            own_bytes = disk_usage(partial_path(root, version)).own_bytes + needed
            _write_reservation(
                descriptor,
                ReservedSpace(bytes=own_bytes, unbacked_bytes=in_flight if reservation.is_backed else own_bytes),
                root,
            )
        yield reservation.shrink


def available_bytes(root: Path, *, except_version: str = "") -> int:
    """Return the bytes free at a root that no stager is about to write; the stager of `except_version` is not
    counted.
    """
    unwritten = 0
    for version, reservation in read_reservations(root, except_version=except_version).items():
        unwritten += min(
            reservation.unbacked_bytes, max(0, reservation.bytes - disk_usage(partial_path(root, version)).own_bytes)
        )
    return free_bytes(root) - unwritten


def make_room(
    root: Path,
    shortfall: Callable[[Usages], Shortfall],
    *,
    except_version: str = "",
    evictable: frozenset[str] | None = None,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
) -> EvictionResult:
    """Evict in order until `shortfall` of the remaining sets is 0; evict nothing if all of them would not suffice.

    except_version: a version to keep. evictable: as in RootLimits. dry_run: only report. Raises ClusterError,
    TryLater.
    """
    usages = _usages(root)
    missing = _remeasure_shortfall(shortfall, usages, _SETTLE_S / 10)
    result = EvictionResult([], missing, Counter())
    candidates = []
    for item in eviction_order(root) if missing > 0 else ():
        if item.path not in usages:
            continue  # it has appeared since they were measured
        reason = None if item.version == except_version else evict_item(root, item, grace_s=grace_s, dry_run=True)
        if not reason and item.is_complete and evictable is not None and item.version not in evictable:
            reason = KeptReason.OF_OTHERS
        if reason:
            if not dry_run:
                refresh_last_use(root, item, reason)
            result.kept_reasons[reason] += 1
        elif item.version != except_version:
            candidates.append(item)
    while missing > 0 and (batch := _choose_evictions(candidates, usages, missing)):
        for item in batch:
            candidates.remove(item)
            if not dry_run and (reason := evict_item(root, item, grace_s=grace_s)):
                result.kept_reasons[reason] += 1
                continue
            total = total_bytes(usages.values())
            del usages[item.path]
            result.evicted.append((item, total - total_bytes(usages.values())))
        missing = (
            result.missing_bytes - sum(size for _, size in result.evicted)
            if dry_run
            else _remeasure_shortfall(shortfall, usages, _SETTLE_S)
        )
    return result._replace(missing_bytes=max(0, missing))


def _choose_evictions(candidates: list[EvictionCandidate], usages: Usages, missing: int) -> list[EvictionCandidate]:
    """Return the first candidates that together free `missing` bytes; none when all of them do not."""
    total, remaining = total_bytes(usages.values()), dict(usages)
    for count, item in enumerate(candidates, start=1):
        del remaining[item.path]
        if total - total_bytes(remaining.values()) >= missing:
            return candidates[:count]
    return []


def _remeasure_shortfall(shortfall: Callable[[Usages], Shortfall], usages: Usages, wait_s: float) -> int:
    deadline = time.monotonic() + wait_s
    while (current := shortfall(usages)).disk > max(0, current.quota) and time.monotonic() < deadline:
        time.sleep(0.01)
    return current.bytes


def _require_space(
    root: Path,
    version: str,
    needed: int,
    limits: RootLimits,
    grace_s: float,
    on_evicted: Callable[[Eviction], None],
) -> None:
    purge_trash(root)
    shortfall = shortfall_within(root, version, needed, limits)
    if limits.quota_bytes is None and not shortfall({}).bytes:
        return  # without measuring the root
    result = make_room(root, shortfall, except_version=version, evictable=limits.evictable, grace_s=grace_s)
    for item, n_bytes in result.evicted:
        on_evicted(make_record(item, n_bytes, None, dry_run=False))
    if result.missing_bytes:
        if limits.quota_bytes is not None and needed > limits.quota_bytes:
            quota = format_size(limits.quota_bytes)
            message = f"version {version[:6]}: {format_size(needed)} needed, more than the quota of {quota}"
            hint = "raise the quota, or stage a part: --arrays, --steps, --episodes"
            raise ClusterError(message, where=str(root), hint=hint)
        raise NoSpace(
            f"version {version[:6]}: {_shortfall_message(shortfall(_usages(root)), needed, limits)}",
            where=str(root),
            hint=no_space_hint(result.kept_reasons),
        )


def shortfall_within(root: Path, version: str, needed: int, limits: RootLimits) -> Callable[[Usages], Shortfall]:
    """Return a function that measures what `needed` bytes for a version lack within the limits, for `make_room`."""
    reservations = read_reservations(root, except_version=version)

    def shortfall(usages: Usages) -> Shortfall:
        disk = needed + limits.min_free_bytes - available_bytes(root, except_version=version)
        if limits.quota_bytes is None:
            return Shortfall(0, disk)
        used_bytes = total_bytes(usages.values())
        for other, reservation in reservations.items():  # count other partial copies as complete
            used_bytes += max(0, reservation.bytes - usages.get(partial_path(root, other), _NO_USAGE).own_bytes)
        return Shortfall(used_bytes + needed - limits.quota_bytes, disk)

    return shortfall


def _shortfall_message(shortfall: Shortfall, needed: int, limits: RootLimits) -> str:
    if shortfall.quota > shortfall.disk:
        remaining = format_size(max(0, needed - shortfall.quota))
        return f"{format_size(needed)} needed, {remaining} left of {format_size(limits.quota_bytes or 0)}"
    free = format_size(max(0, needed + limits.min_free_bytes - shortfall.disk))
    kept_free = f", of which {format_size(limits.min_free_bytes)} must stay free" if limits.min_free_bytes else ""
    return f"{format_size(needed)} needed, {free} free{kept_free}"


def no_space_hint(kept_reasons: Counter[KeptReason]) -> str:
    """Return the hint of a NoSpace error, with the reasons of kept sets."""
    reasons = "; ".join(f"{count} {KEPT_TEXT[reason]}" for reason, count in sorted(kept_reasons.items()))
    return "free space there, or choose another destination" + (f" (kept sets: {reasons})" if reasons else "")


_NO_USAGE = DiskUsage(0, 0, {})


def _usages(root: Path) -> Usages:
    paths = [item.path for item in eviction_order(root)]
    paths += (root / QUARANTINE).glob("*")
    paths += (root / BUILD_DIR).glob("*.old.*")  # replaced sets that are still leased
    return {path: disk_usage(path) for path in paths}


def read_reservations(root: Path, *, except_version: str = "") -> dict[str, ReservedSpace]:
    """Return the reservations of running stagers, by version."""
    reservations = {}
    for path in (root / LOCKS).glob("*.reservation"):
        version = path.name.removesuffix(".reservation")
        try:
            descriptor = os.open(path, _READ_FLAGS)
        except OSError:
            continue
        try:
            if version != except_version and not lock_within(descriptor, fcntl.LOCK_SH, timeout_s=0):
                reservations[version] = decode_json(os.pread(descriptor, 4096, 0), ReservedSpace)
        except msgspec.DecodeError:
            pass  # not written yet
        finally:
            os.close(descriptor)
    return reservations


def _write_reservation(descriptor: int, reservation: ReservedSpace, root: Path) -> None:
    try:
        os.pwrite(descriptor, msgspec.json.encode(reservation), 0)
    except OSError as error:
        raise from_os_error(error, root) from error
