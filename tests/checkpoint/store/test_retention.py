from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pitools.checkpoint.store import layout, locks, lookup, quarantine, retention, verify
from pitools.core.errors import DataError, TryLater, UsageError
from pitools.core.locks import lock_bytes
from tests.checkpoint.conftest import Save, build, contents, protected

HOLD = """
import sys, time
from pathlib import Path
from pitools.checkpoint.store import locks
with getattr(locks, sys.argv[1])(Path(sys.argv[2])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(how: str, path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, how, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(st.integers(0, 40), max_size=7), st.integers(1, 4), st.integers(0, 10), st.sets(st.integers(0, 40)))
def test_what_stays(save: Save, tmp_path: Path, steps: set[int], last: int, every: int, keep: set[int]) -> None:
    """Just the newest, the multiples and the wanted stay, the newest always; a plan says the same and does nothing."""
    folder = tmp_path / os.urandom(8).hex()
    for step in steps:
        save(step, {"x": b"1"}, to=folder)
    stay = {step for step in steps if step in keep or (every and step % every == 0)} | set(sorted(steps)[-last:])
    planned = retention.prune_checkpoints(
        folder, last, every, kept_steps=dict.fromkeys(keep, "requested"), dry_run=True
    )
    assert lookup.complete_steps(folder) == sorted(steps, reverse=True)
    assert {record.step for record in planned if record.state == "kept"} == stay
    retention.prune_checkpoints(folder, last, every, kept_steps=dict.fromkeys(keep, "requested"))
    assert lookup.complete_steps(folder) == sorted(stay, reverse=True)


def test_what_a_link_names_stays(folder: Path, save: Save) -> None:
    """`ln -s step_2 best`: no prune removes it, nor that after a save; a link to elsewhere names nothing."""
    for step in range(1, 6):
        save(step)
    (folder / "best").symlink_to("step_2")
    (folder / "elsewhere").symlink_to("/tmp/step_1")
    retention.prune_after_save(folder, 1)
    assert lookup.complete_steps(folder) == [5, 2]
    assert retention.prune_checkpoints(folder, 1)[0].step == 5


def test_a_link_that_comes_during_a_prune_keeps_its_step(
    folder: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing a large step takes minutes: one that a link names meanwhile stays."""
    for step in range(1, 4):
        save(step)

    def remove(path: Path) -> None:
        if not (folder / "best").is_symlink():
            (folder / "best").symlink_to("step_2")
        shutil.rmtree(path)

    monkeypatch.setattr(layout, "remove_tree", remove)
    retention.prune_checkpoints(folder, 1)
    assert lookup.complete_steps(folder) == [3, 2]


