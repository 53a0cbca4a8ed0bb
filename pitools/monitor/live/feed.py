"""Repeat a call in a thread of its own, and keep its latest answer: who reads it never waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from pitools.core.errors import PitError
from pitools.place.clusters.parallel import site_error

T = TypeVar("T")


class Answer(NamedTuple, Generic[T]):
    """The latest value, None before the first. began_s: when its call began, time.monotonic. error: of a later call."""

    value: T | None
    began_s: float
    error: PitError | None


class Feed(Generic[T]):
    """A call that is repeated `every_s` seconds after its end, in a daemon thread: one that hangs ends with us.

    share: of a core that it takes at most; after a call of much CPU time it waits longer.
    """

    def __init__(self, name: str, call: Callable[[], T], every_s: float, share: float = 1.0) -> None:
        self._name, self._call, self._every_s, self.share = name, call, every_s, share
        self._stop = threading.Event()
        self.answer: Answer[T] = Answer(None, time.monotonic(), None)

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def stop(self) -> None:
        """Begin no further call."""
        self._stop.set()

    @property
    def age_s(self) -> float:
        """Seconds since the call began that gave the latest value; without one, since the feed was made."""
        return time.monotonic() - self.answer.began_s

    def _run(self) -> None:
        while not self._stop.is_set():
            began_s, cpu_s = time.monotonic(), time.thread_time()
            try:
                self.answer = Answer(self._call(), began_s, None)
            except Exception as error:  # noqa: BLE001 - an answer can be malformed in any way
                self.answer = self.answer._replace(error=site_error(self._name, error))
            self._stop.wait(max(self._every_s, (time.thread_time() - cpu_s) / self.share))
