"""Where the episodes of a dataset begin, read from its own arrays: they are small, one-dimensional and of integers."""

from __future__ import annotations

from array import array as numbers
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from pitools.core.errors import DataError, ToolMissing, UsageError
from pitools.stage.sources.store_listing import BOUNDARIES
from pitools.store.manifest import Manifest
from pitools.store.zarr import chunk_keys, shard_index, verify
from pitools.store.zarr.metadata import Array, Codecs
from pitools.store.zarr.shard_index import ABSENT

_TYPES = {"int16": "h", "int32": "i", "int64": "q", "uint16": "H", "uint32": "I", "uint64": "Q"}
_COMPRESSORS = ("blosc", "zstd", "gzip", "zlib", "lz4")  # each says in its bytes how it was set


def read(manifest: Manifest, arrays: Mapping[str, Array], get: Callable[[str], bytes]) -> list[int]:
    """Steps at which the episodes begin, and at last the number of steps: n + 1 for n episodes.

    get: the bytes of a file. Raises UsageError when the dataset has no such array or it cannot be read here, DataError
    when it cannot be true, and what `get` raises.
    """
    known = {array.name: array for array in arrays.values()}
    name = next((name for name in BOUNDARIES if name in known), None)
    if name is None:
        what = f"it is not known where episodes begin: no array {' or '.join(BOUNDARIES)}"
        raise UsageError(what, where="--episodes", hint="choose steps instead: --steps a:b")
    bounds = values(known[name], get)
    if not BOUNDARIES[name]:
        bounds.insert(0, 0)
    ascending = all(low <= high for low, high in pairwise(bounds))
    if not bounds or bounds[0] != 0 or not ascending or bounds[-1] != manifest.steps:
        what = f"episodes do not go from 0 to {manifest.steps} steps in order"
        raise DataError(what, where=name, hint="it is damaged: check the dataset, ingest it again")
    return bounds


def values(array: Array, get: Callable[[str], bytes]) -> list[int]:
    """A whole array of one axis of integers. Raises as `read`."""
    code = _TYPES.get(array.dtype)
    if len(array.shape) != 1 or code is None:
        raise UsageError(f"{array.dtype} of {len(array.shape)} axes is no list of steps", where=array.name)
    found: list[int] = []
    for place, key in enumerate(chunk_keys.keys(array)):
        data = get(key)
        for part in _chunks(array, (place,), data, key):
            items = numbers(code, part)
            if _innermost(array.codecs).big_endian:
                items.byteswap()
            found += items
    if len(found) < array.shape[0]:
        raise DataError(f"{array.shape[0] - len(found)} of its numbers are not stored", where=array.name)
    return found[: array.shape[0]]


def _chunks(array: Array, coordinate: tuple[int, ...], data: bytes, key: str) -> Iterator[bytes]:
    """The plain bytes of a file's chunks, in order up to the first that is absent. Raises DataError for a flaw."""
    window = shard_index.Window.over(data)
    if flaws := verify.judge(window, len(data), array, coordinate).flaws:
        raise DataError(f"{flaws[0].problem}: {flaws[0].expected} expected, not {flaws[0].got}", where=key)
    sharding = array.codecs.sharding
    if not sharding:
        yield _decoded(array, array.codecs, data)
        return
    if array.codecs.names != ("sharding_indexed",):
        raise _unknown(array, array.codecs)
    index = shard_index.read_index(window, 0, len(data), sharding)
    for offset, size in zip(index.offsets, index.sizes, strict=True):
        if offset == ABSENT:
            return
        yield _decoded(array, sharding.inner, data[offset : offset + size])


def _decoded(array: Array, codecs: Codecs, data: bytes) -> bytes:
    names = list(codecs.names)
    while names[-1:] == ["crc32c"]:
        names.pop()
        data = data[:-4]
    if names[:1] == ["bytes"] and names[1:] and names[1] in _COMPRESSORS:
        data = _decompressed(names.pop(), data, array.name)
    if names != ["bytes"] or len(data) != codecs.raw_bytes:
        raise _unknown(array, codecs)
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


def _unknown(array: Array, codecs: Codecs) -> UsageError:
    what = f"its codecs are not understood here: {', '.join(codecs.names)}"
    return UsageError(what, where=array.name, hint="choose steps instead: --steps a:b")


def _innermost(codecs: Codecs) -> Codecs:
    return _innermost(codecs.sharding.inner) if codecs.sharding else codecs
