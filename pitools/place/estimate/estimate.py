"""When a candidate would start, how long it would run, what it would cost, and what may go wrong.

All in seconds from now. The start is what `sbatch --test-only` says of the very script, put right by what became of
earlier such estimates, and spread by the site's own history; what is copied meanwhile costs only what it takes longer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType

import msgspec

from pitools.core import hostlist, units
from pitools.core.errors import ClusterError, UsageError
from pitools.launch import plan as planning
from pitools.launch.request import Request
from pitools.place.clusters import accounting_history, pools, snapshot
from pitools.place.clusters.accounting_history import Waits
from pitools.place.clusters.local_history import Line
from pitools.place.clusters.snapshot import Snapshot
from pitools.place.estimate import slurm_limits, throughput, wait_model
from pitools.place.estimate.candidates import Candidate, same_nodes
from pitools.place.estimate.data_transfer import Missing
from pitools.place.estimate.throughput import Rate
from pitools.place.types import Option, Pool
from pitools.slurm.client import Client

AT_ONCE_S = 60.0  # what starts within a minute starts at once: no history makes that later
REQUEUE_S = 120.0
CHECKPOINT_S = 1800.0  # between two checkpoints, of a request that does not say
_YEARS_S = 5 * 365 * 86400.0


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The run itself. run_s: without failures; loss_s: what failures add, on average; p_fail: of at least one."""

    run_s: float
    loss_s: float
    p_fail: float
    cost: float
    basis: str


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds until the job starts, of which 10, 50 and 90 % are less. raw_s: as Slurm said."""

    q10_s: float
    q50_s: float
    q90_s: float
    raw_s: float
    basis: str


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. done_s: when the results are there, in the middle case."""

    start: Start
    work: Work
    missing: Missing

    @property
    def done_s(self) -> float:
        """Waiting and copying go on at once; then the run, and what failures add to it."""
        return max(self.start.q50_s, self.missing.wall_s) + self.work.run_s + self.work.loss_s


def ask_start(candidate: Candidate, seen: Snapshot, timeout_s: float) -> float:
    """Ask Slurm when it would start the candidate's own script: one call. Returns seconds from now.

    Raises Unreachable, and ClusterError where Slurm refuses the script or its answer is for another.
    """
    assert candidate.plan
    plan = candidate.plan
    script = planning.script(plan, candidate.site, run_dir=f"{plan.runs}/{plan.name}", payload="true")
    said = Client(snapshot.reach(candidate.site, timeout_s)).test_only(script)
    where = f"sbatch --test-only on {candidate.site.name}"
    if said.partition and said.partition != candidate.partition:
        raise ClusterError(f'it answers for partition "{said.partition}"', where=where, hint="try the script by hand")
    try:
        names = set(hostlist.expand(said.node_list) if hostlist.count(said.node_list) <= candidate.nodes else ())
    except UsageError as error:
        raise ClusterError(f"it names no nodes: {error.what}", where=where) from error
    if len(names) < candidate.plan.nodes or not names <= candidate.names:
        what = f"it names nodes that are not {candidate.plan.nodes} of the partition: {said.node_list}"
        raise ClusterError(what, where=where, hint="try the script by hand")
    # Both times are the cluster's clock; what was due by now is due now.
    there_s = datetime.fromisoformat(said.start).timestamp() if said.start else math.inf
    raw_s = there_s - seen.skew_s - time.time()
    if raw_s > _YEARS_S:
        raise ClusterError(f"it would start at {said.start or 'no time'}", where=where, hint="ask for less")
    return max(0.0, raw_s)


def group_wait_s(candidate: Candidate, seen: Snapshot) -> float:
    """Seconds until the job's account and QOS have room for it, of which `--test-only` knows nothing."""
    assert candidate.plan
    longest = 0.0
    wanted = slurm_limits.asked(candidate.plan.job)
    there = next(one for one in seen.partitions if one.partition == candidate.partition)
    for group in slurm_limits.groups(candidate.plan.job, there, seen):
        for name, most in group.most.items():
            if name in ("node", "gres/gpu") and wanted[name]:
                held = pools.held_by(seen, candidate.said.gpus_per_node if name != "node" else 0, group.holds)
                need = wanted[name] + sum(units for _, units in held) - most
                longest = max(longest, pools.freed(held, need, time.time()))
    return longest


