"""Copy the next batch to a device while training uses the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from pitools.loader.loader import Loader, LoaderState, LoaderStats, NumpyBatch, Stateful
from pitools.run.trace_capture import annotate

T = TypeVar("T")


class DevicePrefetcher(Stateful, Generic[T]):
    """An endless iterator of a loader's batches after `put`, with the loader's state and `close`."""

    def __init__(
        self, loader: Loader, put: Callable[[NumpyBatch], T], wait: Callable[[T], Any], *, early: bool
    ) -> None:
        """put: starts the copy of a batch to the device. wait: waits for the end of that copy; then the loader may
        reuse its buffers. early: start the copy of the next batch before the current one is returned. False: the
        arrays of a batch are the loader's buffers, and are valid until the next call.
        """
        self._loader, self._put, self._wait, self._early = loader, put, wait, early
        self._state = loader.state()
        self._next: tuple[T, LoaderState] | None = None

    def __iter__(self) -> Iterator[T]:
        return self

    @annotate("input")
    def __next__(self) -> T:
        """Return the next batch. Raises as the loader, `put` and `wait`; the call after an error returns that batch."""
        batch, state = self._next or self._copy_next()
        self._next = None
        with self._restore_on_error(self._state):
            self._wait(batch)
        # Only if it is ready: this batch must neither wait for the next one nor fail with it.
        if self._early and self._loader.is_ready:
            with suppress(Exception):  # the next call raises it
                self._next = self._copy_next()
        self._state = state
        return batch

    @property
    def stats(self) -> LoaderStats:
        """Totals over all batches so far."""
        return self._loader.stats

    def state(self) -> LoaderState:
        """Return the state after the last batch that was returned."""
        return self._state

    def load_state(self, state: LoaderState) -> None:
        """Continue at the position of `state`. Raises ConfigError as `Loader.load_state`."""
        self._loader.load_state(state)
        self._state, self._next = self._loader.state(), None

    def close(self) -> None:
        """Stop the loader's threads."""
        self.load_state(self._state)  # a prefetched batch is read again if iteration continues
        self._loader.close()

    def _copy_next(self) -> tuple[T, LoaderState]:
        state, batch = self._loader.state(), next(self._loader)
        with self._restore_on_error(state):
            return self._put(batch), self._loader.state()

    @contextmanager
    def _restore_on_error(self, state: LoaderState) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._loader.load_state(state)  # else the batch would be skipped
            raise
