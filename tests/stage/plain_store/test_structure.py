from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from msgspec import structs
from zarr.codecs import BloscCodec, Crc32cCodec

from pitools.core.errors import DataError
from pitools.stage.plain_store.structure import StructureNote, StructureReport, check_structure, format_notes
from pitools.stage.sources.local import LocalSource
from pitools.stage.sources.store_listing import list_store, make_manifest, read_file
from pitools.stage.subset import make_subset
from pitools.store.manifest import Manifest

Damage = Callable[[Path], object]


def flip(path: Path, at: int) -> None:
    """One bit of a file, `at` bytes from its start or, below 0, from its end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def build(folder: Path) -> Path:
    """A store of both formats, sharded and not, with checksums and without."""
    group = zarr.create_group(folder)
    values = np.random.default_rng(0).integers(1, 99, (20, 6)).astype("int32")
    created: dict[str, dict[str, Any]] = {
        "sharded": {"shards": (8, 6), "chunks": (2, 6), "compressors": [BloscCodec(), Crc32cCodec()]},
        "obs/raw": {"shards": (8, 6), "chunks": (2, 6), "compressors": None},
        "obs/blosc": {"chunks": (4, 6), "compressors": BloscCodec()},
        "checked": {"chunks": (4, 6), "compressors": Crc32cCodec()},
    }
    for name, settings in created.items():
        group.create_array(name, shape=values.shape, dtype=values.dtype, **settings)[...] = values
    old = zarr.create_array(
        folder,
        name="old",
        shape=values.shape,
        dtype=values.dtype,
        chunks=(4, 6),
        zarr_format=2,
        compressors=numcodecs.LZ4(),
    )
    old[...] = values
    zarr.create_array(folder, name="scalar", data=np.array(7.0))
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The store above."""
    return build(tmp_path / "x.zarr")


def describe_folder(folder: Path) -> Manifest:
    reader = LocalSource(folder=folder).connect()
    try:
        return make_manifest(list_store(folder), lambda path: read_file(reader, path))
    finally:
        reader.close()


def judge(folder: Path, made: Manifest | None = None, **settings: Any) -> StructureReport:
    return check_structure(LocalSource(folder=folder), made or describe_folder(folder), readers=2, **settings)


def notes(report: StructureReport) -> dict[tuple[str, str], int]:
    return {(note.array, note.kind): note.count for note in report.notes}


def test_a_whole_store(store: Path) -> None:
    """No flaw; what cannot be proven is said of each array that it concerns; all but the opaque files were read."""
    moved: list[int] = []
    report = judge(store, advance=moved.append)
    assert report.defects == []
    assert notes(report) == {
        ("obs/blosc", "no-checksum"): 5,
        ("obs/raw", "no-checksum"): 3,
        ("old", "unchecked"): 5,
        ("scalar", "no-checksum"): 1,
    }
    assert report.checked_files == 3 + 3 + 5 + 5 + 1
    # Checksums are compared over every byte of the arrays that have them.
    assert sum(moved) >= sum(path.stat().st_size for path in store.glob("sharded/c/*/0"))


@pytest.mark.parametrize(
    ("path", "damage", "problem"),
    [
        ("sharded/c/1/0", lambda path: flip(path, 3), "checksum"),
        ("sharded/c/1/0", lambda path: flip(path, -30), "index"),
        ("sharded/c/2/0", lambda path: os.truncate(path, 50), "size"),
        ("obs/raw/c/0/0", lambda path: flip(path, -1), "index"),
        ("obs/raw/c/0/0", lambda path: path.write_bytes(bytes(path.stat().st_size)), "index"),
        ("obs/raw/c/0/0", lambda path: os.truncate(path, 0), "size"),
        ("obs/blosc/c/3/0", lambda path: os.truncate(path, path.stat().st_size - 1), "content"),
        ("obs/blosc/c/3/0", lambda path: path.write_bytes(bytes(path.stat().st_size)), "content"),
        ("checked/c/4/0", lambda path: flip(path, 0), "checksum"),
        ("scalar/c", lambda path: os.truncate(path, 0), "content"),
    ],
)
def test_damage_is_found(store: Path, path: str, damage: Damage, problem: str) -> None:
    """One damaged file of many is named, with what is wrong, and no other is."""
    damage(store / path)
    [flawed] = judge(store).defects
    assert (flawed.path, flawed.defect.kind) == (path, problem)
    assert flawed.defect.expected
    assert flawed.defect.got


