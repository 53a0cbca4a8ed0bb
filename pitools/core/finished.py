"""Futures as they finish, on a main thread that Ctrl-C may reach at any moment."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class Finished:
    """Futures in the order in which they finish. Made by `finished`."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Future[Any] | None] = SimpleQueue()  # its put may come in the middle of its get
        self.interrupted = False

    def expect(self, future: Future[Any]) -> None:
        """Have `take` return it once."""
        future.add_done_callback(self._queue.put)

    def take(self, timeout: float | None = None) -> Future[Any]:
        """The next one. Raises KeyboardInterrupt, and queue.Empty after these seconds."""
        future = self._queue.get(timeout=timeout)
        if future is None or self.interrupted:
            raise KeyboardInterrupt
        return future

    def interrupt(self, *_: object) -> None:
        """Make `take` raise KeyboardInterrupt."""
        self.interrupted = True
        self._queue.put(None)


@contextlib.contextmanager
def finished() -> Iterator[Finished]:
    """Futures as they finish; in this block Ctrl-C is heard by `take`, or else at the block's end.

    An exception out of a signal handler can leave a lock of `concurrent.futures` taken. The pool's own thread then
    waits for that lock for ever, and Python, at its exit, for that thread.
    """
    arriving = Finished()
    # What is ignored, or another's to handle, stays so; and only the main thread is ever interrupted.
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours or threading.current_thread() is not threading.main_thread():
        yield arriving
        return
    signal.signal(signal.SIGINT, arriving.interrupt)
    try:
        yield arriving
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if arriving.interrupted:
        raise KeyboardInterrupt
