"""Compare a version's statistics with its parent's, from the two manifests, without reading arrays.

parent ──append──▶ new        only the added episodes are compared: in the mixture a bad day of data would not show
parent ──any other──▶ new     the whole version is compared

A few episodes differ from others by nature: in one, a joint may hardly move; and two parent episodes do not show the
range of an arm. Therefore the limits depend on the number of episodes on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

import msgspec
import numpy as np
from numpy.typing import NDArray

from pitools.dataset.check.cameras import is_camera
from pitools.dataset.check.finding import Finding, Level
from pitools.dataset.check.thresholds import Thresholds
from pitools.dataset.check.values import is_action
from pitools.store import manifest as manifests
from pitools.store.manifest import EPISODE_PREFIX, ArraySchema, Manifest, Statistics

# Few episodes differ from others by chance: a bound widens by the first, over the root of the number of new episodes,
# and by the second, over the root of the parent's number.
# Chosen so that at most one healthy append in a hundred is refused: perf/dataset/bench_drift.py.
_FEW_MEAN, _FEW_WIDE, _FEW_NARROW, _FEW_RANGE, _FEW_GREY, _FEW = (3, 12), (2, 12), (12, 4), (0, 7), (1, 0.5), (2.3, 0.5)
# A column that is constant in fewer episodes than the first, or hardly moves in fewer than the second, is not compared,
# but where all of an array's are constant; nor is a range, if the parent has so few.
_MANY, _MANY_NARROW = 5, 10
# In fewer episodes, the columns of an action are compared together: in another unit, most are wider by the first
# factor, or all are narrower by the second. One or two columns, such as a gripper's, may rest.
_UNIT_WIDE, _UNIT_NARROW, _LEAST_COLUMNS = 20.0, 30.0, 3
# A unit shows in most columns of an action at once, where chance shows in one: half of them may be wider or narrower by
# this share of what `deviation_ratio` allows, with any number of episodes from _MANY on. In healthy appends of
# bridge and reach, it was at most 2.1 times as wide: perf/dataset/bench_drift.py.
_UNIT_SHARE = 1.5
# A column that rests at an end of its range is a warning where that is more probable than this: the mean's distance
# from that end, over the range, is the least share of episodes in which it does not rest. Of an action, this holds only
# for a column of two values, such as a gripper's, whose variance is nearly as large as its mean allows.
_CHANCE, _TWO_VALUED = 0.05, 0.9
_UNITS = {"mean": "deviations of the parent", "deviation": "times", "range": "ranges of the parent"}
# Relative to a squared value that is a difference of two others.
_NOISE = 1e-12
# Relative to a range: the precision of a mean that is computed as a difference.
_ROUNDING = 1e-6
Floats = NDArray[np.float64]


class ComparedPart(msgspec.Struct, frozen=True, kw_only=True):
    """The episodes to compare: all of the new version, or the added ones. parent_episodes: number in the parent."""

    episodes: int
    parent_episodes: int
    steps: int
    statistics: dict[str, Statistics]
    instructions: dict[str, int]
    appended: bool

    def tolerance_factor(self, constants: tuple[float, float] = _FEW) -> float:
        """Return the factor by which a threshold widens for few episodes, new and in the parent."""
        return 1 + constants[0] / sqrt(max(self.episodes, 1)) + constants[1] / sqrt(max(self.parent_episodes, 1))


@np.errstate(over="ignore", invalid="ignore")  # of sums that float64 cannot hold
def check_drift(new: Manifest, parent: Manifest, bounds: Thresholds | None = None) -> list[Finding]:
    """Return findings on the drift of a version from its parent, from the two manifests alone.

    Only a `fault` forbids publishing. Without statistics in a manifest, values are not compared.
    """
    bounds = bounds or Thresholds()
    part = new_part(new, parent)
    findings = [*_schema(new, parent), *_lengths(part, parent, bounds), *_instructions(part, parent, bounds)]
    expected = parent.statistics or {}
    for name in sorted(part.statistics.keys() & expected.keys() & new.arrays.keys() & parent.arrays.keys()):
        if _row(new.arrays[name]) == _row(parent.arrays[name]):
            findings += _values(name, new.arrays[name], part, expected[name], bounds)
    return list(bounds.apply_levels(findings))


@np.errstate(over="ignore", invalid="ignore")
def new_part(new: Manifest, parent: Manifest) -> ComparedPart:
    """Return what to compare: the appended steps where the version only appends, else all of it."""
    statistics, instructions = new.statistics or {}, new.instructions or {}
    version = manifests.version_of(manifests.encode_manifest(parent))
    appended = (
        new.parent == version
        and new.episodes > parent.episodes
        and new.recordings[: len(parent.recordings)] == parent.recordings
    )
    if not appended:
        return ComparedPart(
            episodes=new.episodes,
            parent_episodes=parent.episodes,
            steps=new.steps,
            statistics=statistics,
            instructions=instructions,
            appended=False,
        )
    parent_statistics, parent_instructions = parent.statistics or {}, parent.instructions or {}
    return ComparedPart(
        episodes=new.episodes - parent.episodes,
        parent_episodes=parent.episodes,
        steps=new.steps - parent.steps,
        statistics={
            name: _statistics_of_added(total, old)
            if (old := parent_statistics.get(name)) and total.rows > old.rows
            else total
            for name, total in statistics.items()
        },
        instructions={
            text: added
            for text, count in instructions.items()
            if (added := count - parent_instructions.get(text, 0)) > 0
        },
        appended=True,
    )


def _statistics_of_added(whole: Statistics, before: Statistics) -> Statistics:
    """Return the statistics of the rows that `whole` has more than `before`; minimum and maximum are the whole's, and a
    mean or deviation that cannot be computed is NaN."""
    if len(whole.mean) != len(before.mean):
        return whole
    total, old = _finite_rows(whole), _finite_rows(before)
    rows = np.where(total > old, total - old, np.nan)
    mean, mean_0, deviation, deviation_0 = (
        np.asarray(values) for values in (whole.mean, before.mean, whole.deviation, before.deviation)
    )
    added = (mean * total - mean_0 * old) / rows
    square = ((deviation**2 + mean**2) * total - (deviation_0**2 + mean_0**2) * old) / rows - added**2
    # The difference of large numbers is noise. It shows that a column is constant only where it is far less than the
    # deviation before; elsewhere the deviation is unknown.
    noise = _NOISE * (deviation**2 + mean**2) * total / rows
    square[square < noise] = 0
    square[(square < noise) & (noise > 1e-4 * deviation_0**2) & (deviation_0 > 0)] = np.nan
    return msgspec.structs.replace(
        whole,
        rows=whole.rows - before.rows,
        non_finite=max(0, whole.non_finite - before.non_finite),
        mean=tuple(added.tolist()),
        deviation=tuple(np.sqrt(square).tolist()),
    )


def _finite_rows(statistics: Statistics) -> Floats:
    """Return the rows that each column's mean is of: images have several items per row and column."""
    if not statistics.finite:
        return np.full(len(statistics.mean), float(statistics.rows))
    counts: Floats = np.asarray(statistics.finite, np.float64)
    return counts * float(statistics.rows * len(counts) / (counts.sum() + statistics.non_finite))