def test_swapped_files(store: Path) -> None:
    """Two files of arrays of other codecs, one in the other's place, are both found."""
    first, second = store / "sharded/c/0/0", store / "obs/blosc/c/0/0"
    first.rename(store / "aside")
    second.rename(first)
    (store / "aside").rename(second)
    assert {flawed.path for flawed in judge(store).defects} == {"sharded/c/0/0", "obs/blosc/c/0/0"}


def test_missing_chunks_are_counted(store: Path) -> None:
    """A lost file cannot be proven, since Zarr leaves out what is all fill value; so it is never silent."""
    (store / "sharded/c/1/0").unlink()
    for number in (0, 2):
        (store / f"old/{number}.0").unlink()
    report = judge(store)
    assert report.defects == []
    assert {key: count for key, count in notes(report).items() if key[1] == "absent"} == {
        ("sharded", "absent"): 1,
        ("old", "absent"): 2,
    }
    [text] = [note.text for note in report.notes if (note.array, note.kind) == ("old", "absent")]
    assert text.startswith("2 of 5 chunks are not stored")


def test_inner_chunks_that_are_missing_and_strays_are_counted(store: Path) -> None:
    """Inner chunks of nothing but the fill value, and files that hold no chunk, are said too."""
    array = zarr.open_array(store / "sharded", mode="r+")
    array[2:6] = 0
    (store / "sharded/c/9").mkdir()
    (store / "sharded/c/9/0").touch()
    (store / "sharded/note.txt").touch()
    actual = notes(judge(store))
    assert (actual["sharded", "absent-inner"], actual["sharded", "stray"]) == (2, 2)


def test_notes_of_a_thousand_arrays_are_a_few_lines() -> None:
    """Each array that lacks chunks has its line; what is said of many alike is said once, with the sum."""
    notes = [StructureNote(array=f"a{i}", kind="unused", count=2, text="2 …") for i in range(1000)]
    notes.insert(7, StructureNote(array="b", kind="absent", count=1, text="1 of 5 chunks are not stored"))
    assert list(format_notes(notes)) == [
        "b: 1 of 5 chunks are not stored",
        "a0, a1, a2 and 997 more: 2000 bytes of shards belong to no chunk",
    ]


def test_files_of_no_array_are_counted(store: Path) -> None:
    """An array that lost its metadata is none any more, but its chunks are not silent."""
    (store / "old/.zarray").unlink()
    (store / "README").touch()
    assert {key: count for key, count in notes(judge(store)).items() if key[1] == "unowned"} == {
        ("README", "unowned"): 6
    }


def test_a_size_that_is_not_the_manifests(store: Path) -> None:
    """A file that the copy cut is found whatever its codecs prove."""
    descriptions = describe_folder(store)
    with (store / "obs/raw/c/0/0").open("ab") as file:
        file.write(b"?")
    [flawed] = judge(store, descriptions).defects
    assert (flawed.path, flawed.defect.kind) == ("obs/raw/c/0/0", "size")


def test_a_subset_lacks_nothing_that_it_should_not_have(store: Path) -> None:
    """Of a subset, only chunks of its steps are expected."""
    descriptions = describe_folder(store)
    part = make_subset(descriptions, "", lambda path: (store / path).read_bytes(), steps="8:16")
    for entry in set(descriptions.files) - set(part.files):
        (store / entry.path).unlink()
    assert len(part.files) < len(descriptions.files)
    assert not {kind for _, kind in notes(judge(store, part))} & {"absent", "stray"}
    (store / "old/3.0").unlink()
    part = structs.replace(part, files=tuple(entry for entry in part.files if entry.path != "old/3.0"))
    assert {key: count for key, count in notes(judge(store, part)).items() if key[1] == "absent"} == {
        ("old", "absent"): 1
    }


def test_metadata_that_changed(store: Path) -> None:
    """When the metadata that were copied are not those that were described, somebody was writing."""
    descriptions = describe_folder(store)
    path = store / "sharded/zarr.json"
    path.write_text(path.read_text().replace("20,", "21,", 1))
    with pytest.raises(DataError, match="changed while it was read"):
        judge(store, descriptions)


def test_a_store_that_is_one_array(tmp_path: Path) -> None:
    """Its files are judged like any other's."""
    zarr.create_array(tmp_path / "x", data=np.ones((7, 2)), chunks=(2, 2), compressors=Crc32cCodec())
    assert judge(tmp_path / "x") == StructureReport([], [], 4)
    flip(tmp_path / "x/c/1/0", 1)
    assert [flawed.path for flawed in judge(tmp_path / "x").defects] == ["c/1/0"]
