from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from unittest.mock import patch

import pytest

from pitools.core.errors import ClusterError
from pitools.dataset.ingest.work_dir import open_work_dir
from pitools.store.manifest import FileEntry


@pytest.fixture
def opened(tmp_path):
    """A working folder."""
    return open_work_dir(tmp_path / "root", "x", "key")


def test_put_leaves_nothing_behind(opened, tmp_path) -> None:
    """A file that is put in its place, a link that is there already, and one that cannot be written leave no part."""
    source = tmp_path / "source"
    source.write_bytes(b"shard")
    for _ in range(2):
        opened.put_file("a/c/0", lambda part: os.link(source, part) or "digest")

    def full(part) -> str:
        part.write_bytes(b"sha")
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        opened.put_file("a/c/0", full)
    assert (opened.store / "a/c/0").samefile(source)
    assert list((opened.path / "part").iterdir()) == []
    assert source.stat().st_nlink == 2


def test_holds(opened) -> None:
    """All files with their sizes, or not."""
    files = [FileEntry(path=name, bytes=3, digest="") for name in ("a/c/0", "a/c/1")]
    opened.put_file("a/c/0", lambda part: str(part.write_bytes(b"abc")))
    assert not opened.has_files(files)
    opened.put_file("a/c/1", lambda part: str(part.write_bytes(b"ab")))
    assert not opened.has_files(files)
    opened.put_file("a/c/1", lambda part: str(part.write_bytes(b"abc")))
    assert opened.has_files(files)


def test_a_store_that_was_published_takes_nothing_more(opened, tmp_path) -> None:
    """Who comes late with a file finds no place for it, and nothing is added to what is published."""
    final = tmp_path / "root" / "x" / "v"
    late = opened
    opened.put_file("a", lambda part: str(part.write_bytes(b"abc")))
    assert opened.publish(final)
    with pytest.raises(FileNotFoundError):
        late.put_file("b/c/0", lambda part: str(part.write_bytes(b"abc")))
    assert late.is_gone()
    assert {path.name for path in final.iterdir()} == {"a", "published.json"}
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["x"]


def mode(path: Path) -> int:
    """The permissions of a path, with sticky and set-group-id."""
    return stat.S_IMODE(path.stat().st_mode)


def test_others_may_not_write_here(tmp_path) -> None:
    """Whatever the umask, nobody else can reach unfinished work, while what is published is as the umask has it; a
    folder that others may write to is refused."""
    umask = os.umask(0)
    try:
        opened = open_work_dir(tmp_path / "root", "x", "key")
    finally:
        os.umask(umask)
    assert (mode(opened.path), mode(opened.store)) == (0o700, 0o777)
    opened.path.chmod(0o775)
    with pytest.raises(ClusterError, match=r"\.tmp/"):
        open_work_dir(tmp_path / "root", "x", "key")


def test_folder_of_another_user(as_root, tmp_path) -> None:
    """A working folder that another user made beforehand is refused, whatever its mode."""
    opened = open_work_dir(tmp_path / "root", "x", "key")
    os.chown(opened.path, 12345, 12345)
    with pytest.raises(ClusterError, match=r"\.tmp/"):
        open_work_dir(tmp_path / "root", "x", "key")


def test_users_share_a_root(tmp_path) -> None:
    """Under umask 077 too, the folders of a root are writable by those who may write to the root; in `.tmp` each has
    their own."""
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o2770)
    umask = os.umask(0o077)
    try:
        opened = open_work_dir(root, "x", "key")
        shared = mode(root / ".tmp")
        assert opened.publish(root / "x" / "v")
    finally:
        os.umask(umask)
    assert (shared, mode(root / "x")) == (0o3770, 0o2770)


def test_unwritable_folder_is_named_first(tmp_path) -> None:
    """Where versions of this name cannot be published, the ingest ends before it writes."""
    (tmp_path / "x").mkdir()
    with patch("os.access", return_value=False), pytest.raises(ClusterError) as caught:
        open_work_dir(tmp_path, "x", "key")
    assert caught.value.where == str(tmp_path / "x")
    assert not (tmp_path / ".tmp").exists()


def test_new_root_is_durable(tmp_path) -> None:
    """The names of a new root, and of each new folder above it, are synced."""
    with patch("pitools.dataset.ingest.work_dir.fsync_dir") as fsync:
        open_work_dir(tmp_path / "new/root", "x", "key")
    assert [call.args[0] for call in fsync.call_args_list] == [tmp_path, tmp_path / "new"]
