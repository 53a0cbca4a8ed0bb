"""Check the values of vectors: non-finite numbers, constants and outliers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.dataset.check.cameras import CameraFrames, SampledArray
from pitools.dataset.check.finding import Finding
from pitools.dataset.check.thresholds import Thresholds
from pitools.dataset.check.vectors import Floats, VectorStats
from pitools.store.manifest import Statistics

ACTION = "action"
_NORMAL_MAD, _NORMAL_80 = 1.4826, 2.563  # deviation over median distance, and the middle 80 % over deviation
# Relative precision that a sum of very many numbers may lose.
_ROUNDING = 1e-5
_NAMED_AT_MOST, _MIN_MOVING_COLUMNS = 8, 3
# The share of episodes that outliers are at most, and sigmas that an episode's furthest value may well be away.
_MAX_LONELY_SHARE, _MAX_REACH = 0.05, 3.0


def is_action(name: str) -> bool:
    """Return whether an array is a command to the robot."""
    return name == ACTION or name.startswith((f"{ACTION}/", f"{ACTION}s/"))


def is_observed(name: str) -> bool:
    """Return whether an array is an observation, by its name: those of a replay buffer are not below `obs/`."""
    return name.startswith(("obs/", "observation", "state/", "keypoint")) or name == "state"


def find_non_finite(array: VectorStats | SampledArray, offsets: NDArray[np.int64]) -> Iterator[Finding]:
    """Yield episodes with NaN or infinite numbers."""
    for episode in np.flatnonzero(array.non_finite.count).tolist():
        count, first = int(array.non_finite.count[episode]), int(array.non_finite.first_steps[episode])
        looked = " of the checked steps" if isinstance(array, SampledArray) else ""
        yield Finding(
            level="fault",
            check="nan",
            array=array.name,
            episode=episode,
            got=f"{count} steps",
            problem=f"{count} steps{looked} have a NaN or an infinity",
            step=first - int(offsets[episode]),
            expected="0 steps",
        )


def find_constant(array: VectorStats) -> Iterator[Finding]:
    """Yield the columns that have one value in all episodes: a warning, since padding and unused columns have, too; a
    fault where no column of an action changes."""
    if not (is_action(array.name) or is_observed(array.name)) or array.rows.max(initial=0) < 2:
        return
    low, high = array.low.min(axis=0), array.high.max(axis=0)
    columns = np.flatnonzero((low == high) & np.isfinite(low))
    if len(columns):
        values = ", ".join(f"{value:g}" for value in low[columns[:_NAMED_AT_MOST]])
        dead = is_action(array.name) and len(columns) == array.columns
        yield Finding(
            level="fault" if dead else "warning",
            check="constant",
            array=array.name,
            problem=f"{_columns(columns, array)} the same in every step",
            got=values,
            expected="values that differ",
        )


def find_motionless(array: VectorStats, lengths: NDArray[np.int64]) -> Iterator[Finding]:
    """Yield the episodes in which no column of actions or observations changes, if one does in most others. Arrays of
    one or two columns, such as a gripper's, are left out: they may rest."""
    if not (is_action(array.name) or is_observed(array.name)) or array.columns < _MIN_MOVING_COLUMNS:
        return
    is_finite = np.isfinite(array.low).all(axis=1) & (lengths > 1)
    quiet = is_finite & (array.low == array.high).all(axis=1)
    if not is_finite.any() or quiet.sum() * 2 > is_finite.sum():
        return
    for episode in np.flatnonzero(quiet).tolist():
        yield Finding(
            level="warning",
            check="motionless",
            array=array.name,
            episode=episode,
            expected="values that differ",
            problem="no value changes from the first step to the last",
        )


def find_outliers(
    array: VectorStats, bounds: Thresholds, read_episode: Callable[[int], NDArray[Any]]
) -> Iterator[Finding]:
    """Yield the episodes with values far beyond the usual: a fault for actions, a warning for observations.

    read_episode: reads an episode's steps, to find the step; its exceptions pass through.
    """
    if not (is_action(array.name) or is_observed(array.name)) or not len(array.sample):
        return
    reach, middle, sigma = _reaches(array, bounds.outlier_sigmas)
    for episode in np.flatnonzero((reach > bounds.outlier_sigmas).any(axis=1)).tolist():
        column = int(reach[episode].argmax())
        low, high = array.low[episode, column], array.high[episode, column]
        far = high if high - middle[column] >= middle[column] - low else low
        rows = read_episode(episode)
        yield Finding(
            level="fault" if is_action(array.name) else "warning",
            check="outlier",
            array=array.name,
            episode=episode,
            step=int((rows.reshape(len(rows), -1)[:, column] == far).argmax()),
            problem=f"column {column} goes {reach[episode, column]:.0f} sigmas from its median",
            got=f"{far:g}",
            expected=f"within {bounds.outlier_sigmas:g} sigmas ({sigma[column]:.3g}) of {middle[column]:.3g}",
        )


