from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import PurePosixPath

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import DataError
from pitools.store import manifest as manifests
from pitools.store.manifest import ArraySchema, FileEntry, Manifest, Subset


def one(**changes) -> Manifest:
    fields = {
        "name": "reach",
        "episodes": 1,
        "steps": 3,
        "arrays": {"action": ArraySchema(shape=(3, 7), dtype="float32")},
        "files": (FileEntry(path="action/c/0/0", bytes=9, digest="xxh3_128:00"),),
        "recordings": ({"file": "a.hdf5", "bytes": 1},),
    }
    return Manifest(**(fields | changes))


def test_round_trip_and_name() -> None:
    """A manifest reads back as it was, and its version is the SHA-256 of its bytes."""
    data = manifests.encode_manifest(one())
    assert manifests.decode_manifest(data, "x") == one()
    assert manifests.version_of(data) == hashlib.sha256(data).hexdigest()[:32]


def test_frozen_keys() -> None:
    """The keys of pit.manifest/2 only ever grow, and none of them is a time or a machine."""
    assert set(msgspec.json.decode(manifests.encode_manifest(one()))) == {
        "schema",
        "name",
        "episodes",
        "steps",
        "arrays",
        "files",
        "recordings",
        "parent",
    }


def test_key_order_of_a_recording_is_no_content() -> None:
    """Two manifests that say the same have the same bytes, whatever order their provenance was put together in."""
    turned = one(recordings=({"bytes": 1, "file": "a.hdf5"},))
    assert manifests.encode_manifest(turned) == manifests.encode_manifest(one())


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "/x",
        "//x",
        "///x",
        "a/../b",
        "..",
        ".",
        "",
        "/",
        "a//b",
        "a/",
        "./a",
        "a/.",
        "a/./b",
        "a/..",
        "a\0b",
        "\0",
        "a\0/b",
        "a/\0",
        "\0/../x",
        "manifest.json",
    ],
)
def test_hostile_paths(path: str, others: int) -> None:
    """A manifest that names a path outside the dataset, or itself, is refused and the path is named."""
    paths = ["a0", "b/c"][:others]
    paths.insert(others // 2, path)
    data = manifests.encode_manifest(one(files=tuple(FileEntry(path=path, bytes=1, digest="d") for path in paths)))
    with pytest.raises(DataError) as caught:
        manifests.decode_manifest(data, "x")
    assert repr(path) in caught.value.message


@pytest.mark.parametrize("path", ["...", "a/...b", "..a/b..", ".a", "a b", "a\nb", "é/日", "a/manifest.json"])
def test_odd_paths_that_stay_inside(path: str) -> None:
    """Dots, spaces and letters of any script are no reason to refuse a name."""
    manifest = one(files=(FileEntry(path=path, bytes=1, digest="d"),))
    assert manifests.decode_manifest(manifests.encode_manifest(manifest), "x") == manifest


@given(st.lists(st.text(alphabet="./a\0\n", max_size=6), min_size=1, max_size=4, unique=True))
def test_paths_are_judged_as_pathlib_would(paths: list[str]) -> None:
    """All names at once are judged as each one is: what pathlib takes apart differently is refused."""

    def is_inside(path: str) -> bool:
        pure = PurePosixPath(path)
        odd = pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path
        return not odd and str(pure) == path

    data = manifests.encode_manifest(one(files=tuple(FileEntry(path=path, bytes=1, digest="d") for path in paths)))
    if not all(is_inside(path) for path in paths):
        with pytest.raises(DataError, match="outside"):
            manifests.decode_manifest(data, "x")
    elif any(PurePosixPath(path) in PurePosixPath(other).parents for path in paths for other in paths):
        with pytest.raises(DataError, match="folder"):
            manifests.decode_manifest(data, "x")
    else:
        manifests.decode_manifest(data, "x")


@pytest.mark.parametrize("bad", [{"path": "a"}, {"path": "b", "bytes": -1}])
def test_impossible_entries(bad: dict) -> None:
    """A path that is named twice, or a negative size, is refused."""
    entries = (FileEntry(path="a", bytes=1, digest="d"), FileEntry(**({"path": "c", "bytes": 0, "digest": "d"} | bad)))
    with pytest.raises(DataError):
        manifests.decode_manifest(manifests.encode_manifest(one(files=entries)), "x")


def test_100_000_entries_are_checked_in_no_time() -> None:
    """Checking the paths costs no more than a few times what parsing them does."""
    entries = [FileEntry(path=f"images/c/{i}/0/0/0", bytes=i, digest="xxh3_128:" + "0" * 32) for i in range(100_000)]
    data = manifests.encode_manifest(one(files=tuple(entries)))

    def seconds(work: Callable[[], object]) -> float:
        started = time.process_time()
        work()
        return time.process_time() - started

    parsing = min(seconds(lambda: msgspec.json.decode(data, type=Manifest)) for _ in range(3))
    # With a PurePosixPath for each it was 20 times.
    assert min(seconds(lambda: manifests.decode_manifest(data, "x")) for _ in range(3)) < 6 * parsing


BYTES_BEFORE_SUBSETS = (
    b'{\n "arrays": {},\n "episodes": 1,\n "files": [],\n "name": "reach",\n "parent": "",\n "recordings": [],\n'
    b' "schema": "pit.manifest/2",\n "steps": 3\n}\n'
)


def test_bytes_without_a_subset_are_as_ever() -> None:
    """A manifest that is no subset has the bytes it had before there were subsets, hence the same version."""
    manifest = one(arrays={}, files=(), recordings=())
    assert manifests.encode_manifest(manifest) == BYTES_BEFORE_SUBSETS
    assert manifests.decode_manifest(BYTES_BEFORE_SUBSETS, "x") == manifest


def subset(*steps: tuple[int, int], arrays: tuple[str, ...] = ("action",)) -> Manifest:
    return one(subset=Subset(whole="ab", arrays=arrays, steps=steps))


def test_a_subset_reads_back_and_has_its_own_version() -> None:
    """What was taken is part of the bytes, hence of the version."""
    data = manifests.encode_manifest(subset((0, 1), (2, 3)))
    assert manifests.decode_manifest(data, "x") == subset((0, 1), (2, 3))
    assert (
        len({manifests.version_of(manifests.encode_manifest(m)) for m in (one(), subset((0, 3)), subset((0, 2)))}) == 3
    )


@pytest.mark.parametrize(
    "bad",
    [
        subset(),
        subset((0, 4)),
        subset((-1, 2)),
        subset((1, 1)),
        subset((2, 1)),
        subset((0, 1), (1, 2)),
        subset((2, 3), (0, 1)),
        subset((0, 3), arrays=("state",)),
        subset((0, 3), arrays=()),
    ],
)
def test_impossible_subsets(bad: Manifest) -> None:
    """Runs outside the steps, empty, touching or out of order, or of other arrays, are refused."""
    with pytest.raises(DataError, match="subset"):
        manifests.decode_manifest(manifests.encode_manifest(bad), "x")


def test_a_subset_has_the_text_of_groups_metadata_alone() -> None:
    """Of any other file, or of one that it does not name, a part has what its parent has."""
    paths = ("action/c/0/0", "action/zarr.json", "g/.zmetadata", "xzarr.json", "zarr.json")
    files = tuple(FileEntry(path=path, bytes=1, digest="d") for path in paths)

    def part(*own: str) -> bytes:
        metadata = dict.fromkeys(own, "x")
        used = Subset(whole="", arrays=("action",), steps=((0, 3),), metadata=metadata)
        return manifests.encode_manifest(one(files=files, subset=used))

    manifests.decode_manifest(part("zarr.json", "g/.zmetadata"), "x")
    for bad in ("action/c/0/0", "action/zarr.json", "xzarr.json", "../zarr.json", "h/zarr.json", "/zarr.json"):
        with pytest.raises(DataError, match="none of its groups' metadata"):
            manifests.decode_manifest(part("zarr.json", bad), "x")


def test_which_rows_are_here() -> None:
    """A subset's runs are those of arrays along steps; of others, and of a whole version, all rows are here."""
    shapes = {
        "action": (3, 7),
        "obs/a": (3,),
        "episode_offsets": (3,),
        "meta/episode_ends": (3,),
        "mean": (7,),
        "x": (),
    }
    arrays = {name: ArraySchema(shape=shape, dtype="int8") for name, shape in shapes.items()}
    part = one(arrays=arrays, subset=Subset(whole="", arrays=tuple(arrays), steps=((0, 1), (2, 3))))
    assert {name for name in arrays if part.along_steps(name)} == {"action", "obs/a"}
    assert {name: part.present_ranges(name) for name in arrays} == {
        "action": ((0, 1), (2, 3)),
        "obs/a": ((0, 1), (2, 3)),
        "episode_offsets": ((0, 3),),
        "meta/episode_ends": ((0, 3),),
        "mean": ((0, 7),),
        "x": ((0, 1),),
    }
    assert one().present_ranges("action") == ((0, 3),)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"schema":"pit.other/1"}', b"\xff"])
def test_not_a_manifest(data: bytes) -> None:
    """Bytes that are not a manifest are a DataError that says where they were."""
    with pytest.raises(DataError) as caught:
        manifests.decode_manifest(data, "there")
    assert caught.value.where == "there"


def test_load_names_the_folder(tmp_path) -> None:
    """A folder without a manifest is not a dataset, and the error says which folder to give; a pipe is none either."""
    with pytest.raises(DataError, match=r"no manifest\.json"):
        manifests.load_manifest(tmp_path)
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(DataError, match="cannot be read"):
        manifests.load_manifest(tmp_path)
