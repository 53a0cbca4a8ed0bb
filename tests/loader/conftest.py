"""Versions of a few episodes of unequal length, with what their recordings say of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from pitools.dataset.ingest.ingest import ingest

Record = Callable[..., Path]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """record(lengths, name=, seed=, state=, masks=, tasks=, succeeded=, attributes=) -> the version's folder."""

    def make(
        lengths: Sequence[int],
        *,
        name: str = "pick",
        seed: int = 0,
        state: str = "obs/state",
        masks: dict[str, Sequence[int]] | None = None,
        tasks: Sequence[str] = (),
        succeeded: Sequence[int] | None = None,
        attributes: Sequence[dict[str, Any]] = (),
    ) -> Path:
        folder, random = tmp_path_factory.mktemp("recording"), np.random.default_rng(seed)
        with h5py.File(folder / "r.hdf5", "w") as file:
            for number, steps in enumerate(lengths):
                demo = file.create_group(f"data/demo_{number}")
                demo.attrs["num_samples"] = steps
                for key, value in (attributes[number] if attributes else {}).items():
                    demo.attrs[key] = value
                if tasks:
                    demo.attrs["language"] = tasks[number]
                demo["actions"] = random.normal(size=(steps, 3))
                demo["obs/image"] = random.integers(0, 255, (steps, 4, 6, 3), np.uint8)
                demo[state] = random.normal(size=(steps, 5)).astype(np.float32)
                if succeeded is not None:
                    demo["rewards"] = np.eye(steps)[-1] * (number in succeeded)
            for split, members in (masks or {}).items():
                file[f"mask/{split}"] = np.array([f"demo_{number}" for number in members], "S")
        return Path(ingest([folder / "r.hdf5"], root=folder / "data", name=name).path)

    return make
