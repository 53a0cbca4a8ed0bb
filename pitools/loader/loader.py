"""Iterate over batches in a computed order; threads prefetch them into a ring of reused buffers.

    positions ──samples──▶ locations ──▶ buffer 0 │ buffer 1 │ buffer 2 …  ──▶ training uses the oldest
                           threads:      fill the buffers of the next batches

Threads, not processes: reading and decoding release the interpreter's lock. So nothing is pickled or copied, and no
worker process can hang after a fork.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ConfigError, Unreachable
from pitools.core.record import Record
from pitools.loader.buffers import allocate_aligned
from pitools.loader.read_threads import ReadFuture, ReadThreads
from pitools.loader.sampling.protocol import Field, Samples
from pitools.loader.sampling.shuffle import rank_slice

# A file system that returns no data for this long is taken for lost, not slow.
STALL_TIMEOUT_S = 300.0
# The least bytes per thread of a batch: for less, handing over costs more than it saves.
_PART_BYTES = 1 << 20

A = TypeVar("A")
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]


class Batch(NamedTuple, Generic[A]):
    """This rank's part of a global batch: b samples, in arrays of NumPy, torch or JAX.

    step: number of the global batch. global_size: its samples. arrays: (b, length, *row) by name.
    valid_mask: (b, length) by name, False at padded steps. extras: (b, …) by name; see `Samples.extras`.
    sample_indices: (b,) numbers of the samples. sample_seeds: (b,) random, for augmentation. bytes_read: from files,
    for this part. waited_s: seconds that training waited for this batch.
    """

    step: int
    global_size: int
    arrays: dict[str, A]
    valid_mask: dict[str, A]
    extras: dict[str, A]
    sample_indices: A
    sample_seeds: A
    bytes_read: int = 0
    waited_s: float = 0.0


NumpyBatch: TypeAlias = Batch[NDArray[Any]]


class LoaderState(Record, frozen=True, kw_only=True, tag="pit.loader-state/1"):
    """A loader's position. position: samples given to all ranks together. identity: see `Samples.identity`."""

    identity: dict[str, str]
    position: Annotated[int, msgspec.Meta(ge=0)]


