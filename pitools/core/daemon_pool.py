"""Threads that work for another, and never keep the process from ending.

Those of concurrent.futures are waited for when the interpreter ends, and one that a file system holds never comes.
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
    """At most so many, each begun when there is work for it. A context manager.

    Its end waits for what is under way; what no thread has begun by then is cancelled.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads, self._name = max_threads, name
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[..., Value], *args: Any) -> Future[Value]:
        """Have this called; returns where its value, or what it raised, will be."""
        future: Future[Value] = Future()
        self._work.put((future, call, args))
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
            del work  # what it was given is not kept until there is more


def _call_into_future(future: Future[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call(*args))
    except BaseException as error:  # noqa: BLE001  # raised by who asks for the value
        future.set_exception(error)
