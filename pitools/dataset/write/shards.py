"""Shards, written once and whole: the `sharding_indexed` layout of Zarr v3, byte for byte as zarr-python writes it.

chunk 0, chunk 1, …, then the index: (offset, bytes) of each chunk as little-endian uint64, and its crc32c. Writing it
here takes half of zarr-python's time, and the digest of the file comes with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from crc32c import crc32c
from numcodecs.blosc import Blosc
from numcodecs.zstd import Zstd
from numpy.typing import NDArray

from pitools.dataset.write.grid import LZ4_LEVEL, ZSTD_LEVEL, Grid, shard_path
from pitools.store import digest
from pitools.store.manifest import FileEntry

ABSENT = 2**64 - 1  # offset and size of a chunk beyond the array's end


class Compressor(Protocol):
    """What numcodecs' codecs have in common."""

    def encode(self, part: NDArray[Any]) -> bytes:
        """The compressed bytes."""


def write(folder: Path, name: str, grid: Grid, index: int, block: NDArray[Any]) -> FileEntry:
    """Write and sync shard number `index` of an array: `block` is its steps, fewer than `grid.shard` only in the last.

    Raises OSError.
    """
    table = np.full((grid.shard // grid.chunk, 2), ABSENT, "<u8")
    size = 0

    def parts() -> Iterator[bytes | memoryview]:
        nonlocal size
        for i, data in enumerate(_encoded(block, grid)):
            table[i] = size, len(data) + 4
            size += len(data) + 4
            yield data
            yield _checksum(data)
        yield table.tobytes()
        yield _checksum(table.tobytes())

    return write_file(folder, shard_path(name, index, block.ndim), parts())


def write_file(folder: Path, path: str, parts: Iterable[bytes | memoryview]) -> FileEntry:
    """Write a new file of these parts, make it survive power loss, and say what it is. Raises OSError."""
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    hasher, size = digest.Hasher(), 0
    with (folder / path).open("xb") as file:
        for part in parts:
            file.write(part)
            hasher.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(path=path, bytes=size, digest=hasher.text())


def _encoded(block: NDArray[Any], grid: Grid) -> Iterator[bytes | memoryview]:
    compressor = _compressor(grid)
    for start in range(0, len(block), grid.chunk):
        part = block[start : start + grid.chunk]
        if len(part) < grid.chunk:  # a chunk is always whole; what lies beyond the array's end is zeros
            part = np.concatenate([part, np.zeros((grid.chunk - len(part), *part.shape[1:]), part.dtype)])
        yield compressor.encode(part) if compressor else part.reshape(-1).view(np.uint8).data


def _compressor(grid: Grid) -> Compressor | None:
    """The compressor that the metadata names. Blosc's own threads would write blocks in any order; numcodecs uses
    them in the main thread only, and shards are written in others."""
    if grid.codec == "lz4":
        compressor: Compressor = Blosc("lz4", LZ4_LEVEL, Blosc.SHUFFLE if grid.itemsize > 1 else Blosc.NOSHUFFLE)
        return compressor
    return Zstd(ZSTD_LEVEL) if grid.codec == "zstd" else None


def _checksum(data: bytes | memoryview) -> bytes:
    return crc32c(data).to_bytes(4, "little")
