"""The scheduler of one pool: first come, first served within a tier, with EASY backfill by time limits.

The first job that does not fit gets a reservation: the shadow, the moment when enough units are free if every running
job uses up its limit. A later job may pass it only if it ends before the shadow, or fits beside the first job there.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pitools.place.simulate.node_allocator import NodeAllocator

# (-tier, number in order of submission, job, units, limit in s)
QueueEntry = tuple[int, int, int, int, float]


class PoolScheduler:
    """The state of one pool.

    running: (end by limit, job, units), ascending. queue: pending entries, in order. `free` units are idle. depth:
    number of queue entries considered (Slurm's bf_max_job_test). closed: windows (from, to) in which nothing may run; a
    job that would reach into one starts after it. packing: place jobs on nodes; the shadow still counts units only, and
    a job with enough units, but not enough nodes, keeps them reserved. version: changes with the pool's state, except
    when jobs are appended to its queue.
    """

    __slots__ = (
        "closed",
        "depth",
        "free",
        "fresh",
        "is_stale",
        "packing",
        "queue",
        "running",
        "shadow",
        "spare",
        "units",
        "version",
    )

    def __init__(
        self, units: int, depth: int, closed: Iterable[tuple[float, float]] = (), packing: NodeAllocator | None = None
    ) -> None:
        self.units = self.free = units
        self.depth, self.packing = depth, packing
        self.closed = sorted(closed)
        self.running: list[tuple[float, int, int]] = []
        self.queue: list[QueueEntry] = []
        self.fresh: list[QueueEntry] = []
        self.is_stale = False
        self.shadow, self.spare = inf, 0
        self.version = 0

    def enqueue(self, entry: QueueEntry) -> None:
        """Add a job to the queue."""
        place = bisect_left(self.queue, entry)
        if place < len(self.queue):
            self.version += 1
        self.queue.insert(place, entry)
        if place < self.depth:
            self.fresh.append(entry)

    def withdraw(self, entry: QueueEntry) -> None:
        """Remove a job that has not started from the queue."""
        self.version += 1
        place = bisect_left(self.queue, entry)
        del self.queue[place]
        if place == 0 or len(self.queue) >= self.depth:
            self.is_stale = True  # the new first job has another shadow, and further entries are within the depth
        if entry in self.fresh:
            self.fresh.remove(entry)

    def hold(self, job: int, units: int, limit_end_s: float) -> None:
        """Allocate units to a job."""
        self.version += 1
        self.free -= units
        insort(self.running, (limit_end_s, job, units))

    def release(self, job: int, units: int, limit_end_s: float) -> None:
        """Free the units of a job."""
        self.version += 1
        del self.running[bisect_left(self.running, (limit_end_s, job, units))]
        self.free += units
        self.is_stale = True

    def startable(self, now_s: float) -> list[QueueEntry]:
        """Return the entries that start now, removed from the queue and holding their units.

        Until units are freed, the shadow stays and entries that did not fit still do not fit: only entries added since
        the last call are considered.
        """
        started: list[QueueEntry] = []
        while self.is_stale or self.fresh:
            is_whole, fresh, self.fresh = self.is_stale, sorted(self.fresh), []
            self.is_stale = False
            if not self.queue:
                break
            if is_whole or self.queue[0] is fresh[0]:
                begun = self._start_head(now_s)
                fresh = self.queue[1 : self.depth]
            else:
                begun = []
            begun += self._backfill(now_s, fresh)
            if begun and len(self.queue) >= self.depth:
                self.is_stale = True  # further entries are within the depth
            started += begun
        return started

    def _start_head(self, now_s: float) -> list[QueueEntry]:
        """Return the entries at the head that fit; set the shadow for the first that does not."""
        started: list[QueueEntry] = []
        for entry in self.queue:
            if entry[3] > self.free or not self._is_allowed(entry, now_s):
                break
            self._start(entry, now_s)
            started.append(entry)
        del self.queue[: len(started)]
        if self.queue:
            self._reserve(now_s, self.queue[0])
        return started

    def _backfill(self, now_s: float, entries: Iterable[QueueEntry]) -> list[QueueEntry]:
        """Return those of the entries that may start before the first one, in order."""
        started: list[QueueEntry] = []
        free, shadow, is_plain = self.free, self.shadow, not self.closed and not self.packing
        for entry in entries:
            units = entry[3]
            if units > free:
                continue
            is_past_shadow = now_s + entry[4] > shadow
            if (is_past_shadow and units > self.spare) or not (is_plain or self._is_allowed(entry, now_s)):
                continue
            if is_past_shadow:
                self.spare -= units
            started.append(entry)
            self._start(entry, now_s)
            free -= units
            if not free:
                break
        for entry in started:
            del self.queue[bisect_left(self.queue, entry)]
        return started

    def _is_allowed(self, entry: QueueEntry, now_s: float) -> bool:
        """Return whether nodes and maintenance windows allow a start for which there are enough units."""
        if self.packing and not self.packing.fits_now(entry[3]):
            return False
        return not self.closed or self.opens_s(now_s, entry[4]) <= now_s

    def _start(self, entry: QueueEntry, now_s: float) -> None:
        if self.packing:
            self.packing.allocate(entry[2], entry[3])
        self.hold(entry[2], entry[3], now_s + entry[4])

    def _reserve(self, now_s: float, entry: QueueEntry) -> None:
        room, self.shadow, self.spare = self.free, now_s, self.free - entry[3]
        if room < entry[3]:
            for end_s, _, units in self.running:
                if room >= entry[3] and end_s > self.shadow:
                    break
                room += units
                self.shadow = end_s
            self.spare = room - entry[3]
        opens_s = self.opens_s(self.shadow, entry[4])
        if opens_s > self.shadow:
            self.shadow, self.spare = opens_s, self.units - entry[3]

    def opens_s(self, start_s: float, limit_s: float) -> float:
        """Return the first time from start_s on at which a job of this limit does not reach into a closed window."""
        for from_s, to_s in self.closed:
            if start_s < to_s and start_s + limit_s > from_s:
                start_s = to_s
        return start_s
