"""Batches in the computed order, read by a few threads ahead of training into buffers that are used again.

    positions ──samples──▶ where they are ──▶ buffer 0 │ buffer 1 │ buffer 2 …  ──▶ training has the oldest
                                    threads:  being read, of the next batches

Threads and not processes: what costs time, reading and decoding, is done without the interpreter's lock, and nothing
has to be pickled, copied, or found hanging after a fork.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ConfigError, Unreachable
from pitools.core.record import Record
from pitools.loader.buffers import allocate_aligned
from pitools.loader.read_threads import ReadFuture, ReadThreads
from pitools.loader.sampling.protocol import Field, Samples
from pitools.loader.sampling.shuffle import rank_slice

# A file system that gives nothing for this long is not slow but gone.
STALL_TIMEOUT_S = 300.0
# Less than this is not worth handing to one more thread.
_PART_BYTES = 1 << 20

A = TypeVar("A")
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]


class Batch(NamedTuple, Generic[A]):
    """This rank's part of a global batch, b samples, in arrays of NumPy, torch or JAX.

    step, size: number of the global batch, and of its samples. arrays: (b, length, *row) by name. valid_mask: (b,
    length) by name, False at steps that are not the sample's own, and extras: (b, …), what else is known; see
    `Samples`. samples, keys: (b,), see `Order`. bytes_read: from files, for this part. waited_s: by training, for it.
    """

    step: int
    size: int
    arrays: dict[str, A]
    valid_mask: dict[str, A]
    extras: dict[str, A]
    samples: A
    keys: A
    bytes_read: int = 0
    waited_s: float = 0.0


NumpyBatch: TypeAlias = Batch[NDArray[Any]]


class LoaderState(Record, frozen=True, kw_only=True, tag="pit.loader-state/1"):
    """Where training is. position: samples that all ranks together have been given. identity: in which order."""

    identity: dict[str, str]
    position: int


class Stateful:
    """What has a `LoaderState`, also as plain text and numbers: for JSON, `torch.save` and frameworks that keep it."""

    def state(self) -> LoaderState:
        """What `load_state` goes on from."""
        raise NotImplementedError

    def load_state(self, state: LoaderState) -> None:
        """Go on where `state` was taken. Raises ConfigError."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return `state` as plain values."""
        plain: dict[str, Any] = msgspec.to_builtins(self.state())
        return plain

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises ConfigError."""
        self.load_state(to_loader_state(state_dict))


def to_loader_state(state: LoaderState | Mapping[str, Any]) -> LoaderState:
    """Return the state that plain values are, or a state itself. Raises ConfigError for anything else."""
    try:
        return state if isinstance(state, LoaderState) else msgspec.convert(state, LoaderState)
    except msgspec.ValidationError as error:
        hint = "give what state() or state_dict() of a loader returned"
        raise ConfigError(f"not a loader's state: {error}", where="state", hint=hint) from error


class LoaderStats(NamedTuple):
    """What all batches so far took: seconds that training waited for them, and bytes read from files for them."""

    waited_s: float = 0.0
    bytes_read: int = 0
    batches: int = 0


class PendingBatch(NamedTuple):
    """A batch that is being read into these buffers. next_position: the position of the one that will be given after
    it."""

    batch: NumpyBatch
    parts: list[ReadFuture]
    next_position: int
    buffers: dict[str, NDArray[Any]]


class Loader(Stateful):
    """An endless iterator of batches; `state` and `load_state` resume it exactly, at another world size too."""

    def __init__(
        self,
        samples: Samples,
        *,
        batch_size: int = 0,
        rank: int = 0,
        world_size: int = 1,
        threads: int = 2,
        prefetch: int = 2,
        stalled_s: float = STALL_TIMEOUT_S,
        allocate: Allocate = allocate_aligned,
    ) -> None:
        """batch_size: of all ranks together; samples whose batches are planned have their own. threads: that read.
        prefetch: batches read before they are asked for. stalled_s: without any read coming back. allocate: makes the
        buffers, as of pinned memory. Raises ConfigError.
        """
        try:
            rank_slice(samples.planned_batch_size or batch_size, rank, world_size)
        except ValueError as error:
            raise ConfigError(str(error), where="batch_size") from error
        self.samples, self.batch_size, self.rank, self.world_size = samples, batch_size, rank, world_size
        self.allocate = allocate
        self._threads, self._ahead, self._stalled_s = max(1, threads), max(1, prefetch), stalled_s
        self._position = 0  # of the next batch to be given
        self._skip = 0  # batches between two that are given
        self._pid, self._readers = 0, None  # type: int, ReadThreads | None
        self._pending: deque[PendingBatch] = deque()
        self._free: list[dict[str, NDArray[Any]]] = []
        self._given: dict[str, NDArray[Any]] | None = None
        self._stalled = False
        self._times = LoaderStats()

    def __iter__(self) -> Iterator[NumpyBatch]:
        return self

    def __next__(self) -> NumpyBatch:
        """Return the next batch, valid until the one after it is asked for.

        Raises DataError for damage, naming it; Unreachable when nothing comes for minutes. After an error the
        same batch is read again by the next call, and other places can be gone to.
        """
        began = time.perf_counter()
        if self._given is not None:
            self._free.append(self._given)
            self._given = None
        self._request(self._ahead)
        coming = self._pending[0]
        bytes_read = self._wait_for_batch(coming)
        self._request(self._ahead + 1)  # before this batch is taken: if it fails, none is lost
        self._pending.popleft()
        self._given, self._position, self._stalled = coming.buffers, coming.next_position, False
        waited, times = time.perf_counter() - began, self._times
        self._times = LoaderStats(times.waited_s + waited, times.bytes_read + bytes_read, times.batches + 1)
        return coming.batch._replace(bytes_read=bytes_read, waited_s=waited)

    @property
    def is_ready(self) -> bool:
        """Whether the next batch is there, so that to ask for it does not wait and does not fail."""
        parts = self._pending[0].parts if self._pending and self._pid == os.getpid() else []
        return bool(parts) and all(part.done() and part.exception() is None for part in parts)

    @property
    def stats(self) -> LoaderStats:
        """What the loader has cost training so far."""
        return self._times

    def state(self) -> LoaderState:
        """What `load_state` goes on from: after the last batch that was given."""
        return LoaderState(identity=dict(self.samples.identity), position=self._position)

    def load_state(self, state: LoaderState) -> None:
        """Go on where `state` was taken. Raises ConfigError where it is of another dataset, windows or seed."""
        mine = self.samples.identity
        for name in sorted(mine.keys() | state.identity.keys()):
            if (theirs := state.identity.get(name)) != mine.get(name):
                what = f"the state's {name} is {theirs!r}, this loader's {mine.get(name)!r}"
                raise ConfigError(what, where="load_state", hint="make the loader as it was made then")
        self._discard_pending()
        self._position = state.position

    def restrict_to_worker(self, first: int, count: int) -> None:
        """Of the batches from here on, give the `first`-th and every `count`-th after it, as one of `count` workers."""
        self._discard_pending()
        self._position = self._advance_position(self._position, first)
        self._skip = count - 1

    def close(self) -> None:
        """End the threads, but for one whose read does not come back. The loader may be used again."""
        self._stalled = True
        self._discard_pending()

    def _discard_pending(self) -> None:
        """Forget what is being read ahead. Threads that may be stuck are left behind, and others begin."""
        if self._pid == os.getpid():  # else a lock of theirs may have been held while this process was forked
            for coming in self._pending:
                self._discard(coming)
        self._pending.clear()
        if self._stalled and self._readers:
            self._readers.close()
            self._readers = None
        self._stalled = False

    def _discard(self, coming: PendingBatch) -> None:
        for part in coming.parts:
            part.cancel()
        if all(part.done() for part in coming.parts):  # else a thread may still fill them
            self._free.append(coming.buffers)

    def _request(self, count: int) -> None:
        """Have threads read so many batches ahead."""
        if self._readers is None or self._pid != os.getpid():
            # Those of a parent that was forked are not here, nor will what they were reading ever come.
            self._pid, self._readers = os.getpid(), ReadThreads(self._threads)
            self._pending.clear()
            self._free.clear()
        while len(self._pending) < count:
            self._pending.append(
                self._submit_batch(self._pending[-1].next_position if self._pending else self._position)
            )

    def _advance_position(self, position: int, batches: int) -> int:
        """The position so many batches later."""
        for _ in range(batches):
            position += self.samples.batch_at(position, self.batch_size)[1]
        return position

    def _submit_batch(self, start: int) -> PendingBatch:
        """Have threads read the batch at a position."""
        assert self._readers
        number, size = self.samples.batch_at(start, self.batch_size)
        low, high = rank_slice(size, self.rank, self.world_size)
        drawn = self.samples.draw(np.arange(start + low, start + high))
        count = high - low
        buffers = self._buffers(count, drawn.fields)
        arrays = {name: _reshape_view(buffers[name], (count, *field.shape)) for name, field in drawn.fields.items()}
        n_bytes = sum(array.nbytes for array in arrays.values())
        pieces = max(1, min(count, 2 * self._threads, n_bytes // _PART_BYTES))
        cuts = itertools.pairwise(count * piece // pieces for piece in range(pieces + 1))
        parts = [self._readers.submit(partial(self.samples.read, drawn, first, last, arrays)) for first, last in cuts]
        inside, aside = self.samples.valid_mask(drawn), self.samples.extras(drawn)
        batch = Batch(number, size, arrays, inside, aside, drawn.samples, drawn.keys)
        return PendingBatch(batch, parts, self._advance_position(start + size, self._skip), buffers)

    def _buffers(self, count: int, fields: Mapping[str, Field]) -> dict[str, NDArray[Any]]:
        """Memory for so many samples, flat: a batch of smaller ones uses a part of what the largest needed."""
        kept = self._free.pop() if self._free else {}
        made = {}
        for name, (shape, dtype) in fields.items():
            items = count * math.prod(shape)
            enough = name in kept and kept[name].size >= items
            made[name] = kept[name] if enough else self.allocate((items,), dtype)
        return made

    def _wait_for_batch(self, coming: PendingBatch) -> int:
        """Wait for the batch that comes first; returns bytes read. Raises as `__next__`."""
        assert self._readers
        for part in coming.parts:
            try:
                error = part.exception(self._stalled_s)
            except TimeoutError:
                self._stalled = True
                where = self._readers.describe_reads(coming.parts) or "a batch"
                what = f"{where}: nothing was read for {self._stalled_s:g} s"
                raise Unreachable(what, where=self.samples.description, hint="is the file system there?") from None
            if error is not None:
                self._discard_pending()  # so that the next call reads it again
                if isinstance(error, OSError):  # what the disk says is no answer, rather than one to believe
                    what = f"{error.filename or 'a read'}: {error.strerror or error}"
                    raise Unreachable(what, where=self.samples.description, hint="is the disk healthy?") from error
                raise error
        return sum(part.result() for part in coming.parts)


def _reshape_view(buffer: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    return buffer[: math.prod(shape)].reshape(shape)
