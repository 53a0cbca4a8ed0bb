"""What is left of a loader that was closed."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest

from pitools.loader.loader import Loader
from pitools.loader.read_threads import ReadThreads
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.store.reader.version_reader import VersionReader
from tests.loader.conftest import Record


def open_files(path: Path) -> int:
    """How many descriptors of this process are of files below a folder."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(link.readlink()))
        except FileNotFoundError:  # of the folder that is listed
            continue
    return sum(target.startswith(f"{path}/") for target in targets)


@pytest.mark.parametrize("close", [True, False])
def test_no_file_stays_open(record: Record, close: bool):
    """Twenty loaders that were read from and dropped leave none, before Python looks for cycles."""
    path = record((30, 40))
    gc.disable()
    try:
        for _ in range(20):
            arrays = VersionReader(path, resident_bytes=0)
            windows = Windows(arrays.offsets, np.arange(2), {"obs/image": WindowSpan(0, 4), "action": WindowSpan(0, 8)})
            batches = Loader(WindowSamples(arrays, windows), global_batch_size=8)
            next(batches)
            assert open_files(path)
            if close:
                batches.close()
            del arrays, windows, batches
        assert open_files(path) == 0
    finally:
        gc.enable()


def test_threads_that_are_dropped_in_one_of_them() -> None:
    """The garbage collector may run in a thread of the pool: it must not join itself."""
    pools, submitted = [ReadThreads(2)], threading.Event()

    def drop() -> None:
        submitted.wait(10)
        pools.clear()
        gc.collect()

    part = pools[0].submit(drop)
    submitted.set()
    assert part.result(timeout=10) == 0
