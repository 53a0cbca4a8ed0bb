"""Read the content of an episode's picture: lines of text, frames, and curves."""

from __future__ import annotations

import textwrap
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import UsageError
from pitools.core.output import format_cell
from pitools.dataset.check.cameras import is_camera
from pitools.dataset.check.values import is_action, is_observed
from pitools.dataset.reader import DatasetReader, open_dataset
from pitools.store.version_state import read_quarantine

MAX_FRAMES = 8  # of a camera, evenly spaced
# The most columns drawn as curves: more could not be distinguished.
MAX_CURVES = 16
_CURVES_A_PANEL = 8
# Of two columns in one panel, neither is flatter than this.
_RANGE_RATIO = 4.0
_ARRAYS, _CAMERAS = 6, 8


class Curves(NamedTuple):
    """One panel: columns of an array over steps. values: (steps, n). columns: their numbers. notes: for the margin."""

    array: str
    values: NDArray[np.float64]
    columns: tuple[int, ...]
    note: str = ""


class TextLine(NamedTuple):
    """A line above the picture. size: in points."""

    text: str
    size: float
    colour: str


class EpisodeContent(NamedTuple):
    """An episode to be drawn. frame_steps: steps of the frames. frames: by camera, (H, W) or (H, W, 3 or 4) uint8
    each."""

    header: list[TextLine]
    frame_steps: list[int]
    frames: dict[str, list[NDArray[np.uint8]]]
    panels: list[Curves]


def read_content(path: Path, episode: int) -> EpisodeContent:
    """Read the drawn values of an episode. Raises UsageError for a missing episode, DataError for damage."""
    data = open_dataset(path)
    start, stop = _steps(data, episode)
    shown = np.unique(np.linspace(start, stop - 1, min(MAX_FRAMES, stop - start)).round().astype(int)).tolist()
    cameras = [name for name, schema in data.arrays.items() if is_camera(name, schema.shape[1:], schema.dtype)]
    frames = {name: [_as_image(_read(data, name, step, step + 1)[0]) for step in shown] for name in cameras[:_CAMERAS]}
    panels, left_out = _panels(data, start, stop)
    head = _header_lines(data, path, episode, stop - start, [*cameras[_CAMERAS:], *left_out])
    return EpisodeContent(head, [at - start for at in shown], frames, panels)


def _steps(data: DatasetReader, episode: int) -> tuple[int, int]:
    count = data.manifest.episodes
    if not 0 <= episode < count:
        hint = f"episodes are 0 to {count - 1}" if count else "the version has none"
        raise UsageError(f"episode: missing: {episode}", where=str(data.path), hint=hint)
    start, stop = (int(offset) for offset in data.episode_offsets[episode : episode + 2])
    if start >= stop:
        raise UsageError(f"episode {episode} has no steps", where=str(data.path), hint="draw another episode")
    return start, stop


def _read(data: DatasetReader, name: str, start: int, stop: int) -> NDArray[Any]:
    try:
        return data.read(name, start, stop)
    except IndexError as error:
        raise UsageError(str(error), where=str(data.path), hint="draw an episode that is here as a whole") from error


def _as_image(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a frame in matplotlib's shape, (H, W) or (H, W, 3 or 4)."""
    if frame.ndim == 3 and frame.shape[-1] not in (1, 3, 4):
        frame = np.moveaxis(frame, 0, -1)
    return frame[..., 0] if frame.ndim == 3 and frame.shape[-1] == 1 else frame


def _panels(data: DatasetReader, start: int, stop: int) -> tuple[list[Curves], list[str]]:
    """Return the panels of actions, then of observations; and the names of arrays that are left out."""
    vectors = [
        name
        for name, schema in data.arrays.items()
        if (is_action(name) or is_observed(name)) and len(schema.shape) <= 2 and np.dtype(schema.dtype).kind in "biuf"
    ]
    ordered = sorted(vectors, key=lambda name: (not is_action(name), name))
    panels = []
    for name in ordered[:_ARRAYS]:
        values = _read(data, name, start, stop).reshape(stop - start, -1).astype(np.float64)
        if values.shape[1] > MAX_CURVES:
            panels.append(Curves(name, values, tuple(range(values.shape[1]))))
        elif values.shape[1]:
            panels += _group_by_range(name, values)
    return panels, ordered[_ARRAYS:]


def _group_by_range(name: str, values: NDArray[np.float64]) -> list[Curves]:
    """Group columns of similar range, so that a small one is not a flat line below a large one."""
    finite = np.where(np.isfinite(values), values, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column of nothing but NaN has no range
        ranges = np.nan_to_num(np.nanmax(finite, axis=0) - np.nanmin(finite, axis=0))
    groups: list[list[int]] = []
    for column in np.argsort(ranges, kind="stable").tolist():
        if ranges[column] == 0:
            continue
        if not groups or ranges[column] > _RANGE_RATIO * ranges[groups[-1][0]]:
            groups.append([])
        groups[-1].append(column)
    resting = [column for column in range(len(ranges)) if ranges[column] == 0]
    some = _CURVES_A_PANEL
    groups = [sorted(group)[i : i + some] for group in groups for i in range(0, len(group), some)]
    groups = sorted(groups) or [resting]
    constants = [f"{column} = {finite[0, column]:.4g}" for column in resting]
    note = "\n".join(constants) if resting and groups != [resting] else ""
    return [Curves(name, finite[:, group], tuple(group), note if group is groups[-1] else "") for group in groups]


def _header_lines(data: DatasetReader, path: Path, episode: int, steps: int, left_out: list[str]) -> list[TextLine]:
    """Return the instruction, the episode's name, the omitted arrays, and the reason of a quarantine."""
    instruction = format_cell(" ".join(data.instructions[episode].split()) or "no instruction")
    lines = [TextLine(line, 13.0, "black") for line in textwrap.wrap(instruction, 110)[:3]]
    version, plural = data.version, "s" * (steps > 1)
    title = f"{version.name} {version.version[:12]}   episode {episode} of {version.episodes}   {steps} step{plural}"
    if splits := [name for name, numbers in data.splits.items() if episode in numbers]:
        title += f"   split {', '.join(splits[:4])}"
    lines.append(TextLine(format_cell(title), 9.0, "dimgray"))
    if left_out:
        lines.append(TextLine(format_cell(f"not drawn: {', '.join(left_out[:12])}"), 9.0, "dimgray"))
    quarantine = read_quarantine(path)
    reasons = [*quarantine.reasons, *quarantine.episodes.get(episode, ())] if quarantine else []
    if quarantine and (quarantine.whole_version or reasons):
        text = f"in quarantine{', the whole version' if quarantine.whole_version else ''}: {'; '.join(reasons)}"
        lines += [TextLine(line, 9.0, "firebrick") for line in textwrap.wrap(format_cell(text), 160)[:4]]
    return lines
