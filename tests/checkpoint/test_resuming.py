"""What a restart goes on with: interrupted copies, a checkpoint of step 0, and a store that does not grow."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from pitools.checkpoint import local_tier, tier_copy
from pitools.checkpoint.checkpointer import Guard
from pitools.checkpoint.coordination.barrier import RemoteRankError
from pitools.checkpoint.store import layout, lookup, owner, retention
from pitools.core.errors import PitError
from tests.checkpoint.conftest import MODEL, RUN, Save, build, contents
from tests.checkpoint.test_checkpointer import Files, Store, on_ranks, restored, saved, state

Pit = Callable[..., subprocess.CompletedProcess[str]]


class Deleting(Store):
    """A store whose keys can be deleted, as those of torch and JAX."""

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)


def copy_interrupted(source: Path, folder: Path, after: int) -> dict[str, int]:
    """Begin to copy a checkpoint, stop after so many files; return the inode of each that was copied, by its path."""
    left = [after]

    def stopped() -> bool:
        left[0] -= 1
        return left[0] < 0

    with pytest.raises(tier_copy.Interrupted):
        tier_copy.drain(source, folder, threads=1, stopped=stopped)
    (place,) = layout.left_over(folder)
    return {
        str(path.relative_to(place)): path.stat().st_ino
        for path in place.rglob("*")
        if path.is_file() and layout.SHARES not in path.parts
    }


def test_a_restart_goes_on_with_an_interrupted_copy(folder: Path, tmp_path: Path) -> None:
    """Files that were copied from the node's disk before the kill are not copied again."""
    stage = tmp_path / "nvme"
    saved(folder, 1, stage=stage, run="r")
    (local,) = stage.iterdir()
    saved(local, 2, run="r")
    copied = copy_interrupted(local / "step_2", folder, after=3)
    assert len(copied) == 3
    with Guard(folder, Files(), stage=stage, run="r") as guard:
        assert guard.restore(state(0)).step == 2  # type: ignore[union-attr]
    assert {name: (folder / "step_2" / name).stat().st_ino for name in copied} == copied


def test_a_restart_without_the_node_s_disk_keeps_no_copy(folder: Path, tmp_path: Path) -> None:
    """Where what was copied is not there any more, its part only takes room."""
    stage = tmp_path / "nvme"
    saved(folder, 1, stage=stage, run="r")
    (local,) = stage.iterdir()
    saved(local, 2, run="r")
    copy_interrupted(local / "step_2", folder, after=3)
    assert restored(folder, run="r").step == 1  # type: ignore[union-attr]
    assert layout.left_over(folder) == []


def test_prune_keeps_a_copy_that_can_go_on(pit: Pit, folder: Path, save: Save, tmp_path: Path) -> None:
    """From a login node the node's disk is not seen: a part of a newer checkpoint stays, of an older one it goes."""
    local = tmp_path / "nvme"
    owner.claim(folder, RUN, MODEL)
    save(10)
    copy_interrupted(save(20, to=local), folder, after=2)
    build(folder, 30, contents(30), token="killed")
    done = pit("checkpoint", "prune", str(folder))
    assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == [10]
    (left,) = layout.left_over(folder)
    assert left.name.startswith(".step_20.drain-")
    assert str(left) in done.stderr
    save(30)
    assert pit("checkpoint", "prune", str(folder)).returncode == 0
    assert layout.left_over(folder) == []


def test_what_a_killed_copier_left_of_a_file_goes(folder: Path, save: Save, tmp_path: Path) -> None:
    """Each kill leaves a part of a file under a name of its own: they do not add up until the copy is whole."""
    source = save(20, {f"f{n}": os.urandom(9000) for n in range(6)}, to=tmp_path / "nvme")
    parts: list[set[str]] = []
    for after in range(3):
        copy_interrupted(source, folder, after=after)
        (place,) = layout.left_over(folder)
        parts.append({path.name for path in (place / layout.SHARES).glob("*.part")})
    assert all(parts)
    assert not parts[0] & parts[1]
    assert not (parts[0] | parts[1]) & parts[2]


