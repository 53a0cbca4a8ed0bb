"""The simulator: arrivals and ends as events, EASY backfill in each pool, and a policy that chooses the pools.

Tune a policy's parameters on one part of a trace::

    from functools import partial
    from pathlib import Path
    from pitools.place.policy import PolicyParams, decide
    from pitools.place.policy.runtime_predictor import RuntimePredictor
    from pitools.place.simulate import engine, metrics, scenario, trace

    jobs = trace.read_trace(Path("trace.csv"))
    sites = scenario.three_unequal(load=1.4)
    ours = partial(decide, policy=PolicyParams())  # called as ours(now_s, jobs, pools, tickets)
    result = engine.simulate(jobs, sites, ours, tick_s=60, predictor=RuntimePredictor())
    print(metrics.summarize(result, jobs, window="first-half").mean_jct_s)
    print(metrics.summarize(engine.simulate(jobs, sites, "federation"), jobs, window="first-half").mean_jct_s)
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from heapq import heappop, heappush
from math import ceil, inf, nan
from typing import NamedTuple

from pitools.place.policy.runtime_predictor import RuntimePredictor
from pitools.place.simulate import baselines
from pitools.place.simulate.model import AttemptSpans, Result, Scenario, SimPool, Trace, Windows
from pitools.place.simulate.node_allocator import NodeAllocator
from pitools.place.simulate.policy_adapter import DecideFunction, PolicyAdapter
from pitools.place.simulate.pool_scheduler import PoolScheduler, QueueEntry
from pitools.place.simulate.workload import Workload
from pitools.place.types import Withdraw


class SimEvent(NamedTuple):
    """An attempt ends: successful, by a failure, or at the longest limit; without units, its job is submitted again.

    For a job number below 0, a node returns, a window ends, or (is_failure) an outage begins.
    """

    time_s: float
    job: int
    pool: int
    units: int = 0
    limit_end_s: float = 0.0
    span: int = -1
    is_failure: bool = False
    is_timeout: bool = False


def simulate(
    trace: Trace,
    scenario: Scenario,
    policy: str | DecideFunction,
    *,
    name: str = "",
    tick_s: float = 60.0,
    predictor: RuntimePredictor | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> Result:
    """Replay a trace. policy: the name of a baseline (`baselines.BASELINES`), or a function that decides.

    The function gets every job that has not started, in order of submission; every pool, with `running` by limits; and
    every pending ticket, in order of placement. It is called when jobs arrive, as `pit place run --wait` ticks at once,
    and at the next multiple of tick_s after any other change, also after its own withdrawals (0: at each event).
    predictor: learns from ended jobs, and predicts an option's run_s when the job arrives; without it, run_s is the
    limit. advance: called with the number of finished jobs. Deterministic.
    """
    return Simulator(trace, scenario, policy, name, tick_s, predictor, advance).replay()


class Simulator:
    """The state of one replay."""

    def __init__(
        self,
        trace: Trace,
        scenario: Scenario,
        policy: str | DecideFunction,
        name: str,
        tick_s: float,
        predictor: RuntimePredictor | None,
        advance: Callable[[int], object],
    ) -> None:
        self.trace, self.scenario, self.tick_s, self.advance = trace, scenario, tick_s, advance
        self.work = Workload(trace, scenario)
        self.bind = baselines.make_baseline(policy, scenario) if isinstance(policy, str) else None
        self.decide = None if isinstance(policy, str) else policy
        self.name = name or (policy if isinstance(policy, str) else "ours")
        self.schedulers = [_make_pool(pool, scenario) for pool in scenario.pools]
        self.view = PolicyAdapter(trace, self.work, predictor)
        self.tickets: list[dict[int, QueueEntry]] = [{} for _ in scenario.pools]
        self.waiting: set[int] = set()
        self.attempts: dict[int, int] = {}
        self.start_s, self.end_s = array("d", [nan]) * len(trace), array("d", [nan]) * len(trace)
        self.pool = array("i", [-1]) * len(trace)
        self.spans = AttemptSpans(
            job=array("i"), pool=array("i"), gpus=array("i"), leaves=array("i"),
            start_s=array("d"), end_s=array("d"), done_s=array("d"),
        )  # fmt: skip
        self.events: list[tuple[float, int, SimEvent]] = []  # a heap: by time, then in the order of their making
        self.number = self.decides = self.placed = self.withdrawn = self.refused = 0
        self.next_tick = inf
        self.touched: set[int] = set()
        self.dark_windows = [_dark_windows(pool) for pool in scenario.pools]
        self.evicts = bool(scenario.preempts) or any(pool.outage_windows for pool in scenario.pools)
        # By job, its end, in order of start; where some are evicted.
        self.running: list[dict[int, SimEvent]] = [{} for _ in scenario.pools]

    def replay(self) -> Result:
        """Handle all events, and return the result."""
        submit, arrived = self.work.submit_s, 0
        for pool, described in enumerate(self.scenario.pools):
            for from_s, _ in described.outage_windows:
                self._push(SimEvent(from_s, -1, pool, is_failure=True))
            for _, to_s in (*described.maintenance_windows, *self.dark_windows[pool]):
                self._push(SimEvent(to_s, -1, pool))
        while True:
            arrives = submit[arrived] if arrived < len(submit) else inf
            now = min(arrives, self.events[0][0] if self.events else inf, self.next_tick)
            if now == inf:
                break
            while self.events and self.events[0][0] == now:
                self._handle(heappop(self.events)[2], now)
            self._start_jobs(now)
            while arrived < len(submit) and submit[arrived] == now:
                self._handle_arrival(now, arrived)
                arrived += 1
                self.next_tick = now if self.decide else inf  # who queues a job ticks at once
            if self.decide and self.waiting and self.next_tick == inf:
                self.next_tick = ceil(now / self.tick_s) * self.tick_s if self.tick_s else now
            if now >= self.next_tick:
                self.next_tick = inf
                self._tick(now)
        return Result(
            policy=self.name,
            trace=self.trace.name,
            scenario=self.scenario,
            submit_s=submit,
            start_s=self.start_s,
            end_s=self.end_s,
            pool=self.pool,
            tier=self.work.tier,
            limit_s=self.work.limit_s,
            spans=self.spans,
            decisions=self.decides,
            placed=self.placed,
            withdrawn=self.withdrawn,
            refused=self.refused,
            starved=len(self.waiting),
        )

    def _push(self, event: SimEvent) -> None:
        self.number += 1
        heappush(self.events, (event.time_s, self.number, event))
        if self.evicts and event.span >= 0:
            self.running[event.pool][event.job] = event

    def _handle(self, event: SimEvent, now: float) -> None:
        site, job = self.schedulers[event.pool], event.job
        if not event.units and job >= 0:
            self._handle_arrival(now, job)
            return
        if self.evicts and job >= 0:
            if self.running[event.pool].get(job) is not event:
                return  # it was evicted before
            del self.running[event.pool][job]
        self.touched.add(event.pool)
        if not event.units:  # a window begins, or is over
            site.is_stale = True
            if event.is_failure:
                self._evict(list(self.running[event.pool].values()), now)
            return
        site.release(job, event.units, event.limit_end_s)
        if event.is_failure:
            self._handle_failure(event, now)
        if site.packing:
            site.packing.release(job)
        if job < 0:
            return
        if event.is_timeout:
            began_s, leaves = self.spans.start_s[event.span], self.spans.leaves[event.span]
            self.spans.done_s[event.span] = self.work.do_work(job, event.pool, now - began_s, leaves)
        if event.is_failure or event.is_timeout:
            self._handle_arrival(now, job)
        else:
            self.end_s[job] = now
            if self.decide:
                self.view.add_end(job)
            self.advance(1)

    def _evict(self, events: list[SimEvent], now: float) -> None:
        """End these attempts, and submit their jobs again, with the work up to their last checkpoint."""
        for event in events:
            site = self.schedulers[event.pool]
            del self.running[event.pool][event.job]
            self.spans.end_s[event.span] = now
            site.release(event.job, event.units, event.limit_end_s)
            if site.packing:
                site.packing.release(event.job)
            self._lose_work(event, now)
            self.touched.add(event.pool)
            self._push(SimEvent(now, event.job, event.pool))

    def _preempt(self, pool: int, now: float) -> bool:
        """Evict the latest started jobs without which the first pending job of a pool can start; whether there are."""
        site, queues, tiers = self.schedulers[pool], self.trace.queue, self.work.tier
        if not site.queue:
            return False
        _, _, job, units, limit_s = site.queue[0]
        below = self.scenario.preempts.get(queues[job], ())
        if not below or self._is_unreachable(pool, now) or site.opens_s(now, limit_s) > now:
            return False
        chosen = {
            other: event
            for other, event in self.running[pool].items()
            if queues[other] in below and tiers[other] < tiers[job]
        }
        surplus = site.free + sum(event.units for event in chosen.values()) - units
        if surplus < 0 or (site.packing and not site.packing.fits_without(chosen, units)):
            return False
        for event in list(chosen.values()):  # spare the earliest started, if the others are enough
            del chosen[event.job]
            if event.units > surplus or (site.packing and not site.packing.fits_without(chosen, units)):
                chosen[event.job] = event
            else:
                surplus -= event.units
        self._evict(list(chosen.values()), now)
        return bool(chosen)

    def _handle_failure(self, event: SimEvent, now: float) -> None:
        """Take a node of the job out of service for its repair; the job keeps its work up to its last checkpoint."""
        site = self.schedulers[event.pool]
        self._lose_work(event, now)
        back_s = now + self.scenario.failures.repair_s
        absent_node = -2 - event.span  # a job number below 0
        units = min(event.units, self.scenario.pools[event.pool].gpus_per_node)
        if site.packing:
            units = site.packing.transfer(event.job, absent_node)
        site.hold(absent_node, units, back_s)
        self._push(SimEvent(back_s, absent_node, event.pool, units, back_s))

    def _lose_work(self, event: SimEvent, now: float) -> None:
        ran_s, leaves = now - self.spans.start_s[event.span], self.spans.leaves[event.span]
        self.spans.done_s[event.span] = self.work.lose_work(event.job, event.pool, ran_s, leaves)

    def _handle_arrival(self, now: float, job: int) -> None:
        fits = [pool for pool in self.work.fits(job) if self._is_runnable(job, pool)]
        if not fits:
            self.advance(1)
            return
        self.waiting.add(job)
        if self.bind:
            open_now = [pool for pool in fits if not self._is_unreachable(pool, now)]
            for pool in self.bind(baselines.Arrival(now, job, open_now or fits, fits, self.schedulers, self.work)):
                self._enqueue(now, job, pool)
            self._start_jobs(now)
        else:
            self.view.add_waiting(job, fits)

    def _is_runnable(self, job: int, pool: int) -> bool:
        packing = self.schedulers[pool].packing
        return packing is None or packing.fits_empty(self.work.units_on(job, pool))

    def _enqueue(self, now: float, job: int, pool: int) -> None:
        assert job not in self.tickets[pool], f"{self.trace.job_id[job]} has a ticket there"
        self.number += 1
        entry = (-self.work.tier[job], self.number, job, self.work.units_on(job, pool), self.work.limit_on(job, pool))
        self.schedulers[pool].enqueue(entry)
        self.tickets[pool][job] = entry
        self.touched.add(pool)

    def _withdraw(self, job: int, pool: int) -> None:
        self.schedulers[pool].withdraw(self.tickets[pool].pop(job))
        self.touched.add(pool)

    def _is_unreachable(self, pool: int, now: float) -> bool:
        windows = self.dark_windows[pool]
        return bool(windows) and any(from_s <= now < to_s for from_s, to_s in windows)

    def _start_jobs(self, now: float) -> None:
        """Start the jobs that can start in each changed pool; preempt only where none can start without."""
        while self.touched:
            while self.touched:
                pool = min(self.touched)
                self.touched.discard(pool)
                if not self._is_unreachable(pool, now):
                    self._start_jobs_of(pool, now)
            if self.scenario.preempts:
                any(self._preempt(pool, now) for pool in range(len(self.schedulers)))

    def _start_jobs_of(self, pool: int, now: float) -> None:
        """Start the jobs that can start in a pool, and remove the sibling tickets of each."""
        for entry in self.schedulers[pool].startable(now):
            job = entry[2]
            self.waiting.discard(job)
            del self.tickets[pool][job]
            if len(self.tickets) > 1:
                for other, tickets in enumerate(self.tickets):
                    if job in tickets:
                        self._withdraw(job, other)
            self._start(entry, pool, now)

    def _start(self, entry: QueueEntry, pool: int, now: float) -> None:
        _, _, job, units, limit_s = entry
        site, spans, attempt = self.schedulers[pool], self.spans, self.attempts.get(job, 0)
        leaves = site.packing.leaf_count(job) if site.packing else 0
        run_s, limit_end_s = self.work.run_on(job, pool, leaves), now + limit_s
        is_timeout = bool(self.scenario.max_limit_s) and run_s > limit_s + 1.0  # less is rounding, or the limit's slack
        if is_timeout:
            run_s = limit_s
        elif run_s > limit_s:  # slowed down beyond its limit: the limit is extended, as a user would have set it
            site.running.remove((limit_end_s, job, units))
            site.free += units
            limit_end_s = now + run_s
            site.hold(job, units, limit_end_s)
        fails_s = self.work.fails_after(job, attempt, units) if self.scenario.failures.per_gpu_day else inf
        ends_s = now + min(run_s, fails_s)
        if not attempt:
            self.start_s[job] = now
        self.attempts[job], self.pool[job] = attempt + 1, pool
        if self.decide:
            self.view.add_start(job)
        is_failure, span = fails_s < run_s, len(spans.job)
        is_timeout = is_timeout and not is_failure
        self._push(SimEvent(ends_s, job, pool, units, limit_end_s, span, is_failure, is_timeout))
        spans.job.append(job)
        spans.pool.append(pool)
        spans.gpus.append(units)
        spans.leaves.append(leaves)
        spans.start_s.append(now)
        spans.end_s.append(ends_s)
        spans.done_s.append(self.work.left_s[job])

    def _tick(self, now: float) -> None:
        assert self.decide
        if not self.waiting:
            return
        self.decides += 1
        is_dark = [self._is_unreachable(pool, now) for pool in range(len(self.schedulers))]
        jobs, tickets = self.view.jobs(), self.view.tickets(self.tickets)
        for move in self.decide(now, jobs, self.view.pools(now, self.schedulers, is_dark), tickets):
            job, pool = self.view.job_index(move.job_id), self.view.pool_index[move.pool]
            if is_dark[pool]:
                self.refused += 1
            elif isinstance(move, Withdraw):
                self.withdrawn += 1
                self._withdraw(job, pool)
                self.next_tick = now + (self.tick_s or 1.0)  # no event need follow, and the job has no ticket
            else:
                self.placed += 1
                self.view.add_submission(job, pool, now)
                self._enqueue(now, job, pool)
        self._start_jobs(now)


def _dark_windows(pool: SimPool) -> Windows:
    """Return the windows in which no job starts, though it may reach into them."""
    return (*pool.unreachable_windows, *pool.outage_windows)


def _make_pool(pool: SimPool, scenario: Scenario) -> PoolScheduler:
    packing = NodeAllocator(pool, pool.fabric, by_name=scenario.nodes == "by-name") if pool.fabric else None
    return PoolScheduler(pool.gpus, scenario.backfill_depth, pool.maintenance_windows, packing)
