"""Names that a version keeps for its arrays of episodes are refused in any group, not stored and lost later."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from pitools.core.errors import DataError
from pitools.dataset.ingest.ingest import ingest


@pytest.mark.parametrize("name", ["episode_progress", "obs/episode_progress", "obs/deep/episode_"])
def test_reserved_prefix_in_any_group(tmp_path: Path, name: str) -> None:
    """A re-encoded version would leave such an array out without a note."""
    with h5py.File(tmp_path / "r.hdf5", "w") as file:
        demo = file.create_group("data/demo_0")
        demo.attrs["num_samples"] = 3
        demo["actions"] = np.zeros((3, 2), np.float32)
        demo[name] = np.zeros((3, 1), np.float32)
    with pytest.raises(DataError, match="episode_"):
        ingest([tmp_path / "r.hdf5"], root=tmp_path / "data", name="x")
