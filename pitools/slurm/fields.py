"""Parse the output of Slurm's commands into values. Pure functions over text.

Slurm does not escape names, reasons and comments, which other users choose: they may contain newlines and separators.
So each call has a random separator (`new_separator`), and rows are found by counting it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from datetime import datetime, tzinfo

from pitools.core import timestamps
from pitools.core.errors import ClusterError, UsageError
from pitools.core.units import parse_duration

_EMPTY_VALUES = frozenset({"", "(null)", "N/A", "n/a", "None", "none", "NONE", "Unknown", "None assigned"})
_NO_LIMIT = frozenset({"UNLIMITED", "INFINITE", "NOT_SET", "Partition_Limit", "INVALID"})
_KEY = re.compile(r"(?:^|\s)([A-Za-z_][\w/:.\[\]-]*)=")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)")
_ALL_FEATURES = re.compile(r"[\w.:-]+(&[\w.:-]+)*")
_ANY_FEATURE = re.compile(r"[\w.:-]+(\|[\w.:-]+)*")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def new_separator() -> str:
    """Return a random printable separator, which no job name can contain."""
    return f"|{os.urandom(6).hex()}|"


def parse_error(command: str, reason: str, line: str) -> ClusterError:
    """Return the error for unreadable output of a command, with the line."""
    excerpt = line if len(line) <= 200 else line[:200] + "..."
    return ClusterError(
        f"cannot parse the output of {command}: {reason}",
        where=f"line: {excerpt!r}",
        hint="run the command by hand; if its output is complete, pitools does not support this Slurm's format",
    )


def split_rows(text: str, sep: str, width: int, command: str) -> list[list[str]]:
    """Split text into rows of `width` (two or more) values.

    Inner values of a row may contain newlines, the first and the last may not: so a newline there ends the row. Raises
    ClusterError for an incomplete row.
    """
    if not text:
        return []
    if not text.endswith("\n"):
        raise parse_error(command, "truncated", text.rsplit("\n", 1)[-1])
    cells = text[:-1].split(sep)
    count, rest = divmod(len(cells) - 1, width - 1)
    edges = [cells[i * (width - 1)].split("\n") for i in range(count + 1)]
    if rest or not count or any(len(edge) != (1 if i in (0, count) else 2) for i, edge in enumerate(edges)):
        lines = text[:-1].split("\n")
        line = next((line for line in lines if line.count(sep) != width - 1), lines[0])
        raise parse_error(command, f"{line.count(sep) + 1} values (expected {width})", line)
    return [[edges[i][-1], *cells[i * (width - 1) + 1 : (i + 1) * (width - 1)], edges[i + 1][0]] for i in range(count)]


def key_values(text: str, keys: Collection[str] = ()) -> dict[str, str]:
    """Parse `Key=value Key=value ...`; values may contain spaces, and the first of a repeated key counts.

    keys: if given, only these start a new value, for text that users write.
    """
    form = re.compile(rf"(?:^|\s)({'|'.join(keys)})=") if keys else _KEY
    parts = form.split(text)
    return dict(zip(reversed(parts[1::2]), map(str.strip, reversed(parts[2::2])), strict=True))


def none_to_empty(text: str) -> str:
    """Return the text, or "" for Slurm's forms of an empty value."""
    text = text.strip()
    return "" if text in _EMPTY_VALUES else text


def comma_list(text: str) -> tuple[str, ...]:
    """Return the parts of a comma list; () for an empty value."""
    return tuple(part for part in none_to_empty(text).split(",") if part)


def parse_slurm_time(text: str, zone: tzinfo | None = None) -> str:
    """Convert Slurm's local time, which has no zone, to RFC 3339 UTC text; "" for an empty value.

    zone: Slurm's time zone; None means this machine's. Raises ClusterError.
    """
    text = none_to_empty(text)
    if not text or text in ("0", "NONE"):
        return ""
    try:
        local = datetime.fromisoformat(text)
    except ValueError as error:
        raise parse_error("a Slurm command", "not a time", text) from error
    # Slurm's standard format has no zone; if a time has one, it must not be shifted twice.
    return timestamps.to_rfc3339(local if local.tzinfo or zone is None else local.replace(tzinfo=zone))


