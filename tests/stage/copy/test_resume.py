from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pitools.core import subprocesses
from pitools.core.errors import DataError, NoSpace
from pitools.stage.cache.layout import create_root, journal_path, partial_path
from pitools.stage.cache.space import reserve
from pitools.stage.copy import resume
from pitools.stage.copy.journal import CopyJournal, WrittenFiles, journal_line
from pitools.stage.copy.tasks import SMALL_FILE_BYTES
from pitools.stage.plan import plan_requests
from pitools.stage.request import StageRequest
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version
from pitools.stage.verify import check_versions
from pitools.store.digest import RANGE_BYTES


def interrupted(
    folder: Path, root: Path, *, bytes_per_s: float, until: Callable[[str], bool], user: int = 0, readers: int = 1
) -> None:
    """Stage in a process that is killed as soon as its journal is as wanted; one reader keeps to the plan's order."""
    dataset, journal = load_version(folder), journal_path(root, folder.name)
    pid = os.fork()
    if pid == 0:
        try:
            if user:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            stage_version(dataset, root, readers=readers, bytes_per_s=bytes_per_s)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    while not (journal.exists() and until(journal.read_text())):
        assert time.monotonic() < deadline
        assert os.waitpid(pid, os.WNOHANG)[0] == 0, "it had ended by itself"
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def findings(place: Path) -> list[object]:
    """What is wrong with the sets there."""
    *actual, _ = check_versions(place, readers=2)
    return actual


def several(text: str) -> bool:
    """Some files are done."""
    return text.count("\nf ") > 3


@pytest.fixture
def shards(make_dataset) -> dict[str, bytes | int]:
    """A file of ranges, which comes first in the copy, and files of which each is a task."""
    return {"L": RANGE_BYTES + 5, **{f"z{i}": os.urandom(SMALL_FILE_BYTES) for i in range(12)}}


def test_a_file_of_another_version_is_never_written_through(make_dataset, build, root: Path, tmp_path: Path, shards):
    """A copy that had linked a large file goes on when the older version is no longer looked at, from a bad source."""
    older = Path(stage_version(load_version(make_dataset({"L": RANGE_BYTES + 5})), root).path)
    source = build(tmp_path / "new", shards)
    interrupted(source, root, bytes_per_s=8 << 20, until=several)
    assert (partial_path(root, source.name) / "L").samefile(older / "L")
    for number in range(4):  # as many as are searched for files to link
        stage_version(load_version(build(tmp_path / f"between{number}", {"x": bytes([number])})), root)
    with (source / "L").open("r+b") as file:
        file.write(b"bad")
    with pytest.raises(DataError):
        stage_version(load_version(source), root)
    assert findings(older) == []


@pytest.mark.usefixtures("as_root")
def test_what_was_linked_is_gone_on_with_by_who_is_not_root(build, commons: Path, shards):
    """A read-only file that an interrupted copy left is begun anew, though only root could write to it."""
    root, user = commons / "pit", 65534
    root.mkdir()
    os.chown(root, user, user)
    older, source = build(commons / "old", {"L": RANGE_BYTES + 5}), build(commons / "new", shards)
    as_user(lambda: stage_version(load_version(older), root), user)
    interrupted(source, root, bytes_per_s=8 << 20, until=several, user=user)
    as_user(lambda: (root / "objects" / older.name / "manifest.json").unlink(), user)  # it is no version any more
    as_user(lambda: stage_version(load_version(source), root, readers=2), user)
    assert findings(root / "objects" / source.name) == []


