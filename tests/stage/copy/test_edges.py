from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pitools.core.errors import DataError
from pitools.core.shared_progress import SharedProgress, WorkerSlot
from pitools.stage.copy import write as write_module
from pitools.stage.copy.copy import write_file
from pitools.stage.copy.tasks import SMALL_FILE_BYTES, CopyTask
from pitools.stage.copy.worker import CopyJob, CopyWorker
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version
from pitools.stage.verify import check_versions
from pitools.store import digest, manifest
from pitools.store import publish as publish_module
from pitools.store.digest import RANGE_BYTES, Hasher
from pitools.store.manifest import FileEntry, Manifest


def older(build, folder: Path, files: dict[str, bytes | int]) -> Path:
    """A dataset as they were before there were ranges: one digest over all of each file."""
    new = build(folder, files)
    entries = []
    for path in sorted(files):
        hasher = Hasher(ranged=False)
        hasher.update((new / path).read_bytes())
        entries.append(FileEntry(path=path, bytes=(new / path).stat().st_size, digest=hasher.digest()))
    data = manifest.encode_manifest(Manifest(name="pick", episodes=1, steps=1, arrays={}, files=tuple(entries)))
    (new / manifest.MANIFEST_FILE).write_bytes(data)
    return new.rename(new.with_name(manifest.version_of(data)))


def test_sizes_at_every_edge_arrive_whole(make_dataset, root: Path):
    """None, one, one less and one more than what is small, what a block is and what a disk's block is."""
    edges = (
        0,
        1,
        4095,
        4096,
        4097,
        (128 << 10) - 1,
        (128 << 10) + 1,
        SMALL_FILE_BYTES - 1,
        SMALL_FILE_BYTES,
        SMALL_FILE_BYTES + 1,
        2 * SMALL_FILE_BYTES + 4095,
    )
    folder = make_dataset({f"c/{size}": os.urandom(size) for size in edges})
    record = stage_version(load_version(folder), root, readers=3)
    for size in edges:
        assert (Path(record.path) / f"c/{size}").read_bytes() == (folder / f"c/{size}").read_bytes(), size
        assert (Path(record.path) / f"c/{size}").stat().st_mode & 0o777 == 0o444


def test_sizes_beside_a_range_arrive_whole(make_dataset, root: Path):
    """One byte less, as much, and one byte more than a range: the digest's kind changes, and so does the way."""
    folder = make_dataset({"less": RANGE_BYTES - 1, "more": RANGE_BYTES + 1})
    files = {entry.path: entry.digest.partition(":")[0] for entry in load_version(folder).manifest.files}
    assert files == {"less": "xxh3_128", "more": "xxh3_128x64m"}
    record = stage_version(load_version(folder), root, readers=2)
    *findings, _ = check_versions(Path(record.path), readers=2)
    assert findings == []


def test_an_older_digest_of_a_large_file_is_compared(build, tmp_path: Path, root: Path):
    """A file larger than a range whose manifest has one digest of all of it: copied in one piece, and judged."""
    folder = older(build, tmp_path / "data", {"a": RANGE_BYTES + 5})
    assert load_version(folder).manifest.files[0].digest.startswith("xxh3_128:")
    stage_version(load_version(folder), root)
    *findings, _ = check_versions(root, readers=2)
    assert findings == []
    shutil.rmtree(root)
    with (folder / "a").open("r+b") as file:
        file.seek(RANGE_BYTES + 2)
        file.write(b"x")
    with pytest.raises(DataError, match=r"digest xxh3_128:\w+ \(expected xxh3_128:"):
        stage_version(load_version(folder), root)
    assert os.listdir(root / "objects") == []


@pytest.mark.parametrize("new", ["a link", "a FIFO", "a folder", "other bytes"])
def test_a_file_that_is_exchanged_during_the_copy_is_refused(make_dataset, root: Path, once, new: str):
    """What stands at a name when its turn comes is judged, whatever stood there when the copy began."""
    folder = make_dataset({"a": os.urandom(4 << 20), "b": os.urandom(1000)})
    file = folder / "b"

    def act() -> None:
        file.rename(folder.parent / "aside")
        if new == "a link":
            file.symlink_to(folder.parent / "aside")
        elif new == "a FIFO":
            os.mkfifo(file)
        elif new == "a folder":
            file.mkdir()
        else:
            file.write_bytes(os.urandom(1000))

    with pytest.raises(DataError) as error:
        stage_version(load_version(folder), root, readers=1, bytes_per_s=16 << 20, advance=once(act))
    assert error.value.where == str(file)
    assert os.listdir(root / "objects") == []


def test_the_longest_and_strangest_names_arrive(make_dataset, root: Path):
    """255 bytes in letters of two, line ends, quotes, a backslash, a leading dash, and names of our own files."""
    names = ("é" * 127 + "x", "a\nb", "-rf", "\\", "'\"", " ", "objects", ".tmp", "x.partial", "c/manifest.json")
    folder = make_dataset({name: name.encode() for name in names})
    record = stage_version(load_version(folder), root)
    assert {name: (Path(record.path) / name).read_bytes() for name in names} == {n: n.encode() for n in names}


