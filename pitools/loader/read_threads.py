"""A pool of daemon threads for reads, with the file that each thread is reading.

A read from a lost file system cannot be cancelled, and neither `close` nor the exit of the program may wait for it.
The caller must not reuse a buffer that such a thread may still fill.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread, current_thread

from pitools.store.reader.read_stats import ReadStats, thread_stats

# `close` waits this long for running reads.
CLOSE_TIMEOUT_S = 1.0

ReadFuture = Future[int]  # result: bytes read from files
_Work = SimpleQueue[tuple[ReadFuture, Callable[[], None]] | None]


class ReadThreads:
    """Threads that run submitted functions first in, first out. They stop at `close`, with this object, or at exit."""

    def __init__(self, threads: int) -> None:
        self._work: _Work = SimpleQueue()
        self._current: dict[ReadFuture, ReadStats] = {}
        workers = [
            Thread(target=_thread_main, args=(self._work, self._current), name=f"pit-loader-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in workers:
            thread.start()
        self.close = weakref.finalize(self, _stop_threads, self._work, workers)

    def submit(self, work: Callable[[], None]) -> ReadFuture:
        """Run `work` in a thread. An OSError without a file name gets the name of the file being read."""
        part: ReadFuture = Future()
        self._work.put((part, work))
        return part

    def describe_reads(self, parts: Iterable[ReadFuture]) -> str:
        """Return the files being read for `parts`; if none of them has started, the files being read for others."""
        current = dict(self._current)
        files = {current[part].where for part in parts if part in current} or {each.where for each in current.values()}
        return ", ".join(sorted(files - {""}))


def _thread_main(work: _Work, current: dict[ReadFuture, ReadStats]) -> None:
    stats = thread_stats()
    while (item := work.get()) is not None:
        part, function = item
        if part.set_running_or_notify_cancel():
            start_bytes = stats.bytes
            current[part] = stats
            try:
                function()
            except BaseException as error:  # noqa: BLE001 - the loader raises it
                if isinstance(error, OSError) and error.filename is None:
                    error.filename = stats.where or None
                part.set_exception(error)
            else:
                part.set_result(stats.bytes - start_bytes)
            del current[part]
            stats.path = None  # it refers to an array's reader, which holds open files
        del item, part, function  # they refer to buffers, which would stay allocated until the next item


def _stop_threads(work: _Work, threads: list[Thread]) -> None:
    for _ in threads:
        work.put(None)
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    for thread in threads:
        if thread is not current_thread():  # the garbage collector may run this in one of them
            thread.join(max(0.0, deadline - time.monotonic()))
