"""Read the `meta` folder of a LeRobot v3 dataset."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from pitools.core.errors import DataError
from pitools.dataset.formats.model import check_row
from pitools.dataset.formats.readers import require_lerobot_tools

RETRY_HINT = "download it again, or convert it again from where it was recorded"
_VERSION = "v3."
_FIELD = re.compile(r"\{(chunk_index|file_index)(?::0(\d))?d?\}|\{(video_key)\}")
_DTYPES = {
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
}
_CHANNELS = (1, 3, 4)


class Feature(msgspec.Struct, frozen=True, kw_only=True):
    """One feature. dtype: `video`, `image`, a NumPy dtype, or an unsupported one. names: of its axes or items."""

    dtype: str
    shape: tuple[int, ...]
    names: Any = None
    info: dict[str, Any] | None = None
    key: str = ""

    @property
    def numpy(self) -> str:
        """Return the dtype of the stored array."""
        return "uint8" if self.dtype in ("video", "image") else self.dtype

    @property
    def row(self) -> tuple[int, ...]:
        """Return the shape of a step. Images are (H, W, channels); features of a step as a whole, such as its reward,
        are scalars."""
        if self.dtype in ("video", "image") and len(self.shape) == 3:
            channels_first = self.shape[0] in _CHANNELS and self.shape[-1] not in _CHANNELS
            return (*self.shape[1:], self.shape[0]) if channels_first else self.shape
        is_scalar = self.shape == (1,) and not self.key.startswith(("observation.", "action"))
        return () if is_scalar else self.shape

    def check(self, where: str) -> None:
        """Raise DataError if the feature cannot be stored."""
        hint = "leave it out with --skip-array"
        if self.dtype not in (*_DTYPES, "video", "image"):
            raise DataError(f"dtype {self.dtype} (expected numbers, video or image)", where=where, hint=hint)
        if self.dtype == "video" and ((self.info or {}).get("video.is_depth_map") or self.row[2:] != (3,)):
            raise DataError(f"a video of {self.row} (expected colour: 3 channels, no depth)", where=where, hint=hint)
        check_row(self.row, self.numpy, where)


class VideoClip(msgspec.Struct, frozen=True):
    """An episode's part of a video file."""

    chunk: int
    file: int
    start_s: float
    stop_s: float


class EpisodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One episode: its rows [start, stop) in the dataset, its data file (chunk, file), and its clips by feature."""

    number: int
    steps: int
    start: int
    stop: int
    chunk: int
    file: int
    tasks: tuple[str, ...]
    videos: dict[str, VideoClip]

    @property
    def name(self) -> str:
        """Return the episode's name, as in file names of LeRobot before v3."""
        return f"episode_{self.number:06d}"


