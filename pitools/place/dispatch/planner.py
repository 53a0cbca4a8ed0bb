"""Turn the queue and the sites' replies into the records that `policy.decide` takes, and its decisions into tickets."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from pitools.launch.tickets.ticket_state import TicketState
from pitools.place import types
from pitools.place.clusters import overlay, pools
from pitools.place.clusters.snapshot import Snapshot
from pitools.place.dispatch import withdrawals
from pitools.place.dispatch.journal import QueueJob, QueueTicket
from pitools.place.dispatch.options import OptionCache
from pitools.place.dispatch.queue_state import QueueState
from pitools.place.dispatch.runtime_history import RuntimeHistory
from pitools.site.schema import Site

RETRY_REFUSED_S = 600.0  # a pool that refused a job, or where its ticket failed, is not tried again for this long
RETRY_DEFERRED_S = 120.0  # a site that could take no ticket (busy, disk full) gets none for this long
RETRY_VOID_S = 10.0  # doubled for each void ticket of the job in that pool
LEAD_S = 300.0  # jobs with a shorter expected run may wait in a site's queue, so that no node idles until the next tick
_TIERS = {"low": -1, "high": 1}

Decide = Callable[
    [float, Sequence[types.PendingJob], Mapping[str, types.PoolState], Sequence[types.Ticket]],
    Sequence[types.Submit | types.Withdraw],
]


class SiteReply(NamedTuple):
    """The answer of one site. tickets: the states of its tickets and of every other job of this user there, by name.

    tickets is empty, without a query, where the queue has no ticket.
    snapshot: the site's nodes and jobs; None where nothing is to be placed there.
    """

    tickets: dict[str, TicketState]
    snapshot: Snapshot | None


class ClusterView(NamedTuple):
    """The sites that answered, and their pools."""

    answered: dict[str, tuple[Site, Snapshot]]
    pools: dict[str, types.PoolState]

    @property
    def open_pools(self) -> dict[str, types.PoolState]:
        """The pools that take tickets now."""
        return {name: pool for name, pool in self.pools.items() if not pool.is_unreachable}

    def speed(self, pool: str) -> float:
        """Return the speed of a pool's nodes; 1.0 where its site did not answer."""
        site, _, partition = pool.partition("/")
        partition_state = self.answered[site][0].partitions.get(partition) if site in self.answered else None
        return partition_state.speed if partition_state else 1.0


class Decisions(NamedTuple):
    """The tickets to submit and to withdraw."""

    submits: list[types.Submit]
    withdrawals: list[types.Withdraw]


def is_undecided(job: QueueJob) -> bool:
    """Return whether the place of a job is still open."""
    is_ending = job.is_over or job.is_cancelled or job.has_failed_starts
    is_ending = is_ending or any(not ticket.is_settled for ticket in job.stopped)  # its checkpoints are being fetched
    return not (is_ending or any(ticket.is_running for ticket in job.tickets))


