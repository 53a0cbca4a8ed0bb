"""Scan LeRobot's v3 layout: a folder of Parquet files and videos, each with many episodes.

meta/info.json                         version, features, rate, splits, patterns of file names
meta/episodes/chunk-*/file-*.parquet   per episode: its rows [dataset_from_index, dataset_to_index) in the dataset,
                                       its data file, and for each camera the video file and its time range
data/…parquet  videos/<key>/….mp4      named by the patterns `data_path` and `video_path`
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

# Positions of rows, which `episode_offsets` replaces.
_BOOKKEEPING = ("frame_index", "episode_index", "index")


class _FileChecks:
    """Checks of the data files and videos that the episodes name, each file once."""

    def __init__(self, info: LeRobotInfo, rows: Sequence[EpisodeRow], tasks: Mapping[int, str]) -> None:
        self.info, self._tasks = info, tasks
        self.first_rows: dict[Path, int] = {}
        self.notes: list[str] = []
        self._episodes: defaultdict[Path, list[tuple[int, int]]] = defaultdict(list)
        self._clips: defaultdict[Path, list[tuple[float, float, int]]] = defaultdict(list)
        self._problems: dict[Path, str] = {}
        self._step_problems: dict[int, str] = {}
        for row in rows:
            path = info.data_file(row)
            self.first_rows.setdefault(path, row.start)
            self._episodes[path].append((row.number, row.steps))
            for key in row.videos:
                clip = row.videos[key]
                self._clips[info.video_file(key, row)].append((clip.start_s, clip.stop_s, row.steps))

    def check(self, path: Path, *, video: bool) -> None:
        """Raise DataError unless the file exists and matches the records of its episodes."""
        if path not in self._problems:
            try:
                exists = path.is_file()
                self._problems[path] = (
                    (self._video_problem if video else self._data_problem)(path) if exists else "the file is missing"
                )
            except DataError as error:
                self._problems[path] = error.message
        if self._problems[path]:
            raise DataError(self._problems[path], where=str(path), hint=lerobot_meta.RETRY_HINT)

    def _data_problem(self, path: Path) -> str:
        """Return the difference between a data file's rows and its episodes' records, "" if they match."""
        with require_lerobot_tools():
            from pitools.dataset.formats import parquet_reader
        actual, claimed = (
            parquet_reader.run_lengths(parquet_reader.read_column(path, "episode_index")),
            self._episodes[path],
        )
        if actual == claimed:
            self._check_step_order(
                claimed, parquet_reader.read_column(path, "frame_index"), parquet_reader.read_column(path, "timestamp")
            )
            if self._tasks and "task_index" in self.info.features:
                unknown = set(parquet_reader.read_column(path, "task_index").tolist()) - self._tasks.keys()
                self.notes += [f"task_index {index} is not in meta/tasks.parquet" for index in sorted(unknown)[:1]]
            return ""
        index = next((i for i, pair in enumerate(zip(actual, claimed, strict=False)) if pair[0] != pair[1]), None)
        if index is None:
            return f"the file has rows of {len(actual)} episodes (expected {len(claimed)}: meta/episodes)"
        actual_text, claimed_text = (
            f"{steps} rows of episode {number}" for number, steps in (actual[index], claimed[index])
        )
        return f"the file has {actual_text} (expected {claimed_text}: meta/episodes)"

    def _check_step_order(self, episodes: Sequence[tuple[int, int]], frames: NDArray[Any], times: NDArray[Any]) -> None:
        """Record a problem for each episode whose rows are out of order, or whose times do not match the frame rate."""
        low = 0
        for number, steps in episodes:
            expected = np.arange(steps)
            indices, seconds = frames[low : low + steps], times[low : low + steps]
            if not np.array_equal(indices, expected):
                step = int((indices != expected).argmax())
                self._step_problems[number] = f"row {step} has frame_index {indices[step]} (expected {step})"
            # Without videos, times select no frames.
            elif self._clips and not (deviation := np.abs(seconds * self.info.fps - expected)).max() <= 0.5:
                step = int(deviation.argmax())
                expected_s = step / self.info.fps
                problem = f"step {step} has the time {seconds[step]:.4f} s (expected {expected_s:.4f} s)"
                self._step_problems[number] = problem
            low += steps

    def check_steps(self, row: EpisodeRow, where: str) -> None:
        """Raise DataError for an episode whose rows are out of order. Call `check` for its data file before."""
        if reason := self._step_problems.get(row.number):
            raise DataError(reason, where=where, hint=lerobot_meta.RETRY_HINT)

    def _video_problem(self, path: Path) -> str:
        """Return why a video does not have its episodes' frames, "" if it may. The reader checks each frame's time."""
        with require_lerobot_tools():
            from pitools.dataset.formats import video_reader
        clips = sorted(self._clips[path])
        for (_, stop_s, _), (start_s, _, _) in pairwise(clips):
            if (stop_s - start_s) * self.info.fps > 0.5:
                return f"two episodes overlap: one ends at {stop_s:.4f} s, the next begins at {start_s:.4f} s"
        frames, claimed = video_reader.frame_count(path), sum(steps for _, _, steps in clips)
        if frames > claimed:
            self.notes.append(f"{path.relative_to(self.info.path)} has {frames - claimed} frames of no episode")
        # A container's header need not have a frame count.
        return f"the video has {frames} frames (expected {claimed})" if 0 < frames < claimed else ""


def scan_lerobot(path: Path, skip: Sequence[str]) -> Recording:
    """Return the dataset's episodes. Raises DataError unless it is a LeRobot v3 dataset; ToolMissing without pyarrow or
    PyAV."""
    info = lerobot_meta.load_info(path)
    tasks = lerobot_meta.read_tasks(info)
    rows = _add_missing_tasks(info, lerobot_meta.read_episodes(info), tasks)
    features = _features_by_store_name(info, rows, skip)
    for name, feature in features.items():
        feature.check(f"{path}: {name}")
    files = _FileChecks(info, rows, tasks)
    episodes: list[Episode] = []
    rejected: list[RejectedEpisode] = []
    array_attributes = {
        name: {"names": feature.names} for name, feature in features.items() if feature.names is not None
    }
    for row in rows:
        try:
            episodes.append(_describe_episode(path, row, features, files, array_attributes))
        except DataError as error:
            rejected.append(rejection(row.name, path, error))
    accepted_names = {episode.name for episode in episodes}
    splits = {
        split: tuple(name for name in names if name in accepted_names)
        for split, names in lerobot_meta.read_splits(info, rows).items()
    }
    if without_task := sum(not row.tasks for row in rows):
        files.notes.append(f"{without_task} of {len(rows)} episodes have no task, so no instruction")
    read_files = {
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
        rejected=tuple(rejected),
        notes=tuple(files.notes),
        files=(*lerobot_meta.meta_files(path), *sorted(read_files)),
    )


def _add_missing_tasks(
    info: LeRobotInfo, rows: Sequence[EpisodeRow], tasks: Mapping[int, str]
) -> tuple[EpisodeRow, ...]:
    """Give each episode without tasks in meta/episodes those of its steps' `task_index`, in order of appearance."""
    first_rows: dict[Path, int] = {}
    indices: dict[Path, NDArray[Any]] = {}
    completed = []
    for row in rows:
        path = info.data_file(row)
        first_rows.setdefault(path, row.start)
        if not row.tasks and "task_index" in info.features:
            if path not in indices:
                indices[path] = _task_indices(path)
            steps = indices[path][row.start - first_rows[path] : row.stop - first_rows[path]].tolist()
            row = msgspec.structs.replace(row, tasks=tuple(tasks[i] for i in dict.fromkeys(steps) if i in tasks))
        completed.append(row)
    return tuple(completed)


