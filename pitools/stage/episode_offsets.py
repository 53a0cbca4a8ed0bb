"""Read where episodes begin from the dataset's own arrays: small, one-dimensional and of integers."""

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
_COMPRESSORS = ("blosc", "zstd", "gzip", "zlib", "lz4")  # their parameters are in the compressed bytes


def read_offsets(
    manifest: Manifest, arrays: Mapping[str, ArrayMetadata], read_file: Callable[[str], bytes]
) -> list[int]:
    """Return the first step of each episode, then the number of steps: n + 1 values for n episodes.

    read_file: returns the bytes of a file. Raises UsageError when there is no such array or it cannot be decoded here,
    DataError for impossible offsets, and as `read_file` does.
    """
    arrays_by_name = {array.name: array for array in arrays.values()}
    name = next((name for name in OFFSET_ARRAYS if name in arrays_by_name), None)
    if name is None:
        message = f"the dataset has no episode offsets: no array {' or '.join(OFFSET_ARRAYS)}"
        raise UsageError(message, where="--episodes", hint="select steps instead: --steps a:b")
    offsets = read_integer_array(arrays_by_name[name], read_file)
    if not OFFSET_ARRAYS[name]:
        offsets.insert(0, 0)
    ascending = all(low <= high for low, high in pairwise(offsets))
    if not offsets or offsets[0] != 0 or not ascending or offsets[-1] != manifest.steps:
        message = f"episode offsets do not ascend from 0 to {manifest.steps} steps"
        raise DataError(message, where=name, hint="the array is damaged: check the dataset, ingest it again")
    return offsets


def read_integer_array(array: ArrayMetadata, read_file: Callable[[str], bytes]) -> list[int]:
    """Read a complete one-dimensional array of integers. Raises as `read_offsets`."""
    code = _STRUCT_CODES.get(array.dtype)
    if len(array.shape) != 1 or code is None:
        raise UsageError(f"{array.dtype} of {len(array.shape)} axes (expected integers of 1 axis)", where=array.name)
    values: list[int] = []
    for index, key in enumerate(chunk_keys.chunk_keys(array)):
        data = read_file(key)
        for chunk in _decoded_chunks(array, (index,), data, key):
            items = numbers(code, chunk)
            if _innermost(array.codecs).big_endian:
                items.byteswap()
            values += items
    if len(values) < array.shape[0]:
        raise DataError(f"{array.shape[0] - len(values)} values are not stored", where=array.name)
    return values[: array.shape[0]]


def _decoded_chunks(array: ArrayMetadata, coordinate: tuple[int, ...], data: bytes, key: str) -> Iterator[bytes]:
    """Yield the decoded chunks of a file in order, up to the first absent one. Raises DataError for a defect."""
    file = shard_index.BufferedFile.over(data)
    if defects := verify.verify_file(file, len(data), array, coordinate).defects:
        raise DataError(f"{defects[0].kind}: {defects[0].expected} expected, not {defects[0].got}", where=key)
    sharding = array.codecs.sharding
    if not sharding:
        yield _decode_chunk(array, array.codecs, data)
        return
    if array.codecs.names != ("sharding_indexed",):
        raise _unsupported_codec(array, array.codecs)
    index = shard_index.read_index(file, 0, len(data), sharding)
    for offset, size in zip(index.offsets, index.sizes, strict=True):
        if offset == NOT_STORED:
            return
        yield _decode_chunk(array, sharding.inner, data[offset : offset + size])


def _decode_chunk(array: ArrayMetadata, codecs: CodecChain, data: bytes) -> bytes:
    names = list(codecs.names)
    while names[-1:] == ["crc32c"]:
        names.pop()
        data = data[:-4]
    if names[:1] == ["bytes"] and names[1:] and names[1] in _COMPRESSORS:
        data = _decompress(names.pop(), data, array.name)
    if names != ["bytes"] or len(data) != codecs.raw_bytes:
        raise _unsupported_codec(array, codecs)
    return data


def _decompress(name: str, data: bytes, where: str) -> bytes:
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
    message = f"unsupported codecs: {', '.join(codecs.names)}"
    return UsageError(message, where=array.name, hint="select steps instead: --steps a:b")


def _innermost(codecs: CodecChain) -> CodecChain:
    return _innermost(codecs.sharding.inner) if codecs.sharding else codecs
