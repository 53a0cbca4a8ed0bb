from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pitools.core.errors import DataError
from pitools.store.zarr import chunk_keys, metadata


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", ">i4", "int64", "float16", ">f8", "complex64", "M8[ns]", "m8[10s]", "U5", "S7"]
)
def test_dtypes(tmp_path: Path, write_array, dtype: str, zarr_format: int) -> None:
    """Each data type has NumPy's own name and size, whichever way the format writes it."""
    expected = np.dtype(dtype)
    array, _ = write_array(tmp_path, dtype=dtype, shape=(4,), chunks=(4,), zarr_format=zarr_format, fill_value=None)
    assert (array.dtype, array.codecs.raw_bytes) == (expected.name, 4 * expected.itemsize)


def test_records_of_v2() -> None:
    """A record's size is the sum of its fields, sub-arrays included."""
    expected = np.dtype([("a", "<f4"), ("b", "u1", (2, 3)), ("c", [("d", "<M8[s]")])])
    array = metadata.parse_metadata("a", json.dumps(V2_ARRAY | {"dtype": expected.descr}).encode(), "a")
    assert array is not None
    assert (array.dtype, array.codecs.raw_bytes) == (expected.name, 2 * expected.itemsize)


def test_text_has_no_fixed_size(tmp_path: Path, write_array) -> None:
    """Of variable-length text no size can be expected."""
    array, _ = write_array(tmp_path, values=np.array(["a", "bc"], dtype=object).astype("T"), chunks=(2,), fill_value="")
    assert array.codecs.raw_bytes is None


def test_nested_groups_and_strays(tmp_path: Path, write_array) -> None:
    """Every array of a tree is found, by path, and a stray file belongs to none, or to an array but to no chunk."""
    write_array(tmp_path, "x")
    write_array(tmp_path, "g/h/y", zarr_format=2)
    (tmp_path / "README").write_text("?")
    (tmp_path / "x/stray").write_text("?")
    paths = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    arrays = metadata.read_arrays(paths, lambda path: (tmp_path / path).read_bytes())
    assert list(arrays) == ["g/h/y", "x"]
    owners = {path: owner and owner.path for path, owner in chunk_keys.arrays_of_paths(arrays, paths)}
    assert (owners["README"], owners["x/stray"], owners["g/h/y/.zarray"]) == (None, "x", "g/h/y")
    assert chunk_keys.make_key_parser(arrays["x"])("x/stray") is None


def test_codecs(tmp_path: Path, write_array) -> None:
    """Codecs inside and outside of a shard, the index's, and where it is, are what was asked of zarr-python."""
    from zarr.codecs import BloscCodec, Crc32cCodec

    array, _ = write_array(
        tmp_path,
        shards={"shape": (16, 3), "index_location": "start"},
        compressors=[BloscCodec(), Crc32cCodec()],
    )
    assert array.codecs.names == ("sharding_indexed",)
    sharding = array.codecs.sharding
    assert sharding is not None
    assert (sharding.counts, sharding.index_at_start, sharding.big_endian) == ((2, 1), True, False)
    assert sharding.index_codecs == ("bytes", "crc32c")
    assert (sharding.inner.names, sharding.inner.raw_bytes) == (("bytes", "blosc", "crc32c"), 8 * 3 * 4)


def test_v3_holds_where_a_node_has_both(tmp_path: Path, write_array) -> None:
    """A store that was migrated in place has both metadata; ours, like zarr-python's, are then v3's."""
    write_array(tmp_path, "x", zarr_format=2)
    array, _ = write_array(tmp_path, "x", shape=(5, 3))
    assert (array.format, array.shape) == (3, (5, 3))


V3_ARRAY = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [4],
    "data_type": "uint8",
    "fill_value": 0,
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
    "chunk_key_encoding": {"name": "default"},
    "codecs": ["bytes"],
}
V2_ARRAY = {"zarr_format": 2, "shape": [4], "chunks": [2], "dtype": "<i4", "compressor": None, "filters": None}


@pytest.mark.parametrize("good", [V3_ARRAY, V2_ARRAY], ids=["v3", "v2"])
def test_short_forms(good: dict[str, Any]) -> None:
    """Names alone stand for extensions without settings, and what has a default may be left out."""
    array = metadata.parse_metadata("a", json.dumps(good).encode(), "a")
    assert array is not None
    assert list(chunk_keys.chunk_keys(array)) == (["a/c/0", "a/c/1"] if array.format == 3 else ["a/0", "a/1"])


@pytest.mark.parametrize(
    ("good", "change"),
    [
        (V3_ARRAY, {"shape": [-1]}),
        (V3_ARRAY, {"shape": [1 << 64]}),
        (V3_ARRAY, {"shape": [True]}),
        (V3_ARRAY, {"shape": "4"}),
        (V3_ARRAY, {"shape": [4, 4]}),
        (V3_ARRAY, {"shape": [1] * 100}),
        (V3_ARRAY, {"node_type": "tree"}),
        (V3_ARRAY, {"zarr_format": 4}),
        (V3_ARRAY, {"data_type": {"name": ["x"]}}),
        (V3_ARRAY, {"chunk_grid": {"name": "rectilinear", "configuration": {}}}),
        (V3_ARRAY, {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0]}}}),
        (V3_ARRAY, {"chunk_grid": None}),
        (V3_ARRAY, {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "../"}}}),
        (V3_ARRAY, {"chunk_key_encoding": "sha256"}),
        (V3_ARRAY, {"codecs": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [3], "codecs": []}}]}),
        (V3_ARRAY, {"codecs": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [0], "codecs": []}}]}),
        (V3_ARRAY, {"codecs": [{"name": "sharding_indexed"}]}),
        (V3_ARRAY, {"codecs": [{"name": "transpose", "configuration": {"order": [7]}}, "sharding_indexed"]}),
        (V3_ARRAY, {"codecs": [1]}),
        (V3_ARRAY, {"codecs": None}),
        (V3_ARRAY, {"storage_transformers": [{"name": "x"}]}),
        (V2_ARRAY, {"dtype": "<q4"}),
        (V2_ARRAY, {"dtype": 4}),
        (V2_ARRAY, {"chunks": None}),
        (V2_ARRAY, {"compressor": {"level": 1}}),
        (V2_ARRAY, {"dimension_separator": ".."}),
    ],
)
def test_hostile_metadata(good: dict[str, Any], change: dict[str, Any]) -> None:
    """Metadata that no reader could open is a DataError that names the file, whatever is wrong with it."""
    assert metadata.parse_metadata("a", json.dumps(good).encode(), "a/it") is not None
    with pytest.raises(DataError) as caught:
        metadata.parse_metadata("a", json.dumps(good | change).encode(), "a/it")
    assert caught.value.where == "a/it"


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"{}", b"[" * 100_000, b'{"zarr_format": 3}'])
def test_what_is_no_metadata(data: bytes) -> None:
    """Anything else is a DataError too."""
    with pytest.raises(DataError):
        metadata.parse_metadata("a", data, "a/it")


def test_array_inside_an_array() -> None:
    """Zarr has no such thing; whose the files are would be anybody's guess."""
    data = json.dumps(V3_ARRAY).encode()
    with pytest.raises(DataError, match="'a'"):
        metadata.read_arrays(["a/zarr.json", "a/c/zarr.json"], lambda _: data)
