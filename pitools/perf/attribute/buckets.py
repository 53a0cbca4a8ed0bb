"""Split each step of each rank into parts that exclude each other and sum to its wall time, in whole nanoseconds.

A moment belongs to the first of its kinds in an order. With a device: compute, communication, checkpoint, compile,
copy, input, host, so that communication and copies are the exposed ones, and the rest is the device's idle time. On
CPUs, where operators compute: checkpoint, compile, input first, as these contain operators. `idle` is what no span
covers: without a device, the program's own Python code, or sleep.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pitools.core.record import Record
from pitools.perf.attribute.collectives import Matched, match_collectives
from pitools.perf.attribute.intervals import union
from pitools.perf.spans import Ints, Kind, SpanTable, Windows

BUCKETS = ("compute", "communication", "copy", "input", "host", "compile", "checkpoint", "idle")
_K = Kind
_DEVICE_ORDER = (_K.COMPUTE, _K.COMMUNICATION, _K.CHECKPOINT, _K.COMPILE, _K.COPY, _K.INPUT, _K.HOST)
_HOST_ORDER = (_K.CHECKPOINT, _K.COMPILE, _K.INPUT, _K.COMPUTE, _K.COMMUNICATION, _K.COPY, _K.HOST)


class StepBuckets(Record, frozen=True, kw_only=True, tag="pit.perf-step/1"):
    """One step of one rank. The parts from compute_ms to idle_ms sum to wall_ms, all to the nanosecond.

    step: -1 for a whole trace without steps. communication_ms, copy_ms: not hidden by compute. skew_ms: what of
    communication_ms is waiting for the last rank to arrive; None if unknown. transfer_ms: the rest of communication_ms.
    overlapped_ms: communication hidden by compute or other work.
    """

    rank: int
    step: int
    wall_ms: float
    compute_ms: float
    communication_ms: float
    skew_ms: float | None
    copy_ms: float
    input_ms: float
    host_ms: float
    compile_ms: float
    checkpoint_ms: float
    idle_ms: float
    overlapped_ms: float
    transfer_ms: float


@dataclass(frozen=True)
class Buckets:
    """The parts of all windows, ns: a column for each of BUCKETS.

    skew_ns: waiting within exposed communication. total_ns: communication, also hidden. matched: the collectives across
    ranks.
    """

    windows: Windows
    parts_ns: Ints
    skew_ns: Ints
    total_ns: Ints
    matched: Matched

    @property
    def wall_ns(self) -> Ints:
        """The windows' lengths, ns."""
        return self.windows.end_ns - self.windows.start_ns

    @property
    def own_ns(self) -> Ints:
        """The windows' lengths without exposed communication and waits for a CPU, ns: a slow rank's are longer.

        A wait counts in the step in which it ends, and for any thread: it is taken from what it can have stretched.
        """
        stretched_ns = self.parts_ns[:, [BUCKETS.index(name) for name in ("compute", "host", "idle")]].sum(axis=1)
        communication_ns = self.parts_ns[:, BUCKETS.index("communication")]
        own_ns: Ints = self.wall_ns - communication_ns - np.minimum(self.windows.cpu_wait_ns, stretched_ns)
        return own_ns

    def records(self) -> list[StepBuckets]:
        """Return a record for each window."""
        has_skew = len(self.matched.rank) > 0
        rows = zip(
            self.windows.rank, self.windows.step, self.wall_ns, self.parts_ns, self.skew_ns, self.total_ns, strict=True
        )
        return [
            StepBuckets(
                rank=int(rank),
                step=int(step),
                wall_ms=int(wall) / 1e6,
                skew_ms=int(skew) / 1e6 if has_skew else None,
                overlapped_ms=int(total - parts[1]) / 1e6,
                transfer_ms=int(parts[1] - skew) / 1e6,
                **{f"{name}_ms": int(part) / 1e6 for name, part in zip(BUCKETS, parts, strict=True)},
            )
            for rank, step, wall, parts, skew, total in rows
        ]


def split_steps(table: SpanTable) -> Buckets:
    """Return the parts of each step of each rank."""
    windows, matched = table.windows, match_collectives(table)
    parts = np.zeros((len(windows), len(BUCKETS)), np.int64)
    skew, total = np.zeros(len(windows), np.int64), np.zeros(len(windows), np.int64)
    for rank, read in table.ranks.items():
        rows = np.flatnonzero(windows.rank == rank)
        begin, end = windows.start_ns[rows], windows.end_ns[rows]
        spans = table.spans.where(table.spans.rank == rank)
        waits = matched.rank == rank
        covered, taken = np.zeros(len(rows), np.int64), np.zeros(len(spans), bool)
        for kind in _DEVICE_ORDER if read.has_device else _HOST_ORDER:
            if kind is Kind.COMMUNICATION and waits.any():
                both = (
                    np.r_[spans.start_ns[taken], matched.start_ns[waits]],
                    np.r_[spans.end_ns[taken], matched.end_ns[waits]],
                )
                skew[rows] = union(*both).measure(begin, end) - covered
            is_kind = spans.kind == kind
            if not is_kind.any():
                continue
            if kind is Kind.COMMUNICATION:
                total[rows] = union(spans.start_ns[is_kind], spans.end_ns[is_kind]).measure(begin, end)
            taken |= is_kind
            now = union(spans.start_ns[taken], spans.end_ns[taken]).measure(begin, end)
            parts[rows, BUCKETS.index(kind.name.lower())] = now - covered
            covered = now
        parts[rows, -1] = end - begin - covered
    return Buckets(windows, parts, skew, total, matched)
