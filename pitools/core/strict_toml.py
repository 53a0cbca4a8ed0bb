"""Read TOML strictly: an error names the file, the wrong key, and the most similar known key."""

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
_LINE = re.compile(r"\(at (?:line (\d+), column \d+|end of document)\)")
_KEY = re.compile(r"\s*(\[\[?[\w.\"-]+\]\]?|[\w.\"-]+(?=\s*=))")
_ENUM = re.compile(r"Invalid enum value '([^']*)'")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file's tables. Raises ConfigError with the file, and the line if known."""
    return read_toml_and_text(path)[0]


def read_toml_and_text(path: Path) -> tuple[dict[str, Any], str]:
    """Read a TOML file's tables, and its text, once: it may be a pipe. Raises ConfigError as `read_toml`."""
    text = ""
    try:
        text = path.read_bytes().decode()
        return tomllib.loads(text), text
    except FileNotFoundError as error:
        raise ConfigError("no such file", where=str(path)) from error
    except ValueError as error:  # also invalid UTF-8, and integers of more digits than Python accepts
        raise ConfigError(f"not TOML: {error}{_key_at(text, str(error))}", where=str(path)) from error
    except RecursionError as error:
        raise ConfigError("TOML nested too deeply", where=str(path)) from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from error


def _key_at(text: str, problem: str) -> str:
    """Return the key, without its value, of the line that tomllib's error names, as text to append; "" for none."""
    if (line_match := _LINE.search(problem)) is None:
        return ""
    lines = text.rstrip().split("\n")
    number = int(line_match[1]) if line_match[1] else len(lines)  # at the end of the document
    key_match = _KEY.match(lines[number - 1]) if number <= len(lines) else None
    return f', at "{key_match[1]}"' if key_match else ""


def convert_tables(tables: dict[str, Any], kind: type[T], where: str, *, elsewhere: Mapping[str, str] = {}) -> T:
    """Convert tables to a record, without unknown keys. Raises ConfigError with the key and the most similar known key.

    elsewhere: a hint by key, for keys that belong to another file.
    """
    try:
        return msgspec.convert(tables, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        unknown = _UNKNOWN.search(text)
        if unknown:
            key, path = unknown.group(1), unknown.group(2) or "$"
            named = _dotted(_with_key_names(tables, kind, path), key)
            hint = elsewhere.get(key.replace("-", "_"), "") if path == "$" else ""
            hint = hint or suggest(key, _fields_at(kind, path))
            raise ConfigError(f'unknown key "{named}"', where=where, hint=hint, key=named) from error
        path_match = _PATH.search(text)
        path = path_match.group(1) if path_match else "$"
        named = _dotted(_with_key_names(tables, kind, path))
        prefix = f'key "{named}": ' if named else ""
        value = _ENUM.search(text)
        options = get_args(_kind_at(kind, path))  # of `Literal[…]`, or of `int | Literal[…]`
        choices = [choice for option in options for choice in get_args(option)] or options
        hint = suggest(value.group(1), map(str, choices)) if value else ""
        raise ConfigError(prefix + _PATH.sub("", text), where=where, hint=hint, key=named) from error
    except RecursionError as error:
        raise ConfigError("tables nested too deeply", where=where) from error


def _dotted(path: str, key: str = "") -> str:
    return ".".join(part for part in (path.removeprefix("$").lstrip("."), key) if part)


def _with_key_names(tables: dict[str, Any], kind: Any, path: str) -> str:
    """Replace each `[...]` of a msgspec path by the first key whose value is wrong: `$.env[...]` becomes `$.env.N`."""
    named, at = "$", "$"
    table: Any = tables
    for part in re.findall(r"\.\w+|\[[^\]]*\]", path):
        at += part
        if part == "[...]" and isinstance(table, dict):
            wrong = (f".{key}" for key, value in table.items() if _is_wrong(value, _kind_at(kind, at)))
            part = next(wrong, part)
        named += part
        table = table.get(part[1:]) if isinstance(table, dict) else None
    return named


def _is_wrong(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return True
    return False


def _fields_at(kind: Any, path: str) -> list[str]:
    """Return the field names of the record at a msgspec path such as `$.partitions[...].gpu`."""
    kind = _kind_at(kind, path)
    is_record = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return [field.encode_name for field in msgspec.structs.fields(kind)] if is_record else []


def _kind_at(kind: Any, path: str) -> Any:
    """Return the type of the value at a msgspec path."""
    for part in re.findall(r"\.(\w+)|(\[[^\]]*\])", path):
        kind = _unwrap(kind)
        if part[0]:
            fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
            kind = fields.get(part[0])
        else:
            kind = get_args(kind)[-1 if get_args(kind)[-1] is not Ellipsis else 0]
    return _unwrap(kind)


def _unwrap(kind: Any) -> Any:
    """Return X of `X | None`."""
    options = [option for option in get_args(kind) if option is not type(None)]
    return options[0] if type(None) in get_args(kind) and len(options) == 1 else kind
