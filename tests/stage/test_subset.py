from __future__ import annotations

import math
import shutil
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, structs
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ZstdCodec

from pitools.core.errors import DataError, UsageError
from pitools.dataset import reader as reading
from pitools.dataset.ingest import chunking
from pitools.dataset.ingest.ingest import ingest
from pitools.dataset.reader import open_dataset
from pitools.stage import episode_offsets
from pitools.stage.plain_store.stage_store import stage_store
from pitools.stage.repair import repair_set
from pitools.stage.resolve import PlainStore, Selection, resolve_source
from pitools.stage.sources.base import DatasetVersion
from pitools.stage.sources.find import load_version
from pitools.stage.sources.local import LocalSource
from pitools.stage.sources.store_listing import list_store, make_manifest, read_file
from pitools.stage.stage import stage_version
from pitools.stage.subset import make_subset
from pitools.stage.verify import FileFinding, check_versions
from pitools.store import manifest
from pitools.store.manifest import MANIFEST_FILE, ArraySchema, FileEntry, Manifest, Subset
from pitools.store.zarr import chunk_keys, metadata

BOUNDS = [0, 30, 180, 200, 230]
STEPS = BOUNDS[-1]
BOTH = {"episode_offsets", "episode_json"}
Take = Callable[..., Path]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 4 episodes in many small shards, whose actions count the steps."""
    import h5py

    folder = tmp_path_factory.mktemp("select")
    with h5py.File(folder / "a.hdf5", "w") as file:
        for i, (start, stop) in enumerate(pairwise(BOUNDS)):
            steps = np.arange(start, stop, dtype=np.int64)
            file[f"data/demo_{i}/actions"] = steps[:, None] * [1, 10]
            file[f"data/demo_{i}/obs/state"] = steps[:, None] + [0.5]
            file[f"data/demo_{i}/obs/image"] = np.full((stop - start, 4, 4, 3), 7, np.uint8)
        file["mask/train"] = np.array([b"demo_0", b"demo_1"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chunking, "CHUNK_BYTES", 128)
        patched.setattr(chunking, "SHARD_BYTES", 512)
        return Path(ingest([folder / "a.hdf5"], root=folder / "root", name="x").path)


def select(folder: Path, **choice: Any) -> Manifest:
    reference, data = manifest.load_manifest(folder)
    return make_subset(reference, manifest.version_of(data), lambda path: (folder / path).read_bytes(), **choice)


@pytest.fixture
def take(tmp_path: Path) -> Take:
    """Stages a part of a version: a folder of just its files and its manifest."""

    def make(folder: Path, **choice: Any) -> Path:
        part = select(folder, **choice)
        data = manifest.encode_manifest(part)
        to = tmp_path / manifest.version_of(data)
        for entry in part.files:
            (to / entry.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / entry.path, to / entry.path)
        for path, content in part.subset.inline_files.items() if part.subset else ():
            (to / path).write_bytes(content)
        (to / MANIFEST_FILE).write_bytes(data)
        return to

    return make


def paths(selection: Manifest) -> set[str]:
    return {entry.path for entry in selection.files}


def test_arrays(whole: Path, take: Take) -> None:
    """What is kept reads as in the whole, and so do episodes; what is not has no file, and opening it is an error."""
    part = open_dataset(take(whole, arrays=["obs/state"]))
    assert set(part.arrays) == {"obs/state"}
    assert part.read("obs/state", 0, STEPS).tolist() == [[i + 0.5] for i in range(STEPS)]
    assert part.episode_offsets.tolist() == open_dataset(whole).episode_offsets.tolist()
    assert part.splits == {"train": [0, 1]}
    assert part.episodes == open_dataset(whole).episodes
    with pytest.raises(UsageError):
        part.read("action", 0, 1)
    group = zarr.open_group(part.path, mode="r")
    assert sorted(group["obs"].array_keys()) == ["state"]
    for name in ("action", "obs/image"):
        assert not (part.path / name).exists()
        with pytest.raises(KeyError):
            group[name]


def test_parts_side_by_side(whole: Path, root: Path) -> None:
    """Staged parts open in silence, each with just its arrays; their own files are judged and repaired like others."""
    for names in (["action"], ["obs/state"], ["obs"]):
        source = resolve_source(whole, Selection(arrays=tuple(names)))
        assert isinstance(source, DatasetVersion)
        done = stage_version(source, root)
        path = Path(done.path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            group = zarr.open_group(path, mode="r")
            arrays = {name for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}
            assert arrays == set(source.manifest.arrays) == set(open_dataset(path).arrays) | BOTH
        assert group.attrs["splits"] == {"train": [0, 1]}
        own = path / "zarr.json"
        data = own.read_bytes()
        own.chmod(0o600)
        own.write_bytes(data[:-1] + b" ")
        actual = [item for item in check_versions(path, readers=1) if isinstance(item, FileFinding)]
        assert [item.path for item in actual] == ["zarr.json"]
        assert repair_set(root, done.version, actual).state == "repaired"
        assert own.read_bytes() == data
        assert stage_version(source, root).state == "present"


def test_own_files_that_are_not_what_the_manifest_says(whole: Path, root: Path) -> None:
    """Nothing is written of a manifest that contradicts itself."""
    source = resolve_source(whole, Selection(arrays=("action",)))
    assert isinstance(source, DatasetVersion)
    part = source.manifest
    assert part.subset
    part = structs.replace(part, subset=structs.replace(part.subset, metadata={"zarr.json": "{}"}))
    with pytest.raises(DataError, match=r"zarr\.json: digest xxh3_128:"):
        stage_version(structs.replace(source, manifest=part), root)


def test_groups(whole: Path) -> None:
    """A group's name stands for its arrays; a name given twice is as good as once."""
    assert set(select(whole, arrays=["obs", "obs/state"]).arrays) == {
        "obs/state",
        "obs/image",
        "episode_offsets",
        "episode_json",
    }
    assert select(whole, arrays=["obs/"]) == select(whole, arrays=["obs/image", "obs/state"])


