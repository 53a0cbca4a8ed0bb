"""Batches in the computed order, read by a few threads ahead of training into buffers that are used again.

    positions ──order──▶ samples ──windows──▶ steps ──arrays──▶ buffer 0 │ buffer 1 │ buffer 2 …  ──▶ training
                                                     threads:   being read, of the next batches      has the oldest

Threads and not processes: what costs time, reading and decoding, is done without the interpreter's lock, and nothing
has to be pickled, copied, or found hanging after a fork.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ConfigError, Unreachable
from pitools.core.record import Record
from pitools.loader.gather import gather
from pitools.loader.order import Indices, Keys, Order, share
from pitools.loader.windows import Place, Span, Windows
from pitools.store.arrays import Arrays

# A file system that gives nothing for this long is not slow but gone.
STALLED_S = 300.0


class Batch(NamedTuple):
    """This rank's part of a global batch, b samples; valid until the next one is asked for.

    step: number of the global batch. arrays: (b, length, *row) by name. inside: (b, length) by name, False where a
    padded window repeats a step; only where windows are padded. samples, keys: (b,), see `Order`.
    """

    step: int
    arrays: dict[str, NDArray[Any]]
    inside: dict[str, NDArray[np.bool_]]
    samples: Indices
    keys: Keys


class State(Record, frozen=True, kw_only=True, tag="pit.loader-state/1"):
    """Where training is. position: samples that all ranks together have been given. The rest says in what order."""

    dataset: str
    samples: int
    seed: int
    shuffle: bool
    position: int


class Times(NamedTuple):
    """Seconds that training waited for batches, and bytes that these held, since the loader was made."""

    waited_s: float
    bytes: int
    batches: int


class Loader:
    """An endless iterator of batches; `state` and `load_state` resume it exactly, at another world size too."""

    def __init__(
        self, arrays: Arrays, windows: Windows, *, batch_size: int, seed: int = 0, shuffle: bool = True, rank: int = 0,
        world_size: int = 1, threads: int = 2, ahead: int = 2,
        allocate: Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]] = np.empty,
    ) -> None:  # fmt: skip
        """batch_size: of all ranks together. threads: that read. ahead: batches read before they are asked for.
        allocate: makes the buffers, as of pinned memory. Raises ConfigError, DataError.
        """
        if not len(windows):
            raise ConfigError("no episode is long enough for a window", where=str(arrays.path))
        try:
            self._part = share(batch_size, rank, world_size)
        except ValueError as error:
            raise ConfigError(str(error), where="batch_size") from error
        self._arrays, self._windows, self._batch_size = arrays, windows, batch_size
        self.order = Order(dataset=arrays.version, samples=len(windows), seed=seed, shuffle=shuffle)
        self._threads, self._ahead, self._allocate = max(1, threads), max(1, ahead), allocate
        self._position = 0  # of the next batch to be given
        self._pid, self._pool = 0, None  # type: int, ThreadPoolExecutor | None
        self._coming: deque[tuple[Batch, list[Future[None]]]] = deque()
        self._free: list[dict[str, NDArray[Any]]] = []
        self._given: dict[str, NDArray[Any]] | None = None
        self._times = Times(0.0, 0, 0)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch. Raises DataError for damage, naming it; Unreachable when nothing comes for minutes."""
        self._start()
        if self._given is not None:
            self._free.append(self._given)
            self._given = None
        while len(self._coming) < self._ahead:
            self._coming.append(self._request(self._position + len(self._coming) * self._batch_size))
        batch, parts = self._coming[0]
        began = time.perf_counter()
        done, late = wait(parts, timeout=STALLED_S)
        if late:
            raise Unreachable(
                f"no batch for {STALLED_S:.0f} s", where=str(self._arrays.path), hint="is the disk there?"
            )
        for part in done:
            part.result()
        waited = time.perf_counter() - began
        self._coming.popleft()
        self._position += self._batch_size
        self._given = batch.arrays
        self._times = Times(
            self._times.waited_s + waited,
            self._times.bytes + sum(array.nbytes for array in batch.arrays.values()),
            self._times.batches + 1,
        )
        self._coming.append(self._request(self._position + len(self._coming) * self._batch_size))
        return batch

    @property
    def times(self) -> Times:
        """What the loader has cost training so far."""
        return self._times

    def state(self) -> State:
        """What `load_state` goes on from: after the last batch that was given."""
        order = self.order
        return State(
            dataset=order.dataset, samples=order.samples, seed=order.seed, shuffle=order.shuffle,
            position=self._position,
        )  # fmt: skip

    def load_state(self, state: State) -> None:
        """Go on where `state` was taken. Raises ConfigError where it is of another dataset, windows or seed."""
        mine = self.state()
        for name in ("dataset", "samples", "seed", "shuffle"):
            if getattr(state, name) != getattr(mine, name):
                what = f"the state's {name} is {getattr(state, name)!r}, this loader's {getattr(mine, name)!r}"
                raise ConfigError(what, where="load_state", hint="make the loader as it was made then")
        self._drop()
        self._position = state.position

    def close(self) -> None:
        """End the threads. The loader may be used again."""
        self._drop()
        if self._pool and self._pid == os.getpid():
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None

    def _start(self) -> None:
        """Threads of this process; those of a parent that was forked are not here."""
        if self._pool is None or self._pid != os.getpid():
            self._coming.clear()
            self._free.clear()
            self._pid, self._pool = os.getpid(), ThreadPoolExecutor(self._threads, thread_name_prefix="pit-loader")

    def _drop(self) -> None:
        """Forget what is being read ahead."""
        if self._pid == os.getpid():
            for _, parts in self._coming:
                for part in parts:
                    part.cancel()
                wait(parts, timeout=STALLED_S)
        self._coming.clear()

    def _request(self, position: int) -> tuple[Batch, list[Future[None]]]:
        """Have threads read the batch at a position."""
        assert self._pool
        positions = np.arange(position + self._part[0], position + self._part[1])
        samples = self.order.at(positions)
        place = self._windows.locate(samples)
        arrays = self._free.pop() if self._free else self._buffers(len(samples))
        batch = Batch(position // self._batch_size, arrays, self._inside(place), samples, self.order.keys(positions))
        cuts = np.linspace(0, len(samples), min(len(samples), 2 * self._threads) + 1).astype(int).tolist()
        parts = [self._pool.submit(self._read, arrays, place, low, high) for low, high in itertools.pairwise(cuts)]
        return batch, parts

    def _read(self, arrays: Mapping[str, NDArray[Any]], place: Place, low: int, high: int) -> None:
        part = Place(*(field[low:high] for field in place))
        for name, span in self._windows.spans.items():
            gather(self._arrays, name, arrays[name][low:high], part, span)

    def _buffers(self, count: int) -> dict[str, NDArray[Any]]:
        return {
            name: self._allocate((count, span.length, *self._arrays.array(name).shape[1:]), self._arrays.dtype(name))
            for name, span in self._windows.spans.items()
        }

    def _inside(self, place: Place) -> dict[str, NDArray[np.bool_]]:
        if not self._windows.pad:
            return {}
        return {name: _inside(place, span) for name, span in self._windows.spans.items()}


def _inside(place: Place, span: Span) -> NDArray[np.bool_]:
    steps = place.anchor[:, None] + np.arange(-span.before, span.after)
    return (steps >= place.start[:, None]) & (steps < place.stop[:, None])
