"""How an array lies on disk: inner chunk, shard and codecs, a function of its shape, dtype and codec name alone.

The metadata is written here and not by zarr-python, so that a version's bytes do not depend on a library's release.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

CODECS = ("lz4", "raw", "zstd")
CHUNK_BYTES = 1 << 20
SHARD_BYTES = 64 << 20
LZ4_LEVEL = 5
ZSTD_LEVEL = 3
# One training window reads few chunks, and one chunk few steps that it does not want.
IMAGE_STEPS = 32
LOW_DIM_STEPS = 256

_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


class ChunkGrid(msgspec.Struct, frozen=True, kw_only=True):
    """One array on disk: (steps, *row), `chunk` steps to an inner chunk and `shard` steps to a file."""

    shape: tuple[int, ...]
    dtype: str
    chunk: int
    shard: int
    codec: str

    @property
    def shards(self) -> int:
        """Number of shard files."""
        return math.ceil(self.shape[0] / self.shard)

    @property
    def itemsize(self) -> int:
        """Bytes of one item."""
        return np.dtype(self.dtype).itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one step."""
        return math.prod(self.shape[1:]) * self.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the array itself."""
        return math.prod(self.shape) * self.itemsize


def choose_grid(shape: tuple[int, ...], dtype: str, codec: str) -> ChunkGrid:
    """Inner chunks of a power of two steps, up to 1 MiB, of images half that; shards of whole chunks up to 64 MiB.

    A step of two or more axes is an image. A row larger than a chunk has a chunk of its own.
    """
    steps, row = shape[0], shape[1:]
    row_bytes = math.prod(row) * np.dtype(dtype).itemsize
    # Of the chunks at a window's ends a part is read in vain, and images have many bytes in a part.
    limit, limit_bytes = (IMAGE_STEPS, CHUNK_BYTES // 2) if len(row) >= 2 else (LOW_DIM_STEPS, CHUNK_BYTES)
    chunk = min(limit, 1 << (max(1, limit_bytes // row_bytes).bit_length() - 1))
    whole = math.ceil(max(steps, 1) / chunk) * chunk
    shard = min(whole, max(chunk, SHARD_BYTES // row_bytes // chunk * chunk))
    return ChunkGrid(shape=shape, dtype=dtype, chunk=chunk, shard=shard, codec=codec)


def dimension_names(name: str, axes: int, *, along_steps: bool) -> tuple[str, ...]:
    """Names of an array's axes, without which xarray does not open it: `steps` is one axis of all arrays that have it,
    any other is the array's own. With a colon they are no array's name, which would make coordinates of that."""
    own = tuple(f"{name}:{axis}" for axis in range(axes))
    return ("steps", *own[1:]) if along_steps else own


def array_metadata(
    grid: ChunkGrid, attributes: dict[str, Any] | None = None, dimensions: Sequence[str] | None = None
) -> dict[str, Any]:
    """The metadata of an array."""
    row = grid.shape[1:]
    zero = {"b": False, "f": 0.0, "c": [0.0, 0.0]}.get(np.dtype(grid.dtype).kind, 0)
    sharding = {
        "chunk_shape": [grid.chunk, *row],
        "codecs": _inner_codecs(grid),
        "index_codecs": [_BYTES, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": grid.shape,
        "data_type": grid.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [grid.shard, *row]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": zero,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": attributes or {},
        **({"dimension_names": dimensions} if dimensions else {}),
    }


def group_metadata(attributes: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def encode(metadata: dict[str, Any]) -> bytes:
    """The `zarr.json` of an array or a group."""
    return msgspec.json.format(msgspec.json.encode(metadata), indent=1) + b"\n"


def shard_path(name: str, index: int, axes: int) -> str:
    """Path of a shard in the dataset, by its number along the first axis."""
    return f"{name}/c/{index}" + "/0" * (axes - 1)


def _inner_codecs(grid: ChunkGrid) -> list[dict[str, Any]]:
    """Core Zarr v3 names only, and crc32c last, so that no reader takes a flipped bit for data.

    lz4: for NVMe (in blosc, shuffled where an item has more than one byte). zstd: for the archive. raw: as it is.
    """
    codecs: list[dict[str, Any]] = [_BYTES if grid.itemsize > 1 else {"name": "bytes"}]
    if grid.codec == "lz4":
        shuffle = "shuffle" if grid.itemsize > 1 else "noshuffle"
        settings = {"cname": "lz4", "clevel": LZ4_LEVEL, "shuffle": shuffle, "typesize": grid.itemsize, "blocksize": 0}
        codecs.append({"name": "blosc", "configuration": settings})
    elif grid.codec == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}})
    return [*codecs, {"name": "crc32c"}]
