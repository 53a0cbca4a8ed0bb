"""LeRobot's own loader on its own mp4: windows of frames by `delta_timestamps`, in an interpreter that has lerobot.

python -m perf.loader.lerobot_loader FRAMES FOLDER WINDOWS        one JSON line: version, how, seconds of each window
"""

from __future__ import annotations

import json
import re
import sys
import time
from importlib.metadata import version

import numpy as np

EPISODE, EPISODES, SIDE, LENGTH, FPS = 500, 4, 96, 64, 10


def without_torchvision_ops() -> object:
    """torchvision's compiled part rarely fits a CPU build of torch. Nothing here calls it, but the import looks for
    its operators: declare those that it misses. They last as long as what is returned."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    while True:
        try:
            import torchvision  # noqa: F401
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if not missing:
                raise
            library.define(f"{missing[1]}(Tensor x) -> Tensor")
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]
        else:
            return library


class VideoReader:
    """What torchvision had under this name and LeRobot still asks it for, with PyAV; later releases left it out."""

    def __init__(self, path: str, stream: str) -> None:
        import av

        self.container = av.open(path)
        self._frames = self.container.decode(video=0)

    def seek(self, time_s: float, keyframes_only: bool = False) -> VideoReader:
        """Go to the key frame before this time."""
        self.container.seek(int(time_s * 1_000_000), any_frame=not keyframes_only, backward=True)
        return self

    def __iter__(self) -> VideoReader:
        return self

    def __next__(self) -> dict[str, object]:
        import torch

        frame = next(self._frames)
        return {"data": torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1), "pts": frame.time}


def main(frames_path: str, folder: str, windows: int) -> None:
    library = without_torchvision_ops()
    import torchvision

    if not hasattr(torchvision.io, "VideoReader"):
        torchvision.io.VideoReader = VideoReader
    try:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
    except ImportError:
        from lerobot.common.datasets.lerobot_dataset import LeRobotDataset

    frames = np.memmap(frames_path, np.uint8, "r").reshape(-1, SIDE, SIDE, 3)
    features = {
        "observation.images.front": {
            "dtype": "video",
            "shape": (SIDE, SIDE, 3),
            "names": ["height", "width", "channel"],
        },
        "action": {"dtype": "float32", "shape": (14,), "names": None},
    }
    created = LeRobotDataset.create("pit/bench", FPS, features, root=folder, use_videos=True)
    for number in range(EPISODES * EPISODE):
        created.add_frame(
            {"observation.images.front": np.ascontiguousarray(frames[number]), "action": np.zeros(14, np.float32)},
            task="pick",
        )
        if number % EPISODE == EPISODE - 1:
            created.save_episode()
    deltas = {"observation.images.front": [step / FPS for step in range(LENGTH)]}
    dataset = LeRobotDataset("pit/bench", root=folder, delta_timestamps=deltas, video_backend="pyav")
    random, seconds = np.random.default_rng(0), []
    for _ in range(windows + 1):
        start = int(random.integers(0, EPISODES)) * EPISODE + int(random.integers(0, EPISODE - LENGTH))
        began = time.perf_counter()
        assert dataset[start]["observation.images.front"].shape == (LENGTH, 3, SIDE, SIDE)
        seconds.append(time.perf_counter() - began)
    del library
    how = f"LeRobotDataset on its mp4, delta_timestamps, {dataset.video_backend}"
    print(json.dumps({"version": version("lerobot"), "how": how, "seconds": seconds[1:]}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
