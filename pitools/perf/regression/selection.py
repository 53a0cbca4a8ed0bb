"""Select measurements by their site, commit or request: of the runs of a folder, or the points of a store."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pitools.core.errors import DataError, UsageError
from pitools.perf.regression.compare import Comparison, compare
from pitools.perf.regression.sources import RunOrigin, RunPlan, point_of_run, read_json, read_numbers
from pitools.perf.regression.store import Point

_MIN_COMMIT = 4  # characters
_ABBREVIATED = 7  # least characters of a stored commit or digest of which a selector may name more than is stored
HINT = "commit:SHA, site:NAME, name:REQUEST, or several with commas between"

Key = tuple[str, ...]


class Selector(NamedTuple):
    """What measurements must have; "" is anything. commit: the begin of its name."""

    commit: str = ""
    site: str = ""
    name: str = ""


class Selected(NamedTuple):
    """A measurement, and the run's folder that it is of; None for a stored one."""

    point: Point
    run_dir: Path | None = None


def parse_selector(text: str) -> Selector | None:
    """Return the selector that a text is; None for another text. Raises UsageError for a wrong one."""
    if not re.match(r"(commit|site|name):", text):
        return None
    parts: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = part.partition(":")
        if key not in Selector._fields or not value or key in parts:
            raise UsageError(f'"{part}" in "{text}" (expected {HINT})')
        parts[key] = value
    if len(parts.get("commit", "0" * _MIN_COMMIT)) < _MIN_COMMIT:
        raise UsageError(f'"{text}": a commit of fewer than {_MIN_COMMIT} characters')
    return Selector(**parts)


def select_runs(selector: Selector, run_dirs: Iterable[Path]) -> tuple[list[Selected], int]:
    """Return the runs that a selector selects and that have steps, oldest first; and how many of the commit are left
    out, as their code had changes on top of it."""
    found, dirty = [], 0
    for run_dir in run_dirs:
        try:
            plan = read_json(run_dir / "plan.json", RunPlan)
            if selector.site not in ("", plan.site) or selector.name not in ("", plan.name):
                continue
            git = read_json(run_dir / "provenance.json", RunOrigin).git
            if not git.commit.startswith(selector.commit):
                continue
            if selector.commit and git.dirty:
                dirty += 1
                continue
            found.append(Selected(point_of_run(run_dir), run_dir))
        except (DataError, OSError):  # without steps, damaged, or another user's
            continue
    return sorted(found, key=lambda each: each.point.t), dirty


def select_points(selector: Selector, points: Iterable[Point]) -> list[Selected]:
    """Return the stored points that a selector selects, oldest first.

    commit: of `source`, or of `software`, where runs have theirs, unless their code had changes on top of it.
    """
    return sorted(
        (
            Selected(point)
            for point in points
            if selector.site in ("", point.site)
            and selector.name in ("", point.measure.rpartition("/")[0])
            and any(_is_commit(text, selector.commit) for text in (point.source, *point.software.split("+")))
        ),
        key=lambda each: each.point.t,
    )


def _is_commit(stored: str, selected: str) -> bool:
    return stored.startswith(selected) or (len(stored) >= _ABBREVIATED and selected.startswith(stored))


def select_run(run_dir: Path) -> list[Selected]:
    """Return one run. Raises DataError."""
    return [Selected(point_of_run(run_dir), run_dir)]


def compare_selected(
    a: Sequence[Selected],
    b: Sequence[Selected],
    *,
    names: tuple[str, str],
    by_site: bool,
    min_effect: float,
) -> list[Comparison]:
    """Compare what both sides have measured on the same device: the runs' medians, or the steps of one run a side.

    by_site: whether sites may be compared, where the two sides share none; else only measurements of the same site and
    partition are. Raises DataError where the sides have nothing in common.
    """
    by_site = by_site and not {each.point.site for each in a} & {each.point.site for each in b}
    first, second = (_by_key(side, by_site) for side in (a, b))
    common = [key for key in first if key in second]
    if not common:
        text = " and ".join(f"{name}: {_describe(side)}" for name, side in zip(names, (first, second), strict=True))
        raise DataError(f"nothing that both have measured on the same device ({text})")
    results = []
    for key in common:
        pair = (first[key], second[key])
        alone = len(pair[0]) == len(pair[1]) == 1
        result = compare(
            *(_values(side, alone=alone) for side in pair),
            names=names,
            measure=key[0],
            better=pair[0][0].point.better,
            min_effect=min_effect,
            of_runs=not alone,
        )
        results.append(msgspec.structs.replace(result, device=key[1]))
    return results


def _by_key(selected: Iterable[Selected], by_site: bool) -> Mapping[Key, list[Selected]]:
    groups: dict[Key, list[Selected]] = {}
    for each in selected:
        point = each.point
        key = (point.measure, point.device) if by_site else (point.measure, point.device, point.site, point.partition)
        groups.setdefault(key, []).append(each)
    return groups


def _values(side: Sequence[Selected], *, alone: bool) -> list[float]:
    if alone and (run_dir := side[0].run_dir) is not None:
        return read_numbers(run_dir)
    return [each.point.value for each in side]


def _describe(groups: Mapping[Key, Sequence[Selected]]) -> str:
    return ", ".join(f"{len(side)} of {' '.join(filter(None, key))}" for key, side in groups.items()) or "none"
