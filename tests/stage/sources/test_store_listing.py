from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import zarr

from pitools.core.errors import ClusterError, DataError, Unreachable
from pitools.dataset.ingest.ingest import ingest
from pitools.stage.sources.local import LocalSource
from pitools.stage.sources.store_listing import (
    METADATA_BYTES,
    StoreListing,
    is_plain_store,
    list_store,
    make_listing,
    make_manifest,
    read_file,
    with_digests,
)
from pitools.store import digest, manifest, version_list
from pitools.store.manifest import ArraySchema, Manifest


def build(folder: Path, zarr_format: int = 3) -> Path:
    """A store of two arrays along 10 steps and one that is not, one of them in a group."""
    group = zarr.create_group(folder, zarr_format=zarr_format, attributes={"robot": "arm"})
    created: dict[str, Any] = {
        "action": np.arange(20, dtype="float32").reshape(10, 2),
        "obs/state": np.ones((10, 3), "int16"),
        "mean": np.zeros(2),
    }
    for name, values in created.items():
        group.create_array(name, data=values, chunks=(min(4, len(values)), *values.shape[1:]))
    return folder


@pytest.fixture(params=[2, 3])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The store above, of either format."""
    return build(tmp_path / "pick.zarr", request.param)


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A store of so many folders that several processes list them."""
    for number in range(100):
        (folder := tmp_path / f"wide.zarr/data/{number}/0").mkdir(parents=True)
        (folder / "0").write_text("x" * number)
    (tmp_path / "wide.zarr/zarr.json").write_text("{}")
    return tmp_path / "wide.zarr"


def describe_folder(folder: Path) -> Manifest:
    reader = LocalSource(folder=folder).connect()
    try:
        return make_manifest(list_store(folder), lambda path: read_file(reader, path))
    finally:
        reader.close()


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_every_file_is_listed(store: Path) -> None:
    """Path and size of each file, metadata and a README too, sorted."""
    (store / "README").write_text("hello")
    listing = list_store(store)
    assert [entry.path for entry in listing.entries] == names(store)
    assert [entry.bytes for entry in listing.entries] == [(store / name).stat().st_size for name in names(store)]
    assert (listing.name, listing.left_out) == ("pick", ())


def test_many_folders_are_listed_as_few_are(wide: Path) -> None:
    """Each file once, with its size; a name that is not UTF-8, a link and a FIFO deep within are refused by name."""
    listing = list_store(wide)
    assert [(entry.path, entry.bytes) for entry in listing.entries] == [
        (name, (wide / name).stat().st_size) for name in names(wide)
    ]
    assert list_store(wide) == listing
    deep = wide / "data/77/0"
    for plant, case in [
        (lambda: (deep / "bad").symlink_to("0"), "a link"),
        (lambda: os.mkfifo(deep / "bad"), "neither a file nor a folder"),
        (lambda: Path(os.fsdecode(bytes(deep) + b"/bad\xff")).touch(), "UTF-8"),
    ]:
        plant()
        with pytest.raises(DataError, match=case) as raised:
            list_store(wide)
        assert "data/77/0/bad" in str(raised.value)
        for path in deep.glob("bad*"):
            path.unlink()
    assert list_store(wide).signature == listing.signature
    (deep / "0").touch()
    assert list_store(wide).signature != listing.signature