def _task_indices(path: Path) -> NDArray[Any]:
    with require_lerobot_tools():
        from pitools.dataset.formats import parquet_reader
    try:
        return parquet_reader.read_column(path, "task_index")
    except DataError:  # the episodes of an unreadable file are rejected one by one
        return np.zeros(0, np.int64)


def _features_by_store_name(info: LeRobotInfo, rows: Sequence[EpisodeRow], skip: Sequence[str]) -> dict[str, Feature]:
    """Return the features by their array names. Raises DataError for two of the same name."""
    # With one task per episode, the task is the episode's instruction, and task_index is redundant.
    skipped_keys = {*_BOOKKEEPING, *(() if any(len(row.tasks) != 1 for row in rows) else ("task_index",))}
    features: dict[str, Feature] = {}
    for key, feature in info.features.items():
        name = store_name(key)
        if is_skipped(name, skip, key) or key in skipped_keys:
            continue
        if name in features:
            problem = f"{features[name].key} and {key} would both be {name!r}"
            raise DataError(problem, where=str(info.path), hint=f"leave one of them out: --skip-array {key}")
        features[name] = msgspec.structs.replace(feature, key=key)
    return features


def store_name(key: str) -> str:
    """Return the array name: `observation.images.top` → `obs/top_image`, `observation.state` → `obs/state`,
    `next.reward` → `reward`."""
    if key.startswith("observation.images."):
        return f"obs/{key.removeprefix('observation.images.').replace('.', '_')}_image"
    head, _, rest = key.partition(".")
    if rest and head in ("observation", "next"):
        key = f"obs/{rest}" if head == "observation" else rest
    return key.replace(".", "/")


