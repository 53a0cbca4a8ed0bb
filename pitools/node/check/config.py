"""The file of a site's checks, `/etc/pitools/node.toml`: checks, node types, and where reports go.

A check is data: rows of one table of facts, a key, and the values that are right. The shipped checks of `base.toml`
come first; a check of the same name in the site's file replaces one.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from pitools.core import hostlist, strict_toml, trust, units
from pitools.core.errors import ConfigError, PitError, suggest
from pitools.node.check.xid_checks import XidSource, xid_checks
from pitools.node.tables import TABLES
from pitools.node.types import Action, Level, Row, Value

CONFIG_PATH = Path("/etc/pitools/node.toml")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
_RATE = re.compile(r"(\d+(?:\.\d+)?)/(s|min|h|d)")
_RATE_S = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_REGEX = "re:"
_VALUE_TESTS = ("min", "max", "equals", "one_of", "pattern", "max_increase", "max_rate", "is_same")
_COUNT_TESTS = ("count", "min_count", "max_count")


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the file."""


class Check(Section, frozen=True, kw_only=True):
    """A rule about the rows of one table of facts. All of its tests must hold.

    table, key: as in `pit node show --tables`. where: the rows meant: a value, a pattern with `*`, a regular expression
    for the whole value after `re:`, or a list of these. A row that could be meant, but lacks that value, fails nothing.
    types: node types that it is for; default: all. within: of a table of events, those that are not older.

    Tests of each row's value: min, max, equals, one_of, pattern (a regular expression for the whole text), max_increase
    and max_rate (`10/s`, `120/h`; never of a single event) since the last gathering of the same boot, is_same (in all
    rows). They say nothing of rows that are not there. Tests of the number of rows: count, min_count, max_count; with
    group_by, of the rows with equal values of these keys. burst: rows of a group that follow each other this closely
    count once. cleared_by: rows that a later row of their group with these values ends. max_groups: where more groups
    than that fail, it is the work of a job, and none does.

    level, action: of a failure. is_shadow: reported, never acted upon. old_names: names that it had, whose drains it
    still owns. source: who recommends it. hint: what an operator does next.
    """

    name: str
    table: str
    key: str = ""
    where: dict[str, Value | tuple[Value, ...]] = {}
    types: tuple[str, ...] = ()
    within: str = ""
    min: float | None = None
    max: float | None = None
    equals: Value = None
    one_of: tuple[Value, ...] = ()
    pattern: str = ""
    max_increase: float | None = None
    max_rate: str = ""
    is_same: bool | None = None
    count: int | None = None
    min_count: int | None = None
    max_count: int | None = None
    max_groups: int | None = None
    group_by: tuple[str, ...] = ()
    burst: str = ""
    cleared_by: dict[str, Value | tuple[Value, ...]] = {}
    level: Level = "critical"
    action: Action = "drain"
    is_shadow: bool = False
    old_names: tuple[str, ...] = ()
    source: str = ""
    hint: str = ""


class NodeType(Section, frozen=True, kw_only=True):
    """Nodes that are alike. nodes: a host list, `gpu[001-064]`, of names as Slurm has them."""

    nodes: str


class Nhc(Section, frozen=True, kw_only=True):
    """A configuration of LBNL's Node Health Check, whose lines are checks, too. file: `/etc/nhc/nhc.conf`; "": none."""

    file: str = ""


class Control(Section, frozen=True, kw_only=True):
    """What the controller may do. act: false prints what it would do.

    max_share_leaf, max_share_partition: of a leaf switch's or a partition's nodes, at most this share is drained by the
    controller at a time, at least one node; max_share_hour: of all nodes, in one hour. They never hold back a return.
    max_evidence_age: older evidence drains nothing. max_report_age: an older report of a node is none. stable_for: how
    long the checks of a drained node must pass before it returns. max_returns, returns_within: a node that returned so
    often in this time is left to a person.
    """

    act: bool = False
    max_share_leaf: float = 0.25
    max_share_partition: float = 0.1
    max_share_hour: float = 0.05
    max_evidence_age: str = "1h"
    max_report_age: str = "15m"
    stable_for: str = "10m"
    max_returns: int = 3
    returns_within: str = "7d"


