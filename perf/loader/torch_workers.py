"""torch's DataLoader with worker processes over each reader, as a lab would write it, and with whole batches a call."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from perf.loader.loader_peers import WAYS

WORKERS = 2


class WindowSet(Dataset[Any]):
    """An index is the first step of a window, or a list of them: then the item is the batch. Opened in the worker."""

    def __init__(self, peer: str, way: int, path: Path, length: int, row: tuple[int, ...], dtype: str) -> None:
        self.way, self._opening = way, (peer, way, path, length)
        self._shape, self._dtype = (length, *row), dtype
        self._fill: Any = None

    def __getitem__(self, index: int | Sequence[int]) -> torch.Tensor:
        if self._fill is None:
            peer, way, path, length = self._opening
            self._fill = WAYS[peer](path, length)[way].fill
        starts = [index] if isinstance(index, int) else list(index)
        out = np.empty((len(starts), *self._shape), self._dtype)
        self._fill(starts, out)
        return torch.from_numpy(out[0] if isinstance(index, int) else out)


class StartSampler:
    """A sampler of first steps that the benchmark sets before each round."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class WorkerLoader:
    """A DataLoader over one peer. whole: a worker makes a batch in one call, else windows that torch stacks."""

    def __init__(self, windows: WindowSet, *, whole: bool, start: str = "spawn", prefetch: int = 2) -> None:
        """start: how processes begin. Those that have used zarrs or tensorstore must not fork."""
        self.starts = StartSampler()
        sampling = {"batch_size": None, "sampler": self.starts} if whole else {"batch_sampler": self.starts}
        self.loader = DataLoader(
            windows,
            num_workers=WORKERS,
            persistent_workers=True,
            prefetch_factor=prefetch,
            pin_memory=False,
            multiprocessing_context=start,
            **sampling,
        )
        self.about = (
            f"num_workers={WORKERS}, persistent_workers, prefetch_factor={prefetch}, "
            f"{'a batch' if whole else 'a window'} a call, way {windows.way}"
        )

    def read(self, batches: list[list[int]]) -> torch.Tensor:
        """Every batch of these first steps, in order; the last one."""
        self.starts.batches = batches
        actual = None
        for batch in self.loader:
            actual = batch
        assert actual is not None
        return actual

    def first(self, batches: list[list[int]]) -> torch.Tensor:
        """The first batch of these; the others may be on their way."""
        self.starts.batches = batches
        return next(iter(self.loader))

    def time(self, batches: list[list[int]]) -> float:
        """Seconds for these, after they were read once to start the workers."""
        self.read(batches)
        began = time.perf_counter()
        self.read(batches)
        return time.perf_counter() - began

    def close(self) -> None:
        """End the workers now, not when the loader is collected."""
        iterator, self.loader._iterator = self.loader._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()
