from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from pitools.checkpoint import tier_copy
from pitools.checkpoint.background_copy import Drainer
from pitools.checkpoint.store import layout, lookup, retention, unreadable, verify
from pitools.checkpoint.store.manifest import load
from pitools.core import subprocesses
from pitools.core.errors import ClusterError, DataError, Unreachable
from tests.checkpoint.conftest import Save, protected
from tests.checkpoint.kill_injection import killed


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The node's own disk."""
    return tmp_path / "nvme" / "checkpoints"


def test_copy_is_the_checkpoint(folder: Path, save: Save, local: Path) -> None:
    """What is copied has every file, its loader's state, time and seal, and is not copied a second time."""
    path = save(8, to=local)
    (path / "payload" / "no_files_here").mkdir()
    made = tier_copy.drain(path, folder)
    assert made == folder / "step_8"
    assert verify.check(made) == []
    assert load(made) == load(path)
    assert (made / "payload" / "no_files_here").is_dir()
    inode = (made / "payload" / "d" / "0a").stat().st_ino
    assert tier_copy.drain(path, folder) == made
    assert (made / "payload" / "d" / "0a").stat().st_ino == inode
    assert sorted(item.name for item in folder.iterdir()) == ["latest", "step_8"]


def test_interrupted_copy_goes_on(folder: Path, save: Save, local: Path) -> None:
    """A file that was copied is not copied again by the next copier; a sweep with its token spares it."""
    path = save(8, {f"f{n}": os.urandom(5000) for n in range(20)}, to=local)
    count = 0

    def stopped() -> bool:
        nonlocal count
        count += 1
        return count > 10

    with pytest.raises(tier_copy.Interrupted):
        tier_copy.drain(path, folder, threads=1, stopped=stopped)
    assert layout.steps(folder) == []
    (building,) = layout.left_over(folder)
    before = {file.name: file.stat().st_ino for file in (building / "payload").iterdir()}
    assert len(before) == 10
    assert retention.sweep(folder, keep=tier_copy.tokens(local)) == []
    made = tier_copy.drain(path, folder)
    assert {name: (made / "payload" / name).stat().st_ino for name in before} == before
    assert verify.check(made) == []


def test_kill_at_every_step_of_a_copy() -> None:
    """Wherever a copier ends, the shared folder shows nothing or the whole checkpoint, and the next makes it whole."""
    seen = set()
    for place in killed("drain"):
        folder = place / "shared"
        seen.add(len(layout.steps(folder)))
        for step in layout.steps(folder):
            assert verify.check(folder / f"step_{step}") == []
        assert verify.check(tier_copy.drain(place / "step_6", folder)) == []
        retention.sweep(folder)
        assert {path.name for path in folder.iterdir()} - {".writer"} == {"latest", "step_6"}
    assert seen == {0, 1}


def test_damaged_source_is_not_copied(folder: Path, save: Save, local: Path) -> None:
    """A bit that flipped on the node's disk does not reach the shared folder."""
    path = save(8, to=local)
    victim = path / "payload" / "d" / "0a"
    content = victim.read_bytes()
    victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="not what its manifest says") as caught:
        tier_copy.drain(path, folder)
    assert caught.value.where == str(victim)
    assert list(folder.iterdir()) == []


def test_what_to_restore_from(folder: Path, save: Save, local: Path) -> None:
    """Newest first, of the same bytes the local ones first; a local one of other bytes is left out, a newer one not."""
    shared = {step: save(step) for step in (1, 2, 3)}
    shutil.copytree(shared[2], local / "step_2")
    save(3, {"x": b"of another attempt"}, to=local)
    save(4, to=local)
    assert tier_copy.candidates(local, folder) == [
        local / "step_4",
        folder / "step_3",
        local / "step_2",
        folder / "step_2",
        folder / "step_1",
    ]
    assert tier_copy.candidates(None, folder) == [folder / f"step_{step}" for step in (3, 2, 1)]


