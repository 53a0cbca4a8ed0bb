"""Select versions by conditions: `episodes>=100`, `instruction~pick`, `array=obs/*_image`, `tag=prod`.

= and != take globs for text; of several values (tags, arrays, instructions) one match is enough. ~ is "contains",
ignoring case. Sizes as 1GiB, dates as 2026-11-01 or RFC 3339.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pitools.core.errors import PitError, UsageError, suggest
from pitools.dataset.catalog.index import DatasetIndex, RootIndex, VersionRow, has_changed, load_index
from pitools.dataset.versions import VersionInfo
from pitools.store.version_list import format_ns

_CONDITION = re.compile(r"([a-z_]+)\s*(>=|<=|!=|=|~|>|<)\s*(.*)", re.DOTALL)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
    "!=": operator.ne,
}


_STATES = ("live", "quarantined", "retired")


class VersionListing(VersionInfo, frozen=True, kw_only=True, tag="pit.dataset-listing/1"):
    """One version as `pit dataset list` prints it. state: `live`, `retired`, `quarantined` (the whole version).

    quarantined_episodes: all where the whole version is in quarantine. parent: version that it begins with, or "".
    """

    tags: tuple[str, ...] = ()
    state: str = "live"
    quarantined_episodes: int = 0
    parent: str = ""


class _DatasetView:
    """A dataset's values, as conditions compare them."""

    def __init__(self, name: str, home: DatasetIndex) -> None:
        self.name, self.home = name, home
        self.tags: dict[str, list[str]] = {}
        for tag, version in home.tags.items():
            self.tags.setdefault(version, []).append(tag)

    def state(self, row: VersionRow) -> str:
        if row.folder in self.home.retired:
            return "retired"
        return "quarantined" if self.home.quarantined.get(row.folder, 0) < 0 else "live"

    def quarantined_episodes(self, row: VersionRow) -> int:
        quarantined = self.home.quarantined.get(row.folder, 0)
        return row.episodes if quarantined < 0 else quarantined

    def named(self, row: VersionRow) -> str:
        return "\n".join(sorted(self.tags.get(row.folder, ())))


Condition = Callable[[_DatasetView, Sequence[VersionRow]], Sequence[VersionRow]]
Predicate = Callable[[str], bool]
# Text that all versions of a dataset have, that a version has one of a few of, and of its own.
_DATASET_KEYS: dict[str, Callable[[_DatasetView], str]] = {"name": lambda place: place.name}
_SHARED_KEYS: dict[str, Callable[[_DatasetView], Sequence[str]]] = {
    "array": lambda place: place.home.arrays,
    "instruction": lambda place: place.home.instructions,
}
_VERSION_KEYS: dict[str, Callable[[_DatasetView, VersionRow], str]] = {
    "version": lambda _, row: row.version or row.folder,
    "parent": lambda _, row: row.parent,
    "state": lambda place, row: place.state(row),
    "tag": lambda place, row: place.named(row),
}
_NUMERIC_KEYS: dict[str, Callable[[_DatasetView, VersionRow], int]] = {
    "episodes": lambda _, row: row.episodes,
    "quarantined_episodes": lambda place, row: place.quarantined_episodes(row),
    "steps": lambda _, row: row.steps,
    "bytes": lambda _, row: row.bytes,
    "size": lambda _, row: row.bytes,
    "files": lambda _, row: row.files,
    "published": lambda _, row: row.published_ns,
    "date": lambda _, row: row.published_ns,
}
KEYS = (*_DATASET_KEYS, *_SHARED_KEYS, *_VERSION_KEYS, *_NUMERIC_KEYS)


def list_versions(
    root: Path, conditions: Sequence[str], *, rebuild: bool = False
) -> tuple[list[VersionListing], list[PitError]]:
    """Return the versions of a root that match every condition, by name, oldest first, and the errors of damaged ones.

    rebuild: read all manifests again. Raises UsageError.
    """
    index, errors = load_index(root, rebuild=rebuild)
    changed_names = {place.name for place, row in _matches(index, conditions) if has_changed(root / place.name, row)}
    if changed_names:
        index, errors = load_index(root, changed_names=changed_names)
    return list(search(root, index, conditions)), errors


def search(root: Path, index: RootIndex, conditions: Sequence[str]) -> Iterator[VersionListing]:
    """Yield the versions in an index that match every condition, by name, oldest first. Raises UsageError."""
    yield from (_version_listing(root, place, row) for place, row in _matches(index, conditions))


def _matches(index: RootIndex, conditions: Sequence[str]) -> Iterator[tuple[_DatasetView, VersionRow]]:
    parsed = [parse_condition(text) for text in conditions]
    for name, home in index.datasets.items():
        place = _DatasetView(name, home)
        rows: Sequence[VersionRow] = home.rows
        for condition in parsed:
            rows = condition(place, rows) if rows else ()
        yield from ((place, row) for row in rows)