class XidOptions(Section, frozen=True, kw_only=True):
    """What an Xid leads to. source: whose opinion of `check/xid.toml` counts."""

    source: XidSource = "pitools"


class NodeConfig(Section, frozen=True, kw_only=True):
    """The whole file. spool: shared folder, where each node writes its report. state: a folder on the node's own disk.

    python: an interpreter with pitools, read by `scripts/pit-healthcheck`. disable: shipped checks that are not made.
    """

    spool: str = ""
    state: str = "/var/lib/pitools/node"
    python: str = ""
    types: dict[str, NodeType] = {}
    disable: tuple[str, ...] = ()
    check: tuple[Check, ...] = ()
    nhc: Nhc = Nhc()
    control: Control = Control()
    xid: XidOptions = XidOptions()


def load_config(path: Path | None = None) -> NodeConfig:
    """Load a site's file, with the shipped checks before its own; those alone if the default file is missing.

    Raises ConfigError with the key, and the nearest known name, also if others could change the file: it names programs
    to run.
    """
    is_missing = path is None and not CONFIG_PATH.exists()
    if not is_missing:
        trust.require_trusted(path or CONFIG_PATH, "file of node checks")
    own = NodeConfig() if is_missing else _load(path or CONFIG_PATH)
    base = _load(Path(__file__).with_name("base.toml"), xid_checks(own.xid.source))
    if is_missing:
        return base
    for name in own.disable:
        if name not in (known := {check.name for check in base.check}):
            where = str(path or CONFIG_PATH)
            raise ConfigError(f'no shipped check "{name}"', where=where, hint=suggest(name, known), key="disable")
    own_names = {check.name for check in own.check}
    shipped = tuple(check for check in base.check if check.name not in own_names.union(own.disable))
    if problem := contradiction(shipped + own.check):
        raise ConfigError(problem, where=str(path or CONFIG_PATH), key="check")
    return msgspec.structs.replace(own, check=shipped + own.check)


def _load(path: Path, more: Sequence[dict[str, Any]] = ()) -> NodeConfig:
    """Load a file. more: further checks, as its own tables are."""
    tables = strict_toml.read_toml(path)
    if more:
        tables["check"] = [*tables.get("check", ()), *more]
    config = strict_toml.convert_tables(tables, NodeConfig, str(path))
    names: set[str] = set()
    for check in config.check:
        if problem := check_problem(check, config):
            raise ConfigError(f'check "{check.name}": {problem}', where=str(path), key="check")
        if check.name in names:
            raise ConfigError(f'two checks "{check.name}"', where=str(path), key="check")
        names.add(check.name)
    for name, node_type in config.types.items():
        try:
            hostlist.expand(node_type.nodes)
        except PitError as error:
            raise ConfigError(error.message, where=str(path), hint=error.hint, key=f"types.{name}.nodes") from error
    return config


def check_problem(check: Check, config: NodeConfig) -> str:
    """Return what is wrong with a check; "" if nothing is."""
    return next(_problems(check, config), "")


def _problems(check: Check, config: NodeConfig) -> Iterator[str]:
    if not _NAME.fullmatch(check.name):
        yield f'name "{check.name}" (expected lower-case letters, digits and -)'
    if check.table not in TABLES:
        yield f'no table "{check.table}": {suggest(check.table, TABLES)}'
        return
    table = TABLES[check.table]
    for key in (check.key, *check.where, *check.group_by, *check.cleared_by):
        if key and key not in table.keys:
            yield f'table {check.table} has no key "{key}": {suggest(key, table.keys)}'
    for name in check.types:
        if name not in config.types:
            yield f'no node type "{name}": {suggest(name, config.types)}'
    if table.target and not isinstance(check.where.get(table.target), str | tuple):
        yield f"where.{table.target} is missing: what is to be read"
    for key, wanted in (*check.where.items(), *check.cleared_by.items()):
        if wanted == ():
            yield f"{key} is an empty list, which no row has"
        for one in wanted if isinstance(wanted, tuple) else (wanted,):
            if isinstance(one, str) and one.startswith(_REGEX):
                if key == table.target:
                    yield f"where.{key} is an expression (expected what is to be read)"
                yield from _pattern_problem(key, one.removeprefix(_REGEX))
    yield from _pattern_problem("pattern", check.pattern)
    yield from _test_problems(check)
    yield from _event_problems(check, "at" in table.keys)