def test_a_part_says_what_it_is(whole: Path) -> None:
    """Parent, arrays and steps; counts and shapes are the whole's, and so is what is said of where it came from."""
    reference, data = manifest.load_manifest(whole)
    part = select(whole, arrays=["action"], steps="10:50")
    names = ("action", "episode_json", "episode_offsets")
    assert part.subset
    assert part.subset.inline_files.keys() == {"zarr.json"}
    assert structs.replace(part.subset, metadata=UNSET) == Subset(
        whole=manifest.version_of(data), arrays=names, steps=((10, 50),)
    )
    assert (part.steps, part.episodes, part.recordings, part.name) == (
        reference.steps,
        reference.episodes,
        reference.recordings,
        reference.name,
    )
    assert manifest.decode_manifest(manifest.encode_manifest(part), "x") == part
    assert select(whole, arrays=["action"], steps="10:50") == part
    assert {entry for entry in part.files if entry.path != "zarr.json"} < set(reference.files)


@settings(deadline=None)
@given(st.tuples(st.integers(0, STEPS), st.integers(0, STEPS)).map(sorted).filter(lambda pair: pair[0] < pair[1]))
def test_steps(whole: Path, pair: list[int]) -> None:
    """Exactly the shards that hold a wanted step are kept, of every array along steps, and all else."""
    reference, _ = manifest.load_manifest(whole)
    arrays = metadata.read_arrays((entry.path for entry in reference.files), lambda path: (whole / path).read_bytes())
    shards = {key for name in ("action", "obs/state", "obs/image") for key in chunk_keys.chunk_keys(arrays[name])}
    expected = {
        key for name in ("action", "obs/state", "obs/image") for key in chunk_keys.chunk_keys(arrays[name], tuple(pair))
    }
    everything = {entry.path for entry in reference.files}
    assert paths(select(whole, steps=f"{pair[0]}:{pair[1]}")) == everything - shards | expected


