"""Time the parts of a loader separately: file reads, batches and transforms."""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from pitools.core.errors import ConfigError, DataError, Unreachable
from pitools.loader.loader import Loader, NumpyBatch

_MAX_RANGES = 200_000
_CGROUPS, _CGROUP_ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")

Range = tuple[int, int, int]  # number of the file, offset, bytes
Transform = Callable[[NumpyBatch], Any]


class Measurement(NamedTuple):
    """operations: number of reads, batches or transforms. bytes_read: from files. wall_s: seconds."""

    operations: int
    bytes_read: int
    wall_s: float


def available_memory() -> int:
    """Return how many bytes of files can stay in memory: the node's free memory, or this job's limit if it is less."""
    limits: list[int] = [psutil.virtual_memory().available]
    for line in _CGROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):  # cgroup v2; v1
            top = _CGROUP_ROOT / controllers
            for folder in (top / path[1:], *(top / path[1:]).parents):
                for name in ("memory.max", "memory.limit_in_bytes"):
                    with suppress(OSError, ValueError):  # no limit there: no file, or "max"
                        limits.append(int((folder / name).read_text()))
    return min(limits)


def drop_page_cache(files: Sequence[Path]) -> None:
    """Drop files from the page cache. Pages mapped by other processes stay."""
    for file in files:
        descriptor = _open(file)
        try:
            os.fdatasync(descriptor)  # dirty pages cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def random_ranges(sizes: Sequence[int], n_bytes: int, *, seed: int = 0) -> list[Range]:
    """Return distinct ranges of `n_bytes` in files of these sizes, in random order; at most 200,000."""
    ends = list(itertools.accumulate(-(-size // n_bytes) for size in sizes))
    total = ends[-1] if ends else 0
    ranges = []
    for number in random.Random(seed).sample(range(total), min(total, _MAX_RANGES)):  # noqa: S311 - no secret
        file = bisect_right(ends, number)
        offset = (number - (ends[file - 1] if file else 0)) * n_bytes
        ranges.append((file, offset, min(n_bytes, sizes[file] - offset)))
    return ranges


def time_reads(files: Sequence[Path], ranges_to_read: Sequence[Range], threads: int, limit_s: float) -> Measurement:
    """Read ranges of files by threads, until all are read or `limit_s` is over. Raises DataError, Unreachable."""
    remaining = iter(ranges_to_read)  # a list's iterator is atomic: threads may share it
    largest = max((n_bytes for _, _, n_bytes in ranges_to_read), default=0)
    began = time.perf_counter()

    def work() -> tuple[int, int]:
        buffer, count, total = memoryview(bytearray(largest)), 0, 0
        for file, offset, n_bytes in remaining:
            total += os.preadv(descriptors[file], [buffer[:n_bytes]], offset)
            count += 1
            if time.perf_counter() - began > limit_s:
                break
        return count, total

    descriptors: list[int] = []
    try:
        descriptors.extend(_open(file) for file in files)
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            results = [future.result() for future in [pool.submit(work) for _ in range(threads)]]
        wall_s = time.perf_counter() - began
    except OSError as error:
        where = os.path.commonpath(files)
        raise Unreachable(f"read failed: {error.strerror}", where=where, hint="check the disk: dmesg") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return Measurement(sum(count for count, _ in results), sum(total for _, total in results), wall_s)


def time_batches(loader: Loader, max_batches: int, limit_s: float, transform: Transform | None = None) -> Measurement:
    """Read and transform batches up to `max_batches` or `limit_s`, at least two if there are two."""
    began, count, bytes_read = time.perf_counter(), 0, 0
    while count < max_batches:
        batch = next(loader)
        count, bytes_read = count + 1, bytes_read + batch.bytes_read
        if transform:
            apply_transform(transform, batch)
        if count > 1 and time.perf_counter() - began > limit_s:
            break
    return Measurement(count, bytes_read, time.perf_counter() - began)


def fastest_pass(loader: Loader, count: int, limit_s: float) -> Measurement:
    """Repeat passes over the next `count` batches until `limit_s` is over, and return the fastest."""
    start, began, passes = loader.state(), time.perf_counter(), list[Measurement]()
    while not passes or time.perf_counter() - began < limit_s:
        loader.load_state(start)
        passes.append(time_batches(loader, count, math.inf))
    return min(passes, key=lambda measurement: measurement.wall_s)


def time_transform(transform: Transform, batch: NumpyBatch, limit_s: float) -> Measurement:
    """Transform one batch repeatedly until `limit_s` is over, after a warm-up that does not count."""
    apply_transform(transform, batch)
    began, count = time.perf_counter(), 0
    while not count or time.perf_counter() - began < limit_s:
        apply_transform(transform, batch)
        count += 1
    return Measurement(count, 0, time.perf_counter() - began)


def apply_transform(transform: Transform, batch: NumpyBatch) -> None:
    """Transform a batch. Raises ConfigError for any exception of the function."""
    try:
        transform(batch)
    except Exception as error:
        message = f"transform: raised {type(error).__name__}: {error}"
        where = f"{getattr(transform, '__module__', '?')}:{getattr(transform, '__name__', '?')}"
        shapes = ", ".join(f"{name} {array.shape} {array.dtype}" for name, array in batch.arrays.items())
        raise ConfigError(message, where=where, hint=f"its argument is a Batch of arrays {shapes}") from error


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"{os.strerror(error.errno or 0)}", where=str(file), hint="stage the dataset again") from error
