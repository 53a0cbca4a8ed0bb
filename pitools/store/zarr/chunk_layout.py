"""Find the layout on disk of an array whose steps can be read directly into a batch.

    steps ──shard──▶ file ──inner chunk──▶ encoded bytes │ crc32c          a row is never split between chunks

All other arrays (transposed, big-endian, chunked along other axes, with other codecs) are read by zarr-python.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from pitools.store.zarr.metadata import SHARDING, ArrayMetadata, CodecChain, ShardingSpec

Codec = Literal["raw", "blosc", "zstd"]
_CODECS: dict[tuple[str, ...], Codec] = {("bytes",): "raw", ("bytes", "blosc"): "blosc", ("bytes", "zstd"): "zstd"}
_INDEX = (("bytes", "crc32c"), ("bytes",))


class ChunkLayout(NamedTuple):
    """shape: (steps, *row). chunk: steps of an encoded chunk. shard: steps of a file.

    crc: each chunk ends in the CRC-32C of its encoded bytes. sharding: None if a file is one chunk.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    chunk: int
    shard: int
    codec: Codec
    crc: bool
    sharding: ShardingSpec | None

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one step."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Return the bytes of a decoded chunk."""
        return self.chunk * self.row_bytes


def chunk_layout(array: ArrayMetadata) -> ChunkLayout | None:
    """Return the layout of an array; None if zarr-python must read it."""
    if array.format != 3 or array.v2_keys or array.separator != "/" or not array.shape or not array.shape[0]:
        return None
    if array.file_chunk[1:] != array.shape[1:] or not all(array.shape):
        return None
    codecs, sharding = array.codecs, array.codecs.sharding
    chunk = array.file_chunk[0]
    if codecs.names == (SHARDING,) and sharding:
        if sharding.axes != tuple(range(len(array.shape))) or math.prod(sharding.counts[1:]) != 1:
            return None
        if sharding.index_codecs not in _INDEX or sharding.inner.sharding:
            return None
        codecs, chunk = sharding.inner, chunk // sharding.counts[0]
    else:
        sharding = None
    codec, crc = _codec(codecs)
    try:
        dtype = np.dtype(array.dtype)
    except TypeError:
        return None
    if codec is None or dtype.hasobject or codecs.big_endian or codecs.raw_bytes is None:
        return None
    return ChunkLayout(array.shape, dtype, chunk, array.file_chunk[0], codec, crc, sharding)


def _codec(codecs: CodecChain) -> tuple[Codec | None, bool]:
    names = codecs.names
    crc = names[-1:] == ("crc32c",)
    return _CODECS.get(names[:-1] if crc else names), crc
