"""Shards, written once and whole: the `sharding_indexed` layout of Zarr v3, byte for byte as zarr-python writes it, but
that large raw chunks are aligned.

chunk 0, chunk 1, …, then the index: (offset, bytes) of each chunk as little-endian uint64, and its crc32c. A shard is
put together in one page-aligned buffer that is used again and again, and goes to the disk in one write past the page
cache: that takes a tenth of the processor time, and leaves the cache to the recordings.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from pitools.dataset.ingest.chunking import LZ4_LEVEL, ZSTD_LEVEL, ChunkGrid
from pitools.store import digest

MISSING_CHUNK = 2**64 - 1  # offset and size of a chunk beyond the array's end
# Frames that begin at a multiple of this in their file are copied out of the page cache in two thirds of the time.
# Chunks smaller than ALIGN_ABOVE_BYTES are mostly held in memory, and for them the gaps would count.
ALIGNMENT, ALIGN_ABOVE_BYTES = 64, 64 << 10
DIRECT_ABOVE_BYTES = 1 << 20  # below this a write through the cache costs less than waiting for the disk
_PAGE = mmap.PAGESIZE


class Compressor(Protocol):
    """What numcodecs' codecs have in common."""

    def encode(self, part: NDArray[Any]) -> bytes:
        """The compressed bytes."""


class PageBuffer:
    """Page-aligned memory that is used again: fresh pages cost as much as copying into them. `view` may be called
    again only when nothing uses what it gave before."""

    def __init__(self) -> None:
        self._memory = _map_memory(_PAGE)

    def view(self, size: int) -> memoryview:
        """At least `size` bytes, whole pages."""
        if len(self._memory) < size:
            self._memory = _map_memory(_pages(size))
        return memoryview(self._memory)

    def array(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """An array of this shape, filled with what was there before."""
        return np.frombuffer(self.view(_bytes(shape, dtype)), dtype, _items(shape)).reshape(shape)


def _map_memory(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # huge pages: a fifth of the time to come by them, and a faster write
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def encode_shard(blocks: Iterable[NDArray[Any]], grid: ChunkGrid, buffer: PageBuffer) -> memoryview:
    """The bytes of a shard, in `buffer`. blocks: its steps in order, each of whole chunks but an array's last.

    A block may be filled anew once the next is asked for: blocks of a few MiB stay in the processor's cache.
    """
    count = grid.shard // grid.chunk
    table = np.full((count, 2), MISSING_CHUNK, "<u8")
    # Room for the worst that a compressor makes of noise: zstd adds one byte in 256, blosc 16 to each chunk.
    out = buffer.view(_bytes((grid.shard, *grid.shape[1:]), grid.dtype) * 33 // 32 + 256 * (count + 1))
    compressor, number, end = _compressor(grid), 0, 0
    for block in blocks:
        for start in range(0, len(block), grid.chunk):
            part = block[start : start + grid.chunk]
            part = part.astype(part.dtype.newbyteorder("<"), copy=False)  # as the metadata say, on any machine
            if len(part) < grid.chunk:  # a chunk is always whole; what lies beyond the array's end is zeros
                part = np.concatenate([part, np.zeros((grid.chunk - len(part), *part.shape[1:]), part.dtype)])
            data = compressor.encode(part) if compressor else part.reshape(-1).view(np.uint8).data
            if not compressor and len(data) >= ALIGN_ABOVE_BYTES:
                gap = -end % ALIGNMENT
                out[end : end + gap] = bytes(gap)
                end += gap
            table[number] = end, len(data) + 4
            end, number = _put_chunk(out, end, data), number + 1
    return out[: _put_chunk(out, end, table.tobytes())]


def _put_chunk(out: memoryview, offset: int, data: bytes | memoryview) -> int:
    """Put data and its checksum at `offset`; returns where they end."""
    end = offset + len(data)
    out[offset:end] = data
    out[end : end + 4] = crc32c(data).to_bytes(4, "little")
    return end + 4


def write_durable(path: Path, data: memoryview | bytes, *, direct: bool = False) -> str:
    """Write a new file that survives power loss, but for its name, and return its digest. Raises OSError.

    direct: past the page cache. `data` is then the beginning of a Buffer's view.
    """
    direct = direct and len(data) >= DIRECT_ABOVE_BYTES and isinstance(data, memoryview)
    hasher = digest.Hasher()
    hasher.update(data)
    try:
        _write(path, data, direct=direct)
    except OSError as error:
        if not direct or error.errno != errno.EINVAL:  # a block larger than a page: rare, and no reason to fail
            raise
        path.unlink(missing_ok=True)
        _write(path, data, direct=False)
    return hasher.digest()


def _write(path: Path, data: memoryview | bytes, *, direct: bool) -> None:
    descriptor = _create(path, direct=direct)
    try:
        if direct and isinstance(data, memoryview):
            _write_all(descriptor, memoryview(data.obj)[: _pages(len(data))])
            os.ftruncate(descriptor, len(data))
        else:
            _write_all(descriptor, memoryview(data))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(path: Path, *, direct: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:  # file systems without it, which create the file all the same
                raise
            path.unlink(missing_ok=True)
    return os.open(path, flags, 0o644)


def _write_all(descriptor: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], done)


def _compressor(grid: ChunkGrid) -> Compressor | None:
    """The compressor that the metadata names. Blosc's own threads would write blocks in any order: it gets none."""
    if grid.codec == "lz4":
        from numcodecs import blosc

        blosc.use_threads = False
        shuffle = blosc.Blosc.SHUFFLE if grid.itemsize > 1 else blosc.Blosc.NOSHUFFLE
        compressor: Compressor = blosc.Blosc("lz4", LZ4_LEVEL, shuffle)
        return compressor
    if grid.codec == "zstd":
        from numcodecs.zstd import Zstd

        zstd: Compressor = Zstd(ZSTD_LEVEL)
        return zstd
    return None


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _items(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return _items(shape) * np.dtype(dtype).itemsize
