"""A loader in forked and spawned processes and in threads: the right batches, and none that hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pitools.loader.loader import Loader
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.store.reader.version_reader import VersionReader

# Python 3.12 on warns of forks beside threads, which is what is tried here.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")

LENGTHS = (40, 3, 25, 60, 17)
TRIALS = 10
LIMIT_S = 30
CHILD = """
from pathlib import Path
import numpy as np
from pitools.loader.loader import Loader
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan

def sums(arrays, queue):
    spans = {"obs/image": WindowSpan(1, 1), "action": WindowSpan(0, 8)}
    windows = Windows(arrays.offsets, np.arange(5), spans, pad=True)
    loader = Loader(WindowSamples(arrays, windows), global_batch_size=16)
    queue.put([int(next(loader).arrays["obs/image"].sum()) for _ in range(6)])
"""


@pytest.fixture(scope="module", params=[0, 64 << 20], ids=["from files", "from memory"])
def arrays(request: pytest.FixtureRequest, record: Callable[..., Path]) -> VersionReader:
    """A small version."""
    return VersionReader(record(LENGTHS), resident_bytes=request.param)


def loader(arrays: VersionReader, **more: Any) -> Loader:
    windows = Windows(
        arrays.offsets, np.arange(5), {"obs/image": WindowSpan(1, 1), "action": WindowSpan(0, 8)}, pad=True
    )
    return Loader(WindowSamples(arrays, windows), **{"global_batch_size": 16, **more})


def sums(batches: Loader, count: int) -> list[int]:
    return [int(batch.arrays["obs/image"].sum()) for batch in islice(batches, count)]


def answers(queue: Any, children: list[Any]) -> list[Any]:
    """What the children found, all of them within the limit; none is left behind."""
    try:
        return [queue.get(timeout=LIMIT_S) for _ in children]
    finally:
        for child in children:
            child.join(5)
            hung = child.is_alive()
            child.kill()
            assert not hung


def test_forked_children_read_on(arrays: VersionReader):
    """Forked while the parent's threads read, ten of ten go on where the parent was, and so does the parent."""
    expected = sums(loader(arrays), 40)
    batches, context = loader(arrays, prefetch=4), multiprocessing.get_context("fork")
    queue, children = context.SimpleQueue(), []

    def read(place: int) -> None:
        actual = sums(batches, 6)
        batches.close()
        queue.put((place, actual))

    for place in range(1, TRIALS + 1):
        assert sums(batches, 1) == [expected[place - 1]]
        children.append(context.Process(target=read, args=(place,)))
        children[-1].start()
    deadline, start_time = time.monotonic() + LIMIT_S, []
    while len(start_time) < TRIALS and time.monotonic() < deadline:
        if queue.empty():
            time.sleep(0.01)
        else:
            start_time.append(queue.get())
    for child in children:
        child.join(5)
        child.kill()
    assert sorted(start_time) == [(place, expected[place : place + 6]) for place in range(1, TRIALS + 1)]
    assert {child.exitcode for child in children} == {0}
    assert sums(batches, 5) == expected[TRIALS : TRIALS + 5]
    batches.close()


def test_spawned_children_read(arrays: VersionReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After the parent has read: a version is sent by pickle, and read by processes that are new."""
    (tmp_path / "read_by_children.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    import read_by_children

    expected = sums(loader(arrays), 6)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    children = [context.Process(target=read_by_children.sums, args=(arrays, queue)) for _ in range(3)]
    for child in children:
        child.start()
    assert answers(queue, children) == [expected] * 3
    del sys.modules["read_by_children"]


def test_threads_read_out_of_one_version(arrays: VersionReader):
    """Loaders of several threads over the same open files, at different places, give what each alone would."""
    expected = sums(loader(arrays), 30)
    actual: dict[int, list[int]] = {}

    def read(place: int) -> None:
        batches = loader(arrays, threads=3)
        batches.skip(place)
        actual[place] = sums(batches, 10)
        batches.close()

    threads = [threading.Thread(target=read, args=(place,), daemon=True) for place in range(TRIALS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert actual == {place: expected[place : place + 10] for place in range(TRIALS)}


def test_a_child_forked_by_a_thread_reads(arrays: VersionReader):
    """As some frameworks fork: from a thread that is not the main one, while the main one reads."""
    expected = sums(loader(arrays), 6)
    batches, ends = loader(arrays), []

    def fork() -> None:
        for _ in range(3):
            if not (child := os.fork()):
                code = 2
                try:
                    code = int(sums(loader(arrays), 6) != expected)
                finally:
                    os._exit(code)
            deadline = time.monotonic() + LIMIT_S
            while not (end := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
                time.sleep(0.005)
            if not end[0]:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            ends.append(end[1] if end[0] else "hung")

    thread = threading.Thread(target=fork)
    thread.start()
    while thread.is_alive():
        next(batches)
    assert ends == [0, 0, 0]
    batches.close()


def test_closing_leaves_no_thread(arrays: VersionReader):
    """Neither after `close`, nor after a loader that nobody closed is gone; a closed one reads again."""
    n_threads = threading.active_count()
    batches = loader(arrays, threads=4)
    expected = sums(batches, 3)
    assert threading.active_count() == n_threads + 4
    batches.close()
    assert threading.active_count() == n_threads
    assert sums(loader(arrays), 3) == expected
    assert threading.active_count() == n_threads
    sums(batches, 1)
    del batches
    assert threading.active_count() == n_threads
