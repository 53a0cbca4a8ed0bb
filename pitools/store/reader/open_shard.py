"""A shard, or a file of one chunk, that is open for reading."""

from __future__ import annotations

import os
import stat
from array import array as numbers

from pitools.store.zarr.metadata import Sharding
from pitools.store.zarr.shard_index import Broken, Index, Window, read_index


class Opened:
    """checked: which chunks were found good. Closed when the last reader lets go of it."""

    def __init__(self, descriptor: int, index: Index) -> None:
        self.descriptor, self.index, self.checked = descriptor, index, bytearray(len(index.offsets))

    def __del__(self) -> None:
        os.close(self.descriptor)


def take(descriptor: int, sharding: Sharding | None) -> Opened:
    """What a descriptor is of, which is closed if it is of nothing that can be read. Raises Broken, OSError."""
    try:
        return Opened(descriptor, _index(descriptor, sharding))
    except BaseException:
        os.close(descriptor)
        raise


def _index(descriptor: int, sharding: Sharding | None) -> Index:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise Broken("content", "a regular file", stat.filemode(found.st_mode))
    # A window is asked for whole, and what lies behind it is another sample's, or nobody's: nothing to read ahead.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    if sharding is None:
        return Index(numbers("Q", [0]), numbers("Q", [found.st_size]), 0, found.st_size)
    window = Window(lambda view, offset: os.preadv(descriptor, [view], offset), memoryview(bytearray(1)))
    return read_index(window, 0, found.st_size, sharding)
