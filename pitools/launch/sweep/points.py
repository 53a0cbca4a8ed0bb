"""Read the points of a sweep, values of request keys and parameters, from `--set` and from a file; plan them.

A point is a dictionary of key → text, in the order in which the keys were given; `request.set_values` types the texts.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pitools.core.errors import ConfigError, UsageError, suggest
from pitools.launch import plan as planning
from pitools.launch import request as requests
from pitools.launch.plan import Plan
from pitools.launch.request import typed_value
from pitools.site.schema import Site

Point = dict[str, str]

# More points than this are usually a mistake in a range.
MAX_POINTS = 1000
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


def parse_sets(texts: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return key → its values, of texts such as `lr=1e-3,3e-4` and `seed=0..3` (0, 1, 2 and 3; `0..9..3` has a step).

    A value with a comma stands in double quotes. Raises UsageError for a text without `=`, an empty value, and a key
    that is given twice.
    """
    values: dict[str, Sequence[str]] = {}
    for text in texts:
        key, equals, listed = text.partition("=")
        if not key or not equals:
            raise UsageError(f'"{text}" is not KEY=VALUES', where="--set", hint="--set lr=1e-3,3e-4")
        if key in values:
            raise UsageError(f'"{key}" is given twice', where="--set", hint=f"--set {key}=VALUE,VALUE")
        values[key] = _parse_values(key, listed)
    return values


def parse_point(texts: Sequence[str]) -> Point:
    """Return the one point of `--set` with a single value for each key. Raises UsageError for several values."""
    sets = parse_sets(texts)
    if several := next((key for key, values in sets.items() if len(values) > 1), ""):
        message = f"{several}: {len(sets[several])} values (expected one)"
        raise UsageError(message, where="--set", hint="several values are a sweep: pit launch run REQUEST --set …")
    return {key: values[0] for key, values in sets.items()}


def _parse_values(key: str, listed: str) -> Sequence[str]:
    if match := _RANGE.fullmatch(listed):
        first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
        if last < first or not step:
            raise UsageError(f"{key}: empty range {listed}", where="--set", hint=f"--set {key}={last}..{first}")
        return _Range(range(first, last + 1, step))
    cells = next(csv.reader([listed], skipinitialspace=True), []) or [""]
    if "" in cells:
        raise UsageError(f'{key}: empty value in "{listed}"', where="--set", hint=f"--set {key}=VALUE,VALUE")
    if repeated := next((cell for cell in cells if cells.count(cell) > 1), ""):
        raise UsageError(f"{key}: {repeated} is given twice", where="--set", hint="give each value once")
    return cells


class _Range(Sequence[str]):
    """The numbers of a range as texts; a long range takes no memory."""

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return str(self._numbers[index])


