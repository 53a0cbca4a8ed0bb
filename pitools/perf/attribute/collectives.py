"""Match collectives across ranks, and tell waiting for the last rank to arrive from the transfer."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pitools.perf.spans import Bools, Ints, Kind, Spans, SpanTable

_CLOCK_NS = 1_000_000  # ranks end a collective this close together, if their clocks agree
_MIN_RESIDUAL_NS = 2_000_000
# By one name of NCCL, gloo, HLO or JAX, without `_` and `-`: a root or sender ends early, as its buffer is sent. Not
# `AllReduce`, `ReduceScatter`, `unreduced_psum`, nor `cross_device_reduce`, which is an all-reduce.
_ENDS_APART = re.compile(
    r"broadcast|bcast|send|recv|permute|(?<!all)gather|(?<!reduce)scatter|(?<!all)(?<!device)reduce(?!scatter|d)"
)


@dataclass(frozen=True)
class Matched:
    """The collectives that several ranks took part in, as intervals of waiting.

    rank, start_ns, end_ns: a rank waits from its own arrival until the last rank's, by its own clock. offsets_ns: how
    far each rank's clock is ahead of the lowest rank's. notes: why there is no match, or what was assumed.
    """

    rank: NDArray[np.int32]
    start_ns: Ints
    end_ns: Ints
    offsets_ns: dict[int, int]
    notes: tuple[str, ...] = ()


def _none(*notes: str) -> Matched:
    nothing = np.zeros(0, np.int64)
    return Matched(nothing.astype(np.int32), nothing, nothing, {}, notes)


def match_collectives(table: SpanTable) -> Matched:
    """Return the matched collectives of a table: by group and number or, where these are missing, by order.

    A rank's clock is shifted by the median difference of the ends of what it shares with the lowest rank, if that is
    over 1 ms or the clock is not the Unix clock. If ends then still differ by much, nothing is matched. Broadcasts and
    what else does not end on all ranks together, by its name, are left out.
    """
    chosen = np.flatnonzero((table.spans.kind == Kind.COMMUNICATION) & ~_ends_apart(table))
    spans, steps = table.spans.where(chosen), table.step_of()[chosen]
    if len(table.ranks) < 2 or not (spans.end_ns > spans.start_ns).any():
        return _none()
    order = np.lexsort((spans.start_ns, spans.rank))
    spans, steps = spans.where(order), steps[order]
    windows = table.windows
    own_steps = {tuple(windows.step[windows.rank == rank].tolist()) for rank in table.ranks}
    key, is_ordinal = _keys(spans, steps, by_step=len(own_steps) > 1)
    order = np.lexsort((spans.rank, key))
    spans, steps, key = spans.where(order), steps[order], key[order]
    shared, notes = _several_ranks(key, spans.rank) & _takes_time(key, spans), []
    spans, steps, key = spans.where(shared), steps[shared], key[shared]
    if not len(spans):
        return _none("no collective is in the traces of two ranks: waiting is not told from transfer")
    if is_ordinal:
        notes.append("collectives are matched by their order, as the traces do not number them")
    offsets, lone = _offsets(table, spans, key)
    if lone:
        notes.append(f"clocks of ranks {lone} are not aligned: they share no collective with the first rank")
    for rank, offset in offsets.items():
        if offset:
            notes.append(f"clock of rank {rank} shifted by {-offset / 1e6:.3f} ms, by the ends of collectives")
    shift = np.array([offsets.get(int(rank), 0) for rank in spans.rank], np.int64)
    start, end = spans.start_ns - shift, spans.end_ns - shift
    first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
    sizes = np.diff(np.r_[first, len(key)])
    spread = np.maximum.reduceat(end, first) - np.minimum.reduceat(end, first)
    limit = max(_MIN_RESIDUAL_NS, int(np.median(end - start)) // 2)
    if np.median(spread) > limit:
        problem = f"collectives end {np.median(spread) / 1e6:.1f} ms apart on different ranks (expected at most"
        return _none(f"{problem} {limit / 1e6:.1f}): the traces do not match, and waiting is not told from transfer")
    last = np.maximum.reduceat(start, first)
    until = np.minimum(np.repeat(last, sizes), end)
    waits = np.maximum(until - start, 0)
    return Matched(spans.rank, spans.start_ns, spans.start_ns + waits, offsets, tuple(notes))


def _ends_apart(table: SpanTable) -> Bools:
    names = (re.sub("[-_]", "", text.lower()) for text in table.texts)
    named = [index for index, name in enumerate(names) if _ENDS_APART.search(name)]
    return np.isin(table.spans.name, named)


def _takes_time(key: Ints, spans: Spans) -> Bools:
    """Return for each span whether its collective, of this key, lasts on any rank: a step log has one in each step."""
    lasting = np.unique(key[spans.end_ns > spans.start_ns])
    return np.isin(key, lasting)


def _keys(spans: Spans, steps: Ints, *, by_step: bool) -> tuple[Ints, bool]:
    """Return a key for each span, equal on the ranks of one collective, and whether any is by order.

    The order counts from the trace's begin where all ranks have as many of that name, and else, or by_step, from each
    step's.
    """
    numbered = spans.sequence >= 0
    columns = [spans.group, spans.name, np.full(len(spans), -1), spans.sequence]
    columns[1] = np.where(numbered, -1, columns[1])  # a launch of the same number may have another kernel's name
    if not numbered.all():
        lane = np.unique(np.c_[spans.group, spans.name, numbered], axis=0, return_inverse=True)[1].reshape(-1)
        counts = np.unique(np.c_[lane, spans.rank], axis=0, return_counts=True)
        of_lane = counts[0][:, 0]
        uneven = [each for each in np.unique(of_lane) if len(set(counts[1][of_lane == each])) > 1]
        columns[2] = np.where((by_step | np.isin(lane, uneven)) & ~numbered, steps, -1)
        run = np.unique(np.c_[lane, spans.rank, columns[2]], axis=0, return_inverse=True)[1].reshape(-1)
        order = np.argsort(run, kind="stable")
        begins = np.r_[True, run[order][1:] != run[order][:-1]]
        ordinal = np.empty(len(run), np.int64)
        ordinal[order] = np.arange(len(run)) - np.maximum.accumulate(np.where(begins, np.arange(len(run)), 0))
        columns[3] = np.where(numbered, spans.sequence, ordinal)
    return np.unique(np.c_[tuple(columns)], axis=0, return_inverse=True)[1].reshape(-1), not bool(numbered.all())


def _several_ranks(key: Ints, rank: NDArray[np.int32]) -> Bools:
    """Return which rows, sorted by key and rank, have a key that several ranks have once each."""
    _, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
    twice = np.zeros(len(counts), bool)
    same = (key[1:] == key[:-1]) & (rank[1:] == rank[:-1])
    twice[inverse[1:][same]] = True
    mask: Bools = ((counts > 1) & ~twice)[inverse]
    return mask


def _offsets(table: SpanTable, spans: Spans, key: Ints) -> tuple[dict[int, int], list[int]]:
    """Return how far each rank's clock is ahead of the lowest rank's, ns, and the ranks that share nothing with it."""
    lowest = min(table.ranks)
    reference = spans.rank == lowest
    offsets, lone = {lowest: 0}, []
    for rank, read in table.ranks.items():
        rows = spans.rank == rank
        if rank == lowest:
            continue
        _, own, other = np.intersect1d(key[rows], key[reference], return_indices=True)
        if not len(own):
            lone.append(rank)
            continue
        offset = int(np.median(spans.end_ns[rows][own] - spans.end_ns[reference][other]))
        is_shared = read.is_unix and table.ranks[lowest].is_unix
        offsets[rank] = 0 if is_shared and abs(offset) <= _CLOCK_NS else offset
    return offsets, lone