def test_a_checkpoint_of_step_0_is_one(folder: Path, save: Save) -> None:
    """`latest` names it, it is the newest, and it is restored."""
    assert lookup.newest(folder) is None
    save(0)
    assert lookup.newest(folder) == 0
    assert (folder / "latest").readlink() == Path("step_0")
    save(5)
    assert retention.prune(folder, 1)[-1].state == "removed"
    other = folder.with_name("other")
    saved(other, 0)
    assert (other / "latest").readlink() == Path("step_0")
    assert restored(other).step == 0  # type: ignore[union-attr]


def test_step_0_is_not_removed_before_it_is_safe(folder: Path, save: Save, tmp_path: Path, monkeypatch: Any) -> None:
    """On a node's disk without room a checkpoint of step 0 that stands nowhere else stays."""
    local = tmp_path / "nvme"
    for step in (0, 1):
        save(step, to=local)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 0}))
    disk = local_tier.Near(local, folder, 3, 0)
    assert disk.takes_next(None) == local_tier.SaveTarget("shared", replaces_failed=False)
    assert lookup.whole(local) == [1, 0]


@pytest.mark.parametrize("kind", ["NoSpace", "DataError"])
def test_a_full_disk_of_another_rank_is_known_by_its_class(folder: Path, tmp_path: Path, kind: str) -> None:
    """The next save makes it good, whatever is said of it, and nothing else."""
    disk = local_tier.Near(tmp_path / "nvme", folder, 3, 0)
    error = RemoteRankError("rank 1: NoSpace: words", error_kind=kind)
    assert disk.takes_next(error).replaces_failed == (kind == "NoSpace")


def test_a_relative_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, and one on the node's disk, are where the loop was when it named them, wherever it goes."""
    folder.parent.mkdir(exist_ok=True)
    monkeypatch.chdir(folder.parent)
    with Guard(Path(folder.name), Files(), stage=Path("nvme")) as guard:
        monkeypatch.chdir("/")
        guard.save(1, state(1))
    assert lookup.newest(folder) == 1
    assert (folder.parent / "nvme").is_dir()


def test_the_ranks_store_does_not_grow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After many saves and restores it holds no more keys than after a few: rank 0's memory is not the run's length."""
    monkeypatch.setattr("pitools.checkpoint.coordination.barrier._KEPT", 0)
    sizes: dict[int, int] = {}
    store = Deleting()

    def work(rank: int, _: dict[str, Any]) -> None:
        keys = {"put": store.put, "get": store.get, "delete": store.delete}
        with Guard(folder, Files(rank), rank=rank, world_size=3, **keys, timeout_s=20) as guard:
            for step in range(1, 13):
                guard.save(step, state(step))
                assert guard.restore(state(0)).step == step  # type: ignore[union-attr]
                if rank == 0:
                    sizes[step] = len(store._values)

    assert on_ranks(3, work) == [None] * 3
    assert sizes[12] <= sizes[2] + 3


def test_a_failed_save_leaves_no_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks said of it goes with the next meeting that all come to."""
    monkeypatch.setattr("pitools.checkpoint.coordination.barrier._KEPT", 0)
    sizes: dict[int, int] = {}

    store, now = Deleting(), [0]

    def work(rank: int, _: dict[str, Any]) -> None:
        def full(name: str) -> None:
            if rank == 0 and name == "w" and now[0] % 2:
                raise OSError(28, "No space left on device")

        keys = {"put": store.put, "get": store.get, "delete": store.delete}
        with Guard(folder, Files(rank, full), rank=rank, world_size=3, **keys, timeout_s=20) as guard:
            for step in range(1, 13):
                now[0] = step
                guard.save(step, state(step))
                with pytest.raises(PitError) if step % 2 else nullcontext():
                    guard.wait()
                guard._barrier.wait(f"test: {step}")
                if rank == 0:
                    sizes[step] = len(store._values)

    assert on_ranks(3, work) == [None] * 3
    assert sizes[12] <= sizes[2] + 3
