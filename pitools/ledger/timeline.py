"""Cut an allocation into exclusive intervals, each in one state.

    allocation   │ attempt 0                                   │ attempt 1                          │
    a rank       │ start, staging │ step │ step │ … │ recovery ┼──────────│ step │ … │ checkpoint, idle │

Each rank has the same share of the allocation. A rank without a log counts as the mean of those that have one: steps
are collective. Whatever overlaps is cut, so that the seconds of an allocation always add up to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pitools.ledger.allocations import Allocation
from pitools.ledger.evidence import Attempt, Floats, Ints, StepTimes
from pitools.ledger.records import State

Seconds = dict[State, float]
_RESOLUTION_S = 0.001  # of the times in step logs: a shorter gap between steps is none


def account(allocation: Allocation, typical_s: float) -> Seconds:
    """Return the resource-seconds of each state. typical_s: a step of the run, for an attempt with a single one.

    For how long the job was suspended is known, but not when: it is taken from pauses, and the rest from each state.
    """
    total = dict.fromkeys(State, 0.0)
    lows = [allocation.begin]
    for attempt, _ in allocation.attempts[1:]:  # an attempt lasts until the next begins
        lows.append(min(max(attempt.started, lows[-1]), allocation.end))
    if not allocation.attempts:
        total[State.UNACCOUNTED] = allocation.end - allocation.begin
    for index, (attempt, again_at) in enumerate(allocation.attempts):
        is_last = index == len(allocation.attempts) - 1
        window = _Window(
            lows[index],
            allocation.end if is_last else lows[index + 1],
            State.RECOVERY if index else State.START,
            State.RECOVERY if not is_last else State.UNACCOUNTED if allocation.is_open else State.IDLE,
        )
        waits = straggler_waits(attempt.steps)
        parts = [
            _of_rank(window, attempt, times, wait, again_at, typical_s)
            for times, wait in zip(attempt.steps, waits, strict=True)
        ] or [_without_steps(window, attempt)]
        for part in parts:
            for state, seconds in part:
                total[state] += seconds / len(parts)
    gaps_s = min(allocation.suspended_s, total[State.UNACCOUNTED])
    total[State.UNACCOUNTED] -= gaps_s
    rest_s = allocation.end - allocation.begin - gaps_s
    share = allocation.length_s / rest_s if rest_s else 1.0
    return {state: seconds * share * allocation.resources for state, seconds in total.items()}


class _Window(NamedTuple):
    """The part of an allocation in which an attempt is. before, after: the states before its first step, and after the
    last."""

    low: float
    high: float
    before: State
    after: State

    def clip(self, moment: float) -> float:
        return min(max(moment, self.low), self.high)


def straggler_waits(steps: Sequence[StepTimes]) -> list[Floats]:
    """Return for each rank and step how long it waited for the slowest rank: its time in collectives, less the least
    of all ranks, that of the last to come. A step that is made again is another."""
    if len(steps) < 2:
        return [np.zeros(len(times.number)) for times in steps]
    numbers = np.concatenate([times.number for times in steps])
    comm = np.concatenate([times.comm for times in steps])
    column = np.unique(numbers, return_inverse=True)[1] * len(numbers)  # a step's number, and which of that number
    column += np.concatenate([_made_before(times.number) for times in steps])
    unique, column, ranks = np.unique(column, return_inverse=True, return_counts=True)
    least = np.full(len(unique), np.inf)
    np.minimum.at(least, column, comm)
    waits = np.where(ranks[column] > 1, comm - least[column], 0.0)
    return np.split(waits, np.cumsum([len(times.number) for times in steps])[:-1])


def _made_before(number: Ints) -> Ints:
    """Return of each step how many before it have its number."""
    order = np.argsort(number, kind="stable")
    before = np.empty_like(number)
    before[order] = np.arange(len(number)) - np.searchsorted(number[order], number[order])
    return before


def typical_step_s(attempts: Sequence[Attempt]) -> float:
    """Return the median step of a run, without the first of each attempt; 0 without one."""
    steps = [_own(times)[1:] for attempt in attempts for times in attempt.steps]
    joined = np.concatenate(steps) if steps else np.zeros(0)
    return float(np.median(joined)) if len(joined) else 0.0


def _own(times: StepTimes) -> Floats:
    return np.maximum(times.wall - times.input - times.checkpoint, 0.0)


def _of_rank(
    window: _Window, attempt: Attempt, times: StepTimes, waits: Floats, again_at: int | None, typical_s: float
) -> Iterator[tuple[State, float]]:
    """Yield the seconds of one rank in a window, in order; their sum is its length."""
    low, high = window.low, window.high
    end = np.clip(times.end, low, high)
    last = np.append(low, end[:-1])
    begin = np.maximum(np.clip(times.end - times.wall, low, high), last)
    begin[1:] = np.where(begin[1:] - last[1:] <= _RESOLUTION_S, last[1:], begin[1:])
    begin = np.minimum(begin, end)
    yield from _until(window, attempt, float(begin[0]))
    yield State.UNACCOUNTED, float((begin[1:] - end[:-1]).sum())
    left = end - begin
    is_lost = _lost(times, again_at)
    yield State.LOST, float(left[is_lost].sum())
    left = np.where(is_lost, 0.0, left)
    parts = ((State.CHECKPOINT, times.checkpoint), (State.INPUT, times.input), (State.STRAGGLER, waits))
    for state, part in parts:
        taken = np.minimum(part, left)
        left = left - taken
        yield state, float(taken.sum())
    is_first = np.append(True, times.number[1:] <= times.number[:-1])  # the program began again
    others = left[~is_first & ~is_lost]
    usual_s = float(np.median(others)) if len(others) else typical_s
    excess = np.where(is_first, np.maximum(left - usual_s, 0.0), 0.0) if usual_s else np.zeros(len(left))
    yield State.COMPILE, float(excess.sum())
    yield State.PRODUCTIVE, float((left - excess).sum())
    done = float(end[-1])
    saved = done if attempt.saved_at is None else max(window.clip(attempt.saved_at), done)
    yield State.CHECKPOINT, saved - done
    yield window.after, high - saved


def _lost(times: StepTimes, again_at: int | None) -> np.ndarray:
    """Return which steps were made again, later in this log or from the step of a later attempt on."""
    highest = np.iinfo(np.int64).max
    later = np.append(times.number[1:], highest if again_at is None else again_at)
    later = np.minimum(later, highest if again_at is None else again_at)
    result: np.ndarray = times.number >= np.minimum.accumulate(later[::-1])[::-1]
    return result


def _until(window: _Window, attempt: Attempt, moment: float) -> Iterator[tuple[State, float]]:
    """Yield the seconds from the begin of a window to a time, at which the first step or the ranks begin."""
    staged_s = 0.0
    if attempt.staged:
        begin, end = (min(window.clip(each), moment) for each in attempt.staged)
        staged_s = end - begin
    yield State.STAGING, staged_s
    yield window.before, moment - window.low - staged_s


def _without_steps(window: _Window, attempt: Attempt) -> Iterator[tuple[State, float]]:
    """Yield the seconds of an attempt of which no step is known: what its ranks did is not accounted for."""
    ended = window.high if attempt.ended is None else window.clip(attempt.ended)
    began = ended if attempt.ranks_began is None else min(window.clip(attempt.ranks_began), ended)
    yield from _until(window, attempt, began)
    yield State.UNACCOUNTED, ended - began
    yield window.after, window.high - ended