@np.errstate(over="ignore", divide="ignore", invalid="ignore")  # next to the largest numbers there are
def _reaches(array: VectorStats, sigmas: float) -> tuple[Floats, Floats, Floats]:
    """(episodes, columns): how many sigmas an episode goes from the median; medians and sigmas: (columns,)."""
    middle, sigma = _robust_spread(array.sample)
    away = np.maximum(array.high - middle, middle - array.low)
    away[~np.isfinite(away)] = 0
    # A gripper rests, but for its noise, and closes in many an episode: they are judged by each other.
    for column in np.flatnonzero((away > sigmas * sigma).any(axis=0)).tolist():
        beyond = away[away[:, column] > sigmas * sigma[column], column]
        if len(beyond) > max(1, _MAX_LONELY_SHARE * len(away)):
            sigma[column] = max(sigma[column], float(np.median(beyond)) / _MAX_REACH)
    reach = away / sigma
    reach[~np.isfinite(reach)] = 0
    return reach, middle, sigma


def _robust_spread(sample: Floats) -> tuple[Floats, Floats]:
    """Return the median and robust deviation of each column; of a mostly constant column, its typical excursion."""
    rows = sample[np.isfinite(sample).all(axis=1)]
    if not len(rows):
        return np.zeros(sample.shape[1]), np.zeros(sample.shape[1])
    middle = np.median(rows, axis=0)
    away = np.abs(rows - middle)
    low, high = np.quantile(rows, [0.1, 0.9], axis=0)
    sigma = np.maximum(_NORMAL_MAD * np.median(away, axis=0), (high - low) / _NORMAL_80)
    for column in np.flatnonzero(sigma == 0).tolist():
        moved = away[away[:, column] > 0, column]
        sigma[column] = np.median(moved) if len(moved) else 0
    return middle, sigma


def find_duplicates(
    arrays: Iterable[VectorStats], cameras: Iterable[CameraFrames], lengths: NDArray[np.int64]
) -> Iterator[Finding]:
    """Yield the episodes that repeat another one: equal actions and observations, bit for bit, and equal first frames.
    A simulation rendered again in another light is not a duplicate."""
    compared = [array for array in arrays if is_action(array.name) or is_observed(array.name)]
    if not compared:
        return
    first_episodes: dict[tuple[int, ...], int] = {}
    alike = [array.fingerprint.tolist() for array in compared] + [camera.first_frames.tolist() for camera in cameras]
    for episode, key in enumerate(zip(lengths.tolist(), *alike, strict=True)):
        first = first_episodes.setdefault(key, episode)
        if first != episode and lengths[episode]:
            problem = f"a duplicate of episode {first}, in {_join_names([array.name for array in compared])}"
            yield Finding(level="fault", check="duplicate", episode=episode, problem=problem, got=f"episode {first}")


def check_statistics(array: VectorStats, recorded: Statistics) -> Iterator[Finding]:
    """Compare the manifest's statistics with the values. Only of vectors: for arrays of more axes the statistics are
    per channel, from a sample of steps."""
    if array.axes > 1:
        return
    low, high = array.low.min(axis=0), array.high.max(axis=0)
    some = array.rows > 0
    deviation = array.deviation
    # Squares of values beyond 1e154 are beyond float64: what became of them depends on how many were summed at a time.
    scale = np.where(np.isfinite(deviation), np.maximum(np.abs(array.mean), deviation) * _ROUNDING + 1e-12, np.inf)
    mean, deviation = np.nan_to_num(array.mean), np.nan_to_num(deviation)
    for problem, computed, stated, near in (
        ("minimum", np.where(some, low, 0), recorded.minimum, 0),
        ("maximum", np.where(some, high, 0), recorded.maximum, 0),
        ("mean", mean, recorded.mean, scale),
        ("deviation", deviation, recorded.deviation, scale),
    ):
        if len(stated) != len(computed):
            yield Finding(
                level="fault",
                check="statistics",
                array=array.name,
                got=f"{len(stated)}",
                problem="the manifest's statistics have another number of columns",
                expected=f"{len(computed)}",
            )
            return
        wrong = np.flatnonzero(~(np.abs(computed - np.asarray(stated)) <= near))
        if len(wrong):
            column = int(wrong[0])
            yield Finding(
                level="fault",
                check="statistics",
                array=array.name,
                problem=f"the manifest's {problem} is not that of the values, in {_columns(wrong, array, verb='')}",
                got=f"{stated[column]:.9g}",
                expected=f"{computed[column]:.9g}",
            )


def _columns(columns: NDArray[np.intp], array: VectorStats, *, verb: str = "is") -> str:
    if len(columns) == array.columns:
        return f"every column {verb}".strip()
    names = _join_names([str(column) for column in columns.tolist()])
    plural = len(columns) > 1
    return f"column{'s' if plural else ''} {names} {'are' if plural and verb else verb}".strip()


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return ", ".join(names[:_NAMED_AT_MOST]) + more
