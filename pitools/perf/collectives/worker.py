"""One rank of the benchmark: `srun python -m pitools.perf.collectives.worker`, started like those of `pit node bench`.

A repetition begins with a barrier, and is a number of calls in a row, each with buffers of its own, as nccl-tests time
them. Every element of every result is compared, outside of the time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from pitools.node.bench.collectives import JaxCollective, RankPosition, TorchCollective
from pitools.node.bench.worker import SizeResult, run_rank, start_rank
from pitools.perf.collectives.operations import (
    OPERATIONS,
    Expected,
    expected_output,
    message_bytes,
    piece_elements,
)

CPU_SIZES = (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24)
GPU_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28, 1 << 30)
"""Bytes of messages, if none are given."""
_REPEATS = 10
_CALLS = 20  # of small messages in a repetition
_CPU_CALL_BYTES, _GPU_CALL_BYTES = 1 << 22, 1 << 28  # of all calls of a repetition, if more than one
_OFFSETS = 61  # kinds of; prime
_MAX_SOURCES = 16  # of wrong data, of a size: a result is a short line


class TorchOperations(TorchCollective):
    """Collectives of torch.distributed."""

    def operations(self) -> tuple[str, ...]:
        """Return the operations that this device has."""
        return tuple(OPERATIONS)

    def time_calls(
        self, operation: str, position: RankPosition, inputs: list[Any], n_out: int
    ) -> tuple[float, list[Any]]:
        """Return the seconds of calls in a row, a call for each input, and their outputs of n_out elements."""
        in_place = operation in ("all_reduce", "broadcast")
        outputs = inputs if in_place else [each.new_zeros(n_out) for each in inputs]
        self._distributed.barrier()
        self._synchronize()
        begin = time.perf_counter()
        for source, target in zip(inputs, outputs, strict=True):
            self.call(operation, position, source, target)
        self._synchronize()
        return time.perf_counter() - begin, outputs

    def call(self, operation: str, position: RankPosition, source: Any, target: Any) -> None:
        """Make one collective; all_reduce and broadcast are in place, in target."""
        distributed, rank, n_ranks = self._distributed, position.rank, position.world_size
        if operation == "all_reduce":
            distributed.all_reduce(target)
        elif operation == "all_gather":
            distributed.all_gather_single(target, source)
        elif operation == "reduce_scatter":
            distributed.reduce_scatter_single(target, source)
        elif operation == "broadcast":
            distributed.broadcast(target, 0)
        elif operation == "all_to_all":
            distributed.all_to_all_single(target, source)
        else:
            send = distributed.P2POp(distributed.isend, source, (rank + 1) % n_ranks)
            receive = distributed.P2POp(distributed.irecv, target, (rank - 1) % n_ranks)
            for work in distributed.batch_isend_irecv([send, receive]):
                work.wait()


class JaxOperations(JaxCollective):
    """Collectives of jax, each a compiled function. XLA has no broadcast on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self._compiled: dict[str, Callable[[Any], Any]] = {}

    def operations(self) -> tuple[str, ...]:
        """As TorchOperations does."""
        return tuple(name for name in OPERATIONS if name != "broadcast" or self.device != "cpu")

    def time_calls(
        self, operation: str, position: RankPosition, inputs: list[Any], n_out: int
    ) -> tuple[float, list[Any]]:
        """As TorchOperations does."""
        import numpy

        parts = [self._distribute(each) for each in inputs]
        call = self._compiled.setdefault(operation, self._compile(operation, position.world_size))
        self._jax.block_until_ready((parts, self._sum(self._distribute(self.pattern(1)))))
        begin = time.perf_counter()
        outputs = [call(each) for each in parts]
        self._jax.block_until_ready(outputs)
        return time.perf_counter() - begin, [numpy.asarray(each.addressable_data(0)) for each in outputs]

    def _compile(self, operation: str, n_ranks: int) -> Callable[[Any], Any]:
        jax, axis = self._jax, "rank"
        lax = jax.lax
        body: Callable[[Any], Any] = {
            "all_reduce": lambda part: lax.psum(part, axis),
            "all_gather": lambda part: lax.all_gather(part, axis, tiled=True),
            "reduce_scatter": lambda part: lax.psum_scatter(part, axis, tiled=True),
            "broadcast": lambda part: lax.pbroadcast(part, (axis,), 0),
            "all_to_all": lambda part: lax.all_to_all(part, axis, 0, 0, tiled=True),
            "send_recv": lambda part: lax.ppermute(
                part, axis, [(rank, (rank + 1) % n_ranks) for rank in range(n_ranks)]
            ),
        }[operation]
        spec = self._sharding.spec
        compiled: Callable[[Any], Any] = jax.jit(
            jax.shard_map(body, mesh=self._sharding.mesh, in_specs=spec, out_specs=spec)
        )
        return compiled


