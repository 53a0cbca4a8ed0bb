from __future__ import annotations

import os
from pathlib import Path

import pytest

from pitools.core.errors import NoSpace
from pitools.stage.copy import journal
from pitools.stage.copy.journal import CopyJournal, WrittenFiles, journal_line
from pitools.store.digest import RANGE_BYTES
from pitools.store.manifest import FileEntry

VERSION = "0123456789abcdef" * 2


@pytest.fixture
def files(tmp_path: Path) -> tuple[FileEntry, ...]:
    """Three small files and a large one that is only a size, as an interrupted copy left them."""
    (tmp_path / "new").mkdir()
    for name, size in (("a", 3), ("b", 3), ("c", 0)):
        (tmp_path / "new" / name).write_bytes(b"x" * size)
    (tmp_path / "new/d").touch()
    os.truncate(tmp_path / "new/d", 2 * RANGE_BYTES + 5)
    return (
        FileEntry(path="a", bytes=3, digest=""),
        FileEntry(path="b", bytes=3, digest="xxh3_128:1"),
        FileEntry(path="c", bytes=0, digest="xxh3_128:2"),
        FileEntry(path="d", bytes=2 * RANGE_BYTES + 5, digest="xxh3_128x64m:3"),
    )


def write(tmp_path: Path, files: tuple[FileEntry, ...], *, durable: bool = True) -> Path:
    """A journal in which all of them are done, the large one but for a range."""
    path = tmp_path / "journal"
    copy_journal = CopyJournal(path, VERSION, durable=durable, append=False)
    for index in range(3):
        file_stat = (tmp_path / "new" / files[index].path).stat()
        copy_journal.add_files(
            WrittenFiles((index,), journal_line(index, file_stat, "xxh3_128:0" if index == 0 else "").encode(), {}, {})
        )
    copy_journal.add_range(3, 0, b"\1" * 16)
    copy_journal.add_range(3, 2, b"\2" * 16)
    copy_journal.close()
    return path


def test_what_was_done_is_known_again(tmp_path: Path, files):
    """Whole files, with the digest where the manifest has none, and ranges of large ones."""
    done = journal.read_journal(write(tmp_path, files), tmp_path / "new", VERSION, files)
    assert done.files == {0: "xxh3_128:0", 1: "", 2: ""}
    assert done.ranges == {3: {0: b"\1" * 16, 2: b"\2" * 16}}


@pytest.mark.parametrize("change", ["rewritten", "touched", "replaced", "gone", "a link", "longer"])
def test_a_file_that_is_not_the_one_written_is_not_believed(tmp_path: Path, files, change: str):
    """A journal that is older than the file beside it says nothing of it."""
    path = write(tmp_path, files)
    file = tmp_path / "new/a"
    if change == "rewritten":
        file.write_bytes(b"abc")
    elif change == "touched":
        os.utime(file, ns=(0, 0))
    elif change == "longer":
        os.truncate(file, 4)
    else:
        file.rename(tmp_path / "aside")
        if change == "replaced":
            file.write_bytes(b"xxx")
        elif change == "a link":
            file.symlink_to(tmp_path / "aside")
    assert sorted(journal.read_journal(path, tmp_path / "new", VERSION, files).files) == [1, 2]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"pit.stage-journal/1",
        b"\xff\xfe\n",
        b"pit.stage-journal/2 {V} x durable\n",
        b"pit.stage-journal/1 other x durable\n",
    ],
)
def test_a_strange_journal_says_nothing(tmp_path: Path, files, content: bytes):
    """Empty, torn in its first line, not text, of another schema or another version."""
    path = tmp_path / "journal"
    entries = write(tmp_path, files).read_bytes().split(b"\n", 1)[1]
    path.write_bytes(content.replace(b"{V}", VERSION.encode()) + entries)
    assert journal.read_journal(path, tmp_path / "new", VERSION, files) == ({}, {})


def test_a_torn_or_senseless_line_is_passed_over(tmp_path: Path, files):
    """What a kill cut in two, numbers out of range, words: nothing of it is believed, the rest is."""
    path = write(tmp_path, files)
    with path.open("ab") as file:
        file.write(b"f 99 1 1\nf -1 1 1\nf x\nr 3 3 00\nr 3 1 zz\nr 99 0 00\nq\n\nf 1 ")
    done = journal.read_journal(path, tmp_path / "new", VERSION, files)
    assert sorted(done.files) == [0, 1, 2]
    assert sorted(done.ranges[3]) == [0, 2]


def test_after_a_crash_of_the_machine_only_what_was_synced_counts(tmp_path: Path, files, monkeypatch):
    """Another boot: bytes that were only in memory are gone, whatever the journal says."""
    volatile = write(tmp_path, files, durable=False)
    assert journal.read_journal(volatile, tmp_path / "new", VERSION, files).files
    monkeypatch.setattr(journal, "boot_id", lambda: "another")
    assert journal.read_journal(volatile, tmp_path / "new", VERSION, files) == ({}, {})
    monkeypatch.undo()
    durable = write(tmp_path, files, durable=True)
    monkeypatch.setattr(journal, "boot_id", lambda: "another")
    assert journal.read_journal(durable, tmp_path / "new", VERSION, files).files


def test_a_journal_goes_on_after_a_torn_line(tmp_path: Path, files):
    """The next call's entries are not glued to what a kill left of the last one."""
    path = write(tmp_path, files)
    with path.open("ab") as file:
        file.write(b"f 1 12")
    copy_journal = CopyJournal(path, VERSION, durable=True, append=True)
    copy_journal.add_range(3, 1, b"\3" * 16)
    copy_journal.close()
    assert sorted(journal.read_journal(path, tmp_path / "new", VERSION, files).ranges[3]) == [0, 1, 2]


def test_a_full_disk_is_told(tmpfs):
    """The journal's own bytes may be the ones that do not fit."""
    disk = tmpfs("size=4k")
    (disk / "filler").write_bytes(b"x" * 4096)
    with pytest.raises(NoSpace):
        CopyJournal(disk / "journal", VERSION, durable=True, append=False)


def test_a_torn_line_is_not_ended_by_who_goes_on(tmp_path: Path, files):
    """A call that adds nothing must not make an entry of what a crash tore, nor believe a digest that is too short."""
    path = write(tmp_path, files)
    path.write_bytes(path.read_bytes()[:-10])
    CopyJournal(path, VERSION, durable=True, append=True).close()
    assert journal.read_journal(path, tmp_path / "new", VERSION, files).ranges == {3: {0: b"\1" * 16}}
    with path.open("ab") as file:
        file.write(b"r 3 1 0101\nr -1 0 " + b"01" * 16 + b"\n")
    assert journal.read_journal(path, tmp_path / "new", VERSION, files).ranges == {3: {0: b"\1" * 16}}
