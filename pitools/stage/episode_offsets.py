"""Where the episodes of a dataset begin, read from its own arrays: they are small, one-dimensional and of integers."""

from __future__ import annotations

from array import array as numbers
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from pitools.core.errors import DataError, ToolMissing, UsageError
from pitools.stage.sources.store_listing import OFFSET_ARRAYS
from pitools.store.manifest import Manifest
from pitools.store.zarr import chunk_keys, shard_index, verify
from pitools.store.zarr.metadata import ArrayMetadata, CodecChain
from pitools.store.zarr.shard_index import NOT_STORED

_STRUCT_CODES = {"int16": "h", "int32": "i", "int64": "q", "uint16": "H", "uint32": "I", "uint64": "Q"}
_COMPRESSORS = ("blosc", "zstd", "gzip", "zlib", "lz4")  # each says in its bytes how it was set


def read_offsets(
    manifest: Manifest, arrays: Mapping[str, ArrayMetadata], read_file: Callable[[str], bytes]
) -> list[int]:
    """Return the steps at which the episodes begin, and at last the number of steps: n + 1 for n episodes.

    read_file: the bytes of a file. Raises UsageError when the dataset has no such array or it cannot be read here,
    DataError when it cannot be true, and what `read_file` raises.
    """
    known = {array.name: array for array in arrays.values()}
    name = next((name for name in OFFSET_ARRAYS if name in known), None)
    if name is None:
        message = f"it is not known where episodes begin: no array {' or '.join(OFFSET_ARRAYS)}"
        raise UsageError(message, where="--episodes", hint="choose steps instead: --steps a:b")
    bounds = read_integer_array(known[name], read_file)
    if not OFFSET_ARRAYS[name]:
        bounds.insert(0, 0)
    ascending = all(low <= high for low, high in pairwise(bounds))
    if not bounds or bounds[0] != 0 or not ascending or bounds[-1] != manifest.steps:
        message = f"episodes do not go from 0 to {manifest.steps} steps in order"
        raise DataError(message, where=name, hint="it is damaged: check the dataset, ingest it again")
    return bounds


def read_integer_array(array: ArrayMetadata, read_file: Callable[[str], bytes]) -> list[int]:
    """Read a whole one-dimensional array of integers. Raises as `read_offsets`."""
    code = _STRUCT_CODES.get(array.dtype)
    if len(array.shape) != 1 or code is None:
        raise UsageError(f"{array.dtype} of {len(array.shape)} axes is no list of steps", where=array.name)
    values: list[int] = []
    for place, key in enumerate(chunk_keys.chunk_keys(array)):
        data = read_file(key)
        for part in _chunks(array, (place,), data, key):
            items = numbers(code, part)
            if _innermost(array.codecs).big_endian:
                items.byteswap()
            values += items
    if len(values) < array.shape[0]:
        raise DataError(f"{array.shape[0] - len(values)} of its numbers are not stored", where=array.name)
    return values[: array.shape[0]]


def _chunks(array: ArrayMetadata, coordinate: tuple[int, ...], data: bytes, key: str) -> Iterator[bytes]:
    """Yield the decoded chunks of a file, in order up to the first that is absent. Raises DataError for a flaw."""
    window = shard_index.BufferedFile.over(data)
    if flaws := verify.verify_file(window, len(data), array, coordinate).defects:
        raise DataError(f"{flaws[0].kind}: {flaws[0].expected} expected, not {flaws[0].got}", where=key)
    sharding = array.codecs.sharding
    if not sharding:
        yield _decoded(array, array.codecs, data)
        return
    if array.codecs.names != ("sharding_indexed",):
        raise _unsupported_codec(array, array.codecs)
    index = shard_index.read_index(window, 0, len(data), sharding)
    for offset, size in zip(index.offsets, index.sizes, strict=True):
        if offset == NOT_STORED:
            return
        yield _decoded(array, sharding.inner, data[offset : offset + size])


def _decoded(array: ArrayMetadata, codecs: CodecChain, data: bytes) -> bytes:
    names = list(codecs.names)
    while names[-1:] == ["crc32c"]:
        names.pop()
        data = data[:-4]
    if names[:1] == ["bytes"] and names[1:] and names[1] in _COMPRESSORS:
        data = _decompressed(names.pop(), data, array.name)
    if names != ["bytes"] or len(data) != codecs.raw_bytes:
        raise _unsupported_codec(array, codecs)
    return data


def _decompressed(name: str, data: bytes, where: str) -> bytes:
    try:
        import numcodecs
    except ImportError as error:
        hint = "pip install 'pitools-hpc[data]'"
        raise ToolMissing(f"{where} is compressed by {name}, which needs numcodecs", hint=hint) from error
    try:
        return bytes(numcodecs.get_codec({"id": name}).decode(data))
    except Exception as error:
        raise DataError(f"cannot be decompressed: {error}", where=where) from error


def _unsupported_codec(array: ArrayMetadata, codecs: CodecChain) -> UsageError:
    message = f"its codecs are not understood here: {', '.join(codecs.names)}"
    return UsageError(message, where=array.name, hint="choose steps instead: --steps a:b")


def _innermost(codecs: CodecChain) -> CodecChain:
    return _innermost(codecs.sharding.inner) if codecs.sharding else codecs