def _describe_episode(
    path: Path, row: EpisodeRow, features: dict[str, Feature], files: _FileChecks, array_attributes: dict[str, Any]
) -> Episode:
    where = f"{path}: {row.name}"
    if row.stop - row.start != row.steps:
        problem = f"rows [{row.start}, {row.stop}) (expected {row.steps} rows)"
        raise DataError(problem, where=where, hint=lerobot_meta.RETRY_HINT)
    data = files.info.data_file(row)
    files.check(data, video=False)
    files.check_steps(row, where)
    columns: list[tuple[str, Column]] = []
    for name, feature in features.items():
        if feature.dtype == "video":
            source: Any = _video_source(row, feature, files, where)
        else:
            first = row.start - files.first_rows[data]
            source = ParquetSource(path=data, key=feature.key, first_row=first, encoded_images=feature.dtype == "image")
        columns.append(
            (name, Column(dataset=feature.key, steps=row.steps, row=feature.row, dtype=feature.numpy, source=source))
        )
    attributes = {"tasks": list(row.tasks)} if len(row.tasks) > 1 else {}
    return make_episode(
        row.name,
        path,
        row.steps,
        columns,
        "length",
        where,
        instruction=row.tasks[0] if row.tasks else "",
        attributes=attributes,
        array_attributes=array_attributes,
    )


def _video_source(row: EpisodeRow, feature: Feature, files: _FileChecks, where: str) -> VideoSource:
    if feature.key not in row.videos:
        raise DataError(f"meta/episodes names no video of {feature.key}", where=where, hint=lerobot_meta.RETRY_HINT)
    path = files.info.video_file(feature.key, row)
    files.check(path, video=True)
    clip, fps = row.videos[feature.key], files.info.fps
    if not (clip.start_s >= 0 and abs((clip.stop_s - clip.start_s) * fps - row.steps) <= 0.5):
        length_s = clip.stop_s - clip.start_s
        problem = f"{length_s:.4f} s of {feature.key} (expected {row.steps} steps at {fps:g} frames/s)"
        raise DataError(problem, where=where, hint=lerobot_meta.RETRY_HINT)
    return VideoSource(path=path, start_s=clip.start_s, fps=fps)
