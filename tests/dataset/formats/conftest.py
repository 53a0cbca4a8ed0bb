"""LeRobot datasets as LeRobot 0.4 writes them, and what readers give for whole recordings."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pitools.dataset.formats.model import Episode
from pitools.dataset.formats.readers import open_reader

FPS = 20
CAMERA = "observation.images.top"


def png(frame: np.ndarray) -> bytes:
    """A frame as a PNG file."""
    out = io.BytesIO()
    Image.fromarray(frame).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def whole() -> Callable[..., dict[str, np.ndarray]]:
    """Every array of an episode, as a reader gives it, in one go or in parts of this many steps."""

    def read(episode: Episode, part: int = 0) -> dict[str, np.ndarray]:
        actual = {}
        reader = open_reader(episode)
        for name, column in episode.columns.items():
            out = np.empty((episode.steps, *column.row), column.dtype)
            for start in range(0, episode.steps, part or episode.steps):
                stop = min(episode.steps, start + (part or episode.steps))
                reader.read_into(column, out[start:stop], start, stop)
            actual[name] = out
        reader.close()
        return actual

    return read


class LeRobot:
    """A dataset folder and what is in it: `frames` (steps, 32, 48, 3) before a video loses some, and `values`."""

    def __init__(self, path: Path, lengths: Sequence[int], *, video: bool) -> None:
        self.path, self.lengths, self.video = path, lengths, video
        rng = np.random.default_rng(0)
        total = sum(lengths)
        self.values = {
            "action": rng.normal(size=(total, 3)).astype(np.float32),
            "observation.state": rng.normal(size=(total, 4)).astype(np.float32),
            "observation.tactile": rng.normal(size=(total, 2, 3)).astype(np.float32),
            "next.reward": rng.normal(size=total).astype(np.float32),
            "next.done": np.concatenate([np.arange(n) == n - 1 for n in lengths]),
            "timestamp": np.concatenate([np.arange(n) / FPS for n in lengths]).astype(np.float32),
            "frame_index": np.concatenate([np.arange(n) for n in lengths]),
            "episode_index": np.repeat(np.arange(len(lengths)), lengths),
            "index": np.arange(total),
            "task_index": np.repeat(np.arange(len(lengths)) % 2, lengths),
        }
        # Each frame says its number, in bars that survive compression.
        bits = (np.arange(total)[:, None] >> np.arange(6)) & 1
        bars = np.repeat(bits, 8, axis=1).astype(np.uint8) * 200 + 20
        self.frames = np.repeat(np.repeat(bars[:, None, :, None], 32, axis=1), 3, axis=3)
        self.files = [(0, len(lengths))] if len(lengths) < 3 else [(0, 2), (2, len(lengths))]

    def write(self) -> Path:
        """The whole folder."""
        offsets = [0, *np.cumsum(self.lengths).tolist()]
        self._info()
        tasks = pa.table({"task_index": [0, 1], "__index_level_0__": ["do 0", "do 1"]})
        self._table("meta/tasks.parquet", tasks)
        rows = []
        for number, (low, high) in enumerate(self.files):
            self.data(number, low, high)
            if self.video:
                self.clip(
                    self.path / f"videos/{CAMERA}/chunk-000/file-{number:03d}.mp4",
                    self.frames[offsets[low] : offsets[high]],
                )
            for i in range(low, high):
                row = {
                    "episode_index": i,
                    "tasks": [f"do {i % 2}"],
                    "length": self.lengths[i],
                    "data/chunk_index": 0,
                    "data/file_index": number,
                    "dataset_from_index": offsets[i],
                    "dataset_to_index": offsets[i + 1],
                    "stats/action/min": [0.0],
                }
                if self.video:
                    clip = {
                        "chunk_index": 0,
                        "file_index": number,
                        "from_timestamp": (offsets[i] - offsets[low]) / FPS,
                        "to_timestamp": (offsets[i + 1] - offsets[low]) / FPS,
                    }
                    row |= {f"videos/{CAMERA}/{key}": value for key, value in clip.items()}
                rows.append(row)
        self._table("meta/episodes/chunk-000/file-000.parquet", pa.Table.from_pylist(rows))
        return self.path

    def data(self, number: int, low: int, high: int) -> None:
        """A data file of episodes [low, high), a row group each."""
        offsets = [0, *np.cumsum(self.lengths).tolist()]
        path = self.path / f"data/chunk-000/file-{number:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        tables = []
        for i in range(low, high):
            columns: dict[str, Any] = {}
            for key, values in self.values.items():
                part = values[offsets[i] : offsets[i + 1]]
                if part.ndim == 2:
                    columns[key] = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), part.shape[1])
                else:
                    columns[key] = pa.array(part.tolist(), pa.list_(pa.list_(pa.float32())) if part.ndim == 3 else None)
                if part.ndim == 1:
                    columns[key] = pa.array(part)
            if not self.video:
                frames = self.frames[offsets[i] : offsets[i + 1]]
                cells = [{"bytes": png(frame), "path": f"frame-{t:06d}.png"} for t, frame in enumerate(frames)]
                columns[CAMERA] = pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
            tables.append(pa.table(columns))
        with pq.ParquetWriter(path, tables[0].schema) as writer:
            for table in tables:
                writer.write_table(table)

    def clip(self, path: Path, frames: np.ndarray, drop: Sequence[int] = ()) -> None:
        """A video of these frames at FPS, those in `drop` left out but for their time."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=FPS, options={"g": "7", "crf": "10"})
            stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
            for i, frame in enumerate(frames):
                if i in drop:
                    continue
                picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
                picture.pts = i
                container.mux(stream.encode(picture))
            container.mux(stream.encode(None))

    def _info(self) -> None:
        features = {
            key: {"dtype": values.dtype.name, "shape": [*(values.shape[1:] or (1,))], "names": None}
            for key, values in self.values.items()
        }
        features[CAMERA] = {
            "dtype": "video" if self.video else "image",
            "shape": [32, 48, 3],
            "names": ["height", "width", "channels"],
        }
        info = {
            "codebase_version": "v3.0",
            "robot_type": "toy",
            "total_episodes": len(self.lengths),
            "fps": FPS,
            "total_frames": sum(self.lengths),
            "splits": {"train": f"0:{len(self.lengths)}"},
            "features": features,
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        }
        (self.path / "meta").mkdir(parents=True)
        (self.path / "meta/info.json").write_text(json.dumps(info, indent=4))

    def _table(self, name: str, table: pa.Table) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, self.path / name)


@pytest.fixture
def lerobot(tmp_path: Path) -> Callable[..., LeRobot]:
    """Writes a LeRobot v3 dataset of these episode lengths."""

    def make(*lengths: int, video: bool = True) -> LeRobot:
        le_robot = LeRobot(tmp_path / "lerobot", lengths, video=video)
        le_robot.write()
        return le_robot

    return make
