"""Room for a set before its first byte: quota and free space kept, old sets evicted, and the rest held.

What is held is an unnamed file (O_TMPFILE) with blocks of its own: every process and user sees that they are taken,
and the kernel frees them however their holder ends. What each stager of a root will take in all is also written down,
in .locks/<version>.room, which counts for as long as its flock is held.
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

from pitools.core.errors import ClusterError, NoSpace, TryLater
from pitools.core.fs import os_error
from pitools.core.lock import announced, flock, open_kept, read_holder, who
from pitools.core.record import decode_json
from pitools.core.units import duration_text, size_text
from pitools.stage.cache.evict import GRACE_S, KEPT_TEXT, Item, KeptReason, evict, items, note_use
from pitools.stage.cache.inventory import Usage, total, usage
from pitools.stage.cache.layout import LOCKS, QUARANTINE, free_bytes, partial_path, sweep
from pitools.stage.cache.reservation import Held
from pitools.store.publish import TEMPORARY

# While bytes are written their room is needed twice: by then it must not be held any more.
_IN_FLIGHT = 256 << 20
# Some file systems, XFS among them, free what was removed a little later.
_SETTLED_S = 2.0
# Who holds the version's lock meets only others that look, and workers of a stager that was killed a moment ago.
_LAST_BREATH_S = 1.0
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Usages = dict[Path, Usage]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a disk a root may take. quota_bytes: of all that stands there. min_free_bytes: of the whole disk."""

    quota_bytes: int | None = None
    min_free_bytes: int = 0


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What a stager's unfinished copy will take in all, and how much of it may be neither written nor held."""

    bytes: int
    in_flight: int


class Lack(NamedTuple):
    """Bytes that are missing, of the root's quota and on the disk; none where they are not above 0."""

    quota: int
    disk: int

    @property
    def bytes(self) -> int:
        """What has to go."""
        return max(0, *self)


class Evicted(NamedTuple):
    """What making room came to. missing: bytes that are still too few. stay: why how many things were kept."""

    gone: list[tuple[Item, int]]
    missing: int
    stay: Counter[KeptReason]


@contextmanager
def reserved(
    root: Path,
    version: str,
    needed: int,
    limits: Limits,
    *,
    in_flight: int = _IN_FLIGHT,
    grace_s: float = GRACE_S,
    timeout_s: float = 600,
) -> Iterator[Callable[[int], None]]:
    """Hold `needed` bytes at a root while a version is copied; yields `used(n)`: n more of them have been written.

    Unfinished copies and then sets are evicted until the limits are kept; none is when that would not be enough.
    Call with the version's lock held, and leave before the set is published. in_flight: the most bytes that are being
    written, or given to files, before `used` hears of them. timeout_s: how long to wait for others that make room.

    Raises NoSpace, TryLater, ClusterError.
    """
    with _ledger(root, version) as ledger, ExitStack() as stack:
        with _deciding(root, timeout_s):
            _require(root, version, needed, limits, grace_s)
            held = Held(root, needed, in_flight)
            stack.callback(held.free)
            mine = usage(partial_path(root, version)).own + needed
            _write(ledger, Room(bytes=mine, in_flight=in_flight if held.real else mine), root)
        yield held.used


def available_bytes(root: Path, *, but: str = "") -> int:
    """Bytes free at a root that no stager of it is about to write; the version `but` does not count as one."""
    coming = 0
    for version, room in rooms(root, but=but).items():
        coming += min(room.in_flight, max(0, room.bytes - usage(partial_path(root, version)).own))
    return free_bytes(root) - coming


def make_room(
    root: Path, lack: Callable[[Usages], Lack], *, sparing: str = "", grace_s: float = GRACE_S, dry_run: bool = False
) -> Evicted:
    """Evict in order until `lack`, of what stands then, says that no byte is missing; nothing when all would not do.

    sparing: a version that stays. dry_run: only say what would go. Raises ClusterError, TryLater.
    """
    usages = _usages(root)
    missing = _settled(lack, usages, _SETTLED_S / 10)
    done = Evicted([], missing, Counter())
    go = []
    for item in items(root) if missing > 0 else ():
        reason = None if item.version == sparing else evict(root, item, grace_s=grace_s, dry_run=True)
        if reason:
            if not dry_run:
                note_use(root, item, reason)
            done.stay[reason] += 1
        elif item.version != sparing:
            go.append(item)
    while missing > 0 and (batch := _enough(go, usages, missing)):
        for item in batch:
            go.remove(item)
            if not dry_run and (reason := evict(root, item, grace_s=grace_s)):
                done.stay[reason] += 1
                continue
            before = total(usages.values())
            del usages[item.path]
            done.gone.append((item, before - total(usages.values())))
        missing = done.missing - sum(size for _, size in done.gone) if dry_run else _settled(lack, usages, _SETTLED_S)
    return done._replace(missing=max(0, missing))