def test_many_folders_are_listed_where_no_process_is_to_be_had(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fork fails, as at the limit of processes, the calling process lists them all."""
    listing = list_store(wide)
    monkeypatch.setattr(os, "fork", Mock(side_effect=BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))))
    assert list_store(wide) == listing


def test_a_folder_that_cannot_be_read_is_named(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nested folder that cannot be read, and one that is removed during the listing, are named in the error."""
    scandir = os.scandir
    for number, kind in ((errno.EACCES, ClusterError), (errno.ESTALE, Unreachable), (errno.ENOENT, DataError)):

        def refused(path: str, number: int = number) -> Any:
            if path.endswith("77/0/"):
                raise OSError(number, os.strerror(number))
            return scandir(path)

        monkeypatch.setattr(os, "scandir", refused)
        with pytest.raises(kind) as raised:
            list_store(wide)
        assert "data/77/0" in str(raised.value)


def test_a_manifest_is_made(store: Path) -> None:
    """Arrays, steps and files are what zarr-python and the file system say; digests are put in after the copy."""
    descriptions = describe_folder(store)
    assert descriptions.arrays == {
        name: ArraySchema(shape=array.shape, dtype=array.dtype.name)
        for name, array in ((name, zarr.open_group(store, mode="r")[name]) for name in ("action", "mean", "obs/state"))
    }
    assert (descriptions.name, descriptions.episodes, descriptions.steps) == ("pick", 0, 10)
    actual = {place: digest.digest_file(store / entry.path)[1] for place, entry in enumerate(descriptions.files)}
    full = with_digests(descriptions, actual)
    assert [(entry.path, entry.digest) for entry in full.files] == [
        (name, digest.digest_file(store / name)[1]) for name in names(store)
    ]
    assert manifest.decode_manifest(manifest.encode_manifest(full), "x") == full


def test_the_same_store_has_the_same_manifest(store: Path, tmp_path: Path) -> None:
    """Where it lies, when it was written and in which order it was listed are no part of the manifest."""
    copied = Path(shutil.copytree(store, tmp_path / "elsewhere/pick.zarr", copy_function=shutil.copyfile))
    assert describe_folder(copied) == describe_folder(store)
    assert list_store(copied).signature != list_store(store).signature
    listed = list(list_store(store).entries)
    for order in (listed, listed[::-1]):
        listing = make_listing("pick.zarr", order, str(store))
        assert make_manifest(listing, lambda path: (store / path).read_bytes()) == describe_folder(store)
        assert listing.signature == list_store(store).signature


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda path: path.write_bytes(path.read_bytes()), id="written again"),
        pytest.param(lambda path: os.truncate(path, 1), id="cut"),
        pytest.param(lambda path: path.unlink(), id="removed"),
        pytest.param(lambda path: path.rename(path.with_name("9")), id="renamed"),
        pytest.param(lambda path: path.with_name("new").touch(), id="added"),
    ],
)
def test_the_signature_tells_a_change(store: Path, change: Callable[[Path], object]) -> None:
    """Whatever is written, removed or added in the store, its signature is another."""
    path = store / next(name for name in names(store) if name.startswith("action/") and name[-1].isdigit())
    os.utime(path, ns=(0, 0))
    before = list_store(store).signature
    assert list_store(store).signature == before
    change(path)
    assert list_store(store).signature != before


def test_what_is_unfinished_is_left_out_and_said(store: Path) -> None:
    """A write that never ended, and what NFS keeps of a deleted file, are no part of the store."""
    listing = list_store(store)
    left = [f"action/0.{'0f' * 16}.partial", "obs/.nfs00000000012a", "x.partial"]
    for name in left:
        (store / name).write_text("?")
    actual = list_store(store)
    assert actual.left_out == tuple(sorted(left))
    assert (actual.entries, actual.signature) == (listing.entries, listing.signature)


def test_names_that_only_look_unfinished(store: Path) -> None:
    """A folder or a file that is merely called a little like these is copied."""
    for name in ("partial", "x.partial.txt", ".nfs", ".nfsx", "d.partial/file"):
        (store / name).parent.mkdir(exist_ok=True)
        (store / name).touch()
    assert list_store(store).left_out == ()
    assert [entry.path for entry in list_store(store).entries] == names(store)


@pytest.mark.parametrize(
    ("plant", "what"),
    [
        (lambda folder: (folder / "link").symlink_to("zarr.json"), "a link"),
        (lambda folder: (folder / "link").symlink_to("/etc"), "a link"),
        (lambda folder: (folder / "gone.partial").symlink_to("/etc/passwd"), "a link"),
        (lambda folder: os.mkfifo(folder / "fifo"), "neither a file nor a folder"),
        (lambda folder: Path(os.fsdecode(bytes(folder) + b"/\xff")).touch(), "UTF-8"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "not a Zarr store"),
    ],
)
def test_what_is_refused(tmp_path: Path, plant: Callable[[Path], object], what: str) -> None:
    """Links, FIFOs, names that no manifest can hold, and a folder that claims to have a manifest."""
    folder = build(tmp_path / "x")
    plant(folder)
    with pytest.raises(DataError, match=what):
        list_store(folder)


def test_what_is_no_store(tmp_path: Path) -> None:
    """A folder of stores, an empty one, one that is not there: none of them is staged by mistake."""
    build(tmp_path / "data/one.zarr")
    assert not is_plain_store(os.listdir(tmp_path / "data"))
    assert is_plain_store(os.listdir(tmp_path / "data/one.zarr"))
    with pytest.raises(DataError, match="not a Zarr store"):
        list_store(tmp_path / "data")
    with pytest.raises(DataError):
        list_store(tmp_path / "nothing")
    zarr.create_group(tmp_path / "bare")
    with pytest.raises(DataError, match="without an array"):
        describe_folder(tmp_path / "bare")


@pytest.mark.parametrize("path", ["../x", "/x", "a//b", "a/", "./x", "zarr.json"])
def test_hostile_keys_of_a_listing(tmp_path: Path, path: str) -> None:
    """An object store's keys may be anything; those that are no path below the store are refused."""
    folder = build(tmp_path / "x")
    listing = make_listing("x", [*list_store(folder).entries, (path, 1, "etag")], "s3://b/x")
    with pytest.raises(DataError) as caught:
        make_manifest(listing, lambda name: (folder / name).read_bytes())
    assert caught.value.where == "s3://b/x"


