"""Zarr's data types: the name that NumPy has for each, and the bytes of one item."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_V2 = re.compile(r"([<>|])([biufcmMSUV])([0-9]+)(\[[0-9A-Za-z]+\])?")
_KINDS = {"i": "int", "u": "uint", "f": "float", "c": "complex", "S": "bytes", "U": "str", "V": "void"}
_V3 = re.compile(r"(?:int|uint|float|complex|r)(8|16|32|64|128)")
_TIMES = {"M": "datetime64", "m": "timedelta64"}


def parse_v2(dtype: Any) -> tuple[str, int | None]:
    """NumPy name, and bytes of an item or None where that is not fixed, of a `.zarray`'s dtype. Raises ValueError."""
    if isinstance(dtype, list):
        return _structured(dtype)
    if dtype == "|O":
        return "object", None
    match = _V2.fullmatch(dtype)
    if not match:
        raise ValueError(f"unknown dtype {dtype!r}")
    kind, number, unit = match[2], int(match[3]), match[4] or ""
    if kind in _TIMES:
        return _TIMES[kind] + unit, number
    if kind == "b":
        return "bool", number
    size = number * 4 if kind == "U" else number
    return f"{_KINDS[kind]}{8 * size}", size


def _structured(fields: list[Any]) -> tuple[str, int | None]:
    total = 0
    for _, dtype, *shape in fields:
        size = parse_v2(dtype)[1]
        if size is None:
            return "object", None
        for length in shape[0] if shape else ():
            size *= int(length)
        total += size
    return f"void{8 * total}", total


def parse_v3(name: str, settings: Mapping[str, Any]) -> tuple[str, int | None]:
    """The same of a `zarr.json`'s data_type; a type that NumPy does not have keeps its own name."""
    if name == "bool":
        return name, 1
    if match := _V3.fullmatch(name):
        size = int(match[1]) // 8
        return (f"void{match[1]}" if name[0] == "r" else name), size
    if name in ("numpy.datetime64", "numpy.timedelta64"):
        unit, scale = settings["unit"], settings.get("scale_factor", 1)
        return f"{name.removeprefix('numpy.')}[{scale if scale != 1 else ''}{unit}]".replace("[generic]", ""), 8
    if name in ("fixed_length_utf32", "null_terminated_bytes", "raw_bytes"):
        size = int(settings["length_bytes"])
        kind = {"fixed_length_utf32": "str", "null_terminated_bytes": "bytes", "raw_bytes": "void"}[name]
        return f"{kind}{8 * size}", size
    return name, 2 if name == "bfloat16" else None
