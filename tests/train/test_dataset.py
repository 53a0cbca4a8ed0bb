"""What a loader gives of demonstrations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
import pytest

from pitools.core.errors import DataError
from pitools.dataset.ingest.ingest import ingest
from pitools.loader.loader import Loader
from pitools.store import version_state
from pitools.store.manifest import Statistics
from pitools.store.reader.version_reader import VersionReader
from pitools.train import dataset
from pitools.train.dataset import DemonstrationDataset


def epoch(data: DemonstrationDataset, samples: int, global_batch_size: int = 6) -> dict[str, Any]:
    """All samples of an epoch, by array, in the dataset's order."""
    loader = Loader(data, global_batch_size=global_batch_size)
    read = [({**batch.arrays}, batch.sample_indices) for batch in islice(copies(loader), samples // global_batch_size)]
    loader.close()
    order = np.argsort(np.concatenate([numbers for _, numbers in read]))
    return {name: np.concatenate([arrays[name] for arrays, _ in read])[order] for name in data.fields}


def copies(loader: Loader) -> Any:
    for batch in loader:
        yield batch._replace(arrays={name: array.copy() for name, array in batch.arrays.items()})


def test_an_epoch_is_the_split_to_train_on(small: Path) -> None:
    """Frames are the recording's own, of the split `train` alone; what is no image or vector is left out."""
    data, raw = DemonstrationDataset(small), VersionReader(small)
    assert (data.cameras, data.proprio) == (["obs/eye_image"], ["obs/joints"])
    assert list(data.fields) == ["obs/eye_image", "action", "proprio"]
    actual = epoch(data, 60)
    np.testing.assert_array_equal(actual["obs/eye_image"], raw.read("obs/eye_image", 10, 70))
    for name, source in (("proprio", "obs/joints"), ("action", "action")):
        rows = raw.read(source, 0, 70)
        assert actual[name].dtype == np.float32
        np.testing.assert_allclose(actual[name], ((rows - rows.mean(0)) / rows.std(0))[10:], atol=1e-5)


def test_ranks_share_a_batch(small: Path) -> None:
    """Parts of 2 ranks are the batch of one; with a seed, the order is another."""
    full = next(Loader(DemonstrationDataset(small), global_batch_size=15))
    parts = [
        next(Loader(DemonstrationDataset(small), global_batch_size=15, rank=rank, world_size=2)) for rank in range(2)
    ]
    for name, array in full.arrays.items():
        np.testing.assert_array_equal(np.concatenate([part.arrays[name] for part in parts]), array)
    assert (
        next(Loader(DemonstrationDataset(small, seed=1), global_batch_size=15)).sample_indices.tolist()
        != full.sample_indices.tolist()
    )


def test_columns_are_brought_to_one_scale(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean 0 and deviation 1 a column, whatever the size of the blocks that the sums are made in."""
    raw = VersionReader(small)
    rows = raw.read("obs/joints", 0, 70)
    for block in (7, 1 << 16):
        monkeypatch.setattr(dataset, "BLOCK_ROWS", block)
        mean, deviation = dataset.compute_moments(raw, "obs/joints")
        np.testing.assert_allclose(mean, rows.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(deviation, rows.std(axis=0), rtol=1e-12)


def test_statistics_are_the_manifest_s(small: Path) -> None:
    """Where the manifest has them nothing is read for them; else they are computed."""
    raw = VersionReader(small)
    statistics = Statistics(
        rows=70, minimum=(0.0,) * 3, maximum=(9.0,) * 3, mean=(1.0, 2.0, 3.0), deviation=(2.0, 4.0, 0.0)
    )
    raw.manifest = msgspec.structs.replace(raw.manifest, statistics={"action": statistics})
    scale = dataset.make_normalizer(raw, "action")
    assert (scale.mean.tolist(), scale.deviation.tolist()) == ([1, 2, 3], [2, 4, 1])
    np.testing.assert_allclose(scale.apply(np.array([[3.0, 2.0, 5.0]])), [[1, 0, 2]])
    joints = dataset.make_normalizer(raw, "obs/joints")
    np.testing.assert_allclose(joints.mean, raw.read("obs/joints", 0, 70).mean(axis=0))


def test_quarantine_does_not_scale(small: Path) -> None:
    """The scale is that of the episodes that are not in quarantine, though the manifest's statistics are of all."""
    version_state.set_quarantine(
        small, version_state.Quarantine(whole_version=False, set_at="", set_by="", episodes={1: ("jump",)})
    )
    try:
        actual = epoch(DemonstrationDataset(small), 35, 7)["action"]
    finally:
        version_state.set_quarantine(small, None)
    rows = VersionReader(small).read("action", 0, 70)
    kept = np.concatenate([rows[:10], rows[35:]])
    np.testing.assert_allclose(actual, (rows[35:] - kept.mean(0)) / kept.std(0), atol=1e-5)


def test_a_column_that_never_changes_stays_finite(tmp_path: Path) -> None:
    """A gripper that is always open is all zeros, not a division by zero."""
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["data/demo_0/actions"] = np.tile(np.float32([0.3, 1.0]), (9, 1)) * np.arange(9)[:, None] ** [[1, 0]]
        file["data/demo_0/obs/joints"] = np.ones((9, 2))
    data = DemonstrationDataset(Path(ingest([tmp_path / "a.hdf5"], root=tmp_path / "r", name="a").path))
    actual = epoch(data, 9, 3)
    assert actual.keys() == {"proprio", "action"}
    assert np.isfinite(actual["action"]).all()
    np.testing.assert_array_equal(actual["action"][:, 1], 0)
    np.testing.assert_array_equal(actual["proprio"], 0)


def test_a_dataset_with_nothing_to_see_is_refused(tmp_path: Path, recording: Callable[..., Path]) -> None:
    """Without images and vectors under `obs/` there is nothing to act on, and the error says what there is."""
    skip = ["obs/eye_image", "obs/joints"]
    version = ingest([recording(tmp_path / "a.hdf5", (4, 4))], root=tmp_path / "r", name="a", skip_arrays=skip)
    with pytest.raises(DataError) as caught:
        DemonstrationDataset(Path(version.path))
    assert "obs/depth" in caught.value.hint
