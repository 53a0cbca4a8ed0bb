"""NHC's checks of commands, files and file systems: from their arguments to the fields of our checks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

from pitools.node.check.nhc.match import (
    NO_SIDE_EFFECTS,
    Fields,
    UnsupportedError,
    count_of,
    limits_of,
    match_regex,
    needed,
    option_values,
    options_of,
    share_of,
    size_bytes,
)
from pitools.node.gather.named import COMMAND_TIMEOUT_S

_SHELL_ONLY = re.compile(
    r"(?:(?:check|nhc)_\w+|mcheck\w*|command|declare|eval|exec|hash|source|type|ulimit|umask)(?: |$)"
)
_EXISTS = {"key": "exists", "equals": True}


def command(arguments: list[str], _: dict[str, str], *, program: str = "") -> Fields:
    """Of check_cmd_output, check_cmd_status and check_cmd_dmesg: exit code, lines of the output, time."""
    pairs, words = options_of(arguments, "e:m:r:t:")
    line = program or shlex.join(" ".join(option_values(pairs, "e")[-1:]).split() or words)
    if not line or _SHELL_ONLY.match(line):
        raise UnsupportedError("names no command" if not line else "its command is known to the shell only")
    given = {"r": "0", "t": "5", **dict(pairs)}
    fields = {"table": "commands", "where": {"command": line}}
    yield {"about": line, **fields, "key": "exit_code", "equals": count_of(given["r"])}
    yield {"about": f"{line} time", **fields, "key": "duration_s", "max": count_of(given["t"])}
    if count_of(given["t"]) > COMMAND_TIMEOUT_S:
        yield f"it is ended after {COMMAND_TIMEOUT_S:g} s, and is unknown then"
    for text in option_values(pairs, "m"):
        pattern = match_regex(text, of_line=True)
        yield {"about": f"{line} output", **fields, "key": "output", "pattern": pattern}


def file_contents(arguments: list[str], _: dict[str, str]) -> Fields:
    """Of check_file_contents: lines that the file has, or has not."""
    path, *patterns = needed(arguments, 2)[: len(arguments)]
    yield from _of_files([path], "exists", _EXISTS)
    for text in patterns:
        yield from _of_files([path], "text", {"key": "text", "pattern": match_regex(text, of_line=True)})


def _digits_with(mode: str) -> str:
    """Return a pattern of the modes that have at least these bits."""
    return "".join(f"[{''.join(str(n) for n in range(8) if n & int(digit) == int(digit))}]" for digit in mode)


def _mode(text: str) -> str:
    mode = text.zfill(4)[-4:]
    if not mode.isdecimal() or set(mode) & {"8", "9"}:
        raise UnsupportedError(f"{text} is no mode (expected 0644)")
    return mode


def file_stat(arguments: list[str], _: dict[str, str]) -> Fields:
    """Of check_file_stat: owner, mode and age."""
    pairs, paths = options_of(arguments, "D:G:M:N:O:T:U:d:g:m:n:o:t:u:")
    tests: dict[str, Callable[[str], dict[str, Any]]] = {
        "U": lambda value: {"key": "user", "equals": value},
        "G": lambda value: {"key": "group", "equals": value},
        "m": lambda value: {"key": "mode", "equals": _mode(value)},
        "M": lambda value: {"key": "mode", "pattern": _digits_with(_mode(value))},
        "n": lambda value: {"key": "age_s", "max": count_of(value)},
        "o": lambda value: {"key": "age_s", "min": count_of(value)},
    }
    same_as = {("u", "0"): ("U", "root"), ("g", "0"): ("G", "root")}
    left_out = []
    yield from _of_files(paths, "exists", _EXISTS)
    for letter, value in (same_as.get(pair, pair) for pair in pairs):
        if letter not in tests:
            left_out.append(f"-{letter}")
            continue
        yield from _of_files(paths, letter, tests[letter](value))
    if left_out:
        yield f"{' '.join(left_out)}: ids, device numbers and the inode's time are not read"


def _of_files(paths: list[str], about: str, test: dict[str, Any]) -> Fields:
    if not paths:
        raise UnsupportedError("names no file")
    for path in paths:
        yield {"about": f"{path} {about}", "table": "files", "where": {"path": path}, **test}


def file_test(arguments: list[str], _: dict[str, str]) -> Fields:
    """Of check_file_test: kind, mode, owner and size. Root, as which NHC runs, may read and write any file."""
    pairs, paths = options_of(arguments, "abcdefghkprstuwxOGLSN")
    letters = dict.fromkeys(letter for letter, _value in pairs)
    tests: dict[str, dict[str, Any]] = {
        "b": {"key": "kind", "equals": "device"},
        "c": {"key": "kind", "equals": "device"},
        "d": {"key": "kind", "equals": "directory"},
        "f": {"key": "kind", "equals": "file"},
        "p": {"key": "kind", "equals": "pipe"},
        "S": {"key": "kind", "equals": "socket"},
        "s": {"key": "size_bytes", "min": 1},
        "u": {"key": "mode", "pattern": _digits_with("4000")},
        "g": {"key": "mode", "pattern": _digits_with("2000")},
        "k": {"key": "mode", "pattern": _digits_with("1000")},
        "x": {"key": "mode", "pattern": r"\d*[1357]\d*"},
        "O": {"key": "user", "equals": "root"},
        "G": {"key": "group", "equals": "root"},
    }
    if "d" in letters:
        tests["w"] = {"key": "is_writable", "equals": True}
    yield from _of_files(paths, "exists", _EXISTS)
    for letter in (letter for letter in letters if letter in tests):
        yield from _of_files(paths, letter, tests[letter])
    if left_out := [f"-{letter}" for letter in letters if letter in "hLtN"]:
        yield f"{' '.join(left_out)}: links and the time of the last reading are not read"


# --- File systems ---


def mount(arguments: list[str], _: dict[str, str], *, options: str = "") -> Fields:
    """Of check_fs_mount and its short forms. options: a match string that the mount options have to fit, too."""
    if arguments[:1] and arguments[0].startswith("/"):  # the old form: mount point, source, type, options
        old = needed(arguments, 1)
        pairs, points = [("s", old[1]), ("t", old[2]), ("o", old[3])], [arguments[0]]
    else:
        pairs, points = options_of(arguments, "0rE:F:O:e:f:o:s:t:")
        points = [*option_values(pairs, "f"), *option_values(pairs, "F"), *points]
    if not points:
        raise UnsupportedError("names no mount point")
    reports_only = {"reports_only": ("0", "") in pairs}
    keys = {"s": "device", "t": "type", "o": "options"}
    for point in points:
        fields = {"table": "mounts", "where": {"target": point}, **reports_only}
        yield {"about": _point_name(point), "min_count": 1, **fields}
        for letter, value in (*pairs, ("o", options)):
            if letter in keys and value:
                yield {
                    "about": f"{_point_name(point)} {keys[letter]}",
                    **fields,
                    "key": keys[letter],
                    "pattern": match_regex(value),
                }
    if {letter for letter, _value in pairs} & set("rOeEF"):
        yield f"{NO_SIDE_EFFECTS}, nor triggered"


def _point_name(point: str) -> str:
    return "root" if point == "/" else point


def space(arguments: list[str], _: dict[str, str], *, key: str, share: str = "", is_free: bool = False) -> Fields:
    """Of free, used and total space or inodes. share: the key for a percentage.

    As NHC has it: df rounds up to whole % and kB, a used limit itself fails; size 0 passes, as does what is no mount.
    """
    place, low, high, *_rest = needed(arguments, 2 if is_free or share else 1)
    is_count = "inodes" in key or "inodes" in share
    value = count_of if is_count else size_bytes
    where = {"target": (place,), "inodes" if is_count else "size_bytes": "re:[1-9].*"}
    fields = {"about": _point_name(place), "table": "mounts", "where": where}
    if share and low.endswith("%"):
        yield {**fields, "key": share, "max": round(1 - share_of(low) if is_free else share_of(low) - 0.01, 9)}
    elif not key:
        raise UnsupportedError("used inodes are read as a share (expected 98%, or check_fs_ifree)")
    elif is_free:
        yield {**fields, "key": key, "min": value(low)}
    elif share:
        yield {**fields, "key": key, "max": value(low) - 1024}
    else:
        yield {**fields, "key": key, **limits_of(low, high, value)}
    yield f"passes where {place} is no mount point, as NHC's does"
