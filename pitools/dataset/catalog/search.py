"""Versions by what they hold: `episodes>=100`, `task~pick`, `field=obs/*_image`, `published>=2026-11-01`, `tag=prod`.

= != of text take globs, and of what a version has several of (tags, fields, tasks) one that fits is enough. ~ is
"contains", in either case. Sizes as 1GiB, dates as 2026-11-01 or RFC 3339.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pitools.core.errors import UsageError, nearest
from pitools.dataset.catalog.index import Home, Index, Row
from pitools.dataset.versions import Version
from pitools.store.version_list import published

_CONDITION = re.compile(r"([a-z_]+)\s*(>=|<=|!=|=|~|>|<)\s*(.*)", re.DOTALL)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
    "!=": operator.ne,
}


class Listed(Version, frozen=True, kw_only=True, tag="pit.dataset/1"):
    """A version, and what is said of it. state: `live`, `retired`, `quarantined` (as a whole).

    quarantined_episodes: all of them where it is as a whole. parent: the version it was made of, or "".
    """

    tags: tuple[str, ...] = ()
    state: str = "live"
    quarantined_episodes: int = 0
    parent: str = ""


class _Place:
    """A dataset, as conditions look at its versions."""

    def __init__(self, name: str, home: Home) -> None:
        self.name, self.home = name, home
        self.tags: dict[str, list[str]] = {}
        for tag, version in home.tags.items():
            self.tags.setdefault(version, []).append(tag)

    def state(self, row: Row) -> str:
        if row.folder in self.home.retired:
            return "retired"
        return "quarantined" if self.home.quarantined.get(row.folder, 0) < 0 else "live"

    def named(self, row: Row) -> str:
        return "\n".join(sorted(self.tags.get(row.folder, ())))


Condition = Callable[[_Place, Sequence[Row]], Sequence[Row]]
Fits = Callable[[str], bool]
# Text that all versions of a dataset have, that a version has one of a few of, and of its own.
_OF_ALL: dict[str, Callable[[_Place], str]] = {"name": lambda place: place.name}
_SHARED: dict[str, Callable[[_Place], Sequence[str]]] = {
    "field": lambda place: place.home.fields,
    "task": lambda place: place.home.tasks,
    "language": lambda place: place.home.tasks,
}
_OWN: dict[str, Callable[[_Place, Row], str]] = {
    "version": lambda _, row: row.version or row.folder,
    "parent": lambda _, row: row.parent,
    "state": lambda place, row: place.state(row),
    "tag": lambda place, row: place.named(row),
}
_NUMBERS: dict[str, Callable[[Row], int]] = {
    "episodes": operator.attrgetter("episodes"),
    "steps": operator.attrgetter("steps"),
    "bytes": operator.attrgetter("bytes"),
    "size": operator.attrgetter("bytes"),
    "files": operator.attrgetter("files"),
    "published": operator.attrgetter("mtime_ns"),
    "date": operator.attrgetter("mtime_ns"),
}
KEYS = (*_OF_ALL, *_SHARED, *_OWN, *_NUMBERS)


def find(root: Path, index: Index, conditions: Sequence[str]) -> Iterator[Listed]:
    """The versions of a root that meet every condition, by name, oldest first. Raises UsageError."""
    parsed = [parse(text) for text in conditions]
    for name, home in index.homes.items():
        place = _Place(name, home)
        rows: Sequence[Row] = home.rows
        for condition in parsed:
            rows = condition(place, rows) if rows else ()
        yield from (_listed(root, place, row) for row in rows)


def parse(text: str) -> Condition:
    """A condition: of a dataset's versions, those that meet it. Raises UsageError."""
    found = _CONDITION.fullmatch(text.strip())
    if not found:
        raise UsageError(f'"{text}" is not a condition', where="--where", hint="such as 'episodes>=100' or 'task~pick'")
    key, sign, value = found.groups()
    try:
        if key in _NUMBERS:
            return _number(key, sign, value)
        if key in KEYS:
            return _text(key, _fits(key, sign, value))
        raise UsageError(f'nothing is called "{key}"', hint=nearest(key, KEYS))
    except UsageError as error:
        raise UsageError(error.what, where=f"--where '{text}'", hint=error.hint) from error


def _text(key: str, fits: Fits) -> Condition:
    if key in _OF_ALL:
        return lambda place, rows: rows if fits(_OF_ALL[key](place)) else ()
    if key in _OWN:
        own = _OWN[key]
        return lambda place, rows: [row for row in rows if fits(own(place, row))]
    number: Callable[[Row], int] = operator.attrgetter("fields" if key == "field" else "tasks")

    def shared(place: _Place, rows: Sequence[Row]) -> Sequence[Row]:
        good = {i for i, lines in enumerate(_SHARED[key](place)) if fits(lines)}
        return [row for row in rows if number(row) in good]

    return shared


def _fits(key: str, sign: str, value: str) -> Fits:
    if sign == "~":
        wanted = value.casefold()
        return lambda lines: wanted in lines.casefold()
    if key in ("version", "parent") and re.fullmatch(r"[0-9a-f]{6,}", value):
        value += "*"  # as everywhere, its first digits will do
    if sign in ("=", "!="):
        return lambda lines: any(fnmatchcase(line, value) for line in lines.split("\n")) == (sign == "=")
    raise UsageError(f"{key} is text", hint=f"'{key}={value}' (a glob) or '{key}~{value}'")


def _number(key: str, sign: str, value: str) -> Condition:
    get = _NUMBERS[key]
    if sign not in _COMPARE:
        raise UsageError(f"{key} is a number", hint=f"'{key}>={value}'")
    compare = _COMPARE[sign]
    if key in ("published", "date"):
        return _published(sign, value)
    bound = _amount(key, value)
    return lambda _, rows: [row for row in rows if compare(get(row), bound)]


def _published(sign: str, value: str) -> Condition:
    first, last = _moments(value)
    if sign in ("=", "!="):
        return lambda _, rows: [row for row in rows if (first <= row.mtime_ns <= last) == (sign == "=")]
    compare, bound = _COMPARE[sign], last if sign in (">", "<=") else first
    return lambda _, rows: [row for row in rows if compare(row.mtime_ns, bound)]


def _amount(key: str, value: str) -> int:
    if key in ("bytes", "size"):
        from pitools.core import units

        return units.size(value)
    if not re.fullmatch(r"[0-9]+", value):
        raise UsageError(f'"{value}" is not a number', hint=f"'{key}>=100', and a --where for each condition")
    return int(value)


def _moments(value: str) -> tuple[int, int]:
    """The first and the last nanosecond of a day, or of the millisecond of a time as `list` shows it."""
    try:
        moment = datetime.fromisoformat(value)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        first = round(moment.timestamp() * 1e3) * 1_000_000
    except ValueError as error:
        hint = "'published>=2026-11-01'"
        raise UsageError(f'"{value}" is not a date', hint=hint) from error
    length = 1_000_000 if "T" in value or " " in value else 86_400_000_000_000
    return first, first + length - 1


def _listed(root: Path, place: _Place, row: Row) -> Listed:
    held = place.home.quarantined.get(row.folder, 0)
    return Listed(
        name=place.name,
        version=row.version or row.folder,
        path=f"{root}/{place.name}/{row.folder}",
        episodes=row.episodes,
        steps=row.steps,
        bytes=row.bytes,
        files=row.files,
        source_bytes=row.source_bytes,
        published=published(row.mtime_ns),
        tags=tuple(sorted(place.tags.get(row.folder, ()))),
        state=place.state(row),
        quarantined_episodes=row.episodes if held < 0 else held,
        parent=row.parent,
    )
