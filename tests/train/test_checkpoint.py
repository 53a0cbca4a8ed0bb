"""A checkpoint is one whole file, and the newest is the one with the most steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import DataError, PitError
from pitools.loader.loader import State
from pitools.train import checkpoint

STATE = {"params/cam/conv0/w": np.arange(6, dtype=np.float32).reshape(2, 3), "momentum/b": np.zeros(3, np.float32)}
SEEN = State(identity={"dataset": "ab", "seed": "7"}, position=12 * 64)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    """Names, shapes and every bit come back; the folder is made when it is not there."""
    path = checkpoint.save(tmp_path / "run" / "checkpoints", 12, STATE, SEEN)
    assert path.name == "step_12.npz"
    loaded, seen = checkpoint.load(path, STATE)
    assert seen == SEEN
    assert loaded.keys() == STATE.keys()
    for name, array in STATE.items():
        assert loaded[name].tobytes() == array.tobytes()
    assert [entry.name for entry in path.parent.iterdir()] == ["step_12.npz"]


def test_newest_counts_steps(tmp_path: Path) -> None:
    """Step 10 comes after step 9; unfinished and foreign files are no checkpoints; no folder means none."""
    assert checkpoint.newest(None) == checkpoint.newest(tmp_path / "absent") == checkpoint.newest(tmp_path) == ""
    for name in ("step_9.npz", "step_10.npz", ".step_11.npz.123.ab", "step_12.npz.tmp", "step_x.npz", "step_13"):
        (tmp_path / name).touch()
    assert checkpoint.newest(tmp_path) == "step_10.npz"
    assert checkpoint.steps("step_10.npz") == 10
    assert checkpoint.steps("") == 0


@pytest.mark.parametrize("keep", [0, 10, 200, -1])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, keep: int) -> None:
    """A file cut anywhere is an error that names it and says what to do, not a part of a state."""
    path = checkpoint.save(tmp_path, 3, STATE, SEEN)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError) as caught:
        checkpoint.load(path, STATE)
    assert caught.value.where == str(path)
    assert caught.value.hint


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    """A checkpoint that holds Python objects is refused: loading one would run what it says."""
    path = tmp_path / "step_1.npz"
    np.savez(path, **{"params/w": np.array([{}], dtype=object)})
    with pytest.raises(DataError):
        checkpoint.load(path, {"params/w": np.zeros(1)})


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """Another shape, a missing name or a name too many are told with both shapes."""
    path = checkpoint.save(tmp_path, 3, STATE, SEEN)
    for like in ({**STATE, "momentum/b": np.zeros(4)}, {**STATE, "new": np.zeros(1)}, {"momentum/b": np.zeros(3)}):
        with pytest.raises(DataError, match="shape"):
            checkpoint.load(path, like)


def test_a_checkpoint_of_before_there_was_a_loader_is_refused(tmp_path: Path) -> None:
    """It does not say which samples were seen: to go on in another order would not be to resume."""
    np.savez(tmp_path / "step_3.npz", **STATE)
    with pytest.raises(DataError, match="which samples were seen") as caught:
        checkpoint.load(tmp_path / "step_3.npz", STATE)
    assert "begin again" in caught.value.hint


def test_a_full_folder_leaves_the_old_one(tmp_path: Path) -> None:
    """A save that cannot be made is an error of ours, and the checkpoint before it stands."""
    old = checkpoint.save(tmp_path, 3, STATE, SEEN)
    (tmp_path / "step_4.npz").mkdir()
    with pytest.raises(PitError):
        checkpoint.save(tmp_path, 4, STATE, SEEN)
    assert checkpoint.load(old, STATE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3.npz", "step_4.npz"]


@given(total=st.integers(1, 100), every=st.integers(0, 20))
def test_a_checkpoint_is_due_at_the_end_and_every_so_often(total: int, every: int) -> None:
    """The last step is always kept, and between two checkpoints lie never more than `every` steps."""
    kept = [done for done in range(1, total + 1) if checkpoint.due(done, total, every, 0)]
    assert kept[-1] == total
    assert len(kept) == (1 if not every else -(-total // every))
    assert all(checkpoint.due(done, total, every, 15) for done in range(1, total + 1))