def _test_problems(check: Check) -> Iterator[str]:
    """Yield why the tests of a check cannot be made, or cannot all hold."""
    given = {name for name in _VALUE_TESTS + _COUNT_TESTS if _is_given(getattr(check, name))}
    of_value = given.intersection(_VALUE_TESTS)
    if not given:
        yield f"it tests nothing (expected one of {', '.join(_VALUE_TESTS + _COUNT_TESTS)})"
    if of_value and not check.key:
        yield f"{min(of_value)} needs a key"
    if check.key and not of_value:
        yield f'key "{check.key}" has no test (expected one of {", ".join(_VALUE_TESTS)})'
    if check.is_same is False:
        yield "is_same = false tests nothing (expected true)"
    if check.min is not None and check.max is not None and check.min > check.max:
        yield f"min {check.min:g} is above max {check.max:g}"
    allowed = check.one_of if check.equals is None else (check.equals,)
    if allowed and not any(_is_allowed(check, value) for value in allowed):
        yield f"{'one_of' if check.equals is None else 'equals'} contradicts its other tests: no value passes all"
    if check.count is not None and (check.min_count is not None or check.max_count is not None):
        yield "count contradicts min_count and max_count"
    if (check.min_count or 0) > (check.max_count if check.max_count is not None else float("inf")):
        yield f"min_count {check.min_count} is above max_count {check.max_count}"
    for name in (*_COUNT_TESTS, "max_increase"):
        if (getattr(check, name) or 0) < 0:
            yield f"{name} {getattr(check, name):g} (expected at least 0)"
    if check.min_count == 0:
        yield "min_count 0 tests nothing (expected at least 1)"
    if check.group_by and not (given.intersection(_COUNT_TESTS) or check.cleared_by):
        yield f"group_by needs one of {', '.join(_COUNT_TESTS)}"
    if check.max_groups is not None and not (check.group_by and check.max_count is not None):
        yield "max_groups needs group_by and max_count"
    if check.max_rate and not (match := _RATE.fullmatch(check.max_rate)):
        yield f'max_rate "{check.max_rate}" (expected 10/s, 5/min, 120/h or 3/d)'
    elif check.max_rate and match and not float(match[1]):
        yield "max_rate 0 (expected max_increase = 0)"


def _event_problems(check: Check, is_events: bool) -> Iterator[str]:
    """Yield what is wrong with the keys that are for events."""
    for name in ("within", "burst", "cleared_by"):
        if getattr(check, name) and not is_events:
            events = ", ".join(name for name, one in TABLES.items() if "at" in one.keys)
            yield f"{name} needs a table of events (expected {events})"
    if check.burst and check.count is check.min_count is check.max_count is None:
        yield f"burst needs one of {', '.join(_COUNT_TESTS)}"
    for name in ("within", "burst"):
        if text := getattr(check, name):
            try:
                if not units.parse_duration(text):
                    yield f'{name} "{text}" (expected more than 0 s)'
            except PitError as error:
                yield f"{name}: {error.message}"


def _pattern_problem(name: str, pattern: str) -> Iterator[str]:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        yield f"{name}: {error}"


def _is_allowed(check: Check, value: Value) -> bool:
    """Return whether a value that `equals` or `one_of` allows passes the other tests."""
    if check.one_of and not any(is_equal(value, one) for one in check.one_of):
        return False
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number and (check.min is not None or check.max is not None):
        return False
    if is_number and not (check.min is None or value >= check.min):  # type: ignore[operator]
        return False
    if is_number and not (check.max is None or value <= check.max):  # type: ignore[operator]
        return False
    try:
        return not check.pattern or re.fullmatch(check.pattern, str(value), re.DOTALL) is not None
    except re.error:
        return True  # reported by itself


def contradiction(checks: Sequence[Check]) -> str:
    """Return which two checks about the same rows cannot both pass; "" if there are none."""
    seen: dict[object, list[Check]] = {}
    for check in checks:
        rows = (check.table, tuple(sorted((key, str(value)) for key, value in check.where.items())), check.within)
        for other in seen.setdefault(rows, []):
            is_of_same_nodes = not (check.types and other.types) or set(check.types).intersection(other.types)
            if is_of_same_nodes and (text := _contradiction(check, other)):
                return f'checks "{other.name}" and "{check.name}" contradict each other: {text}'
        seen[rows].append(check)
    return ""


