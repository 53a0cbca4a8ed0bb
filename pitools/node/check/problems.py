"""What is wrong with checks: those that cannot be made, whose tests cannot all hold, or that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from pitools.core import units
from pitools.core.errors import PitError, suggest
from pitools.node.check.rule import RENAMED, Check
from pitools.node.check.values import RATE, REGEX, fits, is_equal, is_plain, listed, unmet
from pitools.node.tables import TABLES
from pitools.node.types import Value, is_at_least

_VALUE_TESTS = ("min", "max", "equals", "any_of", "pattern", "max_increase", "max_rate", "all_equal")
_COUNT_TESTS = ("count", "min_count", "max_count")
_GROUPING = ("group_by", "merge_within", "cleared_by")
_NUMBER_TESTS = ("min", "max", "max_increase", "max_rate")
_A = {"text": "text", "number": "a number", "boolean": "true or false"}
_SHARES = ("used_share", "memory_share", "spare_share")  # wear and CPU may be above 1
_NAME_BYTES = 15  # of a process; the kernel's own may have more
_LONG_TEXTS = ("text", "output", "error_output")
_SIGNS = re.compile(r"[\\.^$*+?{}\[\]|()]")  # that make a text more than itself in a regular expression


def check_problem(check: Check, types: Collection[str] = ()) -> str:
    """Return what is wrong with a check; "" if nothing is. types: names of node types."""
    return next(_problems(check, types), "")


def _problems(check: Check, types: Collection[str]) -> Iterator[str]:
    if check.table not in TABLES:
        yield f'no table "{check.table}": {suggest(check.table, TABLES)}'
        return
    table = TABLES[check.table]
    keys = (check.key, *check.where, *check.group_by, *check.cleared_by)
    if wrong := [key for key in keys if key and key not in table.keys]:
        yield f'table {check.table} has no key "{wrong[0]}": {suggest(wrong[0], table.keys)}'
        return
    if check.level == "warning" and is_at_least(check.action, "drain-after-job"):
        yield f'level "warning" contradicts action "{check.action}" (expected level "critical", or action "report")'
    for name in check.types:
        if name not in types:
            known = suggest(name, types) or f'expected [types.{name}] with nodes = "n[001-064]"'
            yield f'no node type "{name}": {known}'
    if table.named and not isinstance(check.where.get(table.named), str | tuple):
        yield f"where.{table.named} is missing: what is to be read"
    for key, wanted in (*check.where.items(), *check.cleared_by.items()):
        if wanted == ():
            yield f"{key} is an empty list, which no row has"
        for one in listed(wanted):
            if isinstance(one, str) and one.startswith(REGEX):
                if key == table.named:
                    yield f"where.{key} is an expression (expected what is to be read)"
                yield from _pattern_problem(key, one.removeprefix(REGEX))
    yield from _pattern_problem("pattern", check.pattern)
    yield from _type_problems(check)
    yield from _test_problems(check)
    yield from _event_problems(check, "at" in table.keys)


def _type_problems(check: Check) -> Iterator[str]:
    """Yield values of other types than their keys', and texts that a key never has."""
    for key, wanted in (*check.where.items(), *check.cleared_by.items()):
        for value in listed(wanted):
            yield from _misfit(check.table, key, value, is_where=True)
            is_name = (check.table, key) == ("processes", "name") and is_plain(value)
            if is_name and len(str(value).encode()) > _NAME_BYTES and not check.where.get("is_kernel"):
                yield f'name "{value}" (expected at most {_NAME_BYTES} bytes, or is_kernel = true)'
    if not check.key:
        return
    for value in (check.equals, *check.any_of):
        if value is not None:
            yield from _misfit(check.table, check.key, value)
    kind = TABLES[check.table].keys[check.key].type
    for name in _NUMBER_TESTS:
        value = getattr(check, name)
        if value != value:
            yield f"{name} nan (expected a number)"
        elif name in ("min", "max") and check.key.endswith(_SHARES) and (value or 0) > 1:
            yield f"{name} {value:g}: {check.key} is a share (expected 0 to 1)"
        if kind != "number" and _is_given(value):
            yield f"{name}: {check.key} is {_A[kind]} (expected a key of numbers)"
    if check.pattern and kind == "boolean":
        yield f"pattern: {check.key} is true or false (expected equals)"
    elif check.pattern:
        yield from _misfit(check.table, check.key, f"{REGEX}{check.pattern}", is_where=True)


def _misfit(table: str, key: str, value: Value, *, is_where: bool = False) -> Iterator[str]:
    """Yield why no row's value is, or with `is_where` fits, this one."""
    kind, _, known, form, example = TABLES[table].keys[key]
    is_regex = is_where and isinstance(value, str) and value.startswith(REGEX)
    is_of_type = {
        "text": isinstance(value, str),
        "number": is_regex or (isinstance(value, int | float) and not isinstance(value, bool)),
        "boolean": isinstance(value, bool),
    }
    if not is_of_type[kind]:
        shown = f'"{value}"' if isinstance(value, str) else str(value).lower()
        yield f"{key} {shown} (expected {_A[kind]})"
    elif key.endswith(_SHARES) and not isinstance(value, str) and not 0 <= (value or 0) <= 1:
        yield f"{key} {value:g} (expected a share, 0 to 1)"
    elif isinstance(value, str) and kind == "text":
        is_whole = not is_where or is_plain(value) or key == TABLES[table].named
        if known and value and not any(fits(one, value) if is_where else one == value for one in known):
            word = RENAMED.get(value, value)
            nearest = suggest(word.upper() if known[0].isupper() else word.lower(), known)
            yield f'{key} is never "{value.removeprefix(REGEX)}": {nearest}'
        elif is_whole and value and not re.fullmatch(form, value):
            yield f'{key} is never "{value}" (expected one such as "{example}")'
        elif is_where and key in _LONG_TEXTS and _is_literal(value):
            text = value.removeprefix(REGEX)
            yield f'{key} is compared as a whole with "{text}" (expected {f".*{text}.*" if is_regex else f"*{text}*"})'


