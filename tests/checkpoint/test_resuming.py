"""What a restart goes on with: a checkpoint of step 0, and a store that does not grow."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from pitools.checkpoint.checkpointer import Checkpointer
from pitools.checkpoint.store import lookup, retention
from pitools.core.errors import PitError
from tests.checkpoint.conftest import Save
from tests.checkpoint.test_checkpointer import Files, Store, on_ranks, restored, saved, state

Pit = Callable[..., subprocess.CompletedProcess[str]]


class Deleting(Store):
    """A store whose keys can be deleted, as those of torch and JAX."""

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)


def test_a_checkpoint_of_step_0_is_one(folder: Path, save: Save) -> None:
    """`latest` names it, it is the newest, and it is restored."""
    assert lookup.latest_step(folder) is None
    save(0)
    assert lookup.latest_step(folder) == 0
    assert (folder / "latest").readlink() == Path("step_0")
    save(5)
    assert retention.prune_checkpoints(folder, 1)[-1].state == "removed"
    other = folder.with_name("other")
    saved(other, 0)
    assert (other / "latest").readlink() == Path("step_0")
    assert restored(other).step == 0  # type: ignore[union-attr]


def test_a_relative_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is where the loop was when it named it, wherever it goes."""
    folder.parent.mkdir(exist_ok=True)
    monkeypatch.chdir(folder.parent)
    with Checkpointer(Path(folder.name), Files()) as guard:
        monkeypatch.chdir("/")
        guard.save(1, state(1))
    assert lookup.latest_step(folder) == 1


def test_the_ranks_store_does_not_grow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After many saves and restores it holds no more keys than after a few: rank 0's memory is not the run's length."""
    monkeypatch.setattr("pitools.checkpoint.coordination.barrier._MAX_WRITTEN_KEYS", 0)
    sizes: dict[int, int] = {}
    store = Deleting()

    def work(rank: int, _: dict[str, Any]) -> None:
        keys = {"put": store.put, "get": store.get, "delete": store.delete}
        with Checkpointer(folder, Files(rank), rank=rank, world_size=3, **keys, timeout_s=20) as guard:
            for step in range(1, 13):
                guard.save(step, state(step))
                assert guard.restore(state(0)).step == step  # type: ignore[union-attr]
                if rank == 0:
                    sizes[step] = len(store._values)

    assert on_ranks(3, work) == [None] * 3
    assert sizes[12] <= sizes[2] + 3


def test_a_failed_save_leaves_no_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks said of it goes with the next meeting that all come to."""
    monkeypatch.setattr("pitools.checkpoint.coordination.barrier._MAX_WRITTEN_KEYS", 0)
    sizes: dict[int, int] = {}

    store, now = Deleting(), [0]

    def work(rank: int, _: dict[str, Any]) -> None:
        def full(name: str) -> None:
            if rank == 0 and name == "w" and now[0] % 2:
                raise OSError(28, "No space left on device")

        keys = {"put": store.put, "get": store.get, "delete": store.delete}
        with Checkpointer(folder, Files(rank, full), rank=rank, world_size=3, **keys, timeout_s=20) as guard:
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
