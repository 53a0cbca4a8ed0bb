"""The collective operations: how much data they move, in the formulas of nccl-tests, and what their results must be.

Of n ranks, each with pieces of `count` elements, every rank's output is a row of chunks. Chunk j must be
`scale * pattern[start : start + count] + offsets[j]`, where the inputs are `pattern + the rank's offset`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ELEMENT_BYTES = 4  # float32


class Operation(NamedTuple):
    """busbw is algbw * (round_trips * (n - 1) / n), or algbw itself if round_trips is 0.

    is_total: the size of a message is that of all ranks' pieces. many_in, many_out: a piece for or from each rank.
    """

    round_trips: int
    is_total: bool = False
    many_in: bool = False
    many_out: bool = False


OPERATIONS = {
    "all_reduce": Operation(2),
    "all_gather": Operation(1, is_total=True, many_out=True),
    "reduce_scatter": Operation(1, is_total=True, many_in=True),
    "broadcast": Operation(0),
    "all_to_all": Operation(1, is_total=True, many_in=True, many_out=True),
    "send_recv": Operation(0),
}
"""By name. `send_recv`: each rank sends to the next, and the last to the first."""


class Expected(NamedTuple):
    """What an output must be. sources: the rank that a chunk came from; none for sums of all."""

    scale: int
    start: int
    offsets: tuple[float, ...]
    sources: tuple[int, ...] = ()


def algorithm_bandwidth(n_bytes: int, wall_s: float) -> float:
    """Return the bytes of a message by its time, bytes/s."""
    return n_bytes / max(wall_s, 1e-9)


def bus_factor(operation: str, n_ranks: int) -> float:
    """Return bus by algorithm bandwidth: what makes numbers of ranks comparable, by what the slowest link carries."""
    trips = OPERATIONS[operation].round_trips
    return trips * (n_ranks - 1) / n_ranks if trips else 1.0


def piece_elements(operation: str, n_bytes: int, n_ranks: int) -> int:
    """Return `count` for a message of at most n_bytes, at least 1."""
    return max(1, n_bytes // ELEMENT_BYTES // (n_ranks if OPERATIONS[operation].is_total else 1))


def message_bytes(operation: str, count: int, n_ranks: int) -> int:
    """Return the size of a message, as nccl-tests define it."""
    return count * ELEMENT_BYTES * (n_ranks if OPERATIONS[operation].is_total else 1)


def expected_output(operation: str, rank: int, count: int, offsets: Sequence[float]) -> Expected:
    """Return what a rank's output must be. offsets: of the inputs, by rank."""
    n_ranks = len(offsets)
    start = rank * count if OPERATIONS[operation].many_in else 0
    if operation in ("all_reduce", "reduce_scatter"):
        return Expected(n_ranks, start, (sum(offsets),))
    sources = {"broadcast": (0,), "send_recv": ((rank - 1) % n_ranks,)}.get(operation, tuple(range(n_ranks)))
    return Expected(1, start, tuple(offsets[source] for source in sources), sources)
