"""Values of facts, and those that checks ask for: equal, fitting a pattern, or unknown."""

from __future__ import annotations

import fnmatch
import re

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


def matches(row: Row, where: dict[str, Value | tuple[Value, ...]], table: str = "") -> bool | None:
    """Return whether a row has these values; None if that is unknown. Of a list, one must fit.

    table: its table's name. In a table of events a value that is missing is none, as the line does not say it.
    """
    is_unknown = False
    for key, wanted in where.items():
        value = row.get(key)
        if value is None and table and "at" not in TABLES[table].keys:
            is_unknown = True
        elif not any(fits(value, one) for one in (wanted if isinstance(wanted, tuple) else (wanted,))):
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


def is_plain(wanted: Value) -> bool:
    """Return whether a value of `where` means itself alone: it is no pattern."""
    return not isinstance(wanted, str) or not (wanted.startswith(REGEX) or any(sign in wanted for sign in "*?["))
