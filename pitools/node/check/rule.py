"""A check: a rule about the rows of one table of facts, as `[[check]]` in a file has it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pitools.node.types import Action, Level, Value

Wanted = Value | tuple[Value, ...]
RENAMED = {
    "within": "max_age",
    "burst": "merge_within",
    "one_of": "any_of",
    "is_same": "all_equal",
    "watch": "report",
    "folder": "directory",
}
"""What keys and values were called in files that are older."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule about the rows of one table of facts. All of its tests must hold.

    table, key: as in `pit node show --tables`. where: the rows meant: a value, a pattern with `*`, a regular expression
    for the whole value after `re:`, or a list of these. If a row lacks such a value, the check is unknown for it.
    types: node types that it is for; default: all. max_age: of a table of events, those that are not older.

    Tests of each row's value: min, max, equals, any_of, pattern (a regular expression for the whole text), max_increase
    and max_rate (`10/s`, `120/h`; never of a single event) since the last gathering of the same boot, all_equal (as in
    most rows). They pass where there are no rows. Tests of the number of rows: count, min_count, max_count; with
    group_by, of the rows with equal values of these keys. merge_within: rows of a group that follow each other this
    closely count once. cleared_by: rows followed by a row of their group with these values do not count. max_groups:
    if more groups than that fail, a job has caused it, and none does.

    level, action: of a failure. is_shadow: reported, never acted upon. old_names: earlier names; drains made under them
    end when this check passes. source: who recommends it. hint: what an operator does next.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]*\Z")]
    table: str
    key: str = ""
    where: dict[str, Wanted] = {}
    types: tuple[str, ...] = ()
    max_age: str = ""
    min: float | None = None
    max: float | None = None
    equals: Value = None
    any_of: tuple[Value, ...] = ()
    pattern: str = ""
    max_increase: Annotated[float, msgspec.Meta(ge=0)] | None = None
    max_rate: str = ""
    all_equal: Literal[True] | None = None
    count: Count | None = None
    min_count: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_count: Count | None = None
    max_groups: Count | None = None
    group_by: tuple[str, ...] = ()
    merge_within: str = ""
    cleared_by: dict[str, Wanted] = {}
    level: Level = "critical"
    action: Action = "drain"
    is_shadow: bool = False
    old_names: tuple[str, ...] = ()
    source: str = ""
    hint: str = ""

    @property
    def is_of_change(self) -> bool:
        """Whether it compares a row with the one of the gathering before."""
        return self.max_increase is not None or bool(self.max_rate)