def read_points(path: Path) -> list[Point]:
    """Return the points of a file of JSON Lines (an object each) or CSV (keys in the first line).

    Raises ConfigError, with the line, for a file of another form.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=str(path)) from error
    rows = _json_rows(text, path) if text.lstrip().startswith("{") else _csv_rows(text, path)
    points: list[Point] = []
    for number, row in rows:
        if not row or not all(row) or not all(row.values()):
            hint = "give each point the same keys, and each key a value"
            raise ConfigError("a point without a key or a value", where=f"{path}:{number}", hint=hint)
        if points and row.keys() != points[0].keys():
            message = f"other keys than the first point ({', '.join(points[0])})"
            raise ConfigError(message, where=f"{path}:{number}", hint="give each point the same keys")
        points.append(row)
    if not points:
        raise ConfigError("no points", where=str(path), hint='lines such as {"lr": 1e-3, "seed": 0}')
    return points


def _json_rows(text: str, path: Path) -> Iterator[tuple[int, Point]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line, object_pairs_hook=_unique_keys)
            if not isinstance(values, dict):
                raise ValueError("not an object")
            yield number, {key: _json_text(value) for key, value in values.items()}
        except ValueError as error:
            raise ConfigError(f"not a point: {error}", where=f"{path}:{number}", hint='{"lr": 1e-3}') from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)


def _json_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ValueError(f"{value!r} is not a number, a text, true or false")


def _csv_rows(text: str, path: Path) -> Iterator[tuple[int, Point]]:
    reader = csv.reader(io.StringIO(text))
    keys = [key.strip() for key in next(reader, [])]
    if len(set(keys)) < len(keys):
        raise ConfigError("a key is given twice", where=f"{path}:1")
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(keys):
            message = f"{len(cells)} values (expected {len(keys)}: {', '.join(keys)})"
            raise ConfigError(message, where=f"{path}:{reader.line_num}")
        yield reader.line_num, dict(zip(keys, (cell.strip() for cell in cells), strict=True))


def make_points(
    sets: Mapping[str, Sequence[str]], listed: Sequence[Point] = (), limit: int = MAX_POINTS
) -> list[Point]:
    """Return the grid of all values, the last key the fastest, for each of the listed points.

    Raises UsageError for more points than `limit`, for a key in both, and for two equal points.
    """
    count = math.prod(map(len, sets.values())) * max(1, len(listed))
    if count > limit:
        message = f"{count} points (expected at most {limit})"
        raise UsageError(message, where="--set", hint=f"to run them all: --max-points {count}")
    if twice := next((key for key in sets if listed and key in listed[0]), ""):
        raise UsageError(f'"{twice}" is given twice', where="--set", hint="leave it out, or out of the file of points")
    points = [
        {**point, **dict(zip(sets, values, strict=True))}
        for point in (listed or [{}])
        for values in itertools.product(*sets.values())
    ]
    numbers: dict[str, int] = {}
    for number, point in enumerate(points, 1):
        if (first := numbers.setdefault(point_id(point), number)) != number:
            raise UsageError(f"points {first} and {number} are equal: {point_text(point)}", hint="give each point once")
    return points


def point_id(point: Point) -> str:
    """Return a text that is the same for equal points: `1e-3` and `0.001` are equal, the order of keys is free."""
    return json.dumps({key: typed_value(point[key]) for key in sorted(point)})


def point_text(point: Point) -> str:
    """Return a point as one line: `lr=1e-3 seed=0`."""
    return " ".join(f"{key}={text}" for key, text in point.items())


def run_name(template: str, name: str, point: Point, index: int) -> str:
    """Return the name of a point's run: the template with `{name}`, `{index}` and `{KEY}` replaced.

    Characters that a name cannot have become `-`. Raises UsageError for another placeholder.
    """
    values = {"name": name, "index": f"{index:03d}", **point}

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise UsageError(
                f"{match[0]}: not a key of --set or --points", where="--name", hint=suggest(match[1], values)
            )
        return values[match[1]]

    return re.sub(r"[^a-z0-9_-]+", "-", _PLACEHOLDER.sub(value, template).lower()).strip("-")


def plan_point(
    request: Path,
    site: Site,
    point: Point,
    *,
    data: Mapping[str, str],
    nodes: int = 0,
    name: str = "{name}",
    index: int = 0,
) -> Plan:
    """Return the plan of a request at one point, named by the template `name`. Raises the errors of planning.

    data: dataset name → path. nodes: 0 for the request's own.
    """
    loaded = requests.fill_datasets(requests.load_request(request, point), dict(data))
    text = request.read_text()
    if point:  # the run's request.toml
        text = f"# Launched with --set: {point_text(point)}\n{text}"
    named = run_name(name, loaded.name, point, index)
    loaded = msgspec.structs.replace(loaded, name=named, nodes=nodes or loaded.nodes)
    requests.check_request(loaded, f"{request}, {point_text(point)}" if point else str(request))
    return planning.make_plan(loaded, site, str(request), request_text=text)


def default_template(points: Sequence[Point]) -> str:
    """Return the template of names without `--name`: with a number where a sweep has several points."""
    return "{name}-{index}" if len(points) > 1 else "{name}"
