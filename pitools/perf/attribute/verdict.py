"""What limits a run, with its evidence, and what a remedy would gain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from pitools.core.errors import DataError
from pitools.core.record import Record
from pitools.perf.attribute.buckets import BUCKETS, Buckets
from pitools.perf.stragglers import MIN_EFFECT, MIN_STEPS_OF_PROFILE, find_slow_ranks

_MIN_SHARE = 0.15  # of the wall time, to be worth a verdict
_ADVICE_SHARE = 0.05
_COMPUTE_SHARE = 0.6
_SHARED_CPU = 0.5  # of a rank's own time: the most that sharing its CPU adds

_LABEL = {
    "communication": "exposed transfer",
    "straggler": "waiting for the last rank",
    "host": "host and idle",
    "memory": "exposed copies",
}
_REMEDY = {
    "input": "read ahead: more loader workers or threads, or data staged to the node (pit stage)",
    "communication": "overlap with compute, larger buckets, fewer bytes, or ranks closer together (pit topology)",
    "straggler": "free or replace the slow rank's node (pit node), or even out the ranks' work",
    "host": "fewer and larger operations: fuse, compile, capture graphs; less Python code in the step",
    "memory": "keep data on the device, or copy asynchronously from pinned memory",
    "compile": "constant shapes, and a compilation cache",
    "checkpoint": "save asynchronously, or less often",
}
_UNSURE_LABEL = {**_LABEL, "straggler": "waiting for late ranks, for none surely"}
_UNSURE_REMEDY = {
    **_REMEDY,
    "straggler": "trace more steps to be sure which rank is late; then replace its node, or even out the ranks' work",
}


class Advice(Record, frozen=True, kw_only=True, tag="pit.perf-advice/1"):
    """A remedy, and the step's time with it. gain_ms: predicted. ceiling_ms: if the cause were gone altogether."""

    cause: str
    remedy: str
    gain_ms: float
    ceiling_ms: float


class Verdict(Record, frozen=True, kw_only=True, tag="pit.perf-verdict/1"):
    """What limits a run: input, communication, host, compute, straggler, memory, compile, checkpoint, inconclusive.

    wall_ms: a step's mean. shares: parts of it, 0 to 1, as means over ranks. rank: the straggler's, else None. advice:
    the greatest gain first. notes: what limits these statements.
    """

    verdict: str
    evidence: list[str]
    rank: int | None
    ranks: int
    steps: int
    wall_ms: float
    shares: dict[str, float]
    advice: list[Advice]
    notes: list[str]


def judge(buckets: Buckets, notes: Sequence[str] = ()) -> Verdict:
    """Return what limits the run: the largest avoidable part, if it is 15 % or more; else compute, from 60 %.

    Waiting for each other is such a part only where it is surely for one rank; where it is more than any sure part, and
    for no rank surely, that is inconclusive. Time spent waiting for a CPU stretches every part, so host and
    communication are scaled by the share of the time in which ranks had one. Steps that not all ranks have do not
    count, as waiting is not told from transfer there, unless all are such. Raises DataError for steps that take no
    time.
    """
    all_steps, buckets = set(buckets.windows.step.tolist()), _of_common_steps(buckets)
    if left_out := len(all_steps) - len(set(buckets.windows.step.tolist())):
        notes = [*notes, f"{left_out} steps are not in the verdict: not all ranks have them"]
    wall = float(buckets.wall_ns.mean())
    if not wall:
        raise DataError("no step takes any time (expected steps of 1 ns or more)", hint="log wall_s, in seconds")
    mean = {name: float(part) for name, part in zip(BUCKETS, buckets.parts_ns.mean(axis=0), strict=True)}
    skew, cpu_wait = float(buckets.skew_ns.mean()), float(buckets.windows.cpu_wait_ns.mean())
    has_cpu = 1 - cpu_wait / wall
    ranks = len(np.unique(buckets.windows.rank))
    rank, part, excess, lost = _straggler(buckets, has_cpu)
    losses = {
        "input": mean["input"],
        "communication": (mean["communication"] - skew) * has_cpu,
        "straggler": lost,
        "host": (mean["host"] + mean["idle"]) * has_cpu,
        "memory": mean["copy"],
        "compile": mean["compile"],
        "checkpoint": mean["checkpoint"],
    }
    if part == "input":  # while one rank is late, the others' loaders catch up: slow input shows on the last rank only
        losses |= {"input": mean["input"] + min(lost, skew), "straggler": 0.0}
    elif rank is not None and part in ("host", "idle"):  # of which its own excess is the cause of the others' wait
        losses["host"] = max(0.0, losses["host"] - excess * has_cpu / ranks)
    sure = {name: loss for name, loss in losses.items() if name != "straggler" or rank is not None}
    cause = max(sure, key=lambda name: sure[name])
    label, remedy = (_LABEL, _REMEDY) if rank is not None else (_UNSURE_LABEL, _UNSURE_REMEDY)
    shares = {name: round(value / wall, 4) for name, value in (*mean.items(), ("skew", skew), ("cpu_wait", cpu_wait))}
    evidence = [
        f"{label.get(name, name)} {value / 1e6:.3f} ms of {wall / 1e6:.3f} ms"
        for name, value in sorted(losses.items(), key=lambda item: (item[0] != cause, -item[1]))
        if value >= 0.01 * wall
    ]
    verdict, first, without_cpu = cause, "", _describe_cpu_waits(buckets)
    if losses["straggler"] > sure[cause] and losses["straggler"] >= _MIN_SHARE * wall:
        verdict = "inconclusive"
        first = without_cpu or "ranks wait for each other, but in these steps for none of them surely: profile more"
    elif sure[cause] < _MIN_SHARE * wall:
        verdict = "compute" if mean["compute"] >= _COMPUTE_SHARE * wall else "inconclusive"
        first = f"compute {mean['compute'] / 1e6:.3f} ms of {wall / 1e6:.3f} ms"
    elif cause == "straggler" or cause == part == "input":
        first = f"the others wait for rank {rank}: its {part} is {excess / 1e6:.3f} ms a step longer"
    if (buckets.windows.step < 0).all():
        marks = "prof.step() of PyTorch's profiler, or jax.profiler.StepTraceAnnotation"
        notes = [*notes, f"the profile marks no steps, and counts as one, -1: mark them by {marks}"]
    if without_cpu:
        notes = [*notes, without_cpu]
    if ranks == 1 and mean["communication"]:
        notes = [*notes, "transfer includes waiting for other ranks, of which no profile is here"]
    return Verdict(
        verdict=verdict,
        evidence=[first, *evidence] if first else evidence,
        rank=rank if verdict == "straggler" else None,
        ranks=ranks,
        steps=len(set(buckets.windows.step.tolist())),
        wall_ms=round(wall / 1e6, 6),
        shares=shares,
        advice=_advise(losses, mean, wall, remedy),
        notes=[*notes, *buckets.matched.notes],
    )