def parse_slurm_duration(text: str, unit_s: int = 1) -> int | None:
    """Return the seconds of `7-00:00:00`, `4:00:00`, `10:00` or a number of units; None for no limit or no value."""
    text = none_to_empty(text)
    if not text or text in _NO_LIMIT:
        return None
    if text.isdecimal():
        return int(text) * unit_s
    try:
        return parse_duration(text)
    except UsageError as error:
        raise parse_error("a Slurm command", "not a duration", text) from error


def parse_count(text: str) -> int | None:
    """Parse a number, `4K` (4096), or the minimum of `2-4`; None for no limit or no value. Raises ClusterError."""
    text = none_to_empty(text)
    if not text or text in _NO_LIMIT:
        return None
    number = _number(text.split("-", 1)[0])
    if number is None:
        raise parse_error("a Slurm command", "not a number", text)
    return number


def parse_tres(text: str) -> dict[str, str]:
    """Parse `cpu=4,gres/gpu:h100=2` into {"cpu": "4", "gres/gpu:h100": "2"}."""
    return {name: value for name, eq, value in (part.partition("=") for part in comma_list(text)) if eq}


def count_gpus(tres: Mapping[str, str]) -> int:
    """Return the GPUs of parsed TRES: their sum, or else those of each type; 0 where Slurm does not track them."""
    typed = (parse_count(amount) or 0 for name, amount in tres.items() if name.startswith("gres/gpu:"))
    return parse_count(tres.get("gres/gpu", "")) or sum(typed)


def parse_mib(text: str) -> int | None:
    """Return the MiB of `64G`, `64GB` or `512` (MiB); None for what is no amount of memory."""
    match = _COUNT.fullmatch(text.upper().removesuffix("B"))
    return round(float(match[1]) * 1024 ** (_POWERS[match[2] or "M"] - 2)) if match else None


def parse_tres_amounts(limits: Mapping[str, str]) -> dict[str, int]:
    """Return amounts of TRES as numbers, memory in MiB, as Slurm counts it; what is no number is no limit."""
    amounts = {name: parse_mib(text) if name == "mem" else _number(text) for name, text in limits.items()}
    return {name: amount for name, amount in amounts.items() if amount is not None}


def _number(text: str) -> int | None:
    match = _COUNT.fullmatch(text)
    if not match:
        return None
    return int(match[1]) if not match[2] and match[1].isdigit() else round(float(match[1]) * 1024 ** _POWERS[match[2]])


def parse_gpus(gres: str) -> tuple[str, int]:
    """Return type and number of the GPUs in `gpu:h100:8(S:0-1),shard:16`: ("h100", 8). Types are joined by commas."""
    total, types = 0, []
    for part in re.sub(r"\([^)]*\)", "", none_to_empty(gres)).split(","):
        name, *rest = part.removeprefix("gres:").removeprefix("gres/").replace("=", ":").split(":")
        if name == "gpu":
            amount = parse_count(rest[-1]) if rest and _COUNT.fullmatch(rest[-1]) else None
            total += 1 if amount is None else amount
            kinds = rest if amount is None else rest[:-1]
            types += [kind for kind in kinds if kind != "no_consume" and kind not in types]
    return ",".join(types), total


def has_features(features: Collection[str], expression: str) -> bool:
    """Return whether a node with these features meets a `--constraint`; True for other ones than `a&b` and `a|b`."""
    if _ALL_FEATURES.fullmatch(expression):
        return all(feature in features for feature in expression.split("&"))
    if _ANY_FEATURE.fullmatch(expression):
        return any(feature in features for feature in expression.split("|"))
    return True