def test_locks_of_other_nodes_count(folder: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS with local_lock=flock, where flock(2) of another node is not seen, its readers and writers are."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    save(1)
    save(2)
    reader, writer = holder("read_lock", folder / "step_1"), holder("writer_lock", folder)
    try:
        assert retention.prune_checkpoints(folder, 1)[1].reason == "being read"
        with pytest.raises(TryLater), locks.writer_lock(folder, timeout_s=0):
            pass
    finally:
        end(reader)
        end(writer)


def test_what_is_read_stays(folder: Path, save: Save) -> None:
    """While a process reads a checkpoint it stays; when that process is killed it may go."""
    for step in (1, 2, 3):
        save(step)
    reader = holder("read_lock", folder / "step_1")
    try:
        assert {record.step: record.reason for record in retention.prune_checkpoints(folder, 1)} == {
            3: "of the newest 1",
            2: "",
            1: "being read",
        }
        assert verify.verify_checkpoint(folder / "step_1") == []
    finally:
        end(reader)
    retention.prune_checkpoints(folder, 1)
    assert lookup.complete_steps(folder) == [3]


def test_reader_that_comes_late(folder: Path, save: Save) -> None:
    """Who wants to read what is being removed waits no longer than told, and what is gone is told as gone."""
    path = save(1)
    with locks.exclusive_lock(path) as free:
        assert free
        with pytest.raises(TryLater), locks.read_lock(path, timeout_s=0.05):
            pass
    with locks.read_lock(path), locks.read_lock(path), locks.exclusive_lock(path) as free:
        assert not free
    descriptor = os.open(path / "manifest.json", os.O_RDWR)
    lock_bytes(descriptor, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:

        def read() -> None:
            with locks.read_lock(path, timeout_s=20):
                pass

        waiting = pool.submit(read)
        path.rename(folder / ".old.step_1.x")
        os.close(descriptor)
        with pytest.raises(DataError):
            waiting.result(20)
    with pytest.raises(DataError, match="cannot be read"), locks.read_lock(path):
        pass


def test_pruners_race(folder: Path, save: Save) -> None:
    """Many who prune, and one who saves, do each other no harm: what stays is whole, nothing is left behind."""
    for step in range(1, 25):
        save(step, {"x": b"1", "y/z": b"2"})
    with ThreadPoolExecutor(8) as pool:
        pruned = [pool.submit(retention.prune_checkpoints, folder, 2) for _ in range(8)]
        saved = [pool.submit(save, step, {"x": b"1"}) for step in (25, 26)]
        for future in (*pruned, *saved):
            future.result()
    retention.prune_checkpoints(folder, 2)
    assert lookup.complete_steps(folder) == [26, 25]
    assert all(verify.verify_checkpoint(folder / f"step_{step}") == [] for step in (25, 26))
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_25", "step_26"]


def test_damaged_ones_do_not_count(folder: Path, save: Save) -> None:
    """A checkpoint that lost a file takes no good one's place, and is left for the quarantine."""
    for step in (1, 2, 3):
        save(step)
    (folder / "step_3" / "payload" / "d" / "0a").unlink()
    retention.prune_checkpoints(folder, 1)
    assert layout.listed_steps(folder) == [3, 2]


@pytest.mark.parametrize(("last", "every"), [(0, 0), (-1, 1), (1, -1)])
def test_nobody_prunes_everything(folder: Path, save: Save, last: int, every: int) -> None:
    """At least one stays, whatever is asked."""
    save(1)
    with pytest.raises(UsageError):
        retention.prune_checkpoints(folder, last, every)


def test_leftovers(folder: Path, save: Save) -> None:
    """What killed saves left goes when nobody saves there; what is half removed goes anyway; the rest is not ours."""
    save(1)
    build(folder, 2, contents(2), token="killed")
    (folder / ".old.step_9.x").mkdir()
    for name in (".step_x.y", ".cache", ".stepson"):
        (folder / name).mkdir()
    writer = holder("writer_lock", folder)
    try:
        assert [path.name for path in retention.remove_leftovers(folder)] == [".old.step_9.x"]
        with (
            pytest.raises(TryLater, match=r"process [0-9]+ on .* saves checkpoints here"),
            locks.writer_lock(folder, timeout_s=0),
        ):
            pass
    finally:
        end(writer)
    with locks.writer_lock(folder, timeout_s=0) as sure:
        assert sure
        assert [path.name for path in retention.remove_leftovers(folder, is_only_writer=sure)] == [".step_2.killed"]
    build(folder, 2, contents(2), token="killed-again")
    assert [path.name for path in retention.remove_leftovers(folder)] == [".step_2.killed-again"]
    assert lookup.complete_steps(folder) == [1]
    assert (folder / ".cache").is_dir()


def test_a_save_of_another_node_may_be_in_progress(folder: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where locks are known to their own node alone, its leftovers stay, however often, until an hour after a write."""
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "compute-7")
        with locks.writer_lock(folder):
            pass
    unpublished_dir = build(folder, 2, contents(2))
    for _ in range(2):
        assert retention.remove_leftovers(folder) == []
    for path in (unpublished_dir, *unpublished_dir.rglob("*")):
        os.utime(path, (0, 0))
    assert retention.remove_leftovers(folder) == [unpublished_dir]


def test_file_system_without_locks(folder: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where locks are not supported saves, reads and retention go on, and nobody cleans up after others."""

    def refuse(descriptor: int, command: int, argument: object = 0) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    for step in (1, 2):
        save(step)
    build(folder, 3, contents(3), token="other")
    with locks.writer_lock(folder) as sure:
        assert not sure
        assert retention.remove_leftovers(folder, is_only_writer=sure) == []
    with locks.read_lock(folder / "step_1"):
        pass
    retention.prune_checkpoints(folder, 1)
    assert layout.listed_steps(folder) == [2]
    assert len(layout.leftovers(folder)) == 1


def test_quarantine_keeps_everything(folder: Path, save: Save) -> None:
    """What is moved aside is all there, with the reason; twice the same name is no trouble, nor is a second mover."""
    for _ in range(2):
        path = save(2)
        problems = verify.verify_checkpoint(path) or [
            verify.CheckpointProblem(checkpoint="step_2", path="payload/x", problem="digest", expected="a", got="b")
        ]
        moved = quarantine.quarantine_checkpoint(path, problems)
        assert moved is not None
        assert verify.verify_checkpoint(moved) == []
        assert quarantine.quarantine_checkpoint(path, problems) is None
        reason = (moved.parent / "reason.json").read_text()
        assert '"payload/x"' in reason
        assert '"reason": "payload/x: digest: b, expected a"' in reason
    assert len(list((folder / "quarantine").iterdir())) == 2
    assert not os.path.lexists(folder / "latest")


def test_what_cannot_be_removed_stays_alone(folder: Path, save: Save, capfd: pytest.CaptureFixture[str]) -> None:
    """A write-protected one is told, with the reason, and the others go; whoever saves is not failed by it."""
    for step in (1, 2, 3, 4):
        save(step)
    with protected(folder / "step_1"):
        states = {record.step: (record.state, record.reason) for record in retention.prune_checkpoints(folder, 2)}
        assert states[2] == ("removed", "")
        assert states[1][0] == "failed"
        assert states[1][1] in map(os.strerror, (errno.EACCES, errno.EROFS))
        retention.prune_after_save(folder, 1)
        assert lookup.complete_steps(folder) == [4, 1]
    assert f"{folder}/step_1" in capfd.readouterr().err
    retention.prune_after_save(folder, 1)
    assert lookup.complete_steps(folder) == [4]
    assert capfd.readouterr().err == ""
