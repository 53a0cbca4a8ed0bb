"""Fold the tables of several sites into one policy, and write it as TOML text: one key per line, amounts on one."""

from __future__ import annotations

import json
import re
from typing import Any

from pitools.tenancy.policy import AMOUNTS

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_WIDTH = 100


def policy_text(tables: dict[str, Any]) -> str:
    """Return TOML text whose tables are these."""
    lines: list[str] = []
    _write(tables, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def site_tables(tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return one policy for several sites' tables: what all have alike, and below `sites` what each has besides."""
    common = _common(list(tables.values()))
    return {**common, "sites": {site: _besides(own, common) for site, own in tables.items()}}


def _common(tables: list[dict[str, Any]]) -> dict[str, Any]:
    first, *others = tables
    both: dict[str, Any] = {}
    for key, value in first.items():
        values = [value, *(other.get(key) for other in others)]
        if all(isinstance(each, dict) for each in values) and key not in AMOUNTS:
            both[key] = _common(values)
        elif all(each == value for each in values):
            both[key] = value
    return both


def _besides(table: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    rest = {}
    for key, value in table.items():
        if key not in common:
            rest[key] = value
        elif value != common[key]:
            rest[key] = _besides(value, common[key])
    return rest


def _write(table: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    is_inline = {key: not isinstance(value, dict) or key in AMOUNTS for key, value in table.items()}
    if path and (not table or any(is_inline.values())):
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
    for key, value in table.items():
        if is_inline[key]:
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, value in table.items():
        if not is_inline[key]:
            _write(value, (*path, key), lines)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        items = [_value(item) for item in value]
        line = f"[{', '.join(items)}]"
        return line if len(line) <= _WIDTH else "[\n" + "".join(f"    {item},\n" for item in items) + "]"
    return _text(value) if isinstance(value, str) else repr(value)


def _text(text: str) -> str:
    """Return a TOML basic string: JSON's, whose DEL TOML does not allow raw."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