def test_metadata_without_end(tmp_path: Path) -> None:
    """A metadata file larger than any is refused, not read into memory."""
    folder = build(tmp_path / "x")
    os.truncate(folder / "action/zarr.json", METADATA_BYTES + 1)
    with pytest.raises(DataError, match=f"{METADATA_BYTES + 1} .*{METADATA_BYTES}"):
        describe_folder(folder)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    """Less than its size is no content."""

    class Shrunk:
        size = 10

        def read_into(self, view: memoryview, offset: int) -> int:
            return min(4, 4 - offset)

        def close(self) -> None:
            pass

    class Reader:
        def open(self, path: str) -> Shrunk:
            return Shrunk()

        def close(self) -> None:
            pass

    with pytest.raises(DataError, match="changed while it was read"):
        read_file(Reader(), "x")


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("pick.zarr", "pick"),
        ("my data (1).zarr", "my-data-1-"),
        (".hidden", "hidden"),
        (".zarr", "store"),
        ("é", "store"),
        ("a" * 200, "a" * 100),
    ],
)
def test_names(folder: str, name: str) -> None:
    """A dataset is called as its folder is, in letters that a dataset's name may have."""
    assert make_listing(folder, [("zarr.json", 1, "")], "x").name == name


def test_a_store_that_is_one_array(tmp_path: Path) -> None:
    """Its name is a dot, which as a path is the store itself."""
    zarr.create_array(tmp_path / "x", data=np.zeros((7, 2)), chunks=(2, 2))
    descriptions = describe_folder(tmp_path / "x")
    assert (descriptions.arrays, descriptions.steps) == ({".": ArraySchema(shape=(7, 2), dtype="float64")}, 7)


def test_steps_and_episodes_of_a_dataset_of_ours(tmp_path: Path, bridge: Path) -> None:
    """A version without its manifest is refused; its arrays under another name are described as they were by that."""
    path = Path(ingest([bridge], root=tmp_path, name="bridge").path)
    reference, _ = manifest.load_manifest(path)
    (path / manifest.MANIFEST_FILE).unlink()
    (path / version_list.PUBLISHED_FILE).unlink()
    with pytest.raises(DataError, match="lost its manifest"):
        describe_folder(path)
    assert "action" in describe_folder(build(path.with_name("0" * 32))).arrays
    descriptions = describe_folder(path.rename(tmp_path / "copy"))
    assert (descriptions.episodes, descriptions.steps, descriptions.arrays) == (
        reference.episodes,
        reference.steps,
        reference.arrays,
    )
    assert [(entry.path, entry.bytes) for entry in descriptions.files] == [
        (entry.path, entry.bytes) for entry in reference.files
    ]


@pytest.mark.parametrize(
    ("shapes", "episodes", "steps"),
    [
        ({"data/action": (9, 2), "data/img": (9, 4, 4), "meta/episode_ends": (3,)}, 3, 9),
        ({"episode_offsets": (4,), "action": (9, 2)}, 3, 9),
        ({"a": (5,), "b": (5, 2), "c": (9,)}, 0, 5),
        ({"a": (5,), "b": (9,)}, 0, 9),
        ({"a": ()}, 0, 0),
    ],
)
def test_steps_and_episodes(tmp_path: Path, shapes: dict[str, tuple[int, ...]], episodes: int, steps: int) -> None:
    """Episodes by the arrays that bound them, steps by the axis that most arrays share, else by the longest."""
    group = zarr.create_group(tmp_path / "x")
    for name, shape in shapes.items():
        group.create_array(name, shape=shape, dtype="int64", chunks=shape)
    descriptions = describe_folder(tmp_path / "x")
    assert (descriptions.episodes, descriptions.steps) == (episodes, steps)


def test_100_000_files_cost_little() -> None:
    """Listing, signing and describing a store of 100,000 chunks takes about a second."""
    listed = [(f"images/c/{i}/0/0/0", 50_000, str(i)) for i in range(100_000)]
    listed += [("zarr.json", 10, ""), ("images/zarr.json", 10, "")]
    array = (
        b'{"zarr_format": 3, "node_type": "array", "shape": [100000, 64, 64, 3], "data_type": "uint8", "fill_value": 0,'
        b'"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 64, 64, 3]}},'
        b'"chunk_key_encoding": "default", "codecs": ["bytes"]}'
    )
    group = b'{"zarr_format": 3, "node_type": "group"}'
    started = time.process_time()
    listing: StoreListing = make_listing("x", listed, "x")
    assert listing.signature
    created = make_manifest(listing, lambda path: array if "/" in path else group)
    assert (len(created.files), created.steps) == (100_002, 100_000)
    assert time.process_time() - started < 3  # 0.6 s where nothing else runs
