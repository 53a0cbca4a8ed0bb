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
from pitools.place.clusters.accounting_history import AccountingHistory
from pitools.place.clusters.local_history import WaitLine
from pitools.place.clusters.snapshot import Snapshot
from pitools.place.estimate import slurm_limits, throughput, wait_model
from pitools.place.estimate.candidates import Candidate, same_nodes
from pitools.place.estimate.data_transfer import DataTransfer
from pitools.place.estimate.throughput import Throughput
from pitools.place.types import PlacementOption, PoolState
from pitools.slurm.client import Client

STARTS_NOW_S = 60.0  # what starts within a minute starts at once: no history makes that later
REQUEUE_S = 120.0
CHECKPOINT_S = 1800.0  # between two checkpoints, of a request that does not say
_YEARS_S = 5 * 365 * 86400.0


class RunEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The run itself. run_s: without failures; loss_s: what failures add, on average; p_fail: of at least one."""

    run_s: float
    loss_s: float
    p_fail: float
    cost: float
    basis: str


class WaitEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds until the job starts, of which 10, 50 and 90 % are less. slurm_s: as Slurm said."""

    q10_s: float
    q50_s: float
    q90_s: float
    slurm_s: float
    basis: str


class CandidateEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. done_s: when the results are there, in the middle case."""

    wait: WaitEstimate
    run: RunEstimate
    transfer: DataTransfer

    @property
    def done_s(self) -> float:
        """Waiting and copying go on at once; then the run, and what failures add to it."""
        return max(self.wait.q50_s, self.transfer.wall_s) + self.run.run_s + self.run.loss_s


def query_start(candidate: Candidate, site_snapshot: Snapshot, timeout_s: float) -> float:
    """Ask Slurm when it would start the candidate's own script: one call. Returns seconds from now.

    Raises Unreachable, and ClusterError where Slurm refuses the script or its answer is for another.
    """
    assert candidate.plan
    plan = candidate.plan
    script = planning.render_script(plan, candidate.site, run_dir=f"{plan.runs}/{plan.name}", payload="true")
    said = Client(snapshot.make_transport(candidate.site, timeout_s)).test_only(script)
    where = f"sbatch --test-only on {candidate.site.name}"
    if said.partition and said.partition != candidate.partition:
        raise ClusterError(f'it answers for partition "{said.partition}"', where=where, hint="try the script by hand")
    try:
        names = set(
            hostlist.expand(said.node_list) if hostlist.count_hosts(said.node_list) <= candidate.suited_nodes else ()
        )
    except UsageError as error:
        raise ClusterError(f"it names no nodes: {error.message}", where=where) from error
    if len(names) < candidate.plan.nodes or not names <= candidate.node_names:
        what = f"it names nodes that are not {candidate.plan.nodes} of the partition: {said.node_list}"
        raise ClusterError(what, where=where, hint="try the script by hand")
    # Both times are the cluster's clock; what was due by now is due now.
    there_s = datetime.fromisoformat(said.start).timestamp() if said.start else math.inf
    raw_s = there_s - site_snapshot.skew_s - time.time()
    if raw_s > _YEARS_S:
        raise ClusterError(f"it would start at {said.start or 'no time'}", where=where, hint="ask for less")
    return max(0.0, raw_s)


def limit_wait_s(candidate: Candidate, snapshot: Snapshot) -> float:
    """Seconds until the job's account and QOS have room for it, of which `--test-only` knows nothing."""
    assert candidate.plan
    longest = 0.0
    wanted = slurm_limits.requested_tres(candidate.plan.job)
    there = next(one for one in snapshot.partitions if one.partition == candidate.partition)
    for group in slurm_limits.limit_groups(candidate.plan.job, there, snapshot):
        for name, most in group.limits.items():
            if name in ("node", "gres/gpu") and wanted[name]:
                held = pools.held_until(
                    snapshot, candidate.site_partition.gpus_per_node if name != "node" else 0, group.counts
                )
                need = wanted[name] + sum(units for _, units in held) - most
                longest = max(longest, pools.wait_until_free_s(held, need, time.time()))
    return longest