def _contradiction(one: Check, other: Check) -> str:
    if one.key and one.key == other.key:
        merged = {
            name: getattr(one, name) if _is_given(getattr(one, name)) else getattr(other, name)
            for name in ("equals", "one_of", "pattern")
        }
        low = max((check.min for check in (one, other) if check.min is not None), default=None)
        high = min((check.max for check in (one, other) if check.max is not None), default=None)
        both_equal = one.equals is not None and other.equals is not None
        if both_equal and not is_equal(one.equals, other.equals):
            return f"{one.key} is to equal {other.equals} and {one.equals}"
        if problem := next(_test_problems(msgspec.structs.replace(one, min=low, max=high, **merged)), ""):
            return f"{one.key}: {problem}"
    if (one.group_by, one.burst, one.cleared_by) == (other.group_by, other.burst, other.cleared_by):
        lows = [n for check in (one, other) for n in (check.count, check.min_count) if n is not None]
        highs = [n for check in (one, other) for n in (check.count, check.max_count) if n is not None]
        if lows and highs and max(lows) > min(highs):
            return f"at least {max(lows)} and at most {min(highs)} rows"
    return ""


def _is_given(value: object) -> bool:
    return value is not None and value not in ((), "")


def is_equal(value: Value, other: Value) -> bool:
    """Return whether two values are equal; true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def rate_per_s(text: str) -> float:
    """Return `120/h` as events a second."""
    number, unit = _RATE.fullmatch(text).groups()  # type: ignore[union-attr]
    return float(number) / _RATE_S[unit]


def checks_for(config: NodeConfig, node: str) -> list[Check]:
    """Return the checks that are for a node, by its name. Raises ConfigError if the file of NHC cannot be read."""
    types = {name for name, one in config.types.items() if node in _expand(one.nodes)}
    checks = [check for check in config.check if not check.types or types.intersection(check.types)]
    if config.nhc.file:
        from pitools.node.check.nhc.lines import read_nhc  # which needs this module

        checks += [check for line in read_nhc(Path(config.nhc.file), node) for check in line.checks]
    return checks


@lru_cache(maxsize=64)
def _expand(nodes: str) -> frozenset[str]:
    return frozenset(hostlist.expand(nodes))


def targets_of(checks: list[Check]) -> dict[str, set[str]]:
    """Return by table what the checks name to be read: the paths of `files`, and so on."""
    targets: dict[str, set[str]] = {}
    for check in checks:
        if target := TABLES[check.table].target:
            named: Any = check.where[target]
            targets.setdefault(check.table, set()).update([named] if isinstance(named, str) else map(str, named))
    return targets


def matches(row: Row, where: dict[str, Value | tuple[Value, ...]], table: str = "") -> bool | None:
    """Return whether a row has these values; None if that is unknown. Of a list, one must fit.

    table: its table's name. In a table of events a value that is missing is none, as the line does not say it.
    """
    is_unknown = False
    for key, wanted in where.items():
        value = row.get(key)
        if value is None and table and "at" not in TABLES[table].keys:
            is_unknown = True
        elif not any(_fits(value, one) for one in (wanted if isinstance(wanted, tuple) else (wanted,))):
            return False
    return None if is_unknown else True


def _fits(value: Value, wanted: Value) -> bool:
    if isinstance(wanted, str) and wanted.startswith(_REGEX):
        is_text = isinstance(value, str | int) and not isinstance(value, bool)
        return is_text and re.fullmatch(wanted.removeprefix(_REGEX), str(value), re.DOTALL) is not None
    if not is_plain(wanted) and isinstance(value, str):
        return fnmatch.fnmatchcase(value, str(wanted))
    return is_equal(value, wanted)


def is_plain(wanted: Value) -> bool:
    """Return whether a value of `where` means itself alone: it is no pattern."""
    return not isinstance(wanted, str) or not (wanted.startswith(_REGEX) or any(sign in wanted for sign in "*?["))
