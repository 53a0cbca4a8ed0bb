"""Find ranks that are slower than the others of their run, with a bound on false alarms.

In a healthy run the ranks' times of a step could be swapped. Neighbouring steps are alike, so steps are joined to six
blocks, and a rank's excess over the median of the others is compared with the exact distribution of the excesses under
all permutations of the ranks within each block. Of two ranks these are the signs of their difference, of ten blocks,
whose correlation is allowed for. A rank that is noisier than the others needs a larger excess, by that ratio. What all
ranks share, such as a slow step, cancels. Bonferroni's bound is over the ranks. Nodes of different hardware are no such
ranks: a rank is compared with those of its class.

A profile has too few steps to tell a rank that stays slow from one that is for a while, as its data are longer: a rank
that is slower throughout is slow in it, and of two ranks, too, blocks count as independent. With fewer steps than
blocks the test is a t-test on the rank's own deviation: with a correlation of 0.5, up to 10 of 100 healthy profiles
have a slow rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.core.record import Record
from pitools.perf.statistics import to_normal
from pitools.run import run_folder
from pitools.run.steps import Step, read_steps_after

Array = NDArray[np.float64]
Cause = Literal["input", "compute", "host", "network", "unknown"]

ALPHA = 0.01  # of a run without a slow rank
_BLOCKS = 6  # of steps: the fewer, the less correlated; of 2 or 3 ranks more, as
_RAREST = 0.002  # has to be possible as a p-value, for the slowest rank of each block
_GRID = 200  # of a block's largest excess: to what its cells are rounded
MIN_EFFECT = 0.03  # of a step: healthy nodes differ by 1 to 2 percent
_REFERENCE = 0.4  # of the least effect, more with two ranks, less with more: few ranks' median is uncertain, too
_TRIMMED = 0.1  # of the largest and of the smallest excesses of a rank, which are no evidence
MIN_STEPS, MIN_STEPS_OF_PROFILE = 20, 3
_MIN_STEPS_OF_TWO = 30  # with work that is alike for 10 steps, 8 of 100 healthy pairs are slow in 20, 1 to 2 in 30
_CLIP = 3.5  # standard deviations from the median rank


class Straggler(Record, frozen=True, kw_only=True, tag="pit.perf-straggler/1"):
    """A rank that is slower than the median rank.

    cause: the part of its step that is longer; `network` where its collectives end later although its own work is not
    longer; `unknown` without parts. excess_s: mean of the steps without the outermost. effect: excess_s ÷ the median
    step. p: probability of such an excess in a run without a slow rank. steps: their number. ranks: number of those
    compared. node: "" if unknown.
    """

    node: str
    rank: int
    cause: Cause
    effect: float
    excess_s: float
    p: float
    steps: int
    ranks: int


class SlowRank(NamedTuple):
    """A column that is larger than the others: its number, its mean excess, and the excess's probability."""

    column: int
    excess: float
    p: float


class RankTimes(NamedTuple):
    """Seconds by part, each (steps, ranks), and the ranks' numbers and nodes. Parts: input, compute, host, network."""

    parts: dict[Cause, Array]
    ranks: tuple[int, ...]
    nodes: dict[int, str]


def find_slow_ranks(
    times: Array, scale: float, *, min_effect: float = MIN_EFFECT, of_profile: bool = False
) -> list[SlowRank]:
    """Return the ranks whose times exceed the others', largest first.

    times: (steps, ranks), of each rank's own work, or its arrivals at the same collective on one clock. scale: the
    length of a step, in the unit of times. min_effect: an excess of a smaller share of scale is none; of 2 ranks it has
    to be 1.4 times as large, of 8 1.06 times. of_profile: whether to find who was slow in these steps, however few and
    correlated, in place of who stays slow. Raises DataError for fewer than 20 steps, of two ranks 30, of a profile 3;
    for fewer than 2 ranks, or a time that is not finite.
    """
    steps, ranks = times.shape
    min_steps = MIN_STEPS_OF_PROFILE if of_profile else _MIN_STEPS_OF_TWO if ranks == 2 else MIN_STEPS
    if steps < min_steps or ranks < 2 or not np.isfinite(times).all() or not scale > 0:
        message = f"{steps} steps of {ranks} ranks (expected at least {min_steps} of 2 or more, all finite)"
        raise DataError(message, hint="log more steps")
    found: list[SlowRank] = []
    columns = list(range(ranks))
    while len(columns) > 1:  # each one found would hide the next
        excess = times[:, columns] - _median_of_others(times[:, columns])
        cut = max(1, round(_TRIMMED * steps))
        means = np.sort(excess, axis=0)[cut:-cut].mean(axis=0)
        least = min_effect * scale * (1 + _REFERENCE / (len(columns) - 1))
        p_values = _p_values(excess, least, of_profile=of_profile)
        candidates = (p_values <= ALPHA) & (means >= least)
        if not candidates.any():
            break
        worst = int(np.where(candidates, means, -np.inf).argmax())
        found.append(SlowRank(columns.pop(worst), float(means[worst]), float(p_values[worst])))
    return found


