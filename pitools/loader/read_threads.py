"""A few threads that read, and what each of them is busy with.

They are daemons: a read from a file system that is gone cannot be cancelled, and neither `close` nor the end of the
program may wait for it. Whoever holds memory that such a thread may still fill must not use it again.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread

from pitools.store.reader.read_stats import ReadStats, thread_stats

# A healthy read is over within this time; the program ends without the others.
CLOSE_TIMEOUT_S = 1.0

ReadFuture = Future[int]  # of the number of bytes that were read from files
_Work = SimpleQueue[tuple[ReadFuture, Callable[[], None]] | None]


class ReadThreads:
    """Threads that do what is submitted, in this order. They end with `close`, with this object, or at exit."""

    def __init__(self, threads: int) -> None:
        self._work: _Work = SimpleQueue()
        self._doing: dict[ReadFuture, ReadStats] = {}
        served = [
            Thread(target=_thread_main, args=(self._work, self._doing), name=f"pit-loader-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in served:
            thread.start()
        self.close = weakref.finalize(self, _stop_threads, self._work, served)

    def submit(self, work: Callable[[], None]) -> ReadFuture:
        """Have a thread do this. An OSError names the file that was read, where it does not by itself."""
        part: ReadFuture = Future()
        self._work.put((part, work))
        return part

    def describe_reads(self, parts: Iterable[ReadFuture]) -> str:
        """The files that are being read for these, or where none of them has begun, for others."""
        doing = dict(self._doing)
        places = {doing[part].where for part in parts if part in doing} or {each.where for each in doing.values()}
        return ", ".join(sorted(places - {""}))


def _thread_main(work: _Work, current: dict[ReadFuture, ReadStats]) -> None:
    tally = thread_stats()
    while (item := work.get()) is not None:
        part, function = item
        if part.set_running_or_notify_cancel():
            before = tally.bytes
            current[part] = tally
            try:
                function()
            except BaseException as error:  # noqa: BLE001 - whatever it is, the loader raises it
                if isinstance(error, OSError) and error.filename is None:
                    error.filename = tally.where or None
                part.set_exception(error)
            else:
                part.set_result(tally.bytes - before)
            del current[part]
            tally.path = None  # it holds an array's reader, and that its open files
        del item, part, function  # the buffers, which else would live until there is more to do


def _stop_threads(work: _Work, threads: list[Thread]) -> None:
    for _ in threads:
        work.put(None)
    until = time.monotonic() + CLOSE_TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
