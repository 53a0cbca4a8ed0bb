"""Filter runs by text such as `state=running,name~bc,age<2d,lr>1e-4`. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from pitools.core import units
from pitools.core.errors import UsageError, suggest
from pitools.launch.diagnosis import log_timestamps
from pitools.launch.request import typed_value
from pitools.run.run_folder import RunRecord
from pitools.slurm.states import JOB_STATES, UNKNOWN

T = TypeVar("T")
RowFilter = Callable[[Any], bool]

_CONDITION = re.compile(r"([A-Za-z_][\w/.]*)(!=|=|~|<|>)(.+)")


def filter_runs(runs: Sequence[RunRecord], text: str, now: datetime | None = None) -> list[RunRecord]:
    """Return the runs that pass all conditions of a text; "" passes every run.

    A condition is a field of the run's record, `age` (since its creation) or a parameter, then `=`, `!=`, `~` (a
    regular expression), `<` or `>`, and a value. Texts are compared without regard to case. A run without the parameter
    does not pass. Raises UsageError for another form, an invalid value, and a key that none of the runs has.
    """
    keys = [*RunRecord.__struct_fields__, "age", *(name for run in runs for name in run.params)]
    return filter_rows(runs, text, keys, _field, now)


def filter_rows(
    rows: Sequence[T], text: str, keys: Sequence[str], field: Callable[[Any, str], Any], now: datetime | None = None
) -> list[T]:
    """Return the rows that pass all conditions of a text. keys: those that `field`, which returns a value, knows."""
    conditions = [_parse_condition(part, field, now or datetime.now(UTC)) for part in text.split(",") if text]
    for key, _ in conditions:
        if rows and key not in keys:
            raise UsageError(f'no field or parameter "{key}"', where="--where", hint=suggest(key, set(keys)))
    return [row for row in rows if all(condition(row) for _, condition in conditions)]


def _parse_condition(text: str, field: Callable[[Any, str], Any], now: datetime) -> tuple[str, RowFilter]:
    """Return the key and the filter of one condition."""
    match = _CONDITION.fullmatch(text.strip())
    if not match:
        raise UsageError(f'"{text}": not a condition', where="--where", hint="state=running,name~bc,age<2d")
    key, operator, value = match.groups()
    if key == "age":
        return key, _age_condition(operator, value, now)
    if key == "state" and operator in ("=", "!=") and value.upper() not in JOB_STATES | {UNKNOWN}:
        hint = suggest(value.upper(), JOB_STATES)
        raise UsageError(f'no state "{value}"', where=f"--where {text}", hint=hint)
    if operator == "~":
        try:
            pattern = re.compile(value, re.IGNORECASE)
        except re.error as error:
            raise UsageError(f"not a regular expression: {error}", where=f"--where {text}") from error
        return key, lambda row: pattern.search(str(field(row, key))) is not None
    return key, lambda row: _compare(field(row, key), operator, value)


def _age_condition(operator: str, value: str, now: datetime) -> RowFilter:
    if operator not in "<>":
        raise UsageError("age has no = and ~", where="--where", hint="age<2d or age>1h")
    if value.strip().isdecimal():
        raise UsageError(f"age{operator}{value}: no unit", where="--where", hint=f"age{operator}{value.strip()}d")
    limit_s = units.parse_duration(value)

    def is_within(run: RunRecord) -> bool:
        created = log_timestamps.parse_timestamp(run.created)
        if created is None:
            return False
        age_s = (now - created).total_seconds()
        return age_s < limit_s if operator == "<" else age_s > limit_s

    return is_within


def _field(run: RunRecord, key: str) -> Any:
    """Return a parameter or a field of a run; None without it."""
    return run.params[key] if key in run.params else getattr(run, key, None)


def _compare(actual: Any, operator: str, value: str) -> bool:
    if actual is None:
        return False
    expected = typed_value(value)
    if isinstance(actual, (int, float)) and isinstance(expected, (int, float)):
        if operator in "<>":
            return actual < expected if operator == "<" else actual > expected
        return (actual == expected) == (operator == "=")
    left, right = str(actual).lower(), value.lower()
    if operator in "<>":
        return left < right if operator == "<" else left > right
    return (left == right) == (operator == "=")