def start(
    candidate: Candidate, raw_s: float, seen: Snapshot, pool: Pool | None, past: Waits | None, noted: Sequence[Line]
) -> Start:
    """The start as quantiles. past: how long others waited there; noted: what became of earlier estimates of ours."""
    assert candidate.plan
    now_s, limit_s = time.time(), candidate.plan.job.time_s

    def opens_s(wait_s: float) -> float:
        # What was learnt knows nothing of maintenance: Slurm starts no job that might reach into it.
        return pool.opens_s(now_s + wait_s, limit_s) - now_s if pool else wait_s

    group_s = group_wait_s(candidate, seen)
    basis = "Slurm's estimate" if raw_s >= group_s else "a limit of the account or QOS"
    least_s = max(raw_s, group_s)
    mine = [line for line in noted if line.pool == candidate.pool]
    known = None
    if past and least_s > AT_ONCE_S:
        known = accounting_history.quantiles(past, candidate.partition, candidate.plan.nodes)
    if learnt := wait_model.calibrate(least_s, features(candidate, pool), mine, now_s):
        low, middle, high = map(opens_s, wait_model.joined(learnt, known) if known else learnt)
        return Start(q10_s=low, q50_s=middle, q90_s=high, raw_s=raw_s, basis=f"{basis}, calibrated")
    low = high = least_s
    if known:
        low, high = min(low, known[0]), max(high, known[2])
        basis += ", and how long others waited"
    low, middle, high = map(opens_s, (low, least_s, high))
    return Start(q10_s=low, q50_s=middle, q90_s=high, raw_s=raw_s, basis=basis)


def features(candidate: Candidate, pool: Pool | None) -> dict[str, float]:
    """What is known when a wait is foretold: the job's size and limit, and what is asked for before it.

    ahead: what others' jobs wait for, by what the pool has.
    """
    assert candidate.plan
    return {
        "units": float(candidate.units),
        "limit_s": float(candidate.plan.job.time_s),
        "ahead": pool.waiting / pool.units if pool and pool.units else 0.0,
    }


def works(
    request: Request,
    candidates: Sequence[Candidate],
    rates: Mapping[str, Rate],
    past: Mapping[str, Waits | None] = MappingProxyType({}),
) -> dict[str, Work]:
    """Pool → what the run takes there. rates: pool → how it was measured, where it was. past: site → its history."""
    fit = [one for one in candidates if one.plan]
    said = {one.pool: one.said.throughput.get(request.name) for one in fit}
    known = {pool: Rate(samples_s=samples_s) for pool, samples_s in said.items() if samples_s}
    known |= {pool: rate for pool, rate in rates.items() if pool in said}
    scaled = throughput.speeds(known, {one.pool: one.said.speed for one in fit})
    samples = next((rate.samples for rate in rates.values() if rate.samples), None)
    found = {}
    for one in fit:
        per_day = accounting_history.failures(
            past.get(one.site.name), one.partition, one.site.place.failures_per_node_day
        )
        found[one.pool] = _work(request, one, known.get(one.pool), scaled[one.pool], samples, per_day)
    return found


def _work(
    request: Request, candidate: Candidate, rate: Rate | None, speed: float, samples: float | None, per_day: float
) -> Work:
    assert candidate.plan
    job = candidate.plan.job
    if rate and samples:
        run_s, basis = samples / rate.samples_s / job.nodes, "as it ran before"
    else:
        # What a person asks for is what they think it takes where `speed` is 1.
        asked_s = units.seconds(request.time or candidate.site.defaults.time)
        run_s, basis = min(asked_s / speed, job.time_s), "its time limit" if not rate else "its time limit, by rate"
    failures = per_day * job.nodes * run_s / 86400
    lost_s = _interval_s(request, rate, run_s) / 2 + REQUEUE_S
    return Work(
        run_s=run_s,
        loss_s=failures * lost_s,
        p_fail=-math.expm1(-failures),
        cost=candidate.said.price_per_node_hour * job.nodes * (run_s + failures * lost_s) / 3600,
        basis=basis,
    )


def _interval_s(request: Request, rate: Rate | None, run_s: float) -> float:
    """Seconds between two checkpoints; those who only save at the end lose all of it."""
    every = request.args.get("checkpoint_every")
    if every == 0:
        return run_s
    if isinstance(every, int) and rate and rate.step_s:
        return min(run_s, every * rate.step_s)
    return min(run_s, CHECKPOINT_S)


def options(
    candidates: Sequence[Candidate], works: Mapping[str, Work], missing: Mapping[str, Missing]
) -> tuple[Option, ...]:
    """What a dispatcher may choose from: the candidates that fit, one for partitions of the same nodes.

    works: pool → run; missing: pool → data to copy. Of two partitions with the same nodes the first counts.
    """
    taken: list[Candidate] = []
    for one in candidates:
        if one.fits and not any(same_nodes(one, other) for other in taken):
            taken.append(one)
    return tuple(
        Option(
            pool=one.pool,
            units=one.units,
            run_s=works[one.pool].run_s + works[one.pool].loss_s,
            limit_s=float(one.plan.job.time_s) if one.plan else 0.0,
            stage_s=missing[one.pool].wall_s if one.pool in missing else 0.0,
        )
        for one in taken
    )