def _row(schema: ArraySchema) -> tuple[tuple[int, ...], str]:
    return schema.shape[1:], schema.dtype


def _schema(new: Manifest, parent: Manifest) -> Iterator[Finding]:
    for name in sorted(new.arrays.keys() | parent.arrays.keys()):
        if name.rpartition("/")[2].startswith(EPISODE_PREFIX):
            continue
        if name not in new.arrays:
            yield _drift_finding(
                "schema", name, "the parent has this array", "no such array", "the array", level="warning"
            )
        elif name not in parent.arrays:
            yield _drift_finding("schema", name, "the parent has no such array", "an array", "none", level="warning")
        elif _row(new.arrays[name]) != _row(parent.arrays[name]):
            got, expected = (f"{dtype} {shape}" for shape, dtype in map(_row, (new.arrays[name], parent.arrays[name])))
            yield _drift_finding("schema", name, "a step has another shape or dtype than in the parent", got, expected)


def _lengths(part: ComparedPart, parent: Manifest, bounds: Thresholds) -> Iterator[Finding]:
    if not (part.episodes and part.steps and parent.episodes and parent.steps):
        return
    mean, before = part.steps / part.episodes, parent.steps / parent.episodes
    limit = 1 + (bounds.length_ratio - 1) * part.tolerance_factor()
    if not before / limit <= mean <= before * limit:
        yield _drift_finding(
            "length",
            "",
            f"the length of {_describe_part(part)} episodes differs",
            f"{mean:.1f} steps on average",
            f"{before:.1f} in the parent, or {limit:.3g} times it",
            "fault" if part.parent_episodes >= _MANY else "warning",
        )