def as_user(work: Callable[[], object], user: int) -> None:
    """Do it in a process of that user."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_ranges_of_a_file_that_was_begun_again_do_not_count(build, tmp_path: Path, once):
    """After a kill in the middle of its second copy, what its first one wrote is to be copied."""
    dataset, root = load_version(build(tmp_path / "data", {"L": RANGE_BYTES + 5, "a": b"1"})), tmp_path / "pit"
    create_root(root)
    folder = partial_path(root, dataset.version)
    folder.mkdir()
    journal = CopyJournal(journal_path(root, dataset.version), dataset.version, durable=True, append=False)
    journal.add_range(0, 0, bytes(16))
    (folder / "a").write_bytes(b"1")
    journal.add_files(WrittenFiles((1,), journal_line(1, (folder / "a").stat()).encode(), {}, {}))
    journal.close()

    def stop() -> None:
        raise KeyboardInterrupt

    stop_once = once(stop)
    with pytest.raises(KeyboardInterrupt):
        # Not at the byte that is resumed, before the copy.
        stage_version(
            dataset, root, readers=1, bytes_per_s=1 << 30, advance=lambda count: count != 1 and stop_once(count)
        )
    assert (folder / "L").exists()
    assert resume.find_missing(dataset, root).copy_bytes == RANGE_BYTES + 5


@pytest.mark.usefixtures("as_root")
def test_ranges_that_are_there_need_no_room_again(build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A disk with room for the rest of a large file is enough to go on, and what was there is not counted as copied,
    nor as written of the room that is reserved, but as done in the progress.
    """
    written: list[int] = []
    done: list[int] = []

    @contextmanager
    def counted(*args: Any, **settings: Any) -> Iterator[Callable[[int], None]]:
        with reserve(*args, **settings) as used:
            yield lambda count: (written.append(count), used(count))[1]

    monkeypatch.setattr(resume, "reserve", counted)
    disk = tmp_path / "disk"
    disk.mkdir()
    # After two ranges there is room for the rest, also where most of a third was written, and none for the whole.
    assert subprocesses.run(["mount", "-t", "tmpfs", "-o", "size=340m", "tmpfs", str(disk)], timeout_s=10).code == 0
    try:
        source = build(tmp_path / "data", {"L": 4 * RANGE_BYTES - 4096})
        interrupted(source, disk / "pit", bytes_per_s=150 << 20, until=lambda text: text.count("\nr ") >= 2)
        ranges = journal_path(disk / "pit", source.name).read_text().count("\nr ")
        written.clear()
        record = stage_version(load_version(source), disk / "pit", readers=1, advance=done.append)
        assert sum(written) == record.copied_bytes
        assert sum(done) == record.bytes
        assert record.resumed_bytes == ranges * RANGE_BYTES
        assert record.copied_bytes == record.bytes - record.resumed_bytes
        assert findings(disk / "pit") == []
    finally:
        assert subprocesses.run(["umount", str(disk)], timeout_s=10).code == 0


def test_rot_in_a_file_that_versions_share_is_replaced(build, tmp_path: Path, root: Path):
    """`verify` reads the source: a link to the same damaged file would repair nothing."""
    shared = os.urandom(100_000)
    older = build(tmp_path / "old", {"a": shared})
    stage_version(load_version(older), root)
    source = build(tmp_path / "new", {"a": shared, "b": b"1"})
    file = Path(stage_version(load_version(source), root).path) / "a"
    file_stat = file.stat()
    assert file_stat.st_nlink == 2
    file.chmod(0o600)
    with file.open("r+b") as opened:
        opened.write(bytes([shared[0] ^ 1]))
    file.chmod(0o444)
    os.utime(file, ns=(file_stat.st_atime_ns, file_stat.st_mtime_ns))  # as a flipped bit leaves it
    assert len(findings(root)) == 2
    assert stage_version(load_version(source), root, verify=True).state == "repaired"
    assert findings(root / "objects" / source.name) == []
    assert stage_version(load_version(older), root, verify=True).state == "repaired"
    assert findings(root) == []


@pytest.mark.parametrize("readers", [2, 16])
def test_what_many_readers_did_of_small_files_is_kept(build, tmp_path: Path, root: Path, readers: int):
    """Killed when half of the files are there, the copy goes on with most of that half."""
    count, size = 2000, 2000
    source = build(tmp_path / "data", {f"c/{number:04}": os.urandom(size) for number in range(count)})
    folder = partial_path(root, source.name) / "c"

    def half(_: str) -> bool:
        return folder.exists() and len(os.listdir(folder)) >= count // 2

    interrupted(source, root, bytes_per_s=4_000_000, until=half, readers=readers)
    assert stage_version(load_version(source), root).resumed_bytes >= count * size // 4
    assert findings(root) == []


@pytest.mark.usefixtures("as_root")
def test_more_files_than_free_inodes_are_refused_before_the_copy(tmpfs, build, tmp_path: Path):
    """Files of few bytes can fill a disk too: nothing is written, and the plan says so."""
    root = tmpfs("size=64m,nr_inodes=50") / "pit"
    dataset = load_version(build(tmp_path / "data", {f"c/{i}": b"x" for i in range(60)}))
    (plan,) = plan_requests([StageRequest(dataset, root)])
    assert not plan.fits
    with pytest.raises(NoSpace):
        stage_version(dataset, root)
    assert os.listdir(root / ".tmp") == []
