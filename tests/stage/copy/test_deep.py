from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import DataError
from pitools.stage.cache.layout import create_root, journal_path, partial_path
from pitools.stage.sources.find import load_version
from pitools.stage.sources.local import DirDescriptors
from pitools.stage.stage import stage_version
from pitools.store import manifest
from pitools.store.manifest import FileEntry, Manifest

DEEP = "d/" * 2000 + "file"


def write_manifest(folder: Path, path: str) -> Path:
    """A version that names one file, which is not there."""
    folder.mkdir(parents=True)
    entry = FileEntry(path=path, bytes=1, digest="xxh3_128:" + "0" * 32)
    data = manifest.encode_manifest(Manifest(name="pick", episodes=1, steps=1, arrays={}, files=(entry,)))
    (folder / manifest.MANIFEST_FILE).write_bytes(data)
    return folder.rename(folder.parent / manifest.version_of(data))


@pytest.mark.parametrize("path", [DEEP, "d/" * 200 + "f", "n" * 256, "é" * 128, "/".join(["n" * 200] * 20)])
def test_a_path_that_no_disk_can_hold_is_refused_before_anything_is_written(
    tmp_path: Path, root: Path, pit_stage, path: str
):
    """Too many folders, too long a name or path: exit 5, no traceback, and no staging folder is made."""
    source = write_manifest(tmp_path / "data/pick/new", path)
    for words in (["run", source, "--to", root], ["plan", source, "--to", root], ["check", source]):
        code, _, err = pit_stage(*words)
        assert code == (5 if words[0] != "check" else 1)
        assert "Traceback" not in err
    assert not root.exists()


@pytest.mark.parametrize("path", ["d/" * 100 + "f", "n" * 255, "é" * 127, "/".join(["n" * 200] * 9)])
def test_paths_that_are_only_long_are_taken(path: str):
    """Up to what file systems hold, with room for the folders above."""
    entry = FileEntry(path=path, bytes=1, digest="")
    manifest.check_manifest(Manifest(name="pick", episodes=1, steps=1, arrays={}, files=(entry,)), "here")


def test_what_a_deep_path_left_behind_can_be_evicted(root: Path, pit_stage, residue):
    """An unfinished copy 2,000 folders deep, as earlier versions of pit-stage made it, goes like any other."""
    create_root(root)
    version = "f" * 32
    folder = partial_path(root, version)
    folder.mkdir()
    position = os.open(folder, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("d", dir_fd=position)
        below = os.open("d", os.O_RDONLY, dir_fd=position)
        os.close(position)
        position = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=position))
    os.close(position)
    journal_path(root, version).touch()
    assert pit_stage("list", root)[0] == 0
    code, _, err = pit_stage("evict", version, "--to", root)
    assert (code, err) == (0, "")
    assert residue(root) == []


def test_a_manifest_of_such_a_path_is_no_manifest(tmp_path: Path):
    """Whoever reads manifests is told, not the stager alone."""
    with pytest.raises(DataError):
        manifest.load_manifest(write_manifest(tmp_path / "new", DEEP))


def test_deep_paths_are_staged(build, tmp_path: Path, root: Path):
    """As deep as a manifest may name them, neighbours at every level, byte for byte."""
    files = {"d/" * depth + name: os.urandom(50) for depth in (0, 1, 5, 6, 7, 8, 100, 127) for name in ("f", "g")}
    files |= {"d/" * depth + "e/f": os.urandom(50) for depth in (1, 5, 6, 7, 50)}
    record = stage_version(load_version(build(tmp_path / "data", files)), root)
    assert {path: (Path(record.path) / path).read_bytes() for path in files} == files


@given(st.lists(st.lists(st.sampled_from("ab"), max_size=10), min_size=1, max_size=30))
def test_a_folder_is_the_one_of_its_path(paths: list[list[str]]):
    """In whatever order folders are entered, deep or not, made or there; with few descriptors open at a time."""
    with tempfile.TemporaryDirectory() as place:
        before = len(os.listdir("/proc/self/fd"))
        folders = DirDescriptors(Path(place), create=True)
        for path in paths:
            position = folders.open_dir("/".join(path))
            assert os.path.samestat(os.fstat(position), Path(place, *path).stat())
            assert len(os.listdir("/proc/self/fd")) <= before + 7
        folders.close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_cannot_be_entered_leaves_the_others(tmp_path: Path):
    """Neither a link nor what is missing is entered, and what comes next is right."""
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/link").symlink_to("b")
    folders = DirDescriptors(tmp_path)
    for bad in ("a/link", "a/none/b", "x"):
        with pytest.raises(OSError):
            folders.open_dir(bad)
        assert os.path.samestat(os.fstat(folders.open_dir("a/b")), (tmp_path / "a/b").stat())
        assert os.path.samestat(os.fstat(folders.open_dir("")), tmp_path.stat())
    folders.close()
