from __future__ import annotations

import errno
import os

import pytest

from pitools.core.errors import ClusterError
from pitools.dataset.ingest.staging_dir import open_staging_dir
from pitools.store.manifest import FileEntry


@pytest.fixture
def opened(tmp_path):
    """A working folder."""
    return open_staging_dir(tmp_path / "root", "x", "key")


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
    assert [path.name for path in final.iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["x"]


def test_others_may_not_write_here(tmp_path) -> None:
    """Whatever the umask, unfinished work is the owner's alone to write to, while what is published is as the umask has
    it; a folder that others may write to is refused."""
    umask = os.umask(0)
    try:
        opened = open_staging_dir(tmp_path / "root", "x", "key")
    finally:
        os.umask(umask)
    assert (opened.path.stat().st_mode & 0o777, opened.store.stat().st_mode & 0o777) == (0o755, 0o777)
    opened.path.chmod(0o775)
    with pytest.raises(ClusterError, match=r"\.tmp/"):
        open_staging_dir(tmp_path / "root", "x", "key")