def parse_condition(text: str) -> Condition:
    """Parse a condition into a function that selects a dataset's matching versions. Raises UsageError."""
    match = _CONDITION.fullmatch(text.strip())
    if not match:
        raise UsageError(
            f'expected KEY, operator and value, got "{text}"',
            where="--where",
            hint="'episodes>=100', 'instruction~pick'",
        )
    key, sign, value = match.groups()
    try:
        if key in _NUMERIC_KEYS:
            return _numeric_condition(key, sign, value)
        if key in KEYS:
            return _text_condition(key, _text_predicate(key, sign, value))
        raise UsageError(f'unknown key "{key}"', hint=suggest(key, KEYS))
    except UsageError as error:
        raise UsageError(error.message, where=f"--where '{text}'", hint=error.hint) from error


def _text_condition(key: str, fits: Predicate) -> Condition:
    if key in _DATASET_KEYS:
        return lambda place, rows: rows if fits(_DATASET_KEYS[key](place)) else ()
    if key in _VERSION_KEYS:
        own = _VERSION_KEYS[key]
        return lambda place, rows: [row for row in rows if fits(own(place, row))]
    index: Callable[[VersionRow], int] = operator.attrgetter(f"{key}s_index")

    def shared(place: _DatasetView, rows: Sequence[VersionRow]) -> Sequence[VersionRow]:
        good = {i for i, lines in enumerate(_SHARED_KEYS[key](place)) if fits(lines)}
        return [row for row in rows if index(row) in good]

    return shared


def _text_predicate(key: str, sign: str, value: str) -> Predicate:
    if sign == "~":
        wanted = value.casefold()
        return lambda lines: wanted in lines.casefold()
    if key in ("version", "parent") and re.fullmatch(r"[0-9a-f]{6,}", value):
        value += "*"  # as everywhere, its first digits will do
    if sign in ("=", "!="):
        if key == "state" and not any(fnmatchcase(state, value) for state in _STATES):
            raise UsageError(f'state: expected {", ".join(_STATES)}, got "{value}"', hint=suggest(value, _STATES))
        # A version without a tag or parent has one empty line, which only an empty value matches.
        return lambda lines: (
            any((line or not value) and fnmatchcase(line, value) for line in lines.split("\n")) == (sign == "=")
        )
    raise UsageError(f"{key}: text (expected =, != or ~)", hint=f"'{key}={value}' (a glob) or '{key}~{value}'")


def _numeric_condition(key: str, sign: str, value: str) -> Condition:
    get = _NUMERIC_KEYS[key]
    if sign not in _COMPARE:
        raise UsageError(f"{key}: a number (expected =, !=, <, <=, > or >=)", hint=f"'{key}>={value}'")
    compare = _COMPARE[sign]
    if key in ("published", "date"):
        return _date_condition(sign, value)
    bound = _parse_amount(key, value)
    return lambda place, rows: [row for row in rows if compare(get(place, row), bound)]


def _date_condition(sign: str, value: str) -> Condition:
    first, last = _parse_date_range(value)
    if sign in ("=", "!="):
        return lambda _, rows: [row for row in rows if (first <= row.published_ns <= last) == (sign == "=")]
    compare, bound = _COMPARE[sign], last if sign in (">", "<=") else first
    return lambda _, rows: [row for row in rows if compare(row.published_ns, bound)]


def _parse_amount(key: str, value: str) -> int:
    if key in ("bytes", "size"):
        from pitools.core import units

        return units.parse_size(value)
    if not re.fullmatch(r"[0-9]+", value):
        raise UsageError(
            f'{key}: expected a number, got "{value}"', hint=f"'{key}>=100', and a --where for each condition"
        )
    return int(value)


def _parse_date_range(value: str) -> tuple[int, int]:
    """Return the first and last nanosecond of a day, or of the millisecond of a time as `list` prints it."""
    try:
        moment = datetime.fromisoformat(value)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        first = round(moment.timestamp() * 1e3) * 1_000_000
    except ValueError as error:
        hint = "'published>=2026-11-01'"
        raise UsageError(f'expected a date, got "{value}"', hint=hint) from error
    length = 1_000_000 if "T" in value or " " in value else 86_400_000_000_000
    return first, first + length - 1


def _version_listing(root: Path, place: _DatasetView, row: VersionRow) -> VersionListing:
    return VersionListing(
        name=place.name,
        version=row.version or row.folder,
        path=f"{root}/{place.name}/{row.folder}",
        episodes=row.episodes,
        steps=row.steps,
        bytes=row.bytes,
        files=row.files,
        recording_bytes=row.recording_bytes,
        published=format_ns(row.published_ns),
        tags=tuple(sorted(place.tags.get(row.folder, ()))),
        state=place.state(row),
        quarantined_episodes=place.quarantined_episodes(row),
        parent=row.parent,
    )
