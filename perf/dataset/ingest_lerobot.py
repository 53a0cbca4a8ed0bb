"""LeRobot's own way to make a dataset: create, add_frame, save_episode, with videos, in an interpreter that has it.

python -m perf.dataset.ingest_lerobot FRAMES STEPS DEST        one JSON line: version, how, wall_s

FRAMES: raw frames of two cameras, one camera after the other, STEPS of each.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

import numpy as np

from perf.loader.lerobot_loader import without_torchvision_ops

SHAPE, FPS = (480, 640, 3), 50


def main(frames: str, steps: int, dest: str) -> None:
    library = without_torchvision_ops()
    try:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
    except ImportError:
        from lerobot.common.datasets.lerobot_dataset import LeRobotDataset

    images = np.memmap(frames, np.uint8, "r").reshape(2, steps, *SHAPE)
    video = {"dtype": "video", "shape": SHAPE, "names": ["height", "width", "channel"]}
    vector = {"dtype": "float32", "shape": (14,), "names": None}
    features = {
        "observation.images.top": video,
        "observation.images.wrist": video,
        "observation.state": vector,
        "action": vector,
    }
    began = time.perf_counter()
    created = LeRobotDataset.create("pit/bench", FPS, features, root=dest, use_videos=True, image_writer_threads=8)
    for step in range(steps):
        frame = {
            "observation.images.top": np.array(images[0, step]),
            "observation.images.wrist": np.array(images[1, step]),
            "observation.state": np.zeros(14, np.float32),
            "action": np.zeros(14, np.float32),
        }
        created.add_frame(frame, task="pick")
    created.save_episode()
    wall_s = time.perf_counter() - began
    del library
    print(json.dumps({"version": version("lerobot"), "wall_s": wall_s}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
