"""Our loader as the benchmarks run it, and the windows that it reads, for the peers to read the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perf.loader.loader_data import IMAGE, LENGTH
from pitools.loader.loader import Loader
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.store.reader.array_reader import ChecksumMode
from pitools.store.reader.version_reader import VersionReader


class OurLoader:
    """A loader of one array's windows. buffers: batches that it has memory for."""

    def __init__(
        self,
        path: Path,
        *,
        array: str = IMAGE,
        batch: int = 16,
        check: ChecksumMode = "first",
        threads: int = 2,
        ahead: int = 2,
        stride: int = 1,
        warm: bool = True,
    ) -> None:
        """warm: have everything in the page cache, and found good. It is read from front to back, as by a copy that
        stages it: of what comes in small pieces and out of order, the kernel keeps small pages, slower for everybody.
        """
        self.array, self.batch = array, batch
        arrays = VersionReader(path, checksums=check)
        windows = Windows(
            arrays.offsets, np.arange(len(arrays.offsets) - 1), {array: WindowSpan(0, LENGTH)}, stride=stride
        )
        self.samples = WindowSamples(arrays, windows, seed=1)
        self.loader = Loader(self.samples, global_batch_size=batch, threads=threads, prefetch=ahead)
        self.buffers, self._drawn = ahead + 1, 0
        if warm:
            for file in path.rglob("c/**/*"):
                if file.is_file():
                    file.read_bytes()
            steps = arrays.metadata_of(array).shape[0]
            for start in range(0, steps, 256):
                arrays.read(array, start, min(start + 256, steps))

    def read(self, batches: int) -> NDArray[Any]:
        """So many batches, as training gets them; the last one."""
        for _ in range(batches - 1):
            next(self.loader)
        return next(self.loader).arrays[self.array]

    def windows(self, batches: int) -> list[list[int]]:
        """First steps of so many batches of windows in the loader's order; the next ones with each call."""
        drawn = []
        for _ in range(batches):
            drawn.append(self.samples.draw(np.arange(self._drawn, self._drawn + self.batch)).locations.anchor.tolist())
            self._drawn += self.batch
        return drawn

    @contextmanager
    def setting(self, _: str) -> Iterator[None]:
        """Nobody's run begins with batches that were read before it, or while others are still being read."""
        yield
        self.drain_prefetch()

    def drain_prefetch(self) -> None:
        """Wait for, and forget, what was read ahead."""
        self.loader.load_state(self.loader.state())
        time.sleep(0.02)  # what a thread had begun, a few megabytes

    def close(self) -> None:
        """End its threads."""
        self.loader.close()
