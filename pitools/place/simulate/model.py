"""The input and result of a simulation: a trace of jobs, a scenario of pools, and every job's outcome."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from pitools.topology.fabric_model import Fabric

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
Windows = tuple[tuple[float, float], ...]


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs in order of submission, one list per column.

    submit_s: from the trace's start. gpus: number held. run_s: on hardware of speed 1. limit_s: time limit, 0 if the
    trace has none. owner, job_name, queue: user, name, and queue or QOS; "" if unknown. rank_score: an estimate of
    the run time made before the job, on any scale, 0 without one. account: group or account, "" if unknown. wait_s:
    real wait from submission to start, -1 if unknown. began_s: the trace's start by its own clock, as Unix time, for
    hour and weekday; without a date in alibaba's trace, and in SWF without UnixStartTime. skipped: number of rows that
    are not jobs. left_out: reason → GPU hours so far of each job that never ran, held no GPU, or is not over.
    """

    name: str
    job_id: Sequence[str]
    submit_s: Sequence[float]
    gpus: Sequence[int]
    run_s: Sequence[float]
    limit_s: Sequence[float]
    owner: Sequence[str]
    job_name: Sequence[str]
    queue: Sequence[str]
    rank_score: Sequence[float]
    account: Sequence[str] = ()
    wait_s: Sequence[float] = ()
    began_s: float = 0.0
    skipped: int = 0
    left_out: Mapping[str, Sequence[float]] = {}

    def __len__(self) -> int:
        return len(self.job_id)

    @property
    def unallocated(self) -> int:
        """Number of the jobs that are left out."""
        return sum(map(len, self.left_out.values()))


class SimPool(msgspec.Struct, frozen=True, kw_only=True):
    """One pool to simulate. speed: relative to the reference hardware. price: of a GPU hour. max_pending: limit of its
    queue.

    fabric: its nodes; jobs are then placed on nodes of `gpus_per_node` GPUs, not only counted. maintenance_windows:
    windows (from, to) in seconds in which nothing runs, announced before. unreachable_windows: windows in which its
    controller does not answer: running jobs continue, none starts. outage_windows: the same, but running jobs are
    submitted again at the start of the window, with the work up to their last checkpoint.
    """

    pool: str
    gpus: int
    speed: float = 1.0
    price: float = 0.0
    max_pending: int = 4
    gpus_per_node: int = 8
    fabric: Fabric | None = None
    maintenance_windows: Windows = ()
    unreachable_windows: Windows = ()
    outage_windows: Windows = ()


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """Node failures. A job that loses a node is submitted again, with the work since its last checkpoint.

    per_gpu_day: failures per GPU and day. checkpoint_s: interval of checkpoints; 0: no checkpoints. repair_s: time
    until the node is back.
    """

    per_gpu_day: float = 0.0
    checkpoint_s: float = HOUR_S
    repair_s: float = 4 * HOUR_S


class TimeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits where a trace has none: the run time, times a whole number drawn from `factors`, up to a step."""

    factors: tuple[int, int] = (1, 10)
    steps_s: tuple[float, ...] = (HOUR_S, 4 * HOUR_S, 12 * HOUR_S, DAY_S, 2 * DAY_S, 7 * DAY_S)


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Pools and their load.

    load: factor of the arrival rate of the trace. seed: of all random draws. backfill_depth: number of pending jobs
    that each pool's scheduler considers (bf_max_job_test, with Slurm's default). tiers: tier (a job's QOS or queue) →
    priority, called tier in `Result`. preempts: tier → those whose running jobs are submitted again if its first
    pending job can then start. tier_shares: priority → share of the jobs of other tiers. nodes: for pools with a
    fabric, how nodes are chosen. extra_leaf: there, the share of the run time that each leaf switch above the first
    adds. max_limit_s: longest time limit, 0: none; a longer job ends at it, and is submitted again with the rest of its
    work.
    """

    name: str
    pools: tuple[SimPool, ...]
    load: float = 1.0
    seed: int = 0
    backfill_depth: int = 500
    limits: TimeLimits = TimeLimits()
    tiers: Mapping[str, int] = {}
    preempts: Mapping[str, frozenset[str]] = {}
    tier_shares: Mapping[int, float] = {}
    max_limit_s: float = 0.0
    failures: Failures = Failures()
    nodes: Literal["choose", "by-name"] = "choose"
    extra_leaf: float = 0.0


class AttemptSpans(msgspec.Struct, frozen=True, kw_only=True):
    """Every attempt of every job, in order of start.

    job, pool: indices. gpus: held. leaves: 0 without a fabric. done_s: run time at speed 1 that it does, and no failure
    undoes.
    """

    job: array[int]
    pool: array[int]
    gpus: array[int]
    leaves: array[int]
    start_s: array[float]
    end_s: array[float]
    done_s: array[float]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of every job of the trace, in its order.

    submit_s: with the load applied. start_s: of its first attempt; end_s: of its last; NaN for a job that no pool can
    hold. pool: of its last attempt, an index in the scenario, or -1. decisions: calls of the policy; placed, withdrawn:
    its actions; refused: actions that failed, since a pool was unreachable. starved: jobs that a pool could hold, and
    that were pending when no more events came.
    """

    policy: str
    trace: str
    scenario: Scenario
    submit_s: array[float]
    start_s: array[float]
    end_s: array[float]
    pool: array[int]
    tier: array[int]
    limit_s: array[float]
    spans: AttemptSpans
    decisions: int = 0
    placed: int = 0
    withdrawn: int = 0
    refused: int = 0
    starved: int = 0
