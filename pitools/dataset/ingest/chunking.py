"""Choose an array's inner chunk, shard and codecs from its shape, dtype and codec name alone.

This module writes the metadata, not zarr-python, so that a version's bytes do not depend on a library's release.
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
# A training window then reads few chunks, and few steps outside the window.
IMAGE_STEPS = 32
LOW_DIM_STEPS = 256

_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


class ArraySpec(msgspec.Struct, frozen=True, kw_only=True):
    """Chunk layout of an array (steps, *row): `chunk` steps per inner chunk, `shard` steps per file."""

    shape: tuple[int, ...]
    dtype: str
    chunk: int
    shard: int
    codec: str

    @property
    def shards(self) -> int:
        """Return the number of shard files."""
        return math.ceil(self.shape[0] / self.shard)

    @property
    def itemsize(self) -> int:
        """Return the bytes of one item."""
        return np.dtype(self.dtype).itemsize

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one step."""
        return math.prod(self.shape[1:]) * self.itemsize

    @property
    def nbytes(self) -> int:
        """Return the bytes of the uncompressed array."""
        return math.prod(self.shape) * self.itemsize


def choose_array_spec(shape: tuple[int, ...], dtype: str, codec: str) -> ArraySpec:
    """Return inner chunks of 2^n steps, up to 1 MiB (images: 512 KiB), and shards of whole chunks, up to 64 MiB.

    An array with two or more axes per step counts as images. A row above the limit is a chunk by itself.
    """
    steps, row = shape[0], shape[1:]
    row_bytes = math.prod(row) * np.dtype(dtype).itemsize
    # A window uses only a part of its first and last chunk; of images, the unused part has many bytes.
    limit, limit_bytes = (IMAGE_STEPS, CHUNK_BYTES // 2) if len(row) >= 2 else (LOW_DIM_STEPS, CHUNK_BYTES)
    chunk = min(limit, 1 << (max(1, limit_bytes // row_bytes).bit_length() - 1))
    padded_steps = math.ceil(max(steps, 1) / chunk) * chunk
    shard = min(padded_steps, max(chunk, SHARD_BYTES // row_bytes // chunk * chunk))
    return ArraySpec(shape=shape, dtype=dtype, chunk=chunk, shard=shard, codec=codec)


def dimension_names(name: str, axes: int, *, along_steps: bool) -> tuple[str, ...]:
    """Return the names of an array's axes, which xarray requires. Arrays along steps share the axis `steps`.

    The colon keeps an axis' name distinct from array names: xarray makes an array named like an axis a coordinate."""
    own = tuple(f"{name}:{axis}" for axis in range(axes))
    return ("steps", *own[1:]) if along_steps else own


def array_metadata(
    spec: ArraySpec, attributes: dict[str, Any] | None = None, dimensions: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the metadata of an array."""
    row = spec.shape[1:]
    zero = {"b": False, "f": 0.0, "c": [0.0, 0.0]}.get(np.dtype(spec.dtype).kind, 0)
    sharding = {
        "chunk_shape": [spec.chunk, *row],
        "codecs": _inner_codecs(spec),
        "index_codecs": [_BYTES, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": spec.shape,
        "data_type": spec.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [spec.shard, *row]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": zero,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": attributes or {},
        **({"dimension_names": dimensions} if dimensions else {}),
    }


def group_metadata(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def encode(metadata: dict[str, Any]) -> bytes:
    """Return the bytes of the `zarr.json` of an array or a group."""
    return msgspec.json.format(msgspec.json.encode(metadata), indent=1) + b"\n"


def shard_path(name: str, index: int, axes: int) -> str:
    """Return the path of a shard in the store. index: the shard's number along the first axis."""
    return f"{name}/c/{index}" + "/0" * (axes - 1)


def _inner_codecs(spec: ArraySpec) -> list[dict[str, Any]]:
    """Return codecs by core Zarr v3 names, crc32c last, so that every reader detects a flipped bit.

    lz4: for NVMe (in blosc, shuffled for items of more than one byte). zstd: for the archive. raw: uncompressed.
    """
    codecs: list[dict[str, Any]] = [_BYTES if spec.itemsize > 1 else {"name": "bytes"}]
    if spec.codec == "lz4":
        shuffle = "shuffle" if spec.itemsize > 1 else "noshuffle"
        settings = {"cname": "lz4", "clevel": LZ4_LEVEL, "shuffle": shuffle, "typesize": spec.itemsize, "blocksize": 0}
        codecs.append({"name": "blosc", "configuration": settings})
    elif spec.codec == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}})
    return [*codecs, {"name": "crc32c"}]
