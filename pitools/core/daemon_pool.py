"""A pool of daemon threads, which do not keep the process from ending.

The interpreter joins the threads of concurrent.futures at its exit; a thread that is blocked in a file system would
keep it from ending for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

Value = TypeVar("Value")
_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class DaemonPool:
    """A pool of at most `max_threads` threads, started as work is submitted. A context manager.

    At its end, calls that are running are waited for, and calls that have not started are cancelled.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads, self._name = max_threads, name
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[..., Value], *args: Any) -> Future[Value]:
        """Queue a call, and return the future of its value or exception."""
        future: Future[Value] = Future()
        self._work.put((future, function, args))
        if len(self._threads) < self._max_threads:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def __enter__(self) -> DaemonPool:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Empty):
            while waiting := self._work.get_nowait():
                waiting[0].cancel()
        for _thread in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while work := self._work.get():
            _call_into_future(*work)
            del work  # else its arguments stay in memory until the next call


def _call_into_future(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*args))
    except BaseException as error:  # noqa: BLE001  # raised by Future.result
        future.set_exception(error)
