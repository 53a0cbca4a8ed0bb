"""What other tools check of a node, and what does it here, by `coverage.toml`."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pitools.core import strict_toml
from pitools.core.record import Record

Way = Literal["shipped", "nhc.conf", "site", "no"]


class Coverage(Record, frozen=True, kw_only=True, tag="pit.node-coverage/1"):
    """A check of another tool, or a line of a site's nhc.conf.

    way: a check that is shipped, is made of its line in nhc.conf, or that a site writes; or none ("no").
    ours: the shipped check's name, the line, or the check that a site writes. why: there is none, or not all.
    """

    source: str
    check: str
    way: Way
    ours: str = ""
    why: str = ""


def coverage() -> list[Coverage]:
    """Return the checks of all other tools."""
    return [_row(source, name, value) for source, checks in _read().items() for name, value in checks.items()]


def without_lines() -> dict[str, Coverage]:
    """Return by name NHC's and Azure's checks of whose lines none is made."""
    return {row.check: row for row in coverage() if not row.source.startswith("gcm") and row.way != "nhc.conf"}


def reason(row: Coverage, values: dict[str, Any]) -> str:
    """Return why no check is made of a line, and what does it. values: fields of the check to write, from the line."""
    if row.way == "shipped":
        return f"the shipped check {row.ours} does it"
    if row.why:
        return row.why
    example = _read()[row.source][row.check]
    assert isinstance(example, dict)
    of_line = "" if values else ", with values of its own"
    return f"write a [[check]] such as {_written({**example, **values})}{of_line}"


def _row(source: str, name: str, value: str | dict[str, Any]) -> Coverage:
    if isinstance(value, str):
        return Coverage(source=source, check=name, way="shipped", ours=value)
    if "line" in value:
        return Coverage(source=source, check=name, way="nhc.conf", ours=value["line"])
    if "why" in value:
        return Coverage(source=source, check=name, way="no", why=value["why"])
    return Coverage(source=source, check=name, way="site", ours=_written(value))


def _written(check: dict[str, Any]) -> str:
    where = {f"where.{key}": wanted for key, wanted in check.get("where", {}).items()}
    fields = {name: given for name, given in check.items() if name != "where"} | where
    return ", ".join(f"{name} = {json.dumps(given)}" for name, given in fields.items())


@lru_cache(maxsize=1)
def _read() -> dict[str, dict[str, str | dict[str, Any]]]:
    path = Path(__file__).with_name("coverage.toml")
    return strict_toml.convert_tables(
        strict_toml.read_toml(path), dict[str, dict[str, str | dict[str, Any]]], str(path)
    )