def test_drainer(folder: Path, save: Save, local: Path) -> None:
    """What was left by a process that died is copied first, then what is submitted; old ones go, on both sides."""
    for step in (1, 2):
        save(step, to=local)
    drainer = Drainer(local, folder, keep_local=1, keep_last=2)
    try:
        drainer.wait(20)
        assert lookup.whole(folder) == [2]
        assert lookup.whole(local) == [2]
        for step in (3, 4):
            save(step, to=local)
            drainer.submit(step)
            drainer.wait(20)
        assert lookup.whole(folder) == [4, 3]
        assert lookup.whole(local) == [4]
    finally:
        drainer.close()


@pytest.mark.usefixtures("as_root")
def test_shared_folder_is_away_for_a_while(tmp_path: Path, save: Save, local: Path) -> None:
    """While the shared folder is read-only nothing local goes, and the wait says why; afterwards all is copied."""
    place = tmp_path / "shared"
    place.mkdir()
    assert subprocesses.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(place)], timeout_s=10).code == 0
    drainer = None
    try:
        folder = place / "checkpoints"
        drainer = Drainer(local, folder, keep_local=1)
        assert subprocesses.run(["mount", "-o", "remount,ro", str(place)], timeout_s=10).code == 0
        for step in (1, 2, 3):
            save(step, to=local)
            drainer.submit(step)
        with pytest.raises(ClusterError, match="Read-only"):
            drainer.wait(0.5)
        assert lookup.whole(local) == [3, 2, 1]
        assert subprocesses.run(["mount", "-o", "remount,rw", str(place)], timeout_s=10).code == 0
        drainer.wait(20)
        assert lookup.whole(folder)[0] == 3
        assert lookup.whole(local) == [3]
    finally:
        if drainer:
            drainer.close()
        assert subprocesses.run(["umount", str(place)], timeout_s=10).code == 0


def test_damaged_source_is_told_once(folder: Path, save: Save, local: Path) -> None:
    """A drainer does not try for ever to copy what is damaged, and goes on with the next."""
    path = save(1, to=local)
    (path / "payload" / "d" / "0a").write_bytes(b"")
    drainer = Drainer(local, folder)
    try:
        drainer.submit(1)
        with pytest.raises(DataError):
            drainer.wait(20)
        save(2, to=local)
        drainer.submit(2)
        drainer.wait(20)
        assert lookup.whole(folder) == [2]
    finally:
        drainer.close()


def test_wait_is_bounded(folder: Path, save: Save, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a copy that is not done gets word in time, and the thread ends when it is told to."""
    save(1, to=local)

    def slow(*_: object, stopped: tier_copy.Stopped, **__: object) -> None:
        while not stopped():
            time.sleep(0.01)
        raise tier_copy.Interrupted

    monkeypatch.setattr(tier_copy, "drain", slow)
    drainer = Drainer(local, folder)
    with pytest.raises(Unreachable, match=r"not copied in 0\.1 s"):
        drainer.wait(0.1)
    drainer.close()


def test_an_old_one_that_stays_does_not_fail_a_copy(folder: Path, save: Save, local: Path) -> None:
    """What cannot be removed, here or there, hinders neither the copies nor who waits for them."""
    for step, to in ((1, folder), (1, local), (2, folder), (2, local)):
        save(step, to=to)
    with protected(folder / "step_1"), protected(local / "step_1"):
        drainer = Drainer(local, folder, keep_local=1, keep_last=1)
        try:
            save(3, to=local)
            drainer.submit(3)
            drainer.wait(20)
        finally:
            drainer.close()
    assert lookup.whole(folder) == lookup.whole(local) == [3, 1]


def test_what_could_not_be_read_is_read_or_copied_again(folder: Path, save: Save, local: Path) -> None:
    """A shared copy that a run passed by counts as safe once it has been read; one that is damaged is made anew."""
    made = tier_copy.drain(save(8, to=local), folder)
    inode = made.stat().st_ino
    unreadable.mark(made, "it was away")
    tier_copy.drain(local / "step_8", folder)
    assert made.stat().st_ino == inode
    assert lookup.newest(folder) == 8
    unreadable.mark(made, "it was away")
    victim = made / "payload" / "d" / "0a"
    victim.write_bytes(bytes(victim.stat().st_size))
    tier_copy.drain(local / "step_8", folder)
    assert lookup.newest(folder) == 8
    assert verify.check(made) == []
    assert len(list((folder / "quarantine").iterdir())) == 1