def _median_of_others(times: Array) -> Array:
    """Return for each rank the median of the other ranks, of each step."""
    ranks = times.shape[1]
    if ranks > 16:  # the median of all is the same to within the spread of a few
        return np.median(times, axis=1, keepdims=True)
    return np.stack([np.median(np.delete(times, rank, axis=1), axis=1) for rank in range(ranks)], axis=1)


def _p_values(excess: Array, least: float, *, of_profile: bool) -> Array:
    """Return for each rank the probability of its mean excess, or a larger one, times the number of ranks.

    Ranks that are slower in every block by the least excess of all, as several on a slow node, do not hide each other:
    each is compared with those that are not.
    """
    steps, ranks = excess.shape
    count = max(_BLOCKS, 1 + math.ceil(math.log(1 / _RAREST, ranks)))
    if steps < count:
        excess = excess - excess.mean()
        error = np.maximum(excess.std(axis=0, ddof=1) / math.sqrt(steps), 1e-300)
        z = to_normal(excess.mean(axis=0) / error, steps - 1)
        return np.array([min(1.0, ranks * NormalDist().cdf(-float(value))) for value in z])
    own = excess - np.median(excess, axis=0)
    spread = 1.4826 * np.median(np.abs(own)) or own.std() or 1.0
    own = np.clip(own, -_CLIP * spread, _CLIP * spread)
    excess = own + np.median(excess, axis=0)
    noise = np.maximum(own.std(axis=0), 1e-9 * spread)
    blocks = np.stack([part.mean(axis=0) for part in np.array_split(excess, count)])
    is_slow = blocks.min(axis=0) >= least
    blocks -= blocks.mean(axis=1, keepdims=True)
    cells = np.rint(blocks / (np.abs(blocks).max() or 1.0) * _GRID).astype(int)
    deviation = np.maximum(noise / math.sqrt((noise**2).mean()), 1.0)
    if ranks == 2 and not of_profile:
        deviation *= math.sqrt(_inflation(own[:, 0] - own[:, 0].mean(), steps // count))
    sums = np.ceil(cells.sum(axis=0) / deviation).astype(int)
    p = _tails(cells, sums)
    for rank in np.flatnonzero(is_slow) if is_slow.sum() > 1 else ():
        others = cells[:, ~is_slow | (np.arange(ranks) == rank)]
        p[rank] = _tails(others, sums[rank : rank + 1])[0]
    result: Array = np.minimum(ranks * p, 1.0)
    return result


def _tails(cells: NDArray[np.int64], sums: NDArray[np.int64]) -> Array:
    """Return the probability of each sum, or a larger one, of a random rank's cell of each block.

    cells: (blocks, ranks), -_GRID to _GRID.
    """
    count, ranks = cells.shape
    size = 1 << (2 * _GRID * count).bit_length()
    shares = np.array([np.bincount(row + _GRID, minlength=size) for row in cells]) / ranks
    null = np.fft.irfft(np.fft.rfft(shares).prod(axis=0), size)
    tails: Array = np.maximum(null[::-1].cumsum()[::-1][sums + _GRID * count], float(ranks) ** -count)
    return tails


def _inflation(own: Array, length: int) -> float:
    """Return how much larger the variance of a mean is than if blocks of this length were independent.

    own: deviations from the mean; of two ranks those of one, as the other's are the same. Lags count up to the first
    whose correlation is within its error. The mean taken out makes each correlation lower by the inflation of
    independent steps ÷ steps.
    """
    steps = len(own)
    raw = np.zeros(0)
    for lag in range(1, steps // 4 + 1):
        correlation = float(own[lag:] @ own[:-lag]) / max(float(own @ own), 1e-300)
        if correlation + (1 + 2 * raw.sum()) / steps < 1 / math.sqrt(steps):
            break
        raw = np.append(raw, correlation)
    total = float(1 + 2 * raw.sum()) / (1 - 2 * len(raw) / steps)
    weights = np.clip(1 - np.arange(1, len(raw) + 1) / length, 0, None)
    return max(1.0, total / (1 + 2 * float(weights @ (raw + total / steps))))


def find_stragglers(
    times: RankTimes, *, min_effect: float = MIN_EFFECT, classes: Mapping[str, str] | None = None
) -> list[Straggler]:
    """Return the slow ranks of a run, largest excess first, each with its cause.

    classes: node → its hardware; a rank alone in its class is compared with none. Raises as `find_slow_ranks`.
    """
    groups: dict[str, list[int]] = {}
    for column, rank in enumerate(times.ranks):
        groups.setdefault((classes or {}).get(times.nodes.get(rank, ""), ""), []).append(column)
    compared = [columns for columns in groups.values() if len(columns) > 1]
    stragglers = [one for columns in compared for one in _find_in_class(times, columns, min_effect, len(compared))]
    return sorted(stragglers, key=lambda straggler: -straggler.excess_s)


def _find_in_class(times: RankTimes, columns: list[int], min_effect: float, n_classes: int) -> list[Straggler]:
    """Return the slow ranks among some columns, with Bonferroni's bound over the classes, too."""
    parts = {name: part[:, columns] for name, part in times.parts.items()}
    own: Array = np.sum([part for name, part in parts.items() if name != "network"], axis=0)
    end = own + parts["network"] if "network" in parts else own
    step_s = float(np.median(end))
    slow = {found.column: (found, "") for found in find_slow_ranks(own, step_s, min_effect=min_effect)}
    if "network" in parts:
        for found in find_slow_ranks(end, step_s, min_effect=min_effect):
            slow.setdefault(found.column, (found, "network"))
    return [
        Straggler(
            node=times.nodes.get(times.ranks[columns[column]], ""),
            rank=times.ranks[columns[column]],
            cause="network" if cause else _longest_part(parts, column),
            effect=found.excess / step_s,
            excess_s=found.excess,
            p=found.p * n_classes,
            steps=len(own),
            ranks=len(columns),
        )
        for column, (found, cause) in slow.items()
        if found.p * n_classes <= ALPHA
    ]


def _longest_part(parts: Mapping[Cause, Array], column: int) -> Cause:
    """Return the part of a rank's own work that exceeds the others' by most."""
    excess = {
        name: float(np.median(part[:, column] - np.median(np.delete(part, column, axis=1), axis=1)))
        for name, part in parts.items()
        if name != "network"
    }
    return max(excess, key=lambda name: excess[name])


def read_rank_times(run_dir: Path) -> RankTimes:
    """Return the times of a run's last attempt that has steps, from its step logs; steps that all ranks logged count.

    The first step, which compiles, is left out. Raises DataError without two ranks' logs.
    """
    for attempt in reversed(run_folder.attempt_dirs(run_dir)):
        paths = [path for path in (attempt / "steps").glob("*.jsonl") if path.stem.isdecimal()]
        logs = {int(path.stem): read_steps_after(path, 0)[0] for path in paths}
        if len(logs := {rank: log for rank, log in sorted(logs.items()) if log}) > 1:
            return RankTimes(_parts(list(logs.values())), tuple(logs), _nodes(attempt, logs))
    hint = "each rank writes its steps with pitools.run.steps.StepLog"
    raise DataError("step logs of fewer than 2 ranks", where=str(run_dir), hint=hint)


def _parts(logs: Sequence[Sequence[Step]]) -> dict[Cause, Array]:
    by_step = [{step.step: step for step in log} for log in logs]
    common = sorted(set(by_step[0]).intersection(*by_step[1:]))[1:]
    cells = [[rank[number] for rank in by_step] for number in common]

    def part(name: str) -> Array:
        values = [[getattr(step, name) for step in row] for row in cells]
        return np.array(values, dtype=float).reshape(len(common), len(logs))

    inputs, compute, network = part("input_s"), part("compute_s"), part("comm_s")
    host = np.maximum(part("wall_s") - inputs - compute - network, 0.0)
    return {"input": inputs, "compute": compute, "host": host, "network": network}


def read_nodes(run_dir: Path) -> dict[int, str]:
    """Return the node of each rank of a run's last attempt that has ranks."""
    for attempt in reversed(run_folder.attempt_dirs(run_dir)):
        if nodes := _nodes(attempt, [int(path.stem) for path in (attempt / "ranks").glob("[0-9]*.json")]):
            return nodes
    return {}


def _nodes(attempt: Path, ranks: Iterable[int]) -> dict[int, str]:
    nodes = {}
    for rank in ranks:
        with contextlib.suppress(DataError):
            if record := run_folder.read_record(attempt / "ranks" / f"{rank}.json", run_folder.RankRecord):
                nodes[rank] = record.node
    return nodes