@pytest.mark.parametrize("resident", [0, 1 << 28])
def test_steps_left_out_are_refused(whole: Path, take: Take, monkeypatch: pytest.MonkeyPatch, resident: int) -> None:
    """Steps that are here read as in the whole, by runs and one by one; any other is an error, never zeros."""
    monkeypatch.setattr(reading, "RESIDENT_BYTES", resident)
    part = open_dataset(take(whole, episodes="0,3"))
    here = {*range(30), *range(200, 230)}
    for i in range(STEPS):
        for read in (lambda i=i: part.read("action", i, i + 1), lambda i=i: part.take("action", [3, i])[1:]):
            if i in here:
                assert read().tolist() == [[i, 10 * i]]
            else:
                with pytest.raises(IndexError, match=r"0:30, 200:230"):
                    read()
    assert part.take("obs/state", [229, 0, 201, 29]).tolist() == [[229.5], [0.5], [201.5], [29.5]]
    assert part.read("action", 0, 30)[:, 0].tolist() == [*range(30)]
    assert part.take("action", []).shape == (0, 2)
    assert part.read("action", 100, 100).shape == (0, 2)
    for pair in ((29, 31), (0, STEPS), (199, 201), (0, 201)):
        with pytest.raises(IndexError, match="0:30, 200:230"):
            part.read("action", *pair)
    for wanted in ([-1], [STEPS]):
        with pytest.raises(IndexError, match=f"which has {STEPS}"):
            part.take("action", wanted)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_episodes_read_as_in_the_whole(whole: Path, tmp_path_factory: pytest.TempPathFactory, data) -> None:
    """Any choice of episodes and any steps of them in any order, in one chunk or not, are those of the whole."""
    numbers = data.draw(st.lists(st.integers(0, 3), min_size=1, unique=True))
    bounds = open_dataset(whole).episode_offsets.tolist()
    steps = [step for number in numbers for step in range(bounds[number], bounds[number + 1])]
    expected = data.draw(st.lists(st.sampled_from(steps), max_size=20))
    part = select(whole, episodes=",".join(map(str, numbers)))
    to = tmp_path_factory.mktemp("part")
    for entry in part.files:
        (to / entry.path).parent.mkdir(parents=True, exist_ok=True)
        (to / entry.path).hardlink_to(whole / entry.path)
    (to / MANIFEST_FILE).write_bytes(manifest.encode_manifest(part))
    for resident in (0, 1 << 28):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(reading, "RESIDENT_BYTES", resident)
            assert open_dataset(to).take("action", expected)[:, 0].tolist() == expected


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("10:50", (10, 50)),
        (":50", (0, 50)),
        ("200:", (200, 230)),
        ("-30:", (200, 230)),
        (":-200", (0, 30)),
        ("-230:-220", (0, 10)),
    ],
)
def test_ranges_of_steps(whole: Path, text: str, run: tuple[int, int]) -> None:
    """As in Python: an end left out is the dataset's, a negative one counts from its end."""
    part = select(whole, steps=text).subset
    assert part
    assert part.steps == (run,)


@pytest.mark.parametrize(
    "text",
    [
        "10",
        "10:231",
        "231:",
        "-231:",
        ":-231",
        "20:10",
        "10:10",
        "1:2:3",
        "a:b",
        ":0",
        " 1:2",
        "1_0:20",
        "1e1:20",
        "9" * 30 + ":",
        "-:5",
    ],
)
def test_ranges_that_are_none(whole: Path, text: str) -> None:
    """A range that leaves the steps there are is never clipped, one of nothing is a mistake."""
    with pytest.raises(UsageError) as caught:
        select(whole, steps=text)
    assert caught.value.where == "--steps"


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("0", ((0, 30),)),
        ("1-2", ((30, 200),)),
        ("3,0", ((0, 30), (200, 230))),
        ("0,1", ((0, 180),)),
        ("2,0,0-0", ((0, 30), (180, 200))),
        (" 0 , 2", ((0, 30), (180, 200))),
    ],
)
def test_lists_of_episodes(whole: Path, text: str, runs: tuple[tuple[int, int], ...]) -> None:
    """Numbers and ranges, both ends included, in any order; neighbours are one run of steps."""
    part = select(whole, episodes=text).subset
    assert part
    assert part.steps == runs