def estimate_wait(
    candidate: Candidate,
    raw_s: float,
    snapshot: Snapshot,
    pool: PoolState | None,
    accounting: AccountingHistory | None,
    history: Sequence[WaitLine],
) -> WaitEstimate:
    """The start as quantiles. accounting: how long others waited there; history: what became of earlier estimates of
    ours."""
    assert candidate.plan
    now_s, limit_s = time.time(), candidate.plan.job.time_s

    def opens_s(wait_s: float) -> float:
        # What was learnt knows nothing of maintenance: Slurm starts no job that might reach into it.
        return pool.opens_s(now_s + wait_s, limit_s) - now_s if pool else wait_s

    group_s = limit_wait_s(candidate, snapshot)
    basis = "Slurm's estimate" if raw_s >= group_s else "a limit of the account or QOS"
    least_s = max(raw_s, group_s)
    mine = [line for line in history if line.pool == candidate.pool]
    known = None
    if accounting and least_s > STARTS_NOW_S:
        known = accounting_history.wait_quantiles(accounting, candidate.partition, candidate.plan.nodes)
    if learnt := wait_model.calibrate(least_s, wait_features(candidate, pool), mine, now_s):
        low, middle, high = map(opens_s, wait_model.combine(learnt, known) if known else learnt)
        return WaitEstimate(q10_s=low, q50_s=middle, q90_s=high, slurm_s=raw_s, basis=f"{basis}, calibrated")
    low = high = least_s
    if known:
        low, high = min(low, known[0]), max(high, known[2])
        basis += ", and how long others waited"
    low, middle, high = map(opens_s, (low, least_s, high))
    return WaitEstimate(q10_s=low, q50_s=middle, q90_s=high, slurm_s=raw_s, basis=basis)


def wait_features(candidate: Candidate, pool: PoolState | None) -> dict[str, float]:
    """What is known when a wait is foretold: the job's size and limit, and what is asked for before it.

    ahead: what others' jobs wait for, by what the pool has.
    """
    assert candidate.plan
    return {
        "units": float(candidate.units),
        "limit_s": float(candidate.plan.job.time_s),
        "ahead": pool.others_pending / pool.units if pool and pool.units else 0.0,
    }


def estimate_runs(
    request: Request,
    candidates: Sequence[Candidate],
    rates: Mapping[str, Throughput],
    past: Mapping[str, AccountingHistory | None] = MappingProxyType({}),
) -> dict[str, RunEstimate]:
    """Pool → what the run takes there. rates: pool → how it was measured, where it was. past: site → its history."""
    fit = [one for one in candidates if one.plan]
    said = {one.pool: one.site_partition.throughput.get(request.name) for one in fit}
    known = {pool: Throughput(samples_per_node_s=samples_s) for pool, samples_s in said.items() if samples_s}
    known |= {pool: rate for pool, rate in rates.items() if pool in said}
    scaled = throughput.relative_speeds(known, {one.pool: one.site_partition.speed for one in fit})
    samples = next((rate.samples for rate in rates.values() if rate.samples), None)
    found = {}
    for one in fit:
        per_day = accounting_history.node_failure_rate(
            past.get(one.site.name), one.partition, one.site.place.failures_per_node_day
        )
        found[one.pool] = _estimate_run(request, one, known.get(one.pool), scaled[one.pool], samples, per_day)
    return found


def _estimate_run(
    request: Request, candidate: Candidate, rate: Throughput | None, speed: float, samples: float | None, per_day: float
) -> RunEstimate:
    assert candidate.plan
    job = candidate.plan.job
    if rate and samples:
        run_s, basis = samples / rate.samples_per_node_s / job.nodes, "as it ran before"
    else:
        # What a person asks for is what they think it takes where `speed` is 1.
        asked_s = units.parse_duration(request.time or candidate.site.defaults.time)
        run_s, basis = min(asked_s / speed, job.time_s), "its time limit" if not rate else "its time limit, by rate"
    failures = per_day * job.nodes * run_s / 86400
    lost_s = _checkpoint_interval_s(request, rate, run_s) / 2 + REQUEUE_S
    return RunEstimate(
        run_s=run_s,
        loss_s=failures * lost_s,
        p_fail=-math.expm1(-failures),
        cost=candidate.site_partition.price_per_node_hour * job.nodes * (run_s + failures * lost_s) / 3600,
        basis=basis,
    )


def _checkpoint_interval_s(request: Request, rate: Throughput | None, run_s: float) -> float:
    """Seconds between two checkpoints; those who only save at the end lose all of it."""
    every = request.args.get("checkpoint_every")
    if every == 0:
        return run_s
    if isinstance(every, int) and rate and rate.step_s:
        return min(run_s, every * rate.step_s)
    return min(run_s, CHECKPOINT_S)


def placement_options(
    candidates: Sequence[Candidate], works: Mapping[str, RunEstimate], missing: Mapping[str, DataTransfer]
) -> tuple[PlacementOption, ...]:
    """What a dispatcher may choose from: the candidates that fit, one for partitions of the same nodes.

    works: pool → run; missing: pool → data to copy. Of two partitions with the same nodes the first counts.
    """
    taken: list[Candidate] = []
    for one in candidates:
        if one.fits and not any(same_nodes(one, other) for other in taken):
            taken.append(one)
    return tuple(
        PlacementOption(
            pool=one.pool,
            units=one.units,
            run_s=works[one.pool].run_s + works[one.pool].loss_s,
            limit_s=float(one.plan.job.time_s) if one.plan else 0.0,
            stage_s=missing[one.pool].wall_s if one.pool in missing else 0.0,
        )
        for one in taken
    )
