"""Parse the metadata of a Zarr store (v2 or v3) into records.

    array (steps, …) ──grid──▶ chunk (2, 0, 0) ──key──▶ images/c/2/0/0 ──codecs──▶ one file
                                                                        └─ sharded: inner chunks and their index

Pure functions without a Zarr library, and an error for metadata that no reader could use. `chunk_keys.py` maps chunks
to files, `verify.py` verifies files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from pitools.core.errors import DataError
from pitools.store.zarr import dtypes

V3_FILE, V2_ARRAY, V2_GROUP, V2_ATTRIBUTES, V2_CONSOLIDATED = "zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"
METADATA_NAMES = frozenset({V3_FILE, V2_ARRAY, V2_GROUP, V2_ATTRIBUTES, V2_CONSOLIDATED})
SHARDING = "sharding_indexed"
MAX_AXES = 64

Shape = tuple[int, ...]
Coordinate = tuple[int, ...]


class ShardingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The sharding codec's configuration. axes: of the array, in the shard's order. counts: inner chunks on each axis.

    index_at_start: False: at the end of the shard. index_codecs: names. big_endian: of the index, which has (offset,
    bytes) as uint64 of each inner chunk in C order. inner: codecs of an inner chunk.
    """

    axes: Shape
    counts: Shape
    index_at_start: bool
    index_codecs: tuple[str, ...]
    big_endian: bool
    inner: CodecChain


class CodecChain(msgspec.Struct, frozen=True, kw_only=True):
    """The codecs of a chunk. names: in the order of encoding; v2's filters, then its compressor.

    raw_bytes: of the chunk's items, None if their size is not fixed. big_endian: of the items. sharding: None without.
    """

    names: tuple[str, ...]
    raw_bytes: int | None
    big_endian: bool = False
    sharding: ShardingSpec | None = None


class ArrayMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """One array. path: in the store, "" for an array at its root. file_chunk: shape of the part in one file: a
    chunk or a shard. dtype: NumPy's name if it has one. v2_keys: `0.0`, not `c/0/0`.
    """

    path: str
    format: int
    shape: Shape
    file_chunk: Shape
    dtype: str
    codecs: CodecChain
    v2_keys: bool
    separator: str

    @property
    def name(self) -> str:
        """Return the name in a manifest: the path, or `.` for an array at the root."""
        return self.path or "."

    @property
    def grid(self) -> Shape:
        """Return the number of chunks (files) along each axis."""
        return tuple(-(-size // chunk) if size else 0 for size, chunk in zip(self.shape, self.file_chunk, strict=True))


def read_arrays(paths: Iterable[str], read_file: Callable[[str], bytes]) -> dict[str, ArrayMetadata]:
    """Return the arrays of a store by path, sorted. paths: of all its files. read_file: returns a metadata file.

    For a node with metadata of both formats, v3 is used, as in zarr-python. Raises DataError, and the errors of
    `read_file`.
    """
    nodes: dict[str, str] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        if name == V3_FILE or (name == V2_ARRAY and nodes.get(folder) != V3_FILE):
            nodes[folder] = name
    arrays = {}
    for folder in sorted(nodes):
        where = f"{folder}/{nodes[folder]}".removeprefix("/")
        array = parse_metadata(folder, read_file(where), where)
        if array is not None:
            arrays[folder] = array
    for path in arrays:
        if inside := next((group for group in parent_groups(path) if group in arrays), None):
            raise DataError(f"array: inside another array, {arrays[inside].name!r}", where=path)
    return arrays


def parse_metadata(path: str, data: bytes, where: str) -> ArrayMetadata | None:
    """Parse the metadata of an array; return None for a group's. Raises DataError for other content."""
    document = parse_json_object(data, where)
    try:
        if document.get("zarr_format") == 3:
            return None if document["node_type"] == "group" else _require_valid(_v3(path, document))
        if document.get("zarr_format") == 2:
            return _require_valid(_v2(path, document))
        raise ValueError(f"zarr_format: expected 2 or 3, got {document.get('zarr_format')!r}")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise _metadata_error(reason, where) from error


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse a metadata file as a JSON object; NaN is allowed, since zarr-python writes it. Raises DataError."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _metadata_error(str(error), where) from error
    if not isinstance(value, dict):
        raise _metadata_error("not a JSON object", where)
    return value


def consolidate(group: Mapping[str, Any], nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a v3 group's metadata with the consolidated metadata of all nodes below it, in zarr-python's format."""
    # zarr-python requires a group's nodes to be adjacent.
    inside = {path: nodes[path] for path in sorted(nodes)}
    return {**group, "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": inside}}


def keep_consolidated_nodes(file: str, document: Mapping[str, Any], nodes: Container[str]) -> dict[str, Any] | None:
    """Return a group's metadata, of file `file`, with consolidated metadata of `nodes` alone; None if nothing changes.

    nodes: paths from the store's root.
    """
    folder, _, name = file.rpartition("/")
    inside = document if name == V2_CONSOLIDATED else document.get("consolidated_metadata")
    listed = inside.get("metadata") if isinstance(inside, Mapping) else None
    if not isinstance(inside, Mapping) or not isinstance(listed, Mapping):
        return None
    folders = {key: key.rpartition("/")[0] if name == V2_CONSOLIDATED else key for key in listed}
    selected = {key: listed[key] for key, path in folders.items() if f"{folder}/{path}".strip("/") in nodes}
    if len(selected) == len(listed):
        return None
    inside = {**inside, "metadata": selected}
    return inside if name == V2_CONSOLIDATED else {**document, "consolidated_metadata": inside}


def _metadata_error(reason: str, where: str) -> DataError:
    return DataError(f"Zarr metadata: {reason}", where=where, hint="check that the store is complete")


def parent_groups(path: str) -> Iterator[str]:
    """Yield the paths of the groups that contain a node, innermost first; the root, "", last."""
    while path:
        path = path.rpartition("/")[0]
        yield path


def _v3(path: str, document: dict[str, Any]) -> ArrayMetadata:
    if document["node_type"] != "array":
        raise ValueError(f"node_type: expected 'array', got {document['node_type']!r}")
    if document.get("storage_transformers"):
        raise ValueError("storage_transformers: not supported")
    grid, settings = _name_and_settings(document["chunk_grid"])
    if grid != "regular":
        raise ValueError(f"chunk_grid: expected 'regular', got {grid!r}")
    chunk = _shape(settings["chunk_shape"])
    encoding, options = _name_and_settings(document["chunk_key_encoding"])
    if encoding not in ("default", "v2"):
        raise ValueError(f"chunk_key_encoding: expected 'default' or 'v2', got {encoding!r}")
    dtype, itemsize = dtypes.parse_v3(*_name_and_settings(document["data_type"]))
    return ArrayMetadata(
        path=path,
        format=3,
        shape=_shape(document["shape"]),
        file_chunk=chunk,
        dtype=dtype,
        codecs=_codecs(document["codecs"], chunk, itemsize),
        v2_keys=encoding == "v2",
        separator=options.get("separator", "." if encoding == "v2" else "/"),
    )


def _v2(path: str, document: dict[str, Any]) -> ArrayMetadata:
    chunk = _shape(document["chunks"])
    dtype, itemsize = dtypes.parse_v2(document["dtype"])
    codecs = [*(document.get("filters") or ()), *([document["compressor"]] if document["compressor"] else ())]
    # The first codec of v2 is implicit: the bytes of the items (a filter such as vlen-utf8 encodes objects instead).
    listed = [{"name": "bytes", "configuration": {"endian": "big" if str(document["dtype"])[0] == ">" else "little"}}]
    listed += [{"name": codec["id"], "configuration": codec} for codec in codecs]
    return ArrayMetadata(
        path=path,
        format=2,
        shape=_shape(document["shape"]),
        file_chunk=chunk,
        dtype=dtype,
        codecs=_codecs(listed, chunk, itemsize),
        v2_keys=True,
        separator=document.get("dimension_separator") or ".",
    )


def _require_valid(array: ArrayMetadata) -> ArrayMetadata:
    if len(array.shape) != len(array.file_chunk):
        raise ValueError(f"chunks: expected {len(array.shape)} axes as in the shape, got {len(array.file_chunk)}")
    if any(size and not chunk for size, chunk in zip(array.shape, array.file_chunk, strict=True)):
        raise ValueError("chunks: an axis of length 0")
    if array.separator not in (".", "/"):
        raise ValueError(f"separator: expected '.' or '/', got {array.separator!r}")
    return array


def _codecs(listed: list[Any], shape: Shape, itemsize: int | None) -> CodecChain:
    """Parse a list of codecs for chunks of this shape."""
    chain = [_name_and_settings(codec) for codec in listed]
    sharding, is_supported, axes = None, True, tuple(range(len(shape)))
    for name, settings in chain:
        if name == "transpose" and isinstance(settings.get("order"), list):
            axes = tuple(axes[axis] for axis in _shape(settings["order"]))
        elif name == SHARDING and is_supported:
            sharding = _sharding(settings, shape, axes, itemsize)
        else:
            is_supported = False  # another codec before the sharding may change the shape
    raw_bytes = None if itemsize is None else math.prod(shape) * itemsize
    names = tuple(name for name, _ in chain)
    return CodecChain(names=names, raw_bytes=raw_bytes, big_endian=_is_big_endian(chain), sharding=sharding)


def _is_big_endian(chain: list[tuple[str, dict[str, Any]]]) -> bool:
    return any(name == "bytes" and settings.get("endian") == "big" for name, settings in chain)


def _sharding(settings: Mapping[str, Any], shape: Shape, axes: Shape, itemsize: int | None) -> ShardingSpec:
    shape = tuple(shape[axis] for axis in axes)
    inner = _shape(settings["chunk_shape"])
    if len(inner) != len(shape) or any(
        not part or shard_side % part for shard_side, part in zip(shape, inner, strict=True)
    ):
        raise ValueError(f"sharding: chunks of {inner} do not divide a shard of {shape}")
    default = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    index = [_name_and_settings(codec) for codec in settings.get("index_codecs", default)]
    location = settings.get("index_location", "end")
    if location not in ("start", "end"):
        raise ValueError(f"index_location: expected 'start' or 'end', got {location!r}")
    return ShardingSpec(
        axes=axes,
        counts=tuple(whole // part for whole, part in zip(shape, inner, strict=True)),
        index_at_start=location == "start",
        index_codecs=tuple(name for name, _ in index),
        big_endian=_is_big_endian(index),
        inner=_codecs(settings["codecs"], inner, itemsize),
    )


def _name_and_settings(value: Any) -> tuple[str, dict[str, Any]]:
    """Return name and configuration of a v3 extension, which may be a name alone."""
    if isinstance(value, str):
        return value, {}
    name, settings = value["name"], value.get("configuration") or {}
    if not isinstance(name, str) or not isinstance(settings, dict):
        raise ValueError(f"extension: expected a name and a configuration, got {value!r}")
    if name == "numcodecs.crc32c" or (name == "crc32c" and settings.get("location", "end") != "end"):
        # The core specification has only a checksum at the end.
        return ("crc32c" if settings.get("location", "end") == "end" else "crc32c at start"), settings
    return name.removeprefix("numcodecs."), settings


def _shape(value: Any) -> Shape:
    if not isinstance(value, list) or len(value) > MAX_AXES:
        raise ValueError(f"shape: expected up to {MAX_AXES} integers from 0, got {value!r}")
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in value):
        raise ValueError(f"shape: expected up to {MAX_AXES} integers from 0, got {value!r}")
    return tuple(value)
