"""Memory for batches, where copies into it are fast."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray


def allocate_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array on pages of its own, huge ones where there are: the kernel copies a frame there in half the time that it
    takes to where `np.empty` begins."""
    items = math.prod(shape)
    memory = mmap.mmap(-1, max(1, items * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, items).reshape(shape)
