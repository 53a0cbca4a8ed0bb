"""From the queue and what the sites said to decisions: the numbers that `policy.decide` sees, and what it wants."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from pitools.launch.tickets.ticket_state import Seen
from pitools.place import types
from pitools.place.clusters import overlay, pools
from pitools.place.clusters.snapshot import Snapshot
from pitools.place.dispatch import migration
from pitools.place.dispatch.journal import Job
from pitools.place.dispatch.options import Offers
from pitools.place.dispatch.reconcile import Board
from pitools.place.dispatch.runtime_history import Expectations
from pitools.site.schema import Site

REFUSED_S = 600.0  # a pool that refused a job, or where it came to nothing, is left alone for so long
VOID_S = 10.0
LEAD_S = 300.0  # who is expected to run no longer may wait in a site's queue, so that no node waits for a tick
_TIERS = {"low": -1, "high": 1}

Decide = Callable[
    [float, Sequence[types.Job], Mapping[str, types.Pool], Sequence[types.Ticket]],
    Sequence[types.Place | types.Withdraw],
]


class Said(Protocol):
    """What one site said."""

    @property
    def seen(self) -> dict[str, Seen]:
        """Its tickets, and every other job of ours there, by name."""

    @property
    def snapshot(self) -> Snapshot | None:
        """The site as a whole."""


class World(NamedTuple):
    """What a decision is made upon: the sites that answered, and their pools."""

    answered: dict[str, tuple[Site, Snapshot]]
    pools: dict[str, types.Pool]

    def speed(self, pool: str) -> float:
        """How fast a pool's nodes are; 1.0 where its site is silent."""
        site, _, partition = pool.partition("/")
        known = self.answered[site][0].partitions.get(partition) if site in self.answered else None
        return known.speed if known else 1.0


class Wanted(NamedTuple):
    """What was decided."""

    places: list[types.Place]
    withdrawals: list[types.Withdraw]


def is_open(job: Job) -> bool:
    """Whether it may still be decided where a job runs."""
    return not (job.is_over or job.is_cancelled or any(ticket.is_running for ticket in job.tickets))


class Decider:
    """Asks the policy. decide: the policy, its constants filled in."""

    def __init__(self, decide: Decide, place: Path) -> None:
        self._decide, self._offers = decide, Offers()
        self._expected = Expectations(place)

    def see(self, board: Board, sites: Mapping[str, Site], looks: Mapping[str, Said]) -> World:
        """The pools of the sites that answered, our own jobs in them as they are now."""
        names = {ticket.name for job in board.jobs.values() for ticket in job.tickets}
        answered = {name: (sites[name], look.snapshot) for name, look in looks.items() if look.snapshot}
        found = {
            pool.pool: pool
            for name, (site, snapshot) in answered.items()
            for pool in pools.pools(overlay.fresh(snapshot, looks[name].seen), names | looks[name].seen.keys(), site)
        }
        self._offers.begin()
        self._expected.learn(World(answered, found).speed)
        return World(answered, found)

    def options(self, job: Job, world: World) -> tuple[types.Option, ...]:
        """What the job could have at the sites that answered."""
        return self._offers.of(job, world.answered)

    def unfit(self, board: Board) -> dict[str, str]:
        """Job id → why it fits none of the sites that answered."""
        return {name: why for name, job in board.jobs.items() if is_open(job) and (why := self._offers.why_none(name))}

    def moves(self, board: Board, world: World) -> list[types.Withdraw]:
        """Short jobs that wait in one queue, while nobody waits for the room in another: they are decided upon anew."""
        jobs, tickets = self._open(board, world)
        if len({ticket.job_id for ticket in tickets}) < len(jobs):
            return []
        return migration.moves(time.time(), jobs, world.pools, tickets, LEAD_S)

    def decide(self, board: Board, world: World) -> Wanted:
        """What is to be placed and withdrawn now."""
        now_s = time.time()
        jobs, tickets = self._open(board, world)
        wanted = self._decide(now_s, list(jobs.values()), world.pools, tickets)
        # Whatever the policy says, nothing is done at a site that did not answer.
        places = [one for one in wanted if isinstance(one, types.Place) and one.pool in world.pools]
        # Who wants the best of the free nodes waits here until there are some to choose from.
        choosy = {name for name in jobs if board.jobs[name].asked.request.topology != "none"}
        places += self._ahead(now_s, jobs, world.pools, tickets, places, choosy)
        return Wanted(places, [one for one in wanted if isinstance(one, types.Withdraw) and one.pool in world.pools])

    def _open(self, board: Board, world: World) -> tuple[dict[str, types.Job], list[types.Ticket]]:
        """The jobs that may still be put somewhere, and their tickets."""
        known = {job.job_id: one for job in board.jobs.values() if is_open(job) and (one := self._job(job, world))}
        tickets = [
            types.Ticket(job_id=job_id, pool=ticket.pool, placed_s=seconds(ticket.placed))
            for job_id in known
            for ticket in board.jobs[job_id].live
        ]
        return known, tickets

    def _job(self, job: Job, world: World) -> types.Job | None:
        now_s = time.time()
        avoided = {entry.pool for entry in job.refusals if now_s - seconds(entry.t) < REFUSED_S}
        avoided |= {ticket.pool for ticket in job.tickets if ticket.voided and now_s - seconds(ticket.voided) < VOID_S}
        kept = {ticket.pool for ticket in job.live}
        options = tuple(
            self._expected.of(job.asked, option, world.speed)
            for option in self._offers.of(job, world.answered)
            if option.pool in kept or option.pool not in avoided
        )
        if not options or not kept <= {option.pool for option in options}:
            return None  # nowhere to go, or in the queue of a site that is silent: nothing is to be decided
        return types.Job(
            job_id=job.job_id,
            submit_s=seconds(job.asked.submitted),
            options=options,
            tier=_TIERS.get(job.asked.tier, 0),
        )

    def _ahead(
        self,
        now_s: float,
        jobs: Mapping[str, types.Job],
        found: Mapping[str, types.Pool],
        tickets: Sequence[types.Ticket],
        places: Sequence[types.Place],
        without: Collection[str],
    ) -> list[types.Place]:
        """Short jobs to wait in the sites' own queues, so that no node waits for the next tick; those left out do not.

        The policy says which would be next if each pool had room for them.
        """
        bound = {ticket.job_id for ticket in tickets} | {place.job_id for place in places}
        short = [
            replace(job, options=options)
            for job in jobs.values()
            if job.job_id not in bound
            and job.job_id not in without
            and (options := tuple(option for option in job.options if option.run_s <= LEAD_S))
        ]
        seats = {name: migration.seated(pool, jobs, [*tickets, *places]) for name, pool in found.items()}
        left = {name: found[name].tickets - waiting for name, (free, waiting) in seats.items() if not free}
        most = max((option.units for job in short for option in job.options), default=0)
        empty = {
            name: replace(found[name], free=min(found[name].units, most * room), running=(), waiting=0)
            for name, room in left.items()
            if room > 0
        }
        if not short or not empty:
            return []
        chosen = []
        for one in self._decide(now_s, short, empty, []):
            if isinstance(one, types.Place) and left[one.pool] > 0:
                left[one.pool] -= 1
                chosen.append(replace(one, why=one.why or "short, and next here"))
        return chosen


def seconds(moment: str) -> float:
    """Unix time of a moment as records write it."""
    return datetime.fromisoformat(moment).timestamp()
