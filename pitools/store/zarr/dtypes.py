"""Convert Zarr data types to NumPy names and item sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_V2 = re.compile(r"([<>|])([biufcmMSUV])([0-9]+)(\[[0-9A-Za-z]+\])?")
_KINDS = {"i": "int", "u": "uint", "f": "float", "c": "complex", "S": "bytes", "U": "str", "V": "void"}
_V3 = re.compile(r"(?:int|uint|float|complex|r)(8|16|32|64|128)")
_TIMES = {"M": "datetime64", "m": "timedelta64"}


def parse_v2(dtype: Any) -> tuple[str, int | None]:
    """Return NumPy name and item size (None: not fixed) of a dtype in a `.zarray`. Raises ValueError."""
    if isinstance(dtype, list):
        return _structured(dtype)
    if dtype == "|O":
        return "object", None
    match = _V2.fullmatch(dtype)
    if not match:
        raise ValueError(f"dtype {dtype!r}: unknown")
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
    """Return NumPy name and item size (None: not fixed) of a `zarr.json` data_type; others keep their name."""
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