def _of_common_steps(buckets: Buckets) -> Buckets:
    """Return the steps that all ranks have; all, if there are none."""
    windows = buckets.windows
    steps = [windows.step[windows.rank == rank] for rank in np.unique(windows.rank)]
    rows = np.isin(windows.step, reduce(np.intersect1d, steps, windows.step))
    if rows.all() or not rows.any():
        return buckets
    return Buckets(
        windows.where(rows), buckets.parts_ns[rows], buckets.skew_ns[rows], buckets.total_ns[rows], buckets.matched
    )


def _describe_cpu_waits(buckets: Buckets) -> str:
    """Return which rank waited longest for a CPU, and for how long; "" for a small part of its steps."""
    ranks = np.unique(buckets.windows.rank)
    waits_ns = [buckets.windows.cpu_wait_ns[buckets.windows.rank == rank].mean() for rank in ranks]
    longest, wall = max(waits_ns), buckets.wall_ns.mean()
    if longest < _MIN_SHARE * wall:
        return ""
    about = f"rank {ranks[int(np.argmax(waits_ns))]} waited for a CPU for {longest / 1e6:.3f} ms of {wall / 1e6:.3f} ms"
    if len(ranks) > 1:
        about += f", the others for {(sum(waits_ns) - longest) / (len(ranks) - 1) / 1e6:.3f} ms"
    return f"{about}: other programs run on its node, or it has more threads than CPUs"


def _straggler(buckets: Buckets, has_cpu: float) -> tuple[int | None, str, float, float]:
    """Return the rank that the others wait for, its part that is longer, by how much, and what that costs, ns.

    None if no rank is surely slow. Each rank's steps are compared without its waits. The cost is the others' wait, but
    at most the rank's excess: ranks that are late at random wait for each other too. has_cpu: share of the time in
    which the ranks had a CPU.
    """
    ranks, steps = np.unique(buckets.windows.rank), np.unique(buckets.windows.step)
    if not len(buckets.matched.rank):
        return None, "", 0.0, 0.0
    waited = np.array([buckets.skew_ns[buckets.windows.rank == rank].mean() for rank in ranks])
    lost = float(np.sort(waited)[1:].mean()) if len(waited) > 1 else 0.0
    own = np.full((len(steps), len(ranks)), np.nan)
    row, column = np.searchsorted(steps, buckets.windows.step), np.searchsorted(ranks, buckets.windows.rank)
    own[row, column] = buckets.own_ns
    own = own[~np.isnan(own).any(axis=1)]
    if len(own) < MIN_STEPS_OF_PROFILE:
        return None, "", 0.0, lost
    # A rank that shares its CPU also shares caches: healthy ones had up to 0.42 more time of their own than others.
    wall = float(buckets.wall_ns.mean())
    most_wait = max(buckets.windows.cpu_wait_ns[buckets.windows.rank == rank].mean() for rank in ranks) / wall
    least = min(most_wait, _SHARED_CPU) * float(np.median(own, axis=0).min()) / wall
    found = find_slow_ranks(own, wall, min_effect=max(MIN_EFFECT, least), of_profile=True)
    if not found:
        return None, "", 0.0, lost
    slow = int(ranks[found[0].column])
    lost = min(lost, found[0].excess / max(has_cpu, 1e-9))
    others = buckets.windows.rank != slow
    parts = buckets.parts_ns[~others].mean(axis=0) - buckets.parts_ns[others].mean(axis=0)
    parts[BUCKETS.index("communication")] = 0
    most = int(parts.argmax())
    return slow, BUCKETS[most], float(parts[most]), lost


def _advise(losses: dict[str, float], mean: dict[str, float], wall: float, remedy: dict[str, str]) -> list[Advice]:
    """Return remedies of what costs 5 % or more. Input and communication can hide behind the rest of the step's work,
    and gain at most as much as that lasts; half of the host's time, or of checkpoints, is a cautious guess."""
    busy = mean["compute"]
    predicted = {
        "input": min(losses["input"], wall - losses["input"]),
        "communication": min(losses["communication"], busy),
        "memory": min(losses["memory"], busy),
        "checkpoint": losses["checkpoint"] / 2,
        "host": losses["host"] / 2,
    }
    advice = [
        Advice(
            cause=cause,
            remedy=remedy[cause],
            gain_ms=round(predicted.get(cause, loss) / 1e6, 6),
            ceiling_ms=round(loss / 1e6, 6),
        )
        for cause, loss in losses.items()
        if loss >= _ADVICE_SHARE * wall
    ]
    return sorted(advice, key=lambda each: -each.gain_ms)
