"""What the loader benchmarks read: recordings like a camera's and like a simulator's, ingested as a user would.

camera: the real frames of ../shared/data/robot, enlarged, cropped and moved a little from step to step; hardly anything
compresses them. rendered: a still background and before it what moves, in few colours, as simulators draw.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perf.harness.workspace import REPO, execute, print_progress

REAL = REPO.parent / "shared" / "data" / "robot" / "bridge_widowx_robomimic.hdf5"
SIDE, LENGTH, ACTION = 96, 64, 14  # pixels, steps of a window, numbers of an action
IMAGE = "obs/front_image"
EPISODE = 500  # steps
_MOVING, _COLOURS = 0.58, 16  # of a rendered frame's rows, and in how many shades


class Recording(NamedTuple):
    """One recording, and the same bytes as plain files. frames: (steps, 96, 96, 3) uint8; actions: (steps, 14) f32."""

    hdf5: Path
    frames: Path
    actions: Path
    steps: int

    def map(self, path: Path) -> NDArray[Any]:
        """One of the plain files, mapped."""
        if path == self.frames:
            return np.memmap(path, np.uint8, "r", shape=(self.steps, SIDE, SIDE, 3))
        return np.memmap(path, np.float32, "r", shape=(self.steps, ACTION))


def record(home: Path, kind: str, *, episodes: int, seed: int = 1) -> Recording:
    """A recording in robomimic's layout, of frames of this kind."""
    import h5py

    home.mkdir(parents=True, exist_ok=True)
    recording = Recording(home / f"{kind}.hdf5", home / f"{kind}.frames", home / f"{kind}.actions", episodes * EPISODE)
    random = np.random.default_rng(seed)
    with (
        h5py.File(recording.hdf5, "w") as file,
        recording.frames.open("wb") as frames,
        recording.actions.open("wb") as actions,
    ):
        for number in range(episodes):
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = EPISODE
            image = KINDS[kind](random, EPISODE)
            action = random.normal(size=(EPISODE, ACTION)).cumsum(axis=0).astype(np.float32)
            frames.write(image.data)
            actions.write(action.data)
            demo[IMAGE], demo["actions"] = image, action
    return recording


def record_actions(home: Path, *, episodes: int, seed: int = 1) -> Recording:
    """A recording of actions alone."""
    import h5py

    home.mkdir(parents=True, exist_ok=True)
    recording = Recording(home / "actions.hdf5", home / "none", home / "actions", episodes * EPISODE)
    walk = np.random.default_rng(seed).normal(size=(recording.steps, ACTION)).cumsum(axis=0).astype(np.float32)
    walk.tofile(recording.actions)
    with h5py.File(recording.hdf5, "w") as file:
        for number in range(episodes):
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = EPISODE
            demo["actions"] = walk[number * EPISODE : (number + 1) * EPISODE]
    return recording


def ingest_recording(made: Recording, root: Path, codec: str) -> Path:
    """The recording's version under `root`, by our command."""
    name = f"{made.hdf5.stem}-{codec}"
    execute(
        sys.executable, "-m", "pitools", "dataset", "ingest", made.hdf5, "--to", root, "--name", name, "--codec", codec
    )
    (path,) = (path for path in (root / name).iterdir() if not path.name.startswith("."))
    if codec != "raw" and (path / IMAGE).is_dir():
        stored = sum(file.stat().st_size for file in (path / IMAGE / "c").rglob("*") if file.is_file())
        print_progress(f"{name}: {made.frames.stat().st_size / stored:.2f} times smaller")
    return path


def _rendered(random: np.random.Generator, steps: int) -> NDArray[np.uint8]:
    frames = np.empty((steps, SIDE, SIDE, 3), np.uint8)
    frames[:] = random.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    rows = int(SIDE * _MOVING)
    frames[:, SIDE - rows :] = random.integers(0, _COLOURS, (steps, rows, SIDE, 3), np.uint8) * np.uint8(8)
    return frames


def _camera(random: np.random.Generator, steps: int) -> NDArray[np.uint8]:
    import h5py
    from PIL import Image

    large = SIDE + 12
    with h5py.File(REAL) as file:
        demos = [file[f"data/{name}/obs/agentview_image"][:] for name in random.permutation(sorted(file["data"]))]
    still = np.concatenate(demos)
    still = np.stack([np.asarray(Image.fromarray(x).resize((large, large), Image.Resampling.BICUBIC)) for x in still])
    frames = np.empty((steps, SIDE, SIDE, 3), np.uint8)
    shift = np.clip(random.integers(-1, 2, (steps, 2)).cumsum(axis=0) + 6, 0, large - SIDE)
    light = random.integers(-8, 9, steps)
    for step, (y, x) in enumerate(shift.tolist()):
        crop = still[step % len(still), y : y + SIDE, x : x + SIDE].astype(np.int16)
        frames[step] = np.clip(crop + light[step], 0, 255)
    return frames


KINDS: dict[str, Callable[[np.random.Generator, int], NDArray[np.uint8]]] = {"rendered": _rendered, "camera": _camera}


def kinds() -> list[str]:
    """The kinds of frames that can be made here."""
    return list(KINDS) if REAL.is_file() else ["rendered"]
