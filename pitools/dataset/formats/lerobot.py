"""LeRobot v3: a folder of Parquet files and videos, many episodes to a file; `meta/episodes` says which rows are whose.

meta/info.json                         version, features, rate, splits, how files are named
meta/episodes/chunk-*/file-*.parquet   of each episode: rows [dataset_from_index, dataset_to_index) of the dataset,
                                       the file these are in, and for each camera the video and the seconds
data/…parquet  videos/<key>/….mp4      names as `data_path` and `video_path` say
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.dataset.formats import lerobot_meta
from pitools.dataset.formats.lerobot_meta import EpisodeRow, Feature, LeRobotInfo
from pitools.dataset.formats.model import (
    Column,
    Episode,
    ParquetSource,
    Recording,
    RejectedEpisode,
    VideoSource,
    is_skipped,
    make_episode,
    rejection,
)
from pitools.dataset.formats.readers import require_lerobot_tools

# Where a row lies, which we know already.
_BOOKKEEPING = ("frame_index", "episode_index", "index")


class _FileChecks:
    """The data files and videos that the episodes name, each looked at once."""

    def __init__(self, info: LeRobotInfo, rows: Sequence[EpisodeRow]) -> None:
        self.info = info
        self.first: dict[Path, int] = {}
        self.notes: list[str] = []
        self._episodes: defaultdict[Path, list[tuple[int, int]]] = defaultdict(list)
        self._clips: defaultdict[Path, list[tuple[float, float, int]]] = defaultdict(list)
        self._wrong: dict[Path, str] = {}
        self._disordered: dict[int, str] = {}
        for row in rows:
            path = info.data_file(row)
            self.first.setdefault(path, row.start)
            self._episodes[path].append((row.number, row.steps))
            for key in row.videos:
                clip = row.videos[key]
                self._clips[info.video_file(key, row)].append((clip.start_s, clip.stop_s, row.steps))

    def check(self, path: Path, *, video: bool) -> None:
        """Raises DataError unless the file is there, and has what the episodes claim of it."""
        if path not in self._wrong:
            try:
                there = path.is_file()
                self._wrong[path] = (self._video if video else self._data)(path) if there else "the file is missing"
            except DataError as error:
                self._wrong[path] = error.message
        if self._wrong[path]:
            raise DataError(self._wrong[path], where=str(path), hint=lerobot_meta.RETRY_HINT)

    def _data(self, path: Path) -> str:
        """Whether its rows are those of its episodes, one episode after the other."""
        with require_lerobot_tools():
            from pitools.dataset.formats import parquet_reader
        found, claimed = (
            parquet_reader.run_lengths(parquet_reader.read_column(path, "episode_index")),
            self._episodes[path],
        )
        if found == claimed:
            self._steps(
                claimed, parquet_reader.read_column(path, "frame_index"), parquet_reader.read_column(path, "timestamp")
            )
            return ""
        at = next((i for i, pair in enumerate(zip(found, claimed, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            return f"it has rows of {len(found)} episodes, meta/episodes says {len(claimed)}"
        has, says = (f"{steps} rows of episode {number}" for number, steps in (found[at], claimed[at]))
        return f"it has {has} where meta/episodes says {says}"

    def _steps(self, episodes: Sequence[tuple[int, int]], frames: NDArray[Any], times: NDArray[Any]) -> None:
        """Note the episodes whose rows are not in order, or not of the times at which frames are looked for."""
        low = 0
        for number, steps in episodes:
            expected = np.arange(steps)
            mine, seconds = frames[low : low + steps], times[low : low + steps]
            if not np.array_equal(mine, expected):
                at = int((mine != expected).argmax())
                self._disordered[number] = f"row {at} of it is said to be step {mine[at]}"
            # Of a dataset without videos a time is but another value.
            elif self._clips and not (away := np.abs(seconds * self.info.fps - expected)).max() <= 0.5:
                at = int(away.argmax())
                self._disordered[number] = f"step {at} is of {seconds[at]:.4f} s, at {self.info.fps:g} frames a second"
            low += steps

    def check_steps(self, row: EpisodeRow, where: str) -> None:
        """Raises DataError for an episode whose rows are not in order. Its data file has been checked."""
        if reason := self._disordered.get(row.number):
            raise DataError(reason, where=where, hint=lerobot_meta.RETRY_HINT)

    def _video(self, path: Path) -> str:
        """Whether it has enough frames. That each is there, at its time, is seen when they are read."""
        with require_lerobot_tools():
            from pitools.dataset.formats import video_reader
        clips = sorted(self._clips[path])
        for (_, stop_s, _), (start_s, _, _) in pairwise(clips):
            if (stop_s - start_s) * self.info.fps > 0.5:
                return f"an episode of it ends at {stop_s:.4f} s, and the next begins at {start_s:.4f} s"
        found, claimed = video_reader.frame_count(path), sum(steps for _, _, steps in clips)
        if found > claimed:
            self.notes.append(f"{path.relative_to(self.info.path)} has {found - claimed} frames of no episode")
        # A container need not say how many it has.
        return f"it has {found} frames, its episodes {claimed}" if 0 < found < claimed else ""


def scan_lerobot(path: Path, skip: Sequence[str]) -> Recording:
    """What the dataset holds. Raises DataError when it is not a LeRobot dataset, or one of another version than v3;
    ToolMissing where pyarrow or PyAV is not installed."""
    info = lerobot_meta.load_info(path)
    tasks = lerobot_meta.read_tasks(info)
    rows = _with_tasks(info, lerobot_meta.read_episodes(info), tasks)
    features = _features_by_store_name(info, rows, skip)
    for name, feature in features.items():
        feature.check(f"{path}: {name}")
    files = _FileChecks(info, rows)
    episodes: list[Episode] = []
    refused: list[RejectedEpisode] = []
    array_attributes = {
        name: {"names": feature.names} for name, feature in features.items() if feature.names is not None
    }
    for row in rows:
        try:
            episodes.append(_episode(path, row, features, files, array_attributes))
        except DataError as error:
            refused.append(rejection(row.name, path, error))
    taken = {episode.name for episode in episodes}
    splits = {
        split: tuple(name for name in names if name in taken)
        for split, names in lerobot_meta.read_splits(info, rows).items()
    }
    if without := sum(not row.tasks for row in rows):
        files.notes.append(f"no task is named of {without} of {len(rows)} episodes: they have no instruction")
    used = {
        place.path
        for episode in episodes
        for column in episode.columns.values()
        if isinstance(place := column.source, ParquetSource | VideoSource)
    }
    return Recording(
        path=path,
        layout="lerobot",
        episodes=tuple(episodes),
        splits=splits,
        attributes={"robot_type": info.robot_type, "fps": info.fps, "tasks": [tasks[i] for i in sorted(tasks)]},
        rejected=tuple(refused),
        notes=tuple(files.notes),
        files=(*lerobot_meta.meta_files(path), *sorted(used)),
    )


def _with_tasks(info: LeRobotInfo, rows: Sequence[EpisodeRow], tasks: Mapping[int, str]) -> tuple[EpisodeRow, ...]:
    """The episodes. One of which meta/episodes names no task has those of its steps' `task_index`, in their order."""
    first: dict[Path, int] = {}
    indices: dict[Path, NDArray[Any]] = {}
    found = []
    for row in rows:
        path = info.data_file(row)
        first.setdefault(path, row.start)
        if not row.tasks and "task_index" in info.features:
            if path not in indices:
                indices[path] = _task_indices(path)
            steps = indices[path][row.start - first[path] : row.stop - first[path]].tolist()
            row = msgspec.structs.replace(row, tasks=tuple(tasks[i] for i in dict.fromkeys(steps) if i in tasks))
        found.append(row)
    return tuple(found)


