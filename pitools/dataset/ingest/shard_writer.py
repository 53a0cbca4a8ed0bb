"""Write shards in Zarr v3's `sharding_indexed` layout, byte for byte as zarr-python does with `write_empty_chunks`.

Only large raw chunks differ: they are aligned.

A shard is chunk 0, chunk 1, …, then the index: (offset, bytes) of each chunk as little-endian uint64, and its crc32c.
It is assembled in one reused page-aligned buffer and written by one direct write (O_DIRECT): this takes a tenth of the
processor time and leaves the page cache to the recordings.
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

from pitools.dataset.ingest.chunking import LZ4_LEVEL, ZSTD_LEVEL, ArraySpec
from pitools.store import digest

MISSING_CHUNK = 2**64 - 1  # offset and size of a chunk beyond the array's end
# Copying an aligned chunk out of the page cache takes two thirds of the time of an unaligned one. Smaller chunks than
# ALIGN_ABOVE_BYTES mostly stay in the reader's memory, and their gaps would cost space.
ALIGNMENT, ALIGN_ABOVE_BYTES = 64, 64 << 10
DIRECT_ABOVE_BYTES = 1 << 20  # below this a write through the cache costs less than waiting for the disk
_PAGE = mmap.PAGESIZE


class Compressor(Protocol):
    """A codec of numcodecs."""

    def encode(self, part: NDArray[Any]) -> bytes:
        """Return the compressed bytes."""


class PageBuffer:
    """Reusable page-aligned memory: fresh pages cost as much as copying into them. Each call of `view` or `array`
    invalidates the previous result."""

    def __init__(self) -> None:
        self._memory = _map_memory(_PAGE)

    def view(self, size: int) -> memoryview:
        """Return at least `size` bytes, in whole pages."""
        if len(self._memory) < size:
            self._memory = _map_memory(_pages(size))
        return memoryview(self._memory)

    def array(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Return an uninitialised array of this shape."""
        return np.frombuffer(self.view(_bytes(shape, dtype)), dtype, _items(shape)).reshape(shape)


def _map_memory(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # huge pages take a fifth of the time to allocate, and are written faster
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def encode_shard(blocks: Iterable[NDArray[Any]], spec: ArraySpec, buffer: PageBuffer) -> memoryview:
    """Return the bytes of a shard, in `buffer`. blocks: its steps in order, in whole chunks except at the array's end.

    The iterator may reuse a block's memory for the next block: blocks of a few MiB stay in the processor's cache.
    """
    count = spec.shard // spec.chunk
    table = np.full((count, 2), MISSING_CHUNK, "<u8")
    # The largest size of incompressible chunks: zstd adds one byte in 256, blosc 16 bytes per chunk.
    out = buffer.view(_bytes((spec.shard, *spec.shape[1:]), spec.dtype) * 33 // 32 + 256 * (count + 1))
    compressor, number, end = _compressor(spec), 0, 0
    for block in blocks:
        for start in range(0, len(block), spec.chunk):
            part = block[start : start + spec.chunk]
            part = part.astype(part.dtype.newbyteorder("<"), copy=False)  # the metadata's byte order, on any machine
            if len(part) < spec.chunk:  # zeros fill the chunk beyond the array's end
                part = np.concatenate([part, np.zeros((spec.chunk - len(part), *part.shape[1:]), part.dtype)])
            data = compressor.encode(part) if compressor else part.reshape(-1).view(np.uint8).data
            if not compressor and len(data) >= ALIGN_ABOVE_BYTES:
                gap = -end % ALIGNMENT
                out[end : end + gap] = bytes(gap)
                end += gap
            table[number] = end, len(data) + 4
            end, number = _put_chunk(out, end, data), number + 1
    return out[: _put_chunk(out, end, table.tobytes())]


def _put_chunk(out: memoryview, offset: int, data: bytes | memoryview) -> int:
    """Copy data and its checksum to `offset`; return the offset of their end."""
    end = offset + len(data)
    out[offset:end] = data
    out[end : end + 4] = crc32c(data).to_bytes(4, "little")
    return end + 4


def write_durable(path: Path, data: memoryview | bytes, *, direct: bool = False) -> str:
    """Write and fsync a new file, but not its folder; return its digest. Raises OSError.

    direct: bypass the page cache. `data` is then the beginning of a PageBuffer's view.
    """
    direct = direct and len(data) >= DIRECT_ABOVE_BYTES and isinstance(data, memoryview)
    hasher = digest.Hasher()
    hasher.update(data)
    try:
        _write(path, data, direct=direct)
    except OSError as error:
        if not direct or error.errno != errno.EINVAL:  # a device whose blocks are larger than a page: rare
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
            if error.errno != errno.EINVAL:  # no O_DIRECT here; the file is created nevertheless
                raise
            path.unlink(missing_ok=True)
    return os.open(path, flags, 0o644)


def _write_all(descriptor: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], done)


def _compressor(spec: ArraySpec) -> Compressor | None:
    """Return the spec's compressor. Blosc's threads are off: they write blocks in any order."""
    if spec.codec == "lz4":
        from numcodecs import blosc

        blosc.use_threads = False
        shuffle = blosc.Blosc.SHUFFLE if spec.itemsize > 1 else blosc.Blosc.NOSHUFFLE
        compressor: Compressor = blosc.Blosc("lz4", LZ4_LEVEL, shuffle)
        return compressor
    if spec.codec == "zstd":
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