def _instructions(part: ComparedPart, parent: Manifest, bounds: Thresholds) -> Iterator[Finding]:
    new, old = part.instructions, parent.instructions or {}
    all_new, all_before = sum(new.values()), sum(old.values())
    if not (all_new and all_before):
        return
    moved = {text: new.get(text, 0) / all_new - old.get(text, 0) / all_before for text in new.keys() | old.keys()}
    shift = sum(map(abs, moved.values())) / 2
    if shift > bounds.instruction_shift * part.tolerance_factor():
        most = max(moved, key=lambda text: (abs(moved[text]), text))
        yield _drift_finding(
            "instruction",
            "",
            f"the instructions of {_describe_part(part)} episodes differ",
            f"{shift:.0%} would have to change, most of them {most!r} ({moved[most]:+.0%})",
            f"at most {bounds.instruction_shift * part.tolerance_factor():.0%}",
            level="warning",
        )


def _values(
    name: str, schema: ArraySchema, part: ComparedPart, old: Statistics, bounds: Thresholds
) -> Iterator[Finding]:
    new = part.statistics[name]
    if new.non_finite / max(new.rows, 1) > 2 * part.tolerance_factor() * old.non_finite / max(old.rows, 1):
        yield _drift_finding(
            "nan",
            name,
            "more of its values are NaN or infinite",
            f"{new.non_finite} in {new.rows} rows",
            f"{old.non_finite} in {old.rows} rows",
        )
    mean, mean_0, deviation, deviation_0, low, low_0, high, high_0 = (
        np.asarray(values) for pair in zip(_numbers(new), _numbers(old), strict=True) for values in pair
    )
    if len(mean) != len(mean_0) or not len(mean):
        return
    if name.rpartition("/")[2] in bounds.times:  # times increase
        return
    moves, moved = ~(deviation == 0), deviation_0 > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        away, ratio = np.abs(mean - mean_0), deviation / deviation_0
        growth = np.maximum(low_0 - low, high - high_0) / (high_0 - low_0)
    yield from _constants(name, part, moves, moved, (mean, deviation), (mean_0, deviation_0, low_0, high_0))
    if is_camera(name, schema.shape[1:], schema.dtype):
        shift = float(mean.mean() - mean_0.mean())
        if abs(shift) > bounds.brightness * part.tolerance_factor(_FEW_GREY):
            yield _drift_finding(
                "brightness",
                name,
                f"{_describe_part(part)} frames are {'brighter' if shift > 0 else 'darker'}",
                f"grey level {mean.mean():.0f}",
                f"{mean_0.mean():.0f} in the parent",
            )
        return
    limit = bounds.mean_shift * part.tolerance_factor(_FEW_MEAN)
    # Another scene or instruction has other poses, and is added for that; commands are of one kind wherever they act.
    level: Level = "fault" if is_action(name) and part.parent_episodes >= _MANY else "warning"
    yield from _worst_columns(
        "mean",
        name,
        away / np.where(moved, deviation_0, 1),
        moved,
        limit,
        f"the mean of {_describe_part(part)} steps has moved",
        mean,
        mean_0,
        level,
    )
    yield from _compare_spread(name, part, ratio, moved & (deviation > 0), deviation, deviation_0, bounds)
    limit = bounds.range_growth * part.tolerance_factor(_FEW_RANGE)
    yield from _worst_columns(
        "range",
        name,
        growth,
        moved,
        limit,
        "values are far beyond the parent's range",
        np.where(low_0 - low > high - high_0, low, high),
        np.where(low_0 - low > high - high_0, low_0, high_0),
        level,
    )