def _task_indices(path: Path) -> NDArray[Any]:
    with require_lerobot_tools():
        from pitools.dataset.formats import parquet_reader
    try:
        return parquet_reader.read_column(path, "task_index")
    except DataError:  # the episodes of a file that cannot be read are refused one by one
        return np.zeros(0, np.int64)


def _features_by_store_name(info: LeRobotInfo, rows: Sequence[EpisodeRow], skip: Sequence[str]) -> dict[str, Feature]:
    """The features by the names that they have in a store. Raises DataError for two of one name."""
    # With one task to an episode it is the episode's language, and says nothing of its steps.
    left_out = {*_BOOKKEEPING, *(() if any(len(row.tasks) != 1 for row in rows) else ("task_index",))}
    named: dict[str, Feature] = {}
    for key, feature in info.features.items():
        name = store_name(key)
        if key in left_out or is_skipped(name, skip, key):
            continue
        if name in named:
            problem = f"{named[name].key} and {key} would both be {name!r}"
            raise DataError(problem, where=str(info.path), hint=f"leave one of them out: --skip {key}")
        named[name] = msgspec.structs.replace(feature, key=key)
    return named


def store_name(key: str) -> str:
    """`observation.images.top` → `obs/top_image`, `observation.state` → `obs/state`, `next.reward` → `reward`."""
    if key.startswith("observation.images."):
        return f"obs/{key.removeprefix('observation.images.').replace('.', '_')}_image"
    head, _, rest = key.partition(".")
    if rest and head in ("observation", "next"):
        key = f"obs/{rest}" if head == "observation" else rest
    return key.replace(".", "/")


def _episode(
    path: Path, row: EpisodeRow, features: dict[str, Feature], files: _FileChecks, array_attributes: dict[str, Any]
) -> Episode:
    where = f"{path}: {row.name}"
    if row.stop - row.start != row.steps:
        raise DataError(
            f"rows [{row.start}, {row.stop}) for {row.steps} steps", where=where, hint=lerobot_meta.RETRY_HINT
        )
    data = files.info.data_file(row)
    files.check(data, video=False)
    files.check_steps(row, where)
    columns: list[tuple[str, Column]] = []
    for name, feature in features.items():
        if feature.dtype == "video":
            place: Any = _video(row, feature, files, where)
        else:
            first = row.start - files.first[data]
            place = ParquetSource(path=data, key=feature.key, first_row=first, encoded_images=feature.dtype == "image")
        columns.append(
            (name, Column(dataset=feature.key, steps=row.steps, row=feature.row, dtype=feature.numpy, source=place))
        )
    attributes = {"tasks": list(row.tasks)} if len(row.tasks) > 1 else {}
    return make_episode(
        row.name,
        path,
        row.steps,
        columns,
        "length",
        where,
        language=row.tasks[0] if row.tasks else "",
        attributes=attributes,
        array_attributes=array_attributes,
    )


def _video(row: EpisodeRow, feature: Feature, files: _FileChecks, where: str) -> VideoSource:
    if feature.key not in row.videos:
        raise DataError(f"no video of {feature.key} is named for it", where=where, hint=lerobot_meta.RETRY_HINT)
    path = files.info.video_file(feature.key, row)
    files.check(path, video=True)
    at, fps = row.videos[feature.key], files.info.fps
    if not (at.start_s >= 0 and abs((at.stop_s - at.start_s) * fps - row.steps) <= 0.5):
        problem = f"{at.stop_s - at.start_s:.4f} s of {feature.key} for {row.steps} steps at {fps:g} frames a second"
        raise DataError(problem, where=where, hint=lerobot_meta.RETRY_HINT)
    return VideoSource(path=path, start_s=at.start_s, fps=fps)
