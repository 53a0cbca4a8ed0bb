"""Estimate a candidate's wait, run time, cost and risk of failure. Times are seconds from now.

The wait comes from `sbatch --test-only` for the candidate's own script. Past predictions and their outcomes calibrate
it, and the waits of other jobs at the site widen its range. Missing data is copied before the submission; the start is
expected after the longer of copy and wait, as if the job were in the queue meanwhile.
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
from pitools.place.clusters.snapshot import Snapshot
from pitools.place.clusters.wait_log import WaitLine
from pitools.place.estimate import slurm_limits, throughput, wait_model
from pitools.place.estimate.candidates import Candidate, has_same_nodes
from pitools.place.estimate.data_transfer import DataTransfer
from pitools.place.estimate.throughput import Throughput
from pitools.place.types import PlacementOption, PoolState
from pitools.slurm.client import Client

STARTS_NOW_S = 60.0  # a job that Slurm would start within a minute starts now, whatever the history
REQUEUE_S = 120.0
CHECKPOINT_S = 1800.0  # default interval of checkpoints
_YEARS_S = 5 * 365 * 86400.0


class RunEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The run itself. run_s: without failures. loss_s: expected time lost to failures. p_fail: probability of at least
    one failure. basis: source of run_s, as text.
    """

    run_s: float
    loss_s: float
    p_fail: float
    cost: float
    basis: str


class WaitEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """10th, 50th and 90th percentile of the wait, in seconds. slurm_s: Slurm's own estimate. basis: source, as text."""

    q10_s: float
    q50_s: float
    q90_s: float
    slurm_s: float
    basis: str


class CandidateEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The estimate of a candidate."""

    wait: WaitEstimate
    run: RunEstimate
    transfer: DataTransfer

    @property
    def end_s(self) -> float:
        """Return the expected end: the longer of median wait and copy, plus the run and its loss."""
        return max(self.wait.q50_s, self.transfer.wall_s) + self.run.run_s + self.run.loss_s


def query_start(candidate: Candidate, site_snapshot: Snapshot, timeout_s: float) -> float:
    """Query Slurm for the start of the candidate's own script in one call. Returns seconds from now.

    Raises Unreachable, and ClusterError if Slurm rejects the script or answers for another partition or nodes.
    """
    assert candidate.plan
    plan = candidate.plan
    script = planning.render_script(plan, candidate.site, run_dir=f"{plan.runs_dir}/{plan.name}", payload="true")
    answer = Client(snapshot.make_transport(candidate.site, timeout_s)).test_only(script)
    where = f"sbatch --test-only on {candidate.site.name}"
    if answer.partition and answer.partition != candidate.partition:
        message = f'answer for partition "{answer.partition}" (expected "{candidate.partition}")'
        raise ClusterError(message, where=where, hint="run sbatch --test-only with the script by hand")
    try:
        is_plausible = hostlist.count_hosts(answer.node_list) <= candidate.total_nodes
        names = set(hostlist.expand(answer.node_list) if is_plausible else ())
    except UsageError as error:
        raise ClusterError(f"not a node list: {error.message}", where=where) from error
    if len(names) < candidate.plan.nodes or not names <= candidate.node_names:
        message = f"nodes {answer.node_list} (expected {candidate.plan.nodes} of the partition)"
        raise ClusterError(message, where=where, hint="run sbatch --test-only with the script by hand")
    # The answer is on the cluster's clock. A start in the past means now.
    start_s = datetime.fromisoformat(answer.start).timestamp() if answer.start else math.inf
    wait_s = start_s - site_snapshot.skew_s - time.time()
    if wait_s > _YEARS_S:
        message = f"start at {answer.start or 'no time'} (expected within 5 years)"
        raise ClusterError(message, where=where, hint="request less")
    return max(0.0, wait_s)


def limit_wait_s(candidate: Candidate, snapshot: Snapshot) -> float:
    """Return the seconds until limits of the account and QOS admit the job; `--test-only` ignores those limits."""
    assert candidate.plan
    longest_s = 0.0
    job, per_node = candidate.plan.job, candidate.site_partition.gpus_per_node
    requested = {"node": job.nodes, "gres/gpu": job.nodes * job.gpus_per_node}
    for limit, counts in slurm_limits.limits_shared_with_others(job, candidate.site, snapshot):
        if requested.get(limit.tres):
            by_end = pools.units_by_end(snapshot, per_node if limit.tres != "node" else 0, counts)
            excess = requested[limit.tres] + sum(units for _, units in by_end) - limit.value
            longest_s = max(longest_s, pools.wait_until_free_s(by_end, excess, time.time()))
    return longest_s


def estimate_wait(
    candidate: Candidate,
    slurm_s: float,
    snapshot: Snapshot,
    pool: PoolState | None,
    accounting: AccountingHistory | None,
    history: Sequence[WaitLine],
) -> WaitEstimate:
    """Return the wait as quantiles. accounting: waits of other jobs there. history: our earlier predictions and their
    outcomes.
    """
    assert candidate.plan
    now_s, limit_s = time.time(), candidate.plan.job.time_s

    def opens_s(wait_s: float) -> float:
        # History ignores maintenance, but Slurm starts no job whose limit reaches into a reservation.
        return pool.opens_s(now_s + wait_s, limit_s) - now_s if pool else wait_s

    limit_wait = limit_wait_s(candidate, snapshot)
    basis = "Slurm's estimate" if slurm_s >= limit_wait else "a limit of the account or QOS"
    min_wait_s = max(slurm_s, limit_wait)
    pool_log = [line for line in history if line.pool == candidate.pool]
    observed = None
    if accounting and min_wait_s > STARTS_NOW_S:
        observed = accounting_history.wait_quantiles(accounting, candidate.partition, candidate.plan.nodes)
    features = wait_model.log_features(pool, candidate.units, limit_s)
    if predicted := wait_model.calibrate(min_wait_s, features, pool_log, now_s):
        low, middle, high = map(opens_s, wait_model.combine(predicted, observed) if observed else predicted)
        return WaitEstimate(q10_s=low, q50_s=middle, q90_s=high, slurm_s=slurm_s, basis=f"{basis}, calibrated")
    low = high = min_wait_s
    if observed:
        low, high = min(low, observed[0]), max(high, observed[2])
        basis += ", and the waits of other jobs"
    low, middle, high = map(opens_s, (low, min_wait_s, high))
    return WaitEstimate(q10_s=low, q50_s=middle, q90_s=high, slurm_s=slurm_s, basis=basis)


def estimate_runs(
    request: Request,
    candidates: Sequence[Candidate],
    rates: Mapping[str, Throughput],
    histories: Mapping[str, AccountingHistory | None] = MappingProxyType({}),
) -> dict[str, RunEstimate]:
    """Return pool → estimate of the run. rates: pool → measured throughput. histories: site → its accounting."""
    fit = [c for c in candidates if c.plan]
    site_rates = {c.pool: c.site_partition.throughput.get(request.name) for c in fit}
    by_pool = {pool: Throughput(samples_per_node_s=samples_s) for pool, samples_s in site_rates.items() if samples_s}
    by_pool |= {pool: rate for pool, rate in rates.items() if pool in site_rates}
    speeds = throughput.relative_speeds(by_pool, {c.pool: c.site_partition.speed for c in fit})
    samples = next((rate.samples for rate in rates.values() if rate.samples), None)
    runs = {}
    for candidate in fit:
        site, pool = candidate.site, candidate.pool
        daily = accounting_history.node_failure_rate(
            histories.get(site.name), candidate.partition, site.place.failures_per_node_day
        )
        runs[pool] = _estimate_run(request, candidate, by_pool.get(pool), speeds[pool], samples, daily)
    return runs


def _estimate_run(
    request: Request, candidate: Candidate, rate: Throughput | None, speed: float, samples: float | None, daily: float
) -> RunEstimate:
    assert candidate.plan
    job = candidate.plan.job
    if rate and samples:
        run_s, basis = samples / rate.samples_per_node_s / job.nodes, "measured in earlier runs"
    else:
        # The requested time is assumed to fit a partition with `speed` 1.
        requested_s = units.parse_duration(request.time or candidate.site.defaults.time)
        run_s, basis = min(requested_s / speed, job.time_s), "its time limit" if not rate else "its time limit and rate"
    failures = daily * job.nodes * run_s / 86400
    lost_s = _checkpoint_interval_s(request, rate, run_s) / 2 + REQUEUE_S
    return RunEstimate(
        run_s=run_s,
        loss_s=failures * lost_s,
        p_fail=-math.expm1(-failures),
        cost=candidate.site_partition.price_per_node_hour * job.nodes * (run_s + failures * lost_s) / 3600,
        basis=basis,
    )


def _checkpoint_interval_s(request: Request, rate: Throughput | None, run_s: float) -> float:
    """Return the seconds between two checkpoints; without checkpoints, the whole run."""
    steps = request.args.get("checkpoint_every")
    if steps == 0:
        return run_s
    if isinstance(steps, int) and rate and rate.step_s:
        return min(run_s, steps * rate.step_s)
    return min(run_s, CHECKPOINT_S)


def placement_options(
    candidates: Sequence[Candidate], runs: Mapping[str, RunEstimate], missing: Mapping[str, DataTransfer]
) -> tuple[PlacementOption, ...]:
    """Return the options for the dispatcher: candidates that fit. Of partitions with the same nodes only the first
    counts.

    runs: pool → estimate of the run. missing: pool → data to copy.
    """
    chosen: list[Candidate] = []
    for candidate in candidates:
        if candidate.fits and not any(has_same_nodes(candidate, other) for other in chosen):
            chosen.append(candidate)
    return tuple(
        PlacementOption(
            pool=candidate.pool,
            units=candidate.units,
            run_s=runs[candidate.pool].run_s + runs[candidate.pool].loss_s,
            limit_s=float(candidate.plan.job.time_s) if candidate.plan else 0.0,
            copy_s=missing[candidate.pool].wall_s if candidate.pool in missing else 0.0,
        )
        for candidate in chosen
    )