class Stateful:
    """An object with a `LoaderState`, also as a dict of plain values for JSON, `torch.save` and frameworks."""

    def state(self) -> LoaderState:
        """Return the state for `load_state`."""
        raise NotImplementedError

    def load_state(self, state: LoaderState) -> None:
        """Continue at the position of `state`. Raises ConfigError for the state of another loader."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dict of plain values."""
        plain: dict[str, Any] = msgspec.to_builtins(self.state())
        return plain

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the position of `state_dict`. Raises ConfigError for the state of another loader."""
        self.load_state(to_loader_state(state_dict))


def to_loader_state(state: LoaderState | Mapping[str, Any]) -> LoaderState:
    """Convert a `state_dict` to a LoaderState; return a LoaderState as it is. Raises ConfigError for other values."""
    try:
        return state if isinstance(state, LoaderState) else msgspec.convert(state, LoaderState)
    except msgspec.ValidationError as error:
        hint = "pass the result of a loader's state() or state_dict()"
        raise ConfigError(f"state: not a loader's state: {error}", where="state", hint=hint) from error


class LoaderStats(NamedTuple):
    """Totals over all batches so far. waited_s: seconds that training waited. bytes_read: from files."""

    waited_s: float = 0.0
    bytes_read: int = 0
    batches: int = 0


class PendingBatch(NamedTuple):
    """A batch that threads are reading into `buffers`. next_position: of the batch after it."""

    batch: NumpyBatch
    parts: list[ReadFuture]
    next_position: int
    buffers: dict[str, NDArray[Any]]


class Loader(Stateful):
    """An endless iterator of batches. `state` and `load_state` resume it exactly, also with another world size."""

    def __init__(
        self,
        samples: Samples,
        *,
        global_batch_size: int = 0,
        rank: int = 0,
        world_size: int = 1,
        threads: int = 2,
        prefetch: int = 2,
        read_timeout_s: float = STALL_TIMEOUT_S,
        allocate: Allocate = allocate_aligned,
    ) -> None:
        """global_batch_size: samples of a global batch; ignored where `samples` plans its batches. threads: of reading.
        prefetch: batches read in advance. read_timeout_s: of one read, in seconds. allocate: allocates a buffer, for
        example of pinned memory. Raises ConfigError for a batch with no sample for some rank.
        """
        try:
            rank_slice(samples.planned_batch_size or global_batch_size, rank, world_size)
        except ValueError as error:
            raise ConfigError(str(error), where="global_batch_size") from error
        self.samples, self.global_batch_size, self.rank, self.world_size = samples, global_batch_size, rank, world_size
        self.allocate = allocate
        self._threads, self._prefetch, self._read_timeout_s = max(1, threads), max(1, prefetch), read_timeout_s
        self._position = 0  # of the next batch to be returned
        self._skipped_batches = 0  # batches of other workers between two of this one
        self._created_in, self._pid, self._readers = os.getpid(), 0, None  # type: int, int, ReadThreads | None
        self._pending: deque[PendingBatch] = deque()
        self._free: list[dict[str, NDArray[Any]]] = []
        self._returned: dict[str, NDArray[Any]] | None = None
        self._stalled = False
        self._stats = LoaderStats()

    def __iter__(self) -> Iterator[NumpyBatch]:
        return self

    def __next__(self) -> NumpyBatch:
        """Return the next batch. It is valid until the next call.

        Raises DataError for damaged files; Unreachable for a failed read or a read over `read_timeout_s`. After an
        error the next call reads the same batch again; after a read over `read_timeout_s` it waits for that read again,
        unless `load_state` was called.
        """
        began = time.perf_counter()
        if self._returned is not None:
            self._free.append(self._returned)
            self._returned = None
        self._request(self._prefetch)
        pending = self._pending[0]
        bytes_read = self._wait_for_batch(pending)
        self._request(self._prefetch + 1)  # before this batch is removed: if the request fails, no batch is lost
        self._pending.popleft()
        self._returned, self._position, self._stalled = pending.buffers, pending.next_position, False
        waited_s, totals = time.perf_counter() - began, self._stats
        self._stats = LoaderStats(totals.waited_s + waited_s, totals.bytes_read + bytes_read, totals.batches + 1)
        return pending.batch._replace(bytes_read=bytes_read, waited_s=waited_s)

    @property
    def is_ready(self) -> bool:
        """Whether the next batch is read without error, so that `next` neither waits nor fails."""
        parts = self._pending[0].parts if self._pending and self._pid == os.getpid() else []
        return bool(parts) and all(part.done() and part.exception() is None for part in parts)

    @property
    def stats(self) -> LoaderStats:
        """Totals over all batches so far."""
        return self._stats

    def state(self) -> LoaderState:
        """Return the state after the last batch that was returned."""
        return LoaderState(identity=dict(self.samples.identity), position=self._position)

    def load_state(self, state: LoaderState) -> None:
        """Continue at the position of `state`. Raises ConfigError if its dataset, windows or seed differ."""
        identity = self.samples.identity
        for name in sorted(identity.keys() | state.identity.keys()):
            if (value := state.identity.get(name)) != identity.get(name):
                message = f"state: {name} differs (expected {identity.get(name)!r}, got {value!r})"
                raise ConfigError(message, where="load_state", hint="construct the loader with the state's arguments")
        self._discard_pending()
        self._position = state.position

    def skip(self, batches: int) -> None:
        """Continue that many batches later, without reading the ones between."""
        self._discard_pending()
        self._position = self._advance_position(self._position, batches)

    def restrict_to_worker(self, number: int, workers: int) -> None:
        """From here on return only batches `number`, `number + workers`, …: the part of one of several workers."""
        self.skip(number)
        self._skipped_batches = workers - 1

    def close(self) -> None:
        """Stop the threads, except one whose read hangs. The loader may be used again."""
        self._stalled = True
        self._discard_pending()

    def _discard_pending(self) -> None:
        """Discard the prefetched batches. After a stall, abandon the threads; `_request` starts new ones."""
        if self._pid == os.getpid():  # else another thread may have held a future's lock during the fork
            for pending in self._pending:
                self._discard(pending)
        self._pending.clear()
        if self._stalled and self._readers:
            self._readers.close()
            self._readers = None
        self._stalled = False

    def _discard(self, pending: PendingBatch) -> None:
        for part in pending.parts:
            part.cancel()
        if all(part.done() for part in pending.parts):  # else a thread may still fill them
            self._free.append(pending.buffers)

    def _request(self, count: int) -> None:
        """Submit reads until `count` batches are pending."""
        if self._readers is None or self._pid != os.getpid():
            if self._created_in != os.getpid() and not self._skipped_batches:
                require_one_worker("Loader")
            # A forked child has none of its parent's threads, and their reads never complete here.
            self._pid, self._readers = os.getpid(), ReadThreads(self._threads)
            self._pending.clear()
            self._free.clear()
        while len(self._pending) < count:
            self._pending.append(
                self._submit_batch(self._pending[-1].next_position if self._pending else self._position)
            )

    def _advance_position(self, position: int, batches: int) -> int:
        """Return the position `batches` batches later."""
        for _ in range(batches):
            position += self.samples.batch_at(position, self.global_batch_size)[1]
        return position

    def _submit_batch(self, start: int) -> PendingBatch:
        """Submit the reads of the batch at a position."""
        assert self._readers
        number, size = self.samples.batch_at(start, self.global_batch_size)
        low, high = rank_slice(size, self.rank, self.world_size)
        drawn = self.samples.draw(np.arange(start + low, start + high))
        count = high - low
        buffers = self._buffers(count, drawn.fields)
        arrays = {name: _reshape_view(buffers[name], (count, *field.shape)) for name, field in drawn.fields.items()}
        n_bytes = sum(array.nbytes for array in arrays.values())
        pieces = max(1, min(count, 2 * self._threads, n_bytes // _PART_BYTES))
        cuts = itertools.pairwise(count * piece // pieces for piece in range(pieces + 1))
        parts = [self._readers.submit(partial(self.samples.read, drawn, first, last, arrays)) for first, last in cuts]
        valid_mask, extras = self.samples.valid_mask(drawn), self.samples.extras(drawn)
        batch = Batch(number, size, arrays, valid_mask, extras, drawn.sample_indices, drawn.sample_seeds)
        return PendingBatch(batch, parts, self._advance_position(start + size, self._skipped_batches), buffers)

    def _buffers(self, count: int, fields: Mapping[str, Field]) -> dict[str, NDArray[Any]]:
        """Return flat buffers for `count` samples; a free buffer that is large enough is reused."""
        reusable = self._free.pop() if self._free else {}
        buffers = {}
        for name, (shape, dtype) in fields.items():
            items = count * math.prod(shape)
            enough = name in reusable and reusable[name].size >= items
            buffers[name] = reusable[name] if enough else self.allocate((items,), dtype)
        return buffers

    def _wait_for_batch(self, pending: PendingBatch) -> int:
        """Wait for a batch, and return the bytes read. Raises as `__next__`."""
        assert self._readers
        for part in pending.parts:
            try:
                error = part.exception(self._read_timeout_s)
            except TimeoutError:
                self._stalled = True
                where = self._readers.describe_reads(pending.parts) or "a batch"
                message = f"{where}: read timed out after {self._read_timeout_s:g} s"
                hint = "test the file system: ls -l on this file"
                raise Unreachable(message, where=self.samples.description, hint=hint) from None
            if error is not None:
                self._discard_pending()  # so that the next call reads it again
                if isinstance(error, OSError):  # an I/O error does not prove that the file is damaged
                    message = f"{error.filename or 'a read'}: {error.strerror or error}"
                    hint = "check the disk: dmesg"
                    raise Unreachable(message, where=self.samples.description, hint=hint) from error
                raise error
        return sum(part.result() for part in pending.parts)


def require_one_worker(where: str) -> None:
    """Raise ConfigError in one of several workers of a DataLoader: each would return the same batches."""
    data = sys.modules.get("torch.utils.data")
    worker = data.get_worker_info() if data else None
    if worker and worker.num_workers > 1:
        # In one line: torch forwards no more of a worker's error.
        problem = (
            f"in worker {worker.id} of {worker.num_workers} of a DataLoader, each of which would repeat the batches "
        )
        problem += f'(expected pitools.load(…, framework="torch", workers={worker.num_workers}), or num_workers=0)'
        raise ConfigError(problem, where=where)


def _reshape_view(buffer: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    return buffer[: math.prod(shape)].reshape(shape)
