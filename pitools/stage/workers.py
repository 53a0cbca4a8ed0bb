"""Threads that read files: each has one buffer; reading, hashing and writing all release the GIL."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from mmap import mmap
from threading import Event
from typing import TypeVar

from pitools.store.digest import Hasher

T = TypeVar("T")
# A block is read, hashed and written before the next: small enough to stay in the core's own cache meanwhile.
BLOCK = 128 << 10


class Stopped(Exception):
    """Another worker failed, or the process was told to stop; this one gives up without a word."""


def default_readers() -> int:
    """Two per core this process may use, 2 to 16: a reader waits for its file system about as long as it works."""
    return max(2, min(16, 2 * len(os.sched_getaffinity(0))))


def for_each(items: Iterable[T], work: Callable[[T, memoryview, Event], None], *, threads: int) -> None:
    """Call `work(item, buffer, stop)` for every item, on several threads; `buffer` is the thread's own.

    The first exception, also one that a signal raises in the caller, stops all of them, is waited for, and raised.
    """
    todo, stop = deque(items), Event()

    def worker() -> None:
        # A page-aligned buffer: 16 bytes into a page, where malloc puts a large bytearray, the kernel's copies into
        # it take four times as long on AMD's Zen (`rep movsb` into nearly the same page offset).
        buffer = memoryview(mmap(-1, BLOCK))
        with _setting(stop):
            while not stop.is_set():
                try:
                    item = todo.popleft()
                except IndexError:
                    return
                try:
                    work(item, buffer, stop)
                except Stopped:
                    return

    # `_setting` inside the pool: the pool's own exit waits for the workers, which must know by then.
    with ThreadPoolExecutor(threads, "pit-stage") as pool, _setting(stop):
        for future in [pool.submit(worker) for _ in range(max(1, min(threads, len(todo))))]:
            future.result()


@contextmanager
def _setting(stop: Event) -> Iterator[None]:
    try:
        yield
    except BaseException:
        stop.set()
        raise


def pump(
    descriptor: int, buffer: memoryview, sink: Callable[[memoryview], None], *, limit: int, stop: Event
) -> tuple[int, str]:
    """Read to the end, hashing, giving each block to `sink`. Returns bytes read and their digest.

    A file that grows is not followed past `limit` bytes and a block. Raises OSError of the read, Stopped, and
    whatever `sink` raises.
    """
    hasher, total = Hasher(), 0
    while total <= limit and (count := os.readv(descriptor, [buffer])):
        if stop.is_set():
            raise Stopped
        block = buffer[:count]
        hasher.update(block)
        sink(block)
        total += count
    return total, hasher.text()