@pytest.mark.parametrize("text", ["4", "0-4", "2-1", "-1", "a", "1,,2", "", ",", "1-", "1-2-3", "0x1"])
def test_lists_that_are_none(whole: Path, text: str) -> None:
    """An episode that is not there is a mistake, and the message says which there are."""
    with pytest.raises(UsageError) as caught:
        select(whole, episodes=text or " ")
    assert caught.value.where == "--episodes"
    assert caught.value.hint


def test_an_unknown_array(whole: Path) -> None:
    """The nearest name is offered; a part of a name is none."""
    with pytest.raises(UsageError, match="no array 'actoin'") as caught:
        select(whole, arrays=["obs/state", "actoin"])
    assert caught.value.hint == 'did you mean "action"?'
    with pytest.raises(UsageError):
        select(whole, arrays=["ob"])


def test_steps_and_episodes_at_once(whole: Path) -> None:
    """Two answers to one question are a mistake."""
    with pytest.raises(UsageError, match="both"):
        select(whole, steps="1:2", episodes="1")


def test_a_choice_of_everything_is_the_version_itself(whole: Path) -> None:
    """Where no file is left out there is no other version, and the copy of the whole serves."""
    reference, _ = manifest.load_manifest(whole)
    for choice in ({}, {"steps": ":"}, {"episodes": "0-3"}, {"arrays": sorted(reference.arrays)}, {"steps": "1:-1"}):
        assert select(whole, **choice) == reference


def test_a_part_of_a_part(whole: Path, take: Take) -> None:
    """A part can be taken from, within what it has."""
    part = take(whole, arrays=["action", "obs/state"], steps="30:200")
    again = select(part, arrays=["action"], episodes="1")
    direct = select(whole, arrays=["action"], episodes="1")
    assert again.files == direct.files
    assert again.subset
    assert (again.subset.whole, again.subset.steps) == (part.name, ((30, 180),))
    smaller = select(part, arrays=["action"])
    assert smaller.subset
    assert smaller.subset.steps == ((30, 200),)
    for choice in ({"steps": "20:40"}, {"episodes": "0"}, {"episodes": "1-3"}):
        with pytest.raises(UsageError, match="not in this subset") as caught:
            select(part, **choice)
        assert caught.value.hint == "it has 30:200"
    with pytest.raises(UsageError, match="no array 'obs/image'"):
        select(part, arrays=["obs/image"])


def test_a_lost_shard_of_a_part(whole: Path, take: Take) -> None:
    """What is said of a whole version holds for a part: it is not opened when a file of it is missing."""
    part = take(whole, steps="30:200")
    next((part / "action/c").iterdir()).joinpath("0").unlink()
    with pytest.raises(DataError, match="missing"):
        open_dataset(part)


