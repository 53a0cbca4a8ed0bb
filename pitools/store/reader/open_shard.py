"""Open a shard, or a file of one chunk, for reading."""

from __future__ import annotations

import os
import stat
from array import array as numbers
from collections.abc import Callable

from pitools.store.zarr.metadata import ShardingSpec
from pitools.store.zarr.shard_index import BufferedFile, ShardError, ShardIndex, read_index


class OpenShard:
    """An open shard. verified: 1 for each chunk whose checksum matched. The descriptor closes with the object."""

    def __init__(self, descriptor: int, index: ShardIndex) -> None:
        self.descriptor, self.index, self.verified = descriptor, index, bytearray(len(index.offsets))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit, the module's names may be gone
        close(self.descriptor)


def open_shard(descriptor: int, sharding: ShardingSpec | None) -> OpenShard:
    """Read the index of the shard at a descriptor. Raises ShardError, OSError, and then closes the descriptor."""
    try:
        return OpenShard(descriptor, _index(descriptor, sharding))
    except BaseException:
        os.close(descriptor)
        raise


def _index(descriptor: int, sharding: ShardingSpec | None) -> ShardIndex:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ShardError("content", "a regular file", stat.filemode(status.st_mode))
    # A window is read completely, and the bytes after it belong to another sample: read-ahead is useless.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    if sharding is None:
        return ShardIndex(numbers("Q", [0]), numbers("Q", [status.st_size]), 0, status.st_size)
    window = BufferedFile(lambda view, offset: os.preadv(descriptor, [view], offset), memoryview(bytearray(1)))
    return read_index(window, 0, status.st_size, sharding)
