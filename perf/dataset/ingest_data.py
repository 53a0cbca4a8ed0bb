"""What the ingest benchmarks read: ALOHA episodes of two VGA cameras, as they are recorded: raw frames, one to a chunk.

The frames are real ones of ../shared/data/robot, enlarged, faded into each other and given a camera's noise; without
that folder, moving waves of colour with the same noise. LZ4 makes nothing of them, and nothing of a real camera's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perf.harness.workspace import REPO

REAL = REPO.parent / "shared" / "data" / "robot" / "bridge_widowx_robomimic.hdf5"
HEIGHT, WIDTH = 480, 640
FRAME_BYTES = HEIGHT * WIDTH * 3
CAMERAS = ("top", "wrist")
_HELD = 8  # steps from one real frame to the next
_NOISE, _SHIFT = 2.0, 64


def record(home: Path, *, files: int, steps: int, seed: int = 1) -> list[Path]:
    """Episodes of so many steps each: two cameras, qpos, qvel and action of 14 joints."""
    import h5py

    home.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(files):
        random = np.random.default_rng([seed, number])
        paths.append(home / f"episode_{number}.hdf5")
        with h5py.File(paths[-1], "w") as file:
            file.attrs["sim"] = False
            joints = random.normal(size=(3, steps, 14)).cumsum(axis=1) / 100
            file["action"] = joints[0].astype(np.float32)
            file["observations/qpos"], file["observations/qvel"] = joints[1], joints[2]
            for camera, name in enumerate(CAMERAS):
                shape = (steps, HEIGHT, WIDTH, 3)
                images = file.create_dataset(f"observations/images/{name}", shape, "u1", chunks=(1, *shape[1:]))
                for step, frame in enumerate(frames(random, len(CAMERAS) * number + camera, steps)):
                    images[step] = frame
    return paths


def frames(random: np.random.Generator, scene: int, steps: int) -> Iterator[NDArray[np.uint8]]:
    """Frames of one camera."""
    keys = _real(scene) if REAL.is_file() else _waves(scene)
    noise = random.normal(0, _NOISE, (HEIGHT + _SHIFT, WIDTH + _SHIFT, 3)).round().astype(np.int16)
    for step in range(steps):
        position, part = divmod(step, _HELD)
        fade = part / _HELD
        y, x = random.integers(0, _SHIFT, 2)
        frame = keys[position % len(keys)] * (1 - fade) + keys[(position + 1) % len(keys)] * fade
        yield np.clip(frame + noise[y : y + HEIGHT, x : x + WIDTH], 0, 255).astype(np.uint8)


def _real(scene: int) -> list[NDArray[Any]]:
    import h5py
    from PIL import Image

    with h5py.File(REAL) as file:
        demos = sorted(file["data"])
        small = file[f"data/{demos[scene % len(demos)]}/obs/agentview_image"][:]
    large = (Image.fromarray(frame).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC) for frame in small)
    return [np.asarray(frame).astype(np.float32) for frame in large]


def _waves(scene: int) -> list[NDArray[Any]]:
    y, x = np.mgrid[:HEIGHT, :WIDTH].astype(np.float32) / 90
    tones = [np.sin(x * (1 + c / 3) + y + scene + k / 3) * 100 + 128 for k in range(10) for c in range(3)]
    return [np.stack(tones[3 * k : 3 * k + 3], axis=-1) for k in range(10)]
