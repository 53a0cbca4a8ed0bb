"""One pool's scheduler, which looks only at what changed, against one that looks at everything."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pitools.place.simulate.pool_scheduler import PoolScheduler, QueueEntry


class Plain:
    """EASY backfill as its definition reads. running: (end by limit, job, units)."""

    def __init__(self, units: int, depth: int, closed: Sequence[tuple[int, int]]) -> None:
        self.units, self.depth, self.closed = units, depth, closed
        self.running: list[tuple[float, int, int]] = []
        self.queue: list[QueueEntry] = []

    def free_at(self, moment: float) -> int:
        """Units that are free then, if nothing more starts."""
        return self.units - sum(units for end, _, units in self.running if end > moment)

    def opens(self, at: float, limit: float) -> float:
        for start, end in sorted(self.closed):
            if at < end and at + limit > start:
                return self.opens(end, limit)
        return at

    def may_start(self, entry: QueueEntry, free: int, now: float) -> bool:
        return entry[3] <= free and self.opens(now, entry[4]) <= now

    def startable(self, now: float) -> list[QueueEntry]:
        started: list[QueueEntry] = []
        while actual := self.next_one(now):
            self.queue.remove(actual)
            self.running.append((now + actual[4], actual[2], actual[3]))
            started.append(actual)
        return started

    def next_one(self, now: float) -> QueueEntry | None:
        observed = sorted(self.queue)[: self.depth]
        free = self.units - sum(units for _, _, units in self.running)
        if not observed:
            return None
        first = observed[0]
        if self.may_start(first, free, now):
            return first
        shadow = min(
            position for position in (now, *(item[0] for item in self.running)) if self.free_at(position) >= first[3]
        )
        opens = self.opens(shadow, first[4])
        spare = self.free_at(opens) - first[3]
        for entry in observed[1:]:
            if self.may_start(entry, free, now) and (now + entry[4] <= opens or entry[3] <= spare):
                return entry
        return None


def test_looking_at_what_changed_is_enough() -> None:
    """Arrivals of two tiers, withdrawals, ends on time and before, windows, any depth: the same jobs start."""
    for seed in range(400):
        compare(random.Random(seed))


def compare(rng: random.Random) -> None:
    units, depth = rng.randint(4, 12), rng.choice((1, 2, 3, 100))
    begins = [rng.randint(5, 60) for _ in range(rng.choice((0, 0, 1, 2)))]
    closed = [(begin, begin + rng.randint(1, 20)) for begin in begins]
    ours, plain, now = PoolScheduler(units, depth, closed), Plain(units, depth, closed), 0.0
    for number in range(80):
        value = rng.choice(("put", "put", "put", "withdraw", "end", "later", "later"))
        if value == "put":
            entry = (-rng.choice((0, 0, 0, 1)), number, number, rng.randint(1, units), float(rng.randint(1, 25)))
            ours.enqueue(entry)
            plain.queue.append(entry)
        elif value == "withdraw" and plain.queue:
            entry = rng.choice(plain.queue)
            ours.withdraw(entry)
            plain.queue.remove(entry)
        elif value == "end" and plain.running:
            end, job, held = rng.choice(plain.running)
            ours.release(job, held, end)
            plain.running.remove((end, job, held))
        elif value == "later":
            moments = [end for end, _, _ in plain.running] + [float(end) for _, end in closed if end > now]
            now = min([now + rng.choice((1, 2, 5)), *moments])
            ours.is_stale |= now in [end for _, end in closed]
            for end, job, held in [item for item in plain.running if item[0] == now]:
                ours.release(job, held, end)
                plain.running.remove((end, job, held))
        assert sorted(ours.startable(now)) == sorted(plain.startable(now))
        assert ours.free == units - sum(held for _, _, held in plain.running)


def test_what_ends_at_the_shadow_is_all_to_spare() -> None:
    """Two jobs may last until 10, the first in the queue needs one of them gone: what the other holds is left over."""
    site = PoolScheduler(4, depth=100)
    for job in (0, 1):
        site.enqueue((0, job, job, 2, 10.0))
    site.enqueue((0, 2, 2, 2, 10.0))
    assert [entry[2] for entry in site.startable(0.0)] == [0, 1]
    assert (site.shadow, site.spare) == (10.0, 2)
