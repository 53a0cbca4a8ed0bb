from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import DataError, UsageError
from pitools.dataset.catalog.retirement import retire_version
from pitools.stage.sources.find import find_source, load_version
from pitools.stage.sources.local import LocalReader
from pitools.store import manifest, tags


def test_a_version_folder_means_itself(small: Path):
    """The folder with the manifest is the dataset."""
    assert find_source(small) == small


def test_a_name_with_one_version_means_that_version(small: Path):
    """A link to the version, such as `latest`, does not make it two."""
    (small.parent / "latest").symlink_to(small.name)
    (small.parent / ".tmp").mkdir()
    assert find_source(small.parent) == small


def test_a_version_is_named_as_in_every_command(make_dataset):
    """The newest of a name, what a tag names, and the first digits; a retired one only by its folder."""
    old, new = make_dataset({"a": b"1"}), make_dataset({"a": b"2"})
    home = new.parent
    os.utime(old / "manifest.json", (1, 1))
    tags.move_tag(home.parent, home.name, "good", old.name)
    assert find_source(home) == new
    assert find_source(f"{home}@good") == old
    assert find_source(home / new.name[:6]) == new
    (home / "latest").symlink_to(new.name)
    retire_version(new)
    assert find_source(home) == old
    assert find_source(new) == new
    for wrong, hint in ((f"{home}@best", "good"), (f"{home}/{'0' * 6}", "list"), (f"{home.parent}/plick@good", "pick")):
        with pytest.raises(UsageError) as error:
            find_source(wrong)
        assert hint in error.value.hint


def test_a_staging_roots_objects_are_no_dataset(make_dataset):
    """The newest of sets of many datasets is not guessed: the user is told what to choose from."""
    versions = [make_dataset({"a": b"1"}, "objects"), make_dataset({"a": b"2"}, "objects")]
    with pytest.raises(UsageError) as error:
        find_source(versions[0].parent)
    assert all(folder.name in error.value.message for folder in versions)


def test_a_folder_without_versions_is_no_dataset(tmp_path: Path):
    """An empty folder is data that is not what it claims; a missing one is a wrong command line."""
    with pytest.raises(DataError):
        find_source(tmp_path)
    with pytest.raises(UsageError):
        find_source(tmp_path / "none")


def test_load_gives_the_manifest_its_bytes_and_its_version(small: Path):
    """The version is the folder's name."""
    dataset = load_version(small)
    assert dataset.version == small.name
    assert dataset.data == (small / "manifest.json").read_bytes()
    assert len(dataset.manifest.files) == 5


def test_a_changed_manifest_is_refused(small: Path):
    """A manifest edited in place no longer has the digest its folder is named by."""
    path = small / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"episodes": 1', b'"episodes": 2'))
    with pytest.raises(DataError, match=rf"\(expected {small.name}"):
        load_version(small)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"schema":"pit.manifest/2"}', b"[" * 5000])
def test_what_is_not_a_manifest_is_refused(tmp_path: Path, content: bytes):
    """Any bytes that are not a manifest are a DataError, never another exception."""
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(DataError):
        load_version(tmp_path)


@given(
    st.sampled_from(["../x", "/etc/passwd", "a/../../x", "", ".", "a//b", "./a", "a\0b", "..", "manifest.json", "a/"])
)
def test_a_path_out_of_the_dataset_is_refused(path: str):
    """No hostile path of a manifest is ever joined to a folder of ours."""
    data = {"schema": "pit.manifest/2", "name": "x", "episodes": 1, "steps": 1, "arrays": {}}
    data["files"] = [{"path": path, "bytes": 1, "digest": "xxh3_128:0"}]
    with pytest.raises(DataError):
        manifest.decode_manifest(json.dumps(data).encode(), "here")


@pytest.mark.parametrize("paths", [("a", "a/b"), ("a/b", "a/b/c/d"), ("manifest.json/x",)])
def test_a_name_that_is_file_and_folder_is_refused(tmp_path: Path, paths: tuple[str, ...]):
    """Such a manifest cannot be written out, so it is refused before anything is."""
    data = {"schema": "pit.manifest/2", "name": "x", "episodes": 1, "steps": 1, "arrays": {}}
    data["files"] = [{"path": path, "bytes": 1, "digest": "xxh3_128:0"} for path in paths]
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(DataError, match="both as a file and as a folder"):
        load_version(tmp_path)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_a_manifest_that_is_no_plain_file_is_refused(small: Path, kind: str):
    """A FIFO does not hang, a link is not followed."""
    _replace(small / "manifest.json", kind)
    with pytest.raises(DataError):
        load_version(small)


@pytest.mark.parametrize("part", ["images/c/0/0", "images/c", "images"])
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_only_plain_files_beneath_plain_folders_are_opened(small: Path, part: str, kind: str):
    """A link or a FIFO at any part of the path is refused, so that nothing outside the dataset is read."""
    _replace(small / part, kind)
    reader = LocalReader(small)
    with pytest.raises(DataError):
        reader.open("images/c/0/0")
    reader.close()


def test_no_descriptor_is_lost(small: Path):
    """Opening, and failing to open, closes every folder on the way."""
    before = sorted(os.listdir("/proc/self/fd"))
    reader = LocalReader(small)
    for path in ("images/c/0/0", "images/c/1/0", "zarr.json", "actions/c/0"):
        reader.open(path).close()
    for path in ("images/c/0/9", "images/d/0/0", "zarr.json/x"):
        with pytest.raises(DataError):
            reader.open(path)
    reader.open("images/c/0/0").close()
    reader.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


def _replace(path: Path, kind: str) -> None:
    aside = path.with_name("aside")
    path.rename(aside)
    if kind == "link":
        path.symlink_to(aside.name)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()


@pytest.mark.parametrize("digest", ["", "md5:00000000000000000000000000000000"])
def test_a_digest_that_cannot_be_compared_is_refused(make_dataset, digest: str):
    """What nobody can compare must not pass for verified."""
    folder = make_dataset({"a": b"1"})
    data = (folder / "manifest.json").read_bytes()
    record = json.loads(data)["files"][0]["digest"]
    changed = data.replace(record.encode(), digest.encode())
    (folder / "manifest.json").write_bytes(changed)
    with pytest.raises(DataError, match=rf"'{digest}' \(expected xxh3_128"):
        load_version(folder.rename(folder.with_name(manifest.version_of(changed))))


def test_a_folder_that_is_none_is_explained(make_dataset, tmp_path: Path):
    """The nearest name, the datasets inside, a store, an archive, a path elsewhere: each has its next step."""
    make_dataset({"a": b"1"}, name="bridge")
    store = tmp_path / "data/plain.zarr"
    store.mkdir()
    (store / "zarr.json").write_bytes(b"{}")
    (tmp_path / "data/set.zip").touch()
    hints = {
        "data/bridg": 'did you mean "bridge"?',
        "data/zzzz": "give <root>/<name>/<version>",
        "data": "it contains bridge, plain.zarr: name one",
        "data/plain.zarr": "it is a Zarr store without a manifest: stage it to verify it",
        "data/set.zip": "unpack it first",
        "host:/data": "give a path of this machine, or an object store's URL",
    }
    for path, hint in hints.items():
        with pytest.raises((DataError, UsageError)) as error:
            find_source(tmp_path / path)
        assert error.value.hint == hint