class Planner:
    """Calls the policy. decide: the policy with its parameters bound."""

    def __init__(self, decide: Decide, queue_dir: Path) -> None:
        self._decide, self._offers = decide, OptionCache()
        self._run_times = RuntimeHistory(queue_dir)
        self._postponed_before: tuple[str, ...] = ()

    def build_view(
        self,
        state: QueueState,
        sites: Mapping[str, Site],
        replies: Mapping[str, SiteReply],
        postponed: tuple[str, ...] = (),
    ) -> ClusterView:
        """Return the pools of the sites that answered, with our own jobs in their present states.

        postponed: jobs to estimate first, as the tick before, in another process or not, had no time for them.
        """
        self._postponed_before = postponed
        names = {ticket.name for job in state.jobs.values() for ticket in job.tickets}
        answered = {name: (sites[name], reply.snapshot) for name, reply in replies.items() if reply.snapshot}
        closed = _closed_sites(state)
        pool_states = {
            pool.pool: replace(pool, is_unreachable=name in closed)
            for name, (site, snapshot) in answered.items()
            for pool in pools.pool_states(overlay.overlay_own_jobs(snapshot, replies[name].tickets), names, site)
        }
        self._offers.begin_tick()
        self._run_times.update(ClusterView(answered, pool_states).speed)
        return ClusterView(answered, pool_states)

    def options(self, job: QueueJob, view: ClusterView) -> tuple[types.PlacementOption, ...]:
        """Return the job's options at the sites that answered."""
        return self._offers.options(job, view.answered)

    @property
    def postponed(self) -> tuple[str, ...]:
        """The jobs that this tick had no time to estimate."""
        return self._offers.postponed

    def unfit(self, state: QueueState) -> dict[str, str]:
        """Return job id → why it has no option at the sites that answered."""
        return {
            name: why
            for name, job in state.jobs.items()
            if is_undecided(job) and (why := self._offers.unfit_reason(name))
        }

    def plan_queue_moves(self, state: QueueState, view: ClusterView) -> list[types.Withdraw]:
        """Return withdrawals of short jobs that start sooner in another queue, once every open job has a ticket."""
        jobs, tickets = self._open_jobs(state, view)
        if len({ticket.job_id for ticket in tickets}) < len(jobs):
            return []
        return withdrawals.leave_full_queues(time.time(), jobs, view.open_pools, tickets, LEAD_S)

    def decide(self, state: QueueState, view: ClusterView) -> Decisions:
        """Return the tickets to submit and to withdraw now."""
        now_s = time.time()
        jobs, tickets = self._open_jobs(state, view)
        wanted = self._decide(now_s, list(jobs.values()), view.pools, tickets)
        # Whatever the policy returns, nothing is done at a site that did not answer, or takes no tickets.
        places = [one for one in wanted if isinstance(one, types.Submit) and one.pool in view.open_pools]
        # A job that wants the best of the free nodes waits in our queue until some are free.
        choosy = {name for name in jobs if state.jobs[name].request.request.topology != "none"}
        places += self._submit_ahead(now_s, jobs, view.open_pools, tickets, places, choosy)
        return Decisions(places, [one for one in wanted if isinstance(one, types.Withdraw) and one.pool in view.pools])

    def _open_jobs(
        self, state: QueueState, view: ClusterView
    ) -> tuple[dict[str, types.PendingJob], list[types.Ticket]]:
        """Return the jobs that have not started, and their tickets."""
        rank = {job_id: number for number, job_id in enumerate(self._postponed_before)}
        pending_jobs = {
            job.job_id: pending
            for job in sorted(state.jobs.values(), key=lambda job: (not job.live, rank.get(job.job_id, len(rank))))
            if is_undecided(job) and (pending := self._pending_job(job, view))
        }
        open_jobs = {job_id: pending_jobs[job_id] for job_id in state.jobs if job_id in pending_jobs}
        tickets = [
            types.Ticket(job_id=job_id, pool=ticket.pool, submitted_s=unix_time(ticket.submitted_at))
            for job_id in open_jobs
            for ticket in state.jobs[job_id].live
        ]
        return open_jobs, tickets

    def _pending_job(self, job: QueueJob, view: ClusterView) -> types.PendingJob | None:
        now_s = time.time()
        avoided = {entry.pool for entry in job.refusals if now_s - unix_time(entry.t) < RETRY_REFUSED_S}
        voids = Counter(ticket.pool for ticket in job.tickets if ticket.voided_at)
        avoided |= {
            ticket.pool
            for ticket in job.tickets
            if ticket.voided_at and now_s - unix_time(ticket.voided_at) < _avoid_s(ticket, voids[ticket.pool])
        }
        occupied = {ticket.pool for ticket in job.live}
        options = tuple(
            self._run_times.with_predicted_run(job.request, option, view.speed)
            for option in self._offers.options(job, view.answered)
            if option.pool in occupied or option.pool not in avoided
        )
        if not options or not occupied <= {option.pool for option in options}:
            return None  # no option, or queued at a site that did not answer: nothing to decide
        return types.PendingJob(
            job_id=job.job_id,
            submit_s=unix_time(job.request.queued_at),
            options=options,
            tier=_TIERS.get(job.request.tier, 0),
        )

    def _submit_ahead(
        self,
        now_s: float,
        jobs: Mapping[str, types.PendingJob],
        pools: Mapping[str, types.PoolState],
        tickets: Sequence[types.Ticket],
        submits: Sequence[types.Submit],
        excluded: Collection[str],
    ) -> list[types.Submit]:
        """Submit short jobs to the sites' own queues, so that no node idles until the next tick.

        The policy chooses them as if each pool had room for them.
        """
        bound = {ticket.job_id for ticket in tickets} | {place.job_id for place in submits}
        short = [
            replace(job, options=options)
            for job in jobs.values()
            if job.job_id not in bound
            and job.job_id not in excluded
            and (options := tuple(option for option in job.options if option.run_s <= LEAD_S))
        ]
        capacity = {name: withdrawals.free_after_ours(pool, jobs, [*tickets, *submits]) for name, pool in pools.items()}
        room = {name: pools[name].max_pending - waiting for name, (free, waiting) in capacity.items() if not free}
        most = max((option.units for job in short for option in job.options), default=0)
        empty = {
            name: replace(
                pools[name],
                free=min(pools[name].units, most * room),
                running=(),
                others_pending=0,
                others_pending_s=0.0,
            )
            for name, room in room.items()
            if room > 0
        }
        if not short or not empty:
            return []
        chosen = []
        for decision in self._decide(now_s, short, empty, []):
            if isinstance(decision, types.Submit) and room[decision.pool] > 0:
                room[decision.pool] -= 1
                chosen.append(replace(decision, reason=decision.reason or "short, and next here"))
        return chosen


def _avoid_s(ticket: QueueTicket, voids: int) -> float:
    """Return for how long a job avoids the pool of its void ticket, which is one of so many in that pool."""
    return RETRY_REFUSED_S if ticket.end_state else min(RETRY_REFUSED_S, RETRY_VOID_S * 2.0 ** min(voids - 1, 10))


def _closed_sites(state: QueueState) -> set[str]:
    """Return the sites that could take no ticket of any job a moment ago."""
    since_s = time.time() - RETRY_DEFERRED_S
    every = [ticket for job in state.jobs.values() for ticket in job.tickets]
    return {ticket.site for ticket in every if ticket.is_deferred and unix_time(ticket.voided_at) > since_s}


def unix_time(moment: str) -> float:
    """Return the Unix time of an RFC 3339 time."""
    return datetime.fromisoformat(moment).timestamp()
