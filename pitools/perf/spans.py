"""The span table: what ran when on each rank of a job, as numpy columns, whatever wrote it down.

A span is one interval on one stream (a device's stream or a thread) of one rank. Times are int64 nanoseconds: of the
Unix clock where the source has one, else of the rank's own clock (`RankSpans.is_unix`). Windows are the steps. Text is
kept once, in `Names`; columns hold its index, -1 for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_DTYPES = {"kind": np.uint8, "rank": np.int32, "stream": np.int32, "name": np.int32, "group": np.int32}


class Kind(IntEnum):
    """What a span does. OP: an operator on the host, which `finish_rank` makes COMPUTE without a device, else HOST."""

    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2
    INPUT = 3
    HOST = 4
    COMPILE = 5
    CHECKPOINT = 6
    OP = 7


# They block a step only on the thread that steps: elsewhere, they are prefetch, or an asynchronous save.
_OF_STEP_THREAD = (Kind.INPUT, Kind.CHECKPOINT, Kind.HOST)


class Names:
    """Text by index; a text has the same index always."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def index(self, text: str) -> int:
        """Return the index of a text."""
        return self._index.setdefault(text, len(self._index))

    def texts(self) -> list[str]:
        """Return all texts, by index."""
        return list(self._index)


class _Columns:
    """Arrays of one length, a row for each thing."""

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of all parts; none of none."""
        names = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        empty = {name: np.zeros(0, _DTYPES.get(name, np.int64)) for name in names}
        return cls(**{name: np.concatenate([empty[name], *(getattr(part, name) for part in parts)]) for name in names})

    def where(self, chosen: NDArray[Any]) -> Self:
        """Return the rows of a mask, or of indices."""
        return type(self)(**{each.name: getattr(self, each.name)[chosen] for each in fields(self)})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Spans(_Columns):
    """Spans in columns of one length. sequence: number of a collective in its group, -1 if unknown."""

    rank: NDArray[np.int32]
    stream: NDArray[np.int32]
    kind: NDArray[np.uint8]
    name: NDArray[np.int32]
    start_ns: Ints
    end_ns: Ints
    group: NDArray[np.int32]
    sequence: Ints

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True)
class Windows(_Columns):
    """The steps of ranks, in columns, by rank and start. step: its number, -1 for a whole trace without steps.

    cpu_wait_ns: for how long the rank was ready to run and had no CPU; 0 if unknown.
    """

    rank: NDArray[np.int32]
    step: Ints
    start_ns: Ints
    end_ns: Ints
    cpu_wait_ns: Ints

    def __len__(self) -> int:
        return len(self.step)


def make_spans(**columns: Any) -> Spans:
    """Return spans of columns, each an array, a list, or one value for all; without `rank`, `group` or
    `sequence`: 0, -1, -1."""
    values = {"rank": 0, "group": -1, "sequence": -1, **columns}
    count = len(values["start_ns"])
    return Spans(
        **{
            name: np.broadcast_to(np.asarray(value, _DTYPES.get(name, np.int64)), count)
            for name, value in values.items()
        }
    )


def without_nested(spans: Spans, mask: Bools) -> Spans:
    """Return the spans without those of the mask that lie inside another of the mask on the same stream and kind."""
    chosen = np.flatnonzero(mask)
    order = chosen[
        np.lexsort((-spans.end_ns[chosen], spans.start_ns[chosen], spans.kind[chosen], spans.stream[chosen]))
    ]
    if not len(order):
        return spans
    lane = spans.stream[order].astype(np.int64) * 256 + spans.kind[order]
    begins = np.r_[True, lane[1:] != lane[:-1]]
    # The latest end so far within each lane: lanes are lifted apart by more than any time in them.
    origin = spans.start_ns[order].min()
    ends, lift = spans.end_ns[order] - origin, np.cumsum(begins) - 1
    span = int(ends.max()) + 1
    if int(lift[-1] + 1) * span >= 1 << 62:  # a century: no trace
        return spans
    latest = np.maximum.accumulate(ends + lift * span)
    outer = begins | (ends + lift * span > np.r_[-1, latest[:-1]])
    keep = np.ones(len(spans), bool)
    keep[order[~outer]] = False
    return spans.where(keep)


@dataclass(frozen=True)
class RankSpans:
    """The spans and steps of one file, which is one rank's.

    rank: None where the file does not say. windows: without steps, empty. step_stream: the thread that steps, -1 if
    unknown. world_size: of the job, 0 if unknown. is_unix: whether times are of the Unix clock. is_timed: whether spans
    say when, not only how long. slowdown: of its steps against those before, as a share; 0 if unknown. notes: what a
    user should know about this file.
    """

    path: Path
    rank: int | None
    spans: Spans
    windows: Windows
    step_stream: int = -1
    world_size: int = 0
    has_device: bool = False
    is_unix: bool = True
    is_timed: bool = True
    slowdown: float = 0.0
    notes: tuple[str, ...] = ()

    def numbered(self, rank: int) -> Self:
        """Return this with a rank in all columns."""
        return replace(
            self,
            rank=rank,
            spans=replace(self.spans, rank=np.full(len(self.spans), rank, np.int32)),
            windows=replace(self.windows, rank=np.full(len(self.windows), rank, np.int32)),
        )


@dataclass(frozen=True)
class SpanTable:
    """The spans and steps of all ranks of a job, and what each rank's were read from."""

    spans: Spans
    windows: Windows
    texts: Sequence[str]
    ranks: dict[int, RankSpans]
    notes: tuple[str, ...] = ()

    def step_of(self) -> Ints:
        """Return the step of each span, by its start; -1 outside of all steps."""
        steps = np.full(len(self.spans), -1, np.int64)
        for rank in self.ranks:
            if not len(windows := self.windows.where(self.windows.rank == rank)):
                continue
            rows = np.flatnonzero(self.spans.rank == rank)
            at = np.searchsorted(windows.start_ns, self.spans.start_ns[rows], "right") - 1
            inside = (at >= 0) & (self.spans.start_ns[rows] < windows.end_ns[np.maximum(at, 0)])
            steps[rows[inside]] = windows.step[at[inside]]
        return steps