def _constants(
    name: str,
    part: ComparedPart,
    moves: NDArray[np.bool_],
    moved: NDArray[np.bool_],
    now: tuple[Floats, Floats],
    before: tuple[Floats, Floats, Floats, Floats],
) -> Iterator[Finding]:
    """Yield columns that became constant, and columns that were. now: mean, deviation. before: these and the range."""
    (mean, deviation), (mean_0, deviation_0, low_0, high_0) = now, before
    dead = moved & ~moves
    # In few episodes a joint may rest, but not all of an arm.
    all_dead = dead.sum() >= _LEAST_COLUMNS and bool((dead == moved).all())
    if (part.episodes >= _MANY or all_dead) and dead.any():
        size = np.where(moved, high_0 - low_0, 1)
        at_end = np.minimum(np.abs(mean - low_0), np.abs(mean - high_0)) <= _ROUNDING * size
        elsewhere = np.clip(np.abs(mean - mean_0) / size, 0, 1)
        usual = (part.parent_episodes >= _MANY) & at_end & ((1 - elsewhere) ** part.episodes > _CHANCE)
        if is_action(name):
            usual &= (deviation_0 / size) ** 2 >= _TWO_VALUED * elsewhere * (1 - elsewhere)
        level: Level = "fault" if (dead & ~usual).any() else "warning"
        yield _drift_finding(
            "constant",
            name,
            f"{_columns(dead)} no longer changes",
            "a deviation of 0",
            f"about {deviation_0[dead][0]:.4g}",
            level,
        )
    if (~moved & moves).any():
        yield _drift_finding(
            "constant",
            name,
            f"{_columns(~moved & moves)} changes, and never did in the parent",
            f"a deviation of {deviation[~moved & moves][0]:.4g}",
            "0",
            level="warning",
        )


def _compare_spread(
    name: str,
    part: ComparedPart,
    ratio: Floats,
    both: NDArray[np.bool_],
    deviation: Floats,
    deviation_0: Floats,
    bounds: Thresholds,
) -> Iterator[Finding]:
    """Yield columns whose spread widens or narrows. both: columns that move in both parts.

    In one or two episodes, a joint may hardly move.
    """
    problem, base = f"the spread of {_describe_part(part)} steps differs", bounds.deviation_ratio - 1
    narrow = 1 / np.where(both, ratio, 1)
    half_wider, half_narrower = (
        float(np.median(values[both])) if is_action(name) and both.any() else 0.0 for values in (ratio, narrow)
    )
    unit_limit = 1 + base * _UNIT_SHARE if both.sum() >= _LEAST_COLUMNS else np.inf
    if part.parent_episodes >= _MANY:
        limit = 1 + base * part.tolerance_factor(_FEW_WIDE)
        limit = min(limit, unit_limit) if half_wider > unit_limit else limit
        yield from _worst_columns("deviation", name, ratio, both, limit, problem, deviation, deviation_0)
    elif half_wider > _UNIT_WIDE:
        yield from _worst_columns("deviation", name, ratio, both, _UNIT_WIDE, problem, deviation, deviation_0)
    is_unit = part.episodes >= _MANY <= part.parent_episodes and half_narrower > unit_limit
    if is_unit or part.episodes >= _MANY_NARROW:
        limit = 1 + base * part.tolerance_factor(_FEW_NARROW)
        limit = min(limit, unit_limit) if is_unit else limit
        yield from _worst_columns("deviation", name, narrow, both, limit, problem, deviation, deviation_0)
    elif is_action(name) and both.sum() >= _LEAST_COLUMNS and narrow[both].min() > _UNIT_NARROW:
        yield from _worst_columns("deviation", name, narrow, both, _UNIT_NARROW, problem, deviation, deviation_0)


def _worst_columns(
    check: str,
    name: str,
    measure: Floats,
    where: NDArray[np.bool_],
    limit: float,
    problem: str,
    now: Floats,
    before: Floats,
    level: Level = "fault",
) -> Iterator[Finding]:
    over = where & (measure > limit)
    if over.any():
        column = int(np.where(over, measure, -1).argmax())
        expected = f"{before[column]:.4g} ({measure[column]:.3g} {_UNITS[check]}, where {limit:.3g} are allowed)"
        got = f"{now[column]:.4g} in column {column}"
        yield _drift_finding(check, name, f"{problem}: {_columns(over)}", got, expected, level)


def _numbers(statistics: Statistics) -> tuple[tuple[float, ...], ...]:
    return statistics.mean, statistics.deviation, statistics.minimum, statistics.maximum


def _columns(which: NDArray[np.bool_]) -> str:
    columns = np.flatnonzero(which)
    return f"column {columns[0]}" + (f" and {len(columns) - 1} more" if len(columns) > 1 else "")


def _describe_part(part: ComparedPart) -> str:
    return "added" if part.appended else "its"


def _drift_finding(check: str, array: str, problem: str, got: str, expected: str, level: Level = "fault") -> Finding:
    return Finding(level=level, check=f"{check}-drift", array=array, problem=problem, got=got, expected=expected)
