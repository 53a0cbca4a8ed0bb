"""Batches on a device: the next one is copied there while training is busy with this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from pitools.loader.loader import Loader, LoaderState, LoaderStats, NumpyBatch, Stateful

T = TypeVar("T")


class DevicePrefetcher(Stateful, Generic[T]):
    """An endless iterator of a loader's batches after `put`; resumed and ended as the loader is."""

    def __init__(
        self, loader: Loader, put: Callable[[NumpyBatch], T], wait: Callable[[T], Any], *, early: bool
    ) -> None:
        """put: begins to copy a batch to the device. wait: waits until that is done, so that the loader's buffers may
        be used again. early: the copy of the next batch begins before this one is trained on; else its arrays are the
        loader's own, and valid until the next one is asked for.
        """
        self._loader, self._put, self._wait, self._early = loader, put, wait, early
        self._state = loader.state()
        self._next: tuple[T, LoaderState] | None = None

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """The next batch. Raises as the loader's, and as `put` and `settle`; then the next call gives the same one."""
        given, state = self._next or self._copy_next()
        self._next = None
        with self._restore_on_error(self._state):
            self._wait(given)
        # Only if it is there: this batch must not wait for the next, nor fail because that one does.
        if self._early and self._loader.is_ready:
            with suppress(Exception):  # raised when that one is asked for
                self._next = self._copy_next()
        self._state = state
        return given

    @property
    def stats(self) -> LoaderStats:
        """What the loader has cost training so far."""
        return self._loader.stats

    def state(self) -> LoaderState:
        """What `load_state` goes on from: after the last batch that was given."""
        return self._state

    def load_state(self, state: LoaderState) -> None:
        """Go on where `state` was taken. Raises ConfigError as the loader's."""
        self._loader.load_state(state)
        self._state, self._next = self._loader.state(), None

    def close(self) -> None:
        """End the loader's threads."""
        self.load_state(self._state)  # a batch that was not given is given when this is used again
        self._loader.close()

    def _copy_next(self) -> tuple[T, LoaderState]:
        before, batch = self._loader.state(), next(self._loader)
        with self._restore_on_error(before):
            return self._put(batch), self._loader.state()

    @contextmanager
    def _restore_on_error(self, state: LoaderState) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._loader.load_state(state)  # else the batch would be skipped
            raise
