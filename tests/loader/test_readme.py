from __future__ import annotations

import re
from pathlib import Path

import h5py
import numpy as np

from pitools.dataset.ingest.ingest import ingest


def test_the_example_of_the_readme_works(repo: Path, tmp_path: Path):
    """Its block runs as it is printed, and gives what its comments say."""
    with h5py.File(tmp_path / "r.hdf5", "w") as file:
        for number in range(3):
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = 40
            demo["actions"] = np.zeros((40, 7), np.float32)
            demo["obs/image"] = np.zeros((40, 8, 8, 3), np.uint8)
    path = ingest([tmp_path / "r.hdf5"], root=tmp_path / "data", name="pick").path
    block, more = re.findall(r"```python\n(.*?)```", (repo / "pitools/loader/README.md").read_text(), re.DOTALL)
    names: dict[str, object] = {"DATASET": path}
    exec(block, names)
    assert names["batch"].arrays["action"].shape == (64, 16, 7)
    exec(more, names)
    batch, state = names["batch"], names["state"]
    assert batch.arrays["action"].shape == (64, 16, 7)
    assert batch.arrays["obs/image"].shape == (64, 2, 8, 8, 3)
    assert batch.valid_mask["action"].shape == (64, 16)
    assert state["position"] == 64  # type: ignore[index]
    assert batch.extras["instruction"].tolist() == [-1] * 64
    assert len(names["scale"].mean) == 7
