"""Which steps make which batch, and what a dataset gives for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import ConfigError, DataError
from pitools.dataset.ingest import ingest
from pitools.dataset.read import open_dataset
from pitools.train import batches

counts = st.integers(1, 50)


@given(seed=st.integers(0, 2**40), batch=counts, samples=counts)
def test_each_epoch_has_every_sample_once(seed: int, batch: int, samples: int) -> None:
    """Batches laid end to end are one permutation of all samples after another, wherever batches are cut."""
    steps = -(-2 * samples // batch)
    order = np.concatenate([batches.global_batch(seed, step, batch, samples) for step in range(steps)])
    assert sorted(order[:samples]) == sorted(order[samples : 2 * samples]) == list(range(samples))


def test_the_order_is_that_of_the_seed_and_no_other() -> None:
    """A step's batch depends neither on the steps asked for before nor on anything but seed and step."""
    late = batches.global_batch(7, 90, 16, 1000)
    assert [*batches.global_batch(7, 3, 16, 1000)] != [*late]
    assert [*batches.global_batch(8, 90, 16, 1000)] != [*late]
    assert [*batches.global_batch(7, 90, 16, 1000)] == [*late]


@given(batch=counts, world_size=counts)
def test_shares_are_the_batch(batch: int, world_size: int) -> None:
    """Shares in rank order are the global batch, none is empty, and none is two larger than another."""
    whole = np.arange(batch) * 3
    if batch < world_size:
        with pytest.raises(ConfigError, match="no sample"):
            batches.share(whole, 0, world_size)
        return
    parts = [batches.share(whole, rank, world_size) for rank in range(world_size)]
    assert [*np.concatenate(parts)] == [*whole]
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


def test_a_batch_is_the_steps_asked_for(small: Path) -> None:
    """Frames are the recording's own, of the split `train` alone; what is no image or vector is left out."""
    data, raw = batches.Demonstrations(small), open_dataset(small)
    assert (data.cameras, data.proprio) == (["obs/eye_image"], ["obs/joints"])
    assert [*data.indices] == [*range(10, 70)]
    batch = data.batch(np.array([5, 0, 5]))
    assert batch.images.keys() == {"obs/eye_image"}
    np.testing.assert_array_equal(batch.images["obs/eye_image"], raw.take("obs/eye_image", [15, 10, 15]))
    assert (batch.proprio.shape, batch.action.shape, batch.action.dtype) == ((3, 4), (3, 3), np.float32)
    assert batch.nbytes == 3 * (16 * 16 * 3 + 4 * 4 + 3 * 4)


def test_columns_are_brought_to_one_scale(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean 0 and deviation 1 a column, whatever the size of the blocks that the sums are made in."""
    raw = open_dataset(small)
    rows = raw.read("obs/joints", 0, 70)
    for block in (7, 1 << 16):
        monkeypatch.setattr(batches, "BLOCK", block)
        scaled = batches.scale(raw, "obs/joints").apply(rows)
        np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=1e-6)
        np.testing.assert_allclose(scaled.std(axis=0), 1, atol=1e-6)


def test_a_column_that_never_changes_stays_finite(tmp_path: Path) -> None:
    """A gripper that is always open is all zeros, not a division by zero."""
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["data/demo_0/actions"] = np.tile(np.float32([0.3, 1.0]), (9, 1)) * np.arange(9)[:, None] ** [[1, 0]]
        file["data/demo_0/obs/joints"] = np.ones((9, 2))
    data = batches.Demonstrations(Path(ingest([tmp_path / "a.hdf5"], root=tmp_path / "r", name="a").path))
    batch = data.batch(np.arange(9))
    assert batch.images == {}
    assert np.isfinite(batch.action).all()
    np.testing.assert_array_equal(batch.action[:, 1], 0)
    np.testing.assert_array_equal(batch.proprio, 0)


def test_a_dataset_with_nothing_to_see_is_refused(tmp_path: Path, recording: Callable[..., Path]) -> None:
    """Without images and vectors under `obs/` there is nothing to act on, and the error says what there is."""
    skip = ["obs/eye_image", "obs/joints"]
    version = ingest([recording(tmp_path / "a.hdf5", (4, 4))], root=tmp_path / "r", name="a", skip=skip)
    with pytest.raises(DataError) as caught:
        batches.Demonstrations(Path(version.path))
    assert "obs/depth" in caught.value.hint