@pytest.mark.parametrize("path", ["action/zarr.json", "episode_offsets/c/0"])
def test_what_is_read_is_compared(whole: Path, path: str) -> None:
    """Metadata and offsets that are not what the manifest says choose nothing."""
    reference, _ = manifest.load_manifest(whole)

    def read(name: str) -> bytes:
        data = (whole / name).read_bytes()
        return data[:-1] + bytes([data[-1] ^ 1]) if name == path else data

    with pytest.raises(DataError) as caught:
        make_subset(reference, "v", read, episodes="0")
    assert caught.value.where == path
    with pytest.raises(DataError):
        make_subset(reference, "v", lambda name: b"", episodes="0")


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"")])
def test_a_file_that_a_choice_needs_is_named_in_full(
    whole: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    """Its path, whether the source cannot read it or it is not what the manifest says; also below a link."""
    copy = Path(shutil.copytree(whole, tmp_path / whole.name))
    (tmp_path / "link").symlink_to(copy.parent)
    damage(copy / "episode_offsets/c/0")
    for folder in (copy, tmp_path / "link" / whole.name):
        with pytest.raises(DataError) as caught:
            resolve_source(folder, Selection(episodes="0"))
        assert Path(caught.value.where).is_absolute()
        assert Path(caught.value.where).resolve() == copy / "episode_offsets/c/0"


def test_a_manifest_of_other_arrays(whole: Path) -> None:
    """A manifest whose schema is not its metadata's cannot be chosen from."""
    reference, _ = manifest.load_manifest(whole)
    other = structs.replace(reference, arrays=reference.arrays | {"action": ArraySchema(shape=(9, 2), dtype="int64")})
    with pytest.raises(DataError, match="arrays"):
        make_subset(other, "v", lambda path: (whole / path).read_bytes(), arrays=["action"])


def describe_folder(folder: Path) -> Manifest:
    reader = LocalSource(folder=folder).connect()
    try:
        return make_manifest(list_store(folder), lambda path: read_file(reader, path))
    finally:
        reader.close()


def select_plain(folder: Path, **choice: Any) -> Manifest:
    return make_subset(describe_folder(folder), "", lambda path: (folder / path).read_bytes(), **choice)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_consolidated_metadata(tmp_path: Path, root: Path, zarr_format: int) -> None:
    """A part of a store has no metadata by which an array that is not there would be found, and read as zeros."""
    folder = tmp_path / "x.zarr"
    group = zarr.create_group(folder, zarr_format=zarr_format)
    for name in ("a", "g/b", "g/c", "h/b"):
        group.create_array(name, data=np.ones((8, 2)), chunks=(2, 2), attributes={"limit": math.nan})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr-python's, that they are not in the v3 specification yet
        zarr.consolidate_metadata(folder, zarr_format=zarr_format)
        zarr.consolidate_metadata(folder, path="g", zarr_format=zarr_format)
    store = resolve_source(folder, Selection(arrays=("g/b", "h")))
    assert isinstance(store, PlainStore)
    part = Path(stage_store(store, root).path)
    assert not [item for item in check_versions(part, readers=1) if isinstance(item, FileFinding)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        top = zarr.open_group(part, mode="r", use_consolidated=True)
        assert {name for name, _ in top.members(max_depth=None)} == {"g", "g/b", "h", "h/b"}
        assert set(zarr.open_group(part / "g", mode="r", use_consolidated=True).keys()) == {"b"}
    assert np.all(top["g/b"][:] == 1)
    assert math.isnan(top["h/b"].attrs["limit"])
    retained = {2: {".zmetadata", "g/.zmetadata"}, 3: {"zarr.json", "g/zarr.json"}}[zarr_format]
    for choice, changed in (
        ({"steps": "0:3"}, set()),
        ({"arrays": ["g"]}, {path for path in retained if "/" not in path}),
    ):
        chosen = select_plain(folder, **choice)
        assert retained <= paths(chosen)
        assert chosen.subset
        assert chosen.subset.inline_files.keys() == changed


def test_a_plain_store_in_part(tmp_path: Path) -> None:
    """Of a store without a version a part is taken before the copy; strays are no part of it."""
    folder = tmp_path / "x.zarr"
    group = zarr.create_group(folder, zarr_format=2)
    group.create_array("data/action", data=np.ones((9, 2)), chunks=(2, 2))
    group.create_array("data/img", data=np.ones((9, 4, 4)), chunks=(3, 2, 4))
    group.create_array("meta/episode_ends", data=np.array([4, 4, 9]), chunks=(2,))
    (folder / "README").touch()
    part = select_plain(folder, arrays=["data/img"], episodes="2")
    assert part.subset == Subset(whole="", arrays=("data/img", "meta/episode_ends"), steps=((4, 9),))
    assert {entry.path for entry in part.files} == {
        ".zgroup",
        ".zattrs",
        "data/.zgroup",
        "data/.zattrs",
        "data/img/.zarray",
        "data/img/.zattrs",
        "data/img/1.0.0",
        "data/img/1.1.0",
        "data/img/2.0.0",
        "data/img/2.1.0",
        "meta/.zgroup",
        "meta/.zattrs",
        "meta/episode_ends/.zarray",
        "meta/episode_ends/.zattrs",
        "meta/episode_ends/0",
        "meta/episode_ends/1",
    }
    assert all(entry.digest == "" for entry in part.files)


@pytest.mark.parametrize(
    "codec",
    [
        {},
        {"dtype": ">i4", "zarr_format": 2},
        {"dtype": "uint16", "serializer": BytesCodec(endian="big")},
        {"shards": (8,), "compressors": None},
        {"shards": (8,), "compressors": [ZstdCodec(), Crc32cCodec()]},
        {"compressors": [BloscCodec(), Crc32cCodec()]},
        {"compressors": GzipCodec()},
        {"zarr_format": 2, "compressors": numcodecs.Blosc()},
        {"zarr_format": 2, "compressors": numcodecs.LZ4()},
        {"zarr_format": 2, "compressors": numcodecs.Zlib()},
    ],
    ids=[
        "plain",
        "big-endian v2",
        "big-endian",
        "shards",
        "shards+zstd+crc32c",
        "blosc+crc32c",
        "gzip",
        "blosc v2",
        "lz4 v2",
        "zlib v2",
    ],
)
def test_boundaries_of_any_codec(tmp_path: Path, codec: dict[str, Any]) -> None:
    """However zarr-python wrote the offsets, they are read as it would."""
    offsets = np.cumsum([0, *range(1, 21)])
    codec = {"dtype": "int64", "chunks": (4,), "compressors": None} | codec
    folder = tmp_path / "x"
    array = zarr.create_array(folder, name="episode_offsets", shape=offsets.shape, fill_value=0, **codec)
    array[...] = offsets
    reference = structs.replace(describe_folder(folder), steps=int(offsets[-1]))
    arrays = metadata.read_arrays((entry.path for entry in reference.files), lambda path: (folder / path).read_bytes())
    assert (
        episode_offsets.read_offsets(reference, arrays, lambda path: (folder / path).read_bytes()) == offsets.tolist()
    )


@pytest.mark.parametrize("values", [[1, 5, 9], [0, 5, 3, 9], [0, 5, 8], [0, 5, 10], []])
def test_boundaries_that_cannot_be(tmp_path: Path, values: list[int]) -> None:
    """Offsets that do not rise from 0 to the number of steps choose nothing."""
    folder = tmp_path / "x"
    zarr.create_array(folder, name="episode_offsets", data=np.array(values, "int64"), chunks=(2,), fill_value=-1)
    zarr.create_array(folder, name="action", data=np.ones((9, 2)), chunks=(2, 2))
    with pytest.raises(DataError, match="0 to 9 steps"):
        select_plain(folder, episodes="0")


def test_boundaries_that_are_lost(tmp_path: Path) -> None:
    """A chunk of offsets that is missing is an error, not a fill value."""
    folder = tmp_path / "x"
    zarr.create_array(folder, name="episode_offsets", data=np.arange(10), chunks=(2,), compressors=None)
    zarr.create_array(folder, name="action", data=np.ones((9, 2)), chunks=(2, 2))
    assert select_plain(folder, episodes="3").subset
    (folder / "episode_offsets/c/1").write_bytes(b"1")
    with pytest.raises(DataError, match="16 bytes"):
        select_plain(folder, episodes="3")
    (folder / "episode_offsets/c/1").unlink()
    with pytest.raises(DataError, match="missing"):
        select_plain(folder, episodes="3")


def test_inner_chunks_of_boundaries_that_are_absent(tmp_path: Path) -> None:
    """Nor is an inner chunk that its shard does not hold."""
    folder = tmp_path / "x"
    offsets = np.array([0, 0, 0, 5, 9, 9, 9, 9])
    zarr.create_array(folder, name="episode_offsets", data=offsets, chunks=(2,), shards=(8,), fill_value=9)
    zarr.create_array(folder, name="action", data=np.ones((9, 2)), chunks=(2, 2))
    with pytest.raises(DataError, match="episode_offsets: 4 "):
        select_plain(folder, episodes="3")


@pytest.mark.parametrize(
    "stored",
    [
        {"data": np.arange(10.0)},
        {"data": np.zeros((10, 2), "int64")},
        {"data": np.arange(10), "zarr_format": 2, "filters": [numcodecs.Delta("i8")]},
    ],
    ids=str,
)
def test_boundaries_that_are_not_understood(tmp_path: Path, stored: dict[str, Any]) -> None:
    """What is not read here is said, with what can be done instead."""
    folder = tmp_path / "x"
    stored = {"chunks": stored["data"].shape, "compressors": None} | stored
    zarr.create_array(folder, name="episode_offsets", **stored)
    zarr.create_array(folder, name="action", data=np.ones((9, 2)), chunks=(2, 2))
    with pytest.raises(UsageError, match=r"axes|bytes, delta|float64"):
        select_plain(folder, episodes="0")


def test_a_part_without_its_manifest_is_not_told_of_another_version(whole: Path, take: Take, root: Path) -> None:
    """Nothing but its manifest says which part a set was: it is to be staged again, and its source did not change."""
    part = load_version(take(whole, arrays=["action"]))
    path = Path(stage_version(structs.replace(part, source=LocalSource(folder=whole)), root).path)
    (path / MANIFEST_FILE).chmod(0o600)
    (path / MANIFEST_FILE).write_bytes(b"{")
    actual = [each for each in check_versions(path, readers=1) if isinstance(each, FileFinding)]
    record = repair_set(root, part.version, actual)
    assert (record.state, " now" in record.reason, "--arrays" in record.reason) == ("failed", False, True)


def test_no_episodes(tmp_path: Path) -> None:
    """A store that does not say where episodes lie can be cut by steps only, and the message says so."""
    folder = tmp_path / "x"
    zarr.create_group(folder).create_array("a", data=np.ones(9), chunks=(2,))
    with pytest.raises(UsageError, match="episode_offsets") as caught:
        select_plain(folder, episodes="0")
    assert "--steps" in caught.value.hint
    assert paths(select_plain(folder, steps="3:5")) == {"zarr.json", "a/zarr.json", "a/c/1", "a/c/2"}


def test_100_000_files_cost_little() -> None:
    """Choosing from a version of 100,000 files takes about a second."""
    entries = [FileEntry(path=f"images/c/{i}/0/0/0", bytes=1, digest="") for i in range(100_000)]
    array = (
        b'{"zarr_format": 3, "node_type": "array", "shape": [100000, 64, 64, 3], "data_type": "uint8", "fill_value": 0,'
        b'"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 64, 64, 3]}},'
        b'"chunk_key_encoding": "default", "codecs": ["bytes"]}'
    )
    entries.append(FileEntry(path="images/zarr.json", bytes=len(array), digest=""))
    reference = Manifest(
        name="x",
        episodes=0,
        steps=100_000,
        files=tuple(entries),
        arrays={"images": ArraySchema(shape=(100_000, 64, 64, 3), dtype="uint8")},
    )
    started = time.process_time()
    part = make_subset(reference, "", lambda path: array, steps="20000:70000")
    assert len(part.files) == 50_001
    assert time.process_time() - started < 3  # 0.6 s where nothing else runs
