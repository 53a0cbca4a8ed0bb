"""Values of facts, and those that checks ask for: equal, fitting a pattern, within limits, or unknown."""

from __future__ import annotations

import fnmatch
import re

from pitools.core.output import printable
from pitools.node.check.rule import Check, Wanted
from pitools.node.tables import TABLES
from pitools.node.types import Row, Value

REGEX = "re:"
RATE = re.compile(r"(\d+(?:\.\d+)?)/(s|min|h|d)")
_RATE_S = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def is_equal(value: Value, other: Value) -> bool:
    """Return whether two values are equal; true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def rate_per_s(text: str) -> float:
    """Return `120/h` as events a second."""
    number, unit = RATE.fullmatch(text).groups()  # type: ignore[union-attr]
    return float(number) / _RATE_S[unit]


def unmet(check: Check, value: Value) -> str:
    """Return what a check expects instead of a value, by its tests of single values; "" if the value passes these."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if check.min is not None and value < check.min:
            return f"at least {check.min:g}"
        if check.max is not None and value > check.max:
            return f"at most {check.max:g}"
    if check.equals is not None and not is_equal(value, check.equals):
        return shown(check.equals)
    if check.any_of and not any(is_equal(value, one) for one in check.any_of):
        return f"one of {shown(', '.join(map(shown, check.any_of)))}"
    if check.pattern and not re.fullmatch(check.pattern, str(value), re.DOTALL):
        return f"a match of {check.pattern}"
    return ""


def shown(value: Wanted, most: int = 80) -> str:
    """Return a value as TOML has it, in one printable line of at most so many characters."""
    if isinstance(value, tuple):
        return "|".join(map(shown, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    text = text.lower() if isinstance(value, bool) else text
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return printable(text, "?")


def matches(row: Row, where: dict[str, Wanted], table: str = "") -> bool | None:
    """Return whether a row has these values; None if that is unknown. Of a list, one must fit.

    table: its table's name. In a table of events a value that is missing is none, as the line does not say it.
    """
    is_unknown = False
    for key, wanted in where.items():
        value = row.get(key)
        if value is None and table and "at" not in TABLES[table].keys:
            is_unknown = True
        elif not any(fits(value, one) for one in listed(wanted)):
            return False
    return None if is_unknown else True


def fits(value: Value, wanted: Value) -> bool:
    """Return whether a value is the one of `where`, or fits its pattern."""
    if isinstance(wanted, str) and wanted.startswith(REGEX):
        is_text = isinstance(value, str | int) and not isinstance(value, bool)
        return is_text and re.fullmatch(wanted.removeprefix(REGEX), str(value), re.DOTALL) is not None
    if not is_plain(wanted) and isinstance(value, str):
        return fnmatch.fnmatchcase(value, str(wanted)) or value == wanted  # a command may have such signs
    return is_equal(value, wanted)


def listed(wanted: Wanted) -> tuple[Value, ...]:
    """Return the values of `where` for a key, of which one must fit."""
    return wanted if isinstance(wanted, tuple) else (wanted,)


def is_plain(wanted: Value) -> bool:
    """Return whether a value of `where` means itself alone: it is no pattern."""
    return not isinstance(wanted, str) or not (wanted.startswith(REGEX) or any(sign in wanted for sign in "*?["))