class LeRobotInfo(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The used part of `meta/info.json`. path: the dataset's folder."""

    fps: float
    features: dict[str, Feature]
    data_path: str
    video_path: str | None = None
    robot_type: str | None = None
    total_episodes: int | None = None
    total_frames: int | None = None
    splits: dict[str, str] = {}
    path: Path = Path()

    @cached_property
    def videos(self) -> tuple[str, ...]:
        """Return the keys of features that are videos."""
        return tuple(key for key, feature in self.features.items() if feature.dtype == "video")

    def data_file(self, row: EpisodeRow) -> Path:
        """Return the Parquet file of an episode. Raises DataError."""
        return self._file(self.data_path, row.chunk, row.file, "")

    def video_file(self, key: str, row: EpisodeRow) -> Path:
        """Return the video file of an episode's camera. Raises DataError."""
        return self._file(self.video_path or "", row.videos[key].chunk, row.videos[key].file, key)

    def _file(self, pattern: str, chunk: int, file: int, key: str) -> Path:
        # Not str.format: an untrusted pattern could read attributes, or set any width.
        numbers = {"chunk_index": chunk, "file_index": file}
        name = _FIELD.sub(lambda found: key if found[3] else f"{numbers[found[1]]:0{found[2] or 1}d}", pattern)
        relative = PurePosixPath(name)
        if not relative.parts or relative.is_absolute() or ".." in relative.parts or "\0" in name or "{" in name:
            problem = f"invalid file name {name!r}"
            raise DataError(problem, where=str(self.path / "meta/info.json"), hint=RETRY_HINT)
        return self.path / relative


def load_info(path: Path) -> LeRobotInfo:
    """Read `meta/info.json`. Raises DataError if it is missing, or of another version than v3."""
    where = path / "meta" / "info.json"
    try:
        tables = msgspec.json.decode(where.read_bytes())
        version = str(tables["codebase_version"])
    except FileNotFoundError as error:
        raise DataError(f"not LeRobot's layout: {error}", where=str(where), hint="give --layout auto") from error
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise DataError(f"not LeRobot's format: {error}", where=str(where), hint=RETRY_HINT) from error
    if not version.startswith(_VERSION):
        hint = (
            "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id=… (first convert older ones to v2.1)"
        )
        raise DataError(f"a LeRobot dataset of {version} (expected v3)", where=str(where), hint=hint)
    try:
        info = msgspec.convert(
            {**tables, "path": ""}, LeRobotInfo, strict=False, dec_hook=lambda kind, value: kind(value)
        )
    except (msgspec.ValidationError, TypeError) as error:
        raise DataError(f"not LeRobot's format: {error}", where=str(where), hint=RETRY_HINT) from error
    if not 0 < info.fps < math.inf:
        raise DataError(f"fps is {info.fps} (expected a positive number)", where=str(where), hint=RETRY_HINT)
    return msgspec.structs.replace(info, path=path)


def meta_files(path: Path) -> tuple[Path, ...]:
    """Return the files of the `meta` folder."""
    return (
        path / "meta" / "info.json",
        *_episode_files(path),
        *(file for file in (path / "meta" / "tasks.parquet",) if file.is_file()),
    )


def _episode_files(path: Path) -> list[Path]:
    return sorted((path / "meta" / "episodes").glob("*/*.parquet"))


def read_episodes(info: LeRobotInfo) -> tuple[EpisodeRow, ...]:
    """Read the records of all episodes, in order. Raises DataError unless their number matches info.json."""
    with require_lerobot_tools():
        from pitools.dataset.formats import parquet_reader
    columns = [
        "episode_index",
        "length",
        "dataset_from_index",
        "dataset_to_index",
        "data/chunk_index",
        "data/file_index",
        "tasks",
    ]
    clips = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    columns += [f"videos/{key}/{part}" for key in info.videos for part in clips]
    episodes = []
    for file in _episode_files(info.path):
        for row in parquet_reader.read_records(file, columns):
            try:
                episodes.append(_parse_episode(row, info.videos, clips))
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(f"invalid record of an episode: {error}", where=str(file), hint=RETRY_HINT) from error
    episodes.sort(key=lambda row: row.number)
    where = str(info.path / "meta" / "episodes")
    if [row.number for row in episodes] != list(range(len(episodes))):
        raise DataError("missing or duplicate episodes", where=where, hint=RETRY_HINT)
    if info.total_episodes not in (None, len(episodes)) or not episodes:
        problem = f"{len(episodes)} episodes (expected {info.total_episodes}: info.json)"
        raise DataError(problem, where=where, hint=RETRY_HINT)
    if info.total_frames not in (None, steps := sum(row.steps for row in episodes)):
        raise DataError(f"{steps} frames (expected {info.total_frames}: info.json)", where=where, hint=RETRY_HINT)
    return tuple(episodes)


def _parse_episode(row: dict[str, Any], videos: Sequence[str], parts: Sequence[str]) -> EpisodeRow:
    clips = {}
    for key in videos:
        values = [row.get(f"videos/{key}/{part}") for part in parts]
        if None not in values:
            clips[key] = VideoClip(int(values[0]), int(values[1]), float(values[2]), float(values[3]))  # type: ignore[arg-type]
    return EpisodeRow(
        number=int(row["episode_index"]),
        steps=int(row["length"]),
        start=int(row["dataset_from_index"]),
        stop=int(row["dataset_to_index"]),
        chunk=int(row["data/chunk_index"]),
        file=int(row["data/file_index"]),
        tasks=tuple(map(str, row.get("tasks") or ())),
        videos=clips,
    )


def read_tasks(info: LeRobotInfo) -> dict[int, str]:
    """Read the instructions by task index. Raises DataError."""
    with require_lerobot_tools():
        from pitools.dataset.formats import parquet_reader
    file = info.path / "meta" / "tasks.parquet"
    rows = parquet_reader.read_records(file, None) if file.is_file() else []
    return {int(row.pop("task_index")): str(next(iter(row.values()), "")) for row in rows if "task_index" in row}


def read_splits(info: LeRobotInfo, rows: Sequence[EpisodeRow]) -> dict[str, tuple[str, ...]]:
    """Return the episodes' names by split, which info.json gives as `first:stop`. Raises DataError."""
    splits = {}
    for split, text in info.splits.items():
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
        if not match or int(match[2]) > len(rows):
            where = str(info.path / "meta" / "info.json")
            problem = f"split {split} is {text!r} (expected first:stop, at most {len(rows)})"
            raise DataError(problem, where=where, hint=RETRY_HINT)
        splits[split] = tuple(row.name for row in rows[int(match[1]) : int(match[2])])
    return splits