def make_windows(steps: Sequence[tuple[int, int, int]]) -> Windows:
    """Return the windows of steps (number, start, end in ns), sorted by start."""
    number, start, end = np.array(sorted(steps, key=lambda step: step[1]), np.int64).reshape(-1, 3).T
    return Windows(np.zeros(len(number), np.int32), number, start, end, np.zeros(len(number), np.int64))


def finish_rank(read: RankSpans, device_end_ns: int = 0) -> RankSpans:
    """Return a profile's spans as they count, and its steps without gaps.

    A step lasts until the next begins, if that has the next number; the last until its own end or that of the device's
    work for it. Without steps, one window holds all spans of the device or, without device, all spans. Input,
    checkpoint and host annotations count only on the thread that marks the steps; operators, such as those of a
    backward pass, on every thread.

    device_end_ns: when the device's work that the steps launched ended; if unknown, work counts that began in a step.
    """
    spans, windows = read.spans, read.windows
    kind = spans.kind.copy()
    on_device = np.isin(kind, (Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY)) & read.has_device
    drop = np.isin(kind, _OF_STEP_THREAD) & (spans.stream != read.step_stream) & (read.step_stream >= 0)
    kind[kind == Kind.OP] = Kind.HOST if read.has_device else Kind.COMPUTE
    counted = spans.end_ns[on_device] if on_device.any() else spans.end_ns
    if len(windows):
        end = windows.end_ns.copy()
        follows = windows.step[1:] == windows.step[:-1] + 1
        end[:-1] = np.where(follows, windows.start_ns[1:], np.minimum(end[:-1], windows.start_ns[1:]))
        if on_device.any():
            begun_in_time = spans.end_ns[on_device & (spans.start_ns < end[-1])]
            end[-1] = max(end[-1], device_end_ns, begun_in_time.max(initial=0))
        windows = replace(windows, end_ns=end)
    elif len(spans):
        begun = spans.start_ns[on_device] if on_device.any() else spans.start_ns
        windows = make_windows([(-1, int(begun.min()), int(counted.max()))])
    return replace(read, spans=replace(spans, kind=kind).where(~drop), windows=windows)
