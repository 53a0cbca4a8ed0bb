"""What a command used: bytes read by all its processes, as the kernel counts them, and memory at its peak."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from perf.harness.workspace import finish, start

T = TypeVar("T")
_EVERY_S = 0.01


class PeakMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes at the peak. pss: the greatest sum over all processes alive together, pages that several map divided among
    them; largest: the greatest resident size of any one process; processes: the most seen at once.
    """

    pss: int
    largest: int
    processes: int


def bytes_read(run: Callable[[], T]) -> tuple[int, T]:
    """Bytes that `run` and every process it started and waited for got from read(2) and its kin; what `run` returned.

    Files, pipes and sockets alike, and Python's own modules too: take off the same run with nothing to copy. What a
    child read is added to its parent when that waits for it, so the sum is whole once `run` is over.
    """
    before = _characters_read()
    result = run()
    return _characters_read() - before, result


def _characters_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar:"))


def peak_memory(argv: list[str]) -> tuple[PeakMemory, str]:
    """Run a command, looking at its whole process tree every 10 ms; its peak and its stdout."""
    process = start(argv)
    pss = largest = most = 0
    while process.poll() is None:
        tree = list(_process_tree(process.pid))
        pss = max(pss, sum(_kib(f"/proc/{pid}/smaps_rollup", "Pss:") for pid in tree))
        # ru_maxrss would be this plus an error: it also remembers the image of ours that the child had before exec.
        largest = max([largest, *(_kib(f"/proc/{pid}/status", "VmHWM:") for pid in tree)])
        most = max(most, len(tree))
        time.sleep(_EVERY_S)
    return PeakMemory(pss=pss << 10, largest=largest << 10, processes=most), finish(process)


def _process_tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        children = [Path(f"/proc/{pid}/task/{thread}/children").read_text().split() for thread in threads]
    except OSError:  # it has ended meanwhile
        return
    for child in (int(text) for words in children for text in words):
        yield from _process_tree(child)


def _kib(path: str, key: str) -> int:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), 0)