def _is_literal(value: str) -> bool:
    return not _SIGNS.search(value.removeprefix(REGEX)) if value.startswith(REGEX) else is_plain(value)


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
    if _no_value_passes(check):
        yield "its tests contradict each other: no value passes all"
    if check.count is not None and (check.min_count is not None or check.max_count is not None):
        yield "count contradicts min_count and max_count"
    is_one_row, limits = not TABLES[check.table].subject, (check.count, check.min_count, check.max_count)
    if is_one_row and (max(check.count or 0, check.min_count or 0) > 1 or (0 in limits and not check.where)):
        yield f"table {check.table} has one row on each node"
    if (check.min_count or 0) > (check.max_count if check.max_count is not None else float("inf")):
        yield f"min_count {check.min_count} is above max_count {check.max_count}"
    if check.group_by and not (given.intersection(_COUNT_TESTS) or check.cleared_by):
        yield f"group_by needs one of {', '.join(_COUNT_TESTS)}"
    if check.max_groups is not None and not (check.group_by and check.max_count is not None):
        yield "max_groups needs group_by and max_count"
    if check.max_rate and not (match := RATE.fullmatch(check.max_rate)):
        yield f'max_rate "{check.max_rate}" (expected 10/s, 5/min, 120/h or 3/d)'
    elif check.max_rate and match and not float(match[1]):
        yield "max_rate 0 (expected max_increase = 0)"


def _event_problems(check: Check, is_events: bool) -> Iterator[str]:
    """Yield what is wrong with the keys that are for events."""
    for name in ("max_age", "merge_within", "cleared_by"):
        if getattr(check, name) and not is_events:
            events = ", ".join(name for name, one in TABLES.items() if "at" in one.keys)
            yield f"{name} needs a table of events (expected {events})"
    if check.merge_within and check.count is check.min_count is check.max_count is None:
        yield f"merge_within needs one of {', '.join(_COUNT_TESTS)}"
    for name in ("max_age", "merge_within"):
        if text := getattr(check, name):
            try:
                if not units.parse_duration(text):
                    yield f'{name} "{text}" (expected more than 0 s)'
            except PitError as error:
                yield f"{name}: {error.message} (expected 90s, 10m, 2h or 1d)"


def _pattern_problem(name: str, pattern: str) -> Iterator[str]:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        yield f'{name} "{pattern}": {error}'


def _no_value_passes(*checks: Check) -> bool:
    """Return whether no value passes the tests of single values of all checks; false where that is not known."""
    values = [value for check in checks for value in (check.equals, *check.any_of) if value is not None]
    if not values and not any(check.pattern for check in checks):  # a limit passes, or nothing does
        values = [value for check in checks for value in (check.min, check.max) if value is not None]
    values = values or (list(TABLES[checks[0].table].keys[checks[0].key].values) if checks[0].key else [])
    return bool(values) and all(any(unmet(check, value) for check in checks) for value in values)


def contradiction(checks: Sequence[Check]) -> str:
    """Return which two checks cannot both pass, of rows that one of them means and the other too; "" if there are none.

    Checks of rows that overlap otherwise, as of a vendor and of a model, may never meet on a node.
    """
    seen: dict[str, list[Check]] = {}
    for check in checks:
        for other in seen.setdefault(check.table, []):
            is_of_same_nodes = not (check.types and other.types) or set(check.types).intersection(other.types)
            if is_of_same_nodes and (text := _contradiction(other, check)):
                return f'checks "{other.name}" and "{check.name}" contradict each other: {text}'
        seen[check.table].append(check)
    return ""


def _contradiction(one: Check, other: Check) -> str:
    pairs = ((one, other), (other, one))
    if (
        one.key
        and one.key == other.key
        and _no_value_passes(one, other)
        and any(_means_no_more(*pair) for pair in pairs)
    ):
        return f"no value of {one.key} passes both"
    for narrow, wide in pairs:
        low = narrow.min_count if narrow.count is None else narrow.count
        high = wide.max_count if wide.count is None else wide.count
        if low is None or high is None or low <= high or not _means_no_more(narrow, wide):
            continue
        if all(getattr(one, name) == getattr(other, name) for name in _GROUPING):
            return f"at least {low} rows and at most {high}"
    return ""


def _means_no_more(narrow: Check, wide: Check) -> bool:
    """Return whether all rows that a check means are meant by the other, too."""
    if wide.max_age and not (
        narrow.max_age and units.parse_duration(narrow.max_age) <= units.parse_duration(wide.max_age)
    ):
        return False
    return all(
        key in narrow.where
        and all(
            any(fits(one, two) or is_equal(one, two) for two in listed(wanted)) for one in listed(narrow.where[key])
        )
        for key, wanted in wide.where.items()
    )


def _is_given(value: object) -> bool:
    return value is not None and value not in ((), "")
