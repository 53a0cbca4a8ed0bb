"""Strict TOML: unknown keys and wrong types name the file, the key, and the nearest key that exists."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from pitools.core.errors import ConfigError, suggest

T = TypeVar("T")

_UNKNOWN = re.compile(r"unknown field `([^`]+)`(?: - at `([^`]+)`)?")
_PATH = re.compile(r" - at `([^`]+)`")
_ENUM = re.compile(r"Invalid enum value '([^']*)'")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError naming the file, and the line where one is known."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        raise ConfigError("no such file", where=str(path)) from error
    except ValueError as error:  # bytes that are no text, and a number of more digits than Python reads, among them
        raise ConfigError(f"not TOML: {error}", where=str(path)) from error
    except RecursionError as error:
        raise ConfigError("not TOML that can be read: too deeply nested", where=str(path)) from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from error


def convert_tables(tables: dict[str, Any], kind: type[T], where: str, *, elsewhere: Mapping[str, str] = {}) -> T:
    """The tables as a strict record. Raises ConfigError naming the key, and the nearest known one.

    elsewhere: what is no key here → where it is said instead.
    """
    try:
        return msgspec.convert(tables, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        unknown = _UNKNOWN.search(text)
        if unknown:
            key, at = unknown.group(1), unknown.group(2) or "$"
            named = _dotted(_with_key_names(tables, kind, at), key)
            hint = elsewhere.get(key.replace("-", "_"), "") if at == "$" else ""
            hint = hint or suggest(key, _fields_at(kind, at))
            raise ConfigError(f'unknown key "{named}"', where=where, hint=hint, key=named) from error
        found = _PATH.search(text)
        at = found.group(1) if found else "$"
        named = _dotted(_with_key_names(tables, kind, at))
        what = f'key "{named}": ' if named else ""
        value = _ENUM.search(text)
        hint = suggest(value.group(1), map(str, get_args(_kind_at(kind, at)))) if value else ""
        raise ConfigError(what + _PATH.sub("", text), where=where, hint=hint, key=named) from error
    except RecursionError as error:
        raise ConfigError("too deeply nested", where=where) from error


def _dotted(at: str, key: str = "") -> str:
    return ".".join(part for part in (at.removeprefix("$").lstrip("."), key) if part)


def _with_key_names(tables: dict[str, Any], kind: Any, at: str) -> str:
    """A msgspec path such as `$.env[...]` with the key of the first entry that is wrong, as `$.env.N`."""
    head, entry, rest = at.partition("[...]")
    table: Any = tables
    for part in re.findall(r"\.(\w+)", head):
        table = table.get(part) if isinstance(table, dict) else None
    if not entry or not isinstance(table, dict):
        return at
    for key, value in table.items():
        try:
            msgspec.convert(value, _kind_at(kind, head + entry))
        except msgspec.ValidationError:
            return f"{head}.{key}{rest}"
    return at


def _fields_at(kind: Any, at: str) -> list[str]:
    """Names of the fields a record has at a msgspec path such as `$.partitions[...].gpu`."""
    kind = _kind_at(kind, at)
    is_record = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return [field.encode_name for field in msgspec.structs.fields(kind)] if is_record else []


def _kind_at(kind: Any, at: str) -> Any:
    """The type that a msgspec path leads to."""
    for part in re.findall(r"\.(\w+)|(\[[^\]]*\])", at):
        kind = _unwrap(kind)
        if part[0]:
            fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
            kind = fields.get(part[0])
        else:
            kind = get_args(kind)[-1 if get_args(kind)[-1] is not Ellipsis else 0]
    return _unwrap(kind)


def _unwrap(kind: Any) -> Any:
    """The type itself, out of `X | None`."""
    options = [option for option in get_args(kind) if option is not type(None)]
    return options[0] if type(None) in get_args(kind) and len(options) == 1 else kind