Operations = TorchOperations | JaxOperations
FRAMEWORKS: dict[str, Callable[[], Operations]] = {"torch": TorchOperations, "jax": JaxOperations}


def measure(collective: Operations, position: RankPosition, operation: str, n_bytes: int) -> SizeResult:
    """Repeat an operation with messages of about this size, the first time untimed, and compare each result."""
    kind, n_ranks = OPERATIONS[operation], position.world_size
    count = piece_elements(operation, n_bytes, n_ranks)
    size = message_bytes(operation, count, n_ranks)
    pattern = collective.pattern(count * (n_ranks if kind.many_in else 1))
    calls = max(1, min(_CALLS, (_CPU_CALL_BYTES if collective.device == "cpu" else _GPU_CALL_BYTES) // size))
    walls_s: list[float] = []
    wrong, wrong_sources = 0, set[int]()
    for repeat in range(_REPEATS + 1):
        offsets = [
            [float((rank + 7 * repeat + 13 * call) % _OFFSETS) for rank in range(n_ranks)] for call in range(calls)
        ]
        inputs = [pattern + each[position.rank] for each in offsets]
        wall_s, outputs = collective.time_calls(operation, position, inputs, count * (n_ranks if kind.many_out else 1))
        walls_s.append(round(wall_s / calls, 9))
        for output, offset in zip(outputs, offsets, strict=True):
            expected = expected_output(operation, position.rank, count, offset)
            chunks = wrong_chunks(pattern[expected.start : expected.start + count], output, expected)
            wrong += sum(chunks)
            wrong_sources |= {source for source, bad in zip(expected.sources, chunks, strict=False) if bad}
    return SizeResult(
        operation=operation,
        bytes=size,
        wall_s=statistics.median(walls_s[1:]),
        walls_s=tuple(walls_s[1:]),
        wrong=wrong,
        wrong_sources=tuple(sorted(wrong_sources)[:_MAX_SOURCES]),
    )


def wrong_chunks(pattern: Any, output: Any, expected: Expected) -> list[int]:
    """Return how many elements of each chunk of an output are wrong. pattern: of a chunk."""
    base = pattern * expected.scale
    chunks = output.reshape(len(expected.offsets), -1)
    return [int((chunk != base + offset).sum()) for chunk, offset in zip(chunks, expected.offsets, strict=True)]


def main(frameworks: dict[str, Callable[[], Operations]] = FRAMEWORKS) -> None:
    """Run this rank to its end."""
    options = start_rank(
        "perf.collectives.worker",
        **{"--framework": {"default": "torch"}, "--operations": {"default": ""}, "--sizes": {"default": ""}},
    )

    def measure_sizes(collective: Operations, position: RankPosition) -> Iterator[tuple[SizeResult, ...]]:
        sizes = [int(size) for size in options.sizes.split(",") if size]
        sizes = sizes or list(CPU_SIZES if collective.device == "cpu" else GPU_SIZES)
        for operation in options.operations.split(",") if options.operations else collective.operations():
            if operation in collective.operations():
                yield from ((measure(collective, position, operation, size),) for size in sizes)

    run_rank(options.timeout, frameworks[options.framework], measure_sizes)


if __name__ == "__main__":
    main()
