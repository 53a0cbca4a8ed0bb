"""Summarize a replay: one record per policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from pitools.core.record import Record
from pitools.place.simulate.model import Result, Trace

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Window = Literal["all", "first-half", "second-half"]

SHORT_S = 10.0  # a bounded slowdown counts a shorter run as this
SIZES = ((1, 1), (2, 7), (8, 8), (9, 31), (32, 10**9))  # GPUs


class SimulationSummary(Record, frozen=True, kw_only=True, tag="pit.simulation-summary/1"):
    """One policy on one trace, over the jobs that were submitted in `window`.

    jct: completion time, from submission to end. wait: to the first start; by GPUs requested, and by tier. slowdown:
    jct over run time, the run at least 10 s. utilisation: GPU time held over GPU time available; goodput: the same
    without the time of work that was lost to failures; both until the end of the last job for `all`, and
    for a half while its jobs arrive. makespan: from the first submission to the last end. fragmentation: the mean, over
    time, of the share of idle GPUs outside the pool with the most. jain: Jain's index of the owners' mean slowdowns (of
    the jobs', without owners); 1 is fair. leaves: mean leaf switches of jobs of several nodes, 0 without a fabric.
    unplaced: jobs that no pool can hold; starved: jobs that the policy never started; no other figure counts these.
    failures: attempts that a failure, an outage or preemption ended.
    backfill_depth: pending jobs that a scheduler considers. wall_s: duration of the replay.
    """

    policy: str
    trace: str
    scenario: str
    load: float
    seed: int
    window: str
    jobs: int
    mean_jct_s: float
    p50_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    mean_wait_s: float
    max_wait_s: float
    wait_by_gpus_s: dict[str, float]
    wait_by_tier_s: dict[str, float]
    slowdown: float
    utilisation: float
    goodput: float
    makespan_s: float
    fragmentation: float
    jain: float
    leaves: float
    failures: int
    unplaced: int
    starved: int
    backfill_depth: int
    decisions: int
    placed: int
    withdrawn: int
    skipped: int
    unallocated: int
    wall_s: float = 0.0


def summarize(result: Result, trace: Trace, window: Window = "all", wall_s: float = 0.0) -> SimulationSummary:
    """Return the summary of a replay over one window. Every job is replayed, whatever the window."""
    submit, start, end = (np.frombuffer(column) for column in (result.submit_s, result.start_s, result.end_s))
    tier = np.frombuffer(result.tier, np.int32)
    gpus = np.asarray(trace.gpus)
    ran, inside = np.isfinite(end), in_window(result, window)
    jct, wait, run = (end - submit)[inside], (start - submit)[inside], (end - start)[inside]
    slowdown = np.maximum(1.0, jct / np.maximum(run, SHORT_S))
    quantiles = np.percentile(jct, (50, 95, 99)) if jct.size else np.zeros(3)
    bounds = window_bounds(result, window)
    utilisation, goodput = gpu_time_shares(result, trace, bounds)
    several = np.frombuffer(result.spans.leaves, np.int32)
    several = several[np.frombuffer(result.spans.gpus, np.int32) > min(p.gpus_per_node for p in result.scenario.pools)]
    return SimulationSummary(
        policy=result.policy,
        trace=result.trace,
        scenario=result.scenario.name,
        load=result.scenario.load,
        seed=result.scenario.seed,
        window=window,
        jobs=int(inside.sum()),
        mean_jct_s=_mean(jct),
        p50_jct_s=float(quantiles[0]),
        p95_jct_s=float(quantiles[1]),
        p99_jct_s=float(quantiles[2]),
        mean_wait_s=_mean(wait),
        max_wait_s=float(wait.max(initial=0.0)),
        wait_by_gpus_s=_wait_by_size(gpus[inside], wait),
        wait_by_tier_s={str(t): _mean(wait[tier[inside] == t]) for t in np.unique(tier[inside])},
        slowdown=_mean(slowdown),
        utilisation=utilisation,
        goodput=goodput,
        makespan_s=float(np.nanmax(end, initial=submit[0]) - submit[0]),
        fragmentation=_fragmentation(result, bounds),
        jain=_jain(slowdown, np.asarray(trace.owner)[inside]),
        leaves=_mean(several),
        failures=len(result.spans.job) - int(ran.sum()),
        unplaced=int((~ran).sum()) - result.starved,
        starved=result.starved,
        backfill_depth=result.scenario.backfill_depth,
        decisions=result.decisions,
        placed=result.placed,
        withdrawn=result.withdrawn,
        skipped=trace.skipped,
        unallocated=trace.unallocated,
        wall_s=round(wall_s, 3),
    )


def in_window(result: Result, window: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return for each job whether it was submitted in this window and ran to its end."""
    submit, (from_s, to_s) = np.frombuffer(result.submit_s), window_bounds(result, window)
    inside = (submit >= from_s) & (submit <= to_s if window != "first-half" else submit < to_s)
    return np.isfinite(np.frombuffer(result.end_s)) & inside


def window_bounds(result: Result, window: str) -> tuple[float, float]:
    """Return the start and end of a window: `all` ends with the last job, a half with its last submission."""
    first, last = result.submit_s[0], result.submit_s[-1]
    middle = (first + last) / 2
    if window == "first-half":
        return first, middle
    return (middle, last) if window == "second-half" else (first, max(max(result.spans.end_s, default=last), last))


def timeline(result: Result) -> tuple[Floats, Any]:
    """Return the times of ends and starts, ends first, and the GPUs in use from each on, one column per pool."""
    spans, pools = result.spans, len(result.scenario.pools)
    pool, gpus = np.frombuffer(spans.pool, np.int32), np.frombuffer(spans.gpus, np.int32)
    moments = np.concatenate([np.frombuffer(spans.end_s), np.frombuffer(spans.start_s)])
    change = np.zeros((len(moments), pools))
    change[np.arange(len(moments)), np.concatenate([pool, pool])] = np.concatenate([-gpus, gpus])
    order = np.argsort(moments, kind="stable")
    return moments[order], np.cumsum(change[order], axis=0)


def gpu_time_shares(
    result: Result, trace: Trace, window_s: tuple[float, float], pools: Sequence[int] | None = None
) -> tuple[float, float]:
    """Return utilisation and goodput, see `SimulationSummary`, within a window. pools: only of these, by index."""
    chosen = list(range(len(result.scenario.pools)) if pools is None else pools)
    speed, size = (np.array([getattr(each, key) for each in result.scenario.pools]) for key in ("speed", "gpus"))
    from_s, to_s = window_s
    if to_s <= from_s or not chosen:
        return 0.0, 0.0
    spans = result.spans
    job, pool, gpus = (np.frombuffer(column, np.int32) for column in (spans.job, spans.pool, spans.gpus))
    start, end = np.frombuffer(spans.start_s), np.frombuffer(spans.end_s)
    inside_s = np.clip(np.minimum(end, to_s) - np.maximum(start, from_s), 0.0, None) * np.isin(pool, chosen)
    could_s = (end - start) * speed[pool]
    kept = np.divide(np.frombuffer(spans.done_s), could_s, out=np.zeros(len(job)), where=could_s > 0) * inside_s
    total = float(size[chosen].sum()) * (to_s - from_s)
    held, useful = float((gpus * inside_s).sum()), float((np.asarray(trace.gpus)[job] * kept).sum())
    return held / total, useful / total


def _fragmentation(result: Result, window_s: tuple[float, float]) -> float:
    """Return the fragmentation within a window, see `SimulationSummary`."""
    moments, used = timeline(result)
    from_s, to_s = window_s
    if not len(moments) or to_s <= from_s:
        return 0.0
    edges = np.clip(np.append(moments, to_s), from_s, to_s)
    lasts = np.diff(edges)
    lasts[-1] = max(to_s - max(moments[-1], from_s), 0.0)
    idle = np.array([float(p.gpus) for p in result.scenario.pools]) - used
    total = idle.sum(1)
    outside_share = np.divide(total - idle.max(1), total, out=np.zeros_like(total), where=total > 0)
    return float((lasts * outside_share).sum() / (to_s - from_s))


def _mean(values: Any) -> float:
    return float(values.mean()) if values.size else 0.0


def size_name(gpus: int) -> str:
    """Return the name of the size class of a number of GPUs."""
    least, most = next((least, most) for least, most in SIZES if least <= gpus <= most)
    return f"{least}+" if most == SIZES[-1][1] else str(least) if least == most else f"{least}-{most}"


def _wait_by_size(gpus: Any, wait: Any) -> dict[str, float]:
    return {size_name(least): _mean(wait[(gpus >= least) & (gpus <= most)]) for least, most in SIZES}


def _jain(slowdown: Any, owners: Any) -> float:
    if not slowdown.size:
        return 1.0
    if owners.any():
        _, index = np.unique(owners, return_inverse=True)
        slowdown = np.bincount(index, slowdown) / np.bincount(index)
    return float(slowdown.sum() ** 2 / (len(slowdown) * (slowdown**2).sum()))