class Liar:
    """A file of a source that lies until it is found out, as a peer may."""

    def __init__(self, content: bytes, lies: int) -> None:
        self.size, self._content, self._lies = len(content), content, lies

    def read_into(self, view: memoryview, offset: int) -> int:
        """The content, or something else of its size."""
        content = bytes(self.size) if self._lies else self._content
        part = content[offset : offset + len(view)]
        view[: len(part)] = part
        return len(part)

    def distrust(self) -> bool:
        """Found out: once more, and better."""
        self._lies -= 1
        return self._lies >= 0

    def close(self) -> None:
        """Nothing is open."""


class Liars:
    """A source, and its reader, of such files."""

    label, block = "liars", 128 << 10

    def __init__(self, contents: dict[str, bytes], lies: int) -> None:
        self._contents, self._lies = contents, lies

    def connect(self) -> Liars:
        """Itself."""
        return self

    def open(self, path: str) -> Liar:
        """A file."""
        return Liar(self._contents[path], self._lies)

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("lies", [1, 2])
def test_what_was_a_lie_is_written_over(tmp_path: Path, direct: bool, lies: int):
    """Each file of a batch, small or large, is read again from its start until it is right; nothing false is left."""
    contents = {
        "a": os.urandom(10),
        "b": os.urandom(SMALL_FILE_BYTES + 4097),
        "c": b"",
        "d": os.urandom(SMALL_FILE_BYTES - 1),
    }
    entries = tuple(
        FileEntry(path=path, bytes=len(content), digest=digest.digest_bytes(content))
        for path, content in contents.items()
    )
    work = CopyJob(Liars(contents, lies), entries, str(tmp_path), True, False, direct, True, 0)
    copier = CopyWorker(work, WorkerSlot(SharedProgress(1), 0))
    copier(CopyTask(files=(0, 1, 2, 3)))
    copier.close()
    assert {path: (tmp_path / path).read_bytes() for path in contents} == contents


def test_a_set_that_stands_is_used_without_a_lock(small: Path, root: Path, residue):
    """Present is present: nothing is made for it, with `verify` or without, so a disk may be read-only."""
    stage_version(load_version(small), root)
    shutil.rmtree(root / ".locks")
    for verify in (False, True):
        assert stage_version(load_version(small), root, verify=verify).state == "present"
    assert not (root / ".locks").exists()
    assert residue(root) == []


def test_a_version_whose_source_is_its_own_damaged_copy_is_refused(small: Path, root: Path):
    """There is nothing to mend it with, and it is not taken away."""
    final = Path(stage_version(load_version(small), root).path)
    (final / "images/c/0/0").chmod(0o600)
    with (final / "images/c/0/0").open("r+b") as file:
        file.write(b"xxxx")
    with pytest.raises(DataError):
        stage_version(load_version(final), root, verify=True)
    assert final.is_dir()


@pytest.mark.parametrize("mask", [0o077, 0o000])
def test_modes_are_the_same_whatever_the_umask(make_dataset, root: Path, mask: int):
    """Who may read a set is for its root to say, not for the shell of whoever staged it."""
    folder = make_dataset({"c/small": b"1", "c/large": 2 * SMALL_FILE_BYTES, "d/ranges": RANGE_BYTES + 1})
    old_umask = os.umask(mask)
    try:
        final = Path(stage_version(load_version(folder), root).path)
    finally:
        os.umask(old_umask)
    assert {path.name: path.stat().st_mode & 0o777 for path in (final, *final.rglob("*"))} == {
        final.name: 0o755,
        "c": 0o755,
        "d": 0o755,
        "manifest.json": 0o444,
        "small": 0o444,
        "large": 0o444,
        "ranges": 0o444,
    }


@pytest.mark.parametrize("mask", [0o077, 0o000])
def test_a_folder_of_a_rewritten_file_has_the_same_mode(tmp_path: Path, mask: int):
    """A part's own files are written before the workers are forked."""
    old_umask = os.umask(mask)
    try:
        write_file(tmp_path, "obs/zarr.json", b"{}")
    finally:
        os.umask(old_umask)
    assert [(tmp_path / path).stat().st_mode & 0o777 for path in ("obs", "obs/zarr.json")] == [0o755, 0o444]


def test_names_are_on_the_disk_before_the_set_is_shown(build, tmp_path: Path, root: Path, monkeypatch):
    """Where many small files are not synced one by one, one sync comes when every name is there but the manifest's;
    after it the folder with the manifest and the one that shows the set are synced.
    """
    source = build(tmp_path / "data", {f"c/{number}/0": b"x" for number in range(300)})
    events: list[object] = []

    def sync_all(path: Path, _: int) -> None:
        events.append(sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()))

    monkeypatch.setattr(write_module, "sync_fs", sync_all)
    monkeypatch.setattr(publish_module, "fsync_dir", lambda path: events.append(path.name))
    assert stage_version(load_version(source), root).state == "staged"
    assert events == [[f.path for f in load_version(source).manifest.files], f"{source.name}.partial", "objects"]
