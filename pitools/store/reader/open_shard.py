"""A shard, or a file of one chunk, that is open for reading."""

from __future__ import annotations

import os
import stat
from array import array as numbers

from pitools.store.zarr.metadata import ShardingSpec
from pitools.store.zarr.shard_index import BufferedFile, ShardError, ShardIndex, read_index


class OpenShard:
    """checked: which chunks were found good. Closed when the last reader lets go of it."""

    def __init__(self, descriptor: int, index: ShardIndex) -> None:
        self.descriptor, self.index, self.verified = descriptor, index, bytearray(len(index.offsets))

    def __del__(self) -> None:
        os.close(self.descriptor)


def open_shard(descriptor: int, sharding: ShardingSpec | None) -> OpenShard:
    """What a descriptor is of, which is closed if it is of nothing that can be read. Raises Broken, OSError."""
    try:
        return OpenShard(descriptor, _index(descriptor, sharding))
    except BaseException:
        os.close(descriptor)
        raise


def _index(descriptor: int, sharding: ShardingSpec | None) -> ShardIndex:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise ShardError("content", "a regular file", stat.filemode(found.st_mode))
    # A window is asked for whole, and what lies behind it is another sample's, or nobody's: nothing to read ahead.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    if sharding is None:
        return ShardIndex(numbers("Q", [0]), numbers("Q", [found.st_size]), 0, found.st_size)
    window = BufferedFile(lambda view, offset: os.preadv(descriptor, [view], offset), memoryview(bytearray(1)))
    return read_index(window, 0, found.st_size, sharding)