def _enough(go: list[Item], usages: Usages, missing: int) -> list[Item]:
    """As many of these, in order, as free what is missing; none when all together do not."""
    before, left = total(usages.values()), dict(usages)
    for count, item in enumerate(go, start=1):
        del left[item.path]
        if before - total(left.values()) >= missing:
            return go[:count]
    return []


def _settled(lack: Callable[[Usages], Lack], usages: Usages, wait_s: float) -> int:
    until = time.monotonic() + wait_s
    while (missing := lack(usages)).disk > max(0, missing.quota) and time.monotonic() < until:
        time.sleep(0.01)
    return missing.bytes


def _require(root: Path, version: str, needed: int, limits: Limits, grace_s: float) -> None:
    sweep(root)
    others = rooms(root, but=version)

    def lack(usages: Usages) -> Lack:
        disk = needed + limits.min_free_bytes - available_bytes(root, but=version)
        if limits.quota_bytes is None:
            return Lack(0, disk)
        taken = total(usages.values())
        for other, room in others.items():  # the unfinished copy of another is as large as it is going to be
            taken += max(0, room.bytes - usages.get(partial_path(root, other), _NOTHING).own)
        return Lack(taken + needed - limits.quota_bytes, disk)

    if limits.quota_bytes is None and not lack({}).bytes:
        return  # without a look at every file of the root
    done = make_room(root, lack, sparing=version, grace_s=grace_s)
    if done.missing:
        if limits.quota_bytes is not None and needed > limits.quota_bytes:
            what = f"{size_text(needed)} needed, which never fit in a quota of {size_text(limits.quota_bytes)}"
            hint = "raise the quota, or stage a part: --arrays, --steps, --episodes"
            raise ClusterError(what, where=str(root), hint=hint)
        raise NoSpace(_refusal(lack(_usages(root)), needed, limits), where=str(root), hint=why(done.stay))


def _refusal(lack: Lack, needed: int, limits: Limits) -> str:
    if lack.quota > lack.disk:
        left = size_text(max(0, needed - lack.quota))
        return f"{size_text(needed)} needed, {left} left of {size_text(limits.quota_bytes or 0)}"
    free = size_text(max(0, needed + limits.min_free_bytes - lack.disk))
    spare = f", of which {size_text(limits.min_free_bytes)} must stay so" if limits.min_free_bytes else ""
    return f"{size_text(needed)} needed, {free} free{spare}"


def why(stay: Counter[KeptReason]) -> str:
    """What to do where there is no room, and why nothing more was evicted."""
    kept = "; ".join(f"{count} {KEPT_TEXT[reason]}" for reason, count in sorted(stay.items()))
    return "free space there, or choose another destination" + (f" (what stays: {kept})" if kept else "")


_NOTHING = Usage(0, 0, {})


def _usages(root: Path) -> Usages:
    places = [item.path for item in items(root)]
    places += (root / QUARANTINE).glob("*")
    places += (root / TEMPORARY).glob("*.old.*")  # replaced, and leased until then
    return {path: usage(path) for path in places}


def rooms(root: Path, *, but: str = "") -> dict[str, Room]:
    """What stagers that live have written down, by version."""
    found = {}
    for path in (root / LOCKS).glob("*.room"):
        version = path.name.removesuffix(".room")
        try:
            descriptor = os.open(path, _READ)
        except OSError:
            continue
        try:
            if version != but and not flock(descriptor, fcntl.LOCK_SH, timeout_s=0):
                found[version] = decode_json(os.pread(descriptor, 4096, 0), Room)
        except msgspec.DecodeError:
            pass  # it has not decided yet
        finally:
            os.close(descriptor)
    return found


@contextmanager
def _ledger(root: Path, version: str) -> Iterator[int]:
    """The file in which this version's stager writes its room down, locked and empty."""
    path = root / LOCKS / f"{version}.room"
    try:
        descriptor = open_kept(path)
    except OSError as error:
        raise os_error(error, path) from error
    try:
        if not flock(descriptor, fcntl.LOCK_EX, timeout_s=_LAST_BREATH_S):
            what, hint = "another process has reserved room for this version", "run this again in a moment"
            raise TryLater(what, where=str(path), hint=hint)
        os.ftruncate(descriptor, 0)
        try:
            yield descriptor
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor too
    finally:
        os.close(descriptor)


def _write(ledger: int, room: Room, root: Path) -> None:
    try:
        os.pwrite(ledger, msgspec.json.encode(room), 0)
    except OSError as error:
        raise os_error(error, root) from error


@contextmanager
def _deciding(root: Path, timeout_s: float) -> Iterator[None]:
    """One stager of a root at a time counts, evicts and reserves."""
    path = root / LOCKS / ".root"
    try:
        descriptor = open_kept(path)
    except OSError as error:
        raise os_error(error, path) from error
    try:
        if not flock(descriptor, fcntl.LOCK_EX, timeout_s=timeout_s):
            what = f"another process has been making room for {duration_text(timeout_s)}"
            hint = f"it is {who(read_holder(descriptor))}: run this again later"
            raise TryLater(what, where=str(root), hint=hint)
        with announced(descriptor):
            yield
    finally:
        os.close(descriptor)
