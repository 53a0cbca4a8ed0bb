"""Read the configuration of LBNL's Node Health Check, `nhc.conf`: its lines for a node as checks of ours.

A line is `TARGET || check arguments`, or `TARGET || VARIABLE=value`. All checks are made; one fails where NHC's would,
but for check_hw_mcelog, which counts EDAC's lines in the kernel's log and not mcelog's errors. It drains the node (`-0`
or MARK_OFFLINE=0: is only reported). Nothing is executed of a line: no repair, no kill, no shell expression.
"""

from __future__ import annotations

import re
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pitools.core import trust
from pitools.core.errors import ConfigError, most_similar
from pitools.node.check.coverage import Coverage, reason, without_lines
from pitools.node.check.nhc.match import UnsupportedError, is_target
from pitools.node.check.nhc.suggest import values_of
from pitools.node.check.nhc.system import CONVERTERS, UID_MIN
from pitools.node.check.problems import check_problem
from pitools.node.check.rule import Check

_ESCAPED = re.compile(r"\\(.)")  # NHC reads its file without `read -r`: each pair of backslashes is one
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
_VARIABLE = r"(?P<variable>\$(?:\{[a-zA-Z_]\w*\}|[a-zA-Z_]\w*))|(?P<expression>\$[({\[\d?#$!@*-]|`)"
_TOKEN = re.compile(
    r"(?P<blank>\s+)|'(?P<single>[^']*)'|\"(?P<double>(?:[^\"\\]|\\.)*)\"|\\(?P<escaped>.)"
    r"|(?P<unclosed>['\"])|(?P<operator>[;&|<>()])|(?P<braces>\{(?![^\s,.'\"\\$`{}]*\}))"
    rf"|(?P<shell>\$['\"]|(?<![^\s=:])~)|{_VARIABLE}|(?P<plain>.)",
    re.DOTALL,
)
_IN_QUOTES = re.compile(rf"\\(?P<escaped>[$`\"\\])|{_VARIABLE}")
_UNSUPPORTED = {
    "unclosed": "has an open quotation mark",
    "operator": "has more than one command, or a redirection",
    "braces": "has braces, which the shell expands (expected a line for each word)",
}
_UID_MIN = re.compile(r"^UID_MIN\s+(\d+)", re.MULTILINE | re.ASCII)
_NAME_LENGTH = 60
_LINES = 5  # of those that make no check, in a message
_MOST_CHARACTERS = 4096  # of a command, with the values of its variables
_LOGIN_DEFS = Path("/etc/login.defs")
_SETTINGS = {
    "MARK_OFFLINE": "with 0, checks after it are reported, and drain nothing; with 1 they drain",
    "MAX_SYS_UID": "the last uid that is not a user's, for checks after it",
    "NHC_CHECK_ALL": "not used: all checks are made",
    "TIMEOUT": "not used: each read has a time-out of its own",
    "DETACHED_MODE": "not used: a result is never that of the run before",
    "DF_FLAGS": "not used: a mount that hangs does not respond, and holds up no other",
    "DFI_FLAGS": "not used: as DF_FLAGS",
    "ONLINE_NODE": "not used: `pit node drain` returns nodes",
    "OFFLINE_NODE": "not used: `pit node drain` drains nodes",
}


class NhcLine(NamedTuple):
    """A line of the file. note: what of it is not taken, and why; "" if all is.

    is_setting: it sets variables alone. is_made: a check is made of it, or shipped, or it asks for none on this host.
    """

    line: int
    text: str
    checks: tuple[Check, ...] = ()
    note: str = ""
    is_setting: bool = False
    is_made: bool = True


def read_nhc(path: Path, node: str) -> list[NhcLine]:
    """Return the lines of a file, as made for a node. Raises ConfigError if it cannot be read, or others can write it.

    NHC compares targets with the host's name as the kernel has it, so that of this host is taken if it is the node.
    """
    trust.require_trusted(path, "file of NHC's checks")  # it names programs to run
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from error
    host = socket.gethostname()
    return list(parse_nhc(text, host if host.partition(".")[0] == node else node, _uid_min()))


def _uid_min() -> str:
    """Return the first uid of ordinary users; NHC counts it as one of the system's."""
    try:
        match = _UID_MIN.search(_LOGIN_DEFS.read_text(errors="replace"))
    except OSError:
        match = None
    return match[1] if match else UID_MIN


def lines_without_checks(path: Path, node: str) -> str:
    """Return which lines for a node make no check, in a sentence; "" if each does. Raises ConfigError."""
    numbers = [line.line for line in read_nhc(path, node) if not line.is_made]
    if not numbers:
        return ""
    first = ", ".join(map(str, numbers[:_LINES])) + (", ..." if len(numbers) > _LINES else "")
    hint = f"pit node show --coverage --node {node}"
    return f"{path}: no check is made of {len(numbers)}: line {first}; why: {hint}"


def line_rows(path: Path, node: str) -> list[Coverage]:
    """Return the lines of a file as rows: what is made of each for a node, and what is not. Raises ConfigError."""
    return [
        Coverage(
            source=f"{path}:{line.line}",
            check=line.text.partition("||")[2].strip() or line.text,
            way="nhc.conf" if line.checks or line.is_setting else "no",
            ours=" ".join(check.name for check in line.checks),
            why=line.note,
        )
        for line in read_nhc(path, node)
    ]


def parse_nhc(text: str, host: str, uid_min: str = UID_MIN) -> Iterator[NhcLine]:
    """Yield the lines without comments, with the checks of those that are for a host.

    uid_min: MAX_SYS_UID where none is set.
    """
    variables = {"HOSTNAME": host, "HOSTNAME_S": host.partition(".")[0], "MAX_SYS_UID": uid_min}
    names: dict[str, int] = {}
    for number, line in _lines(text):
        target, separator, command = (part.strip() for part in _ESCAPED.sub(r"\1", line).partition("||"))
        try:
            if not separator:
                raise UnsupportedError("has no ||")
            if not target or not command:
                continue
            if not is_target(host, target):
                yield NhcLine(number, line, note="is for other nodes")
                continue
            words = _words(command, variables)
            if (assigned := _assign(words, variables)) is not None:
                note = "; ".join(f"{name}: {_SETTINGS[name]}" for name in assigned if name in _SETTINGS)
                yield NhcLine(number, line, note=note or "sets variables for lines after it", is_setting=True)
                continue
            parts = list(_parts(words, variables))
        except UnsupportedError as error:
            yield NhcLine(number, line, note=str(error), is_made=error.is_shipped)
            continue
        notes = list(dict.fromkeys(part for part in parts if isinstance(part, str)))
        fields = [part for part in parts if not isinstance(part, str)]
        checks = [_check(words[0], {**part, "hint": f"nhc.conf: {line}"}, variables, names) for part in fields]
        wrong = {check.name: problem for check in checks if (problem := check_problem(check))}
        notes += wrong.values()
        taken = tuple(check for check in checks if check.name not in wrong)
        yield NhcLine(
            number, line, taken, "; ".join(notes) if taken or notes else "asks for nothing", is_made=bool(taken)
        )


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are no comments, with their number; a backslash at the end continues one, also a comment."""
    begun, first = "", 1
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_continued = (len(line) - len(line.rstrip("\\"))) % 2 == 1
        begun += line.removesuffix("\\") if is_continued else line
        if is_continued:
            continue
        if begun.strip() and not begun.lstrip().startswith("#"):
            yield first, begun.strip()
        begun, first = "", number + 1


def _words(command: str, variables: dict[str, str]) -> list[str]:
    """Split a command as the shell does, with the variables that the file has set. Raises UnsupportedError."""
    words: list[str] = []
    is_open, length = False, 0
    for match in _TOKEN.finditer(command):
        kind = match.lastgroup or ""
        text, is_split = match[kind], False
        if kind == "plain" and text == "#" and not is_open:
            break
        if kind == "blank":
            is_open = False
            continue
        if kind == "double":
            text = _IN_QUOTES.sub(lambda inner: _value(inner, variables), text)
        elif kind not in ("single", "escaped", "plain"):
            text = _value(match, variables)
            is_split = not (is_open and all(_ASSIGNMENT.match(word) or word == "export" for word in words))
        for piece in re.findall(r"\s+|\S+", text) if is_split else [text]:
            if is_split and piece.isspace():
                is_open = False
                continue
            if not is_open:
                words.append("")
            words[-1] += piece
            is_open, length = True, length + len(piece)
            if length > _MOST_CHARACTERS:
                raise UnsupportedError(f"is too long (expected at most {_MOST_CHARACTERS} characters)")
    return words


def _value(match: re.Match[str], variables: dict[str, str]) -> str:
    """Return what an escaped sign or a variable stands for. Raises UnsupportedError for what the shell alone knows."""
    kind = match.lastgroup or ""
    if kind == "escaped":
        return match[kind]
    if kind != "variable":
        raise UnsupportedError(_UNSUPPORTED.get(kind, "has a shell expression"))
    name = match[kind].strip("${}")
    if name not in variables:
        raise UnsupportedError(f"{match[kind]} is known to the shell only")
    return variables[name]


def _assign(words: list[str], variables: dict[str, str]) -> list[str] | None:
    """Set the variables if it is a line of these, and return their names; None for another line."""
    pairs = [_ASSIGNMENT.fullmatch(word) for word in (words[1:] if words[:1] == ["export"] else words)]
    found = {pair[1]: pair[2] for pair in pairs if pair}
    if not all(pairs):
        return None
    variables.update(found)
    return list(found)


def _parts(words: list[str], variables: dict[str, str]) -> Iterator[dict[str, Any] | str]:
    name = words[0]
    if name in CONVERTERS:
        yield from CONVERTERS[name](words[1:], variables)
    elif name.startswith("/"):
        yield from CONVERTERS["check_cmd_status"](words, variables)
    elif row := without_lines().get(name):
        raise UnsupportedError(reason(row, values_of(name, words[1:])), is_shipped=row.way == "shipped")
    else:
        similar = most_similar(name, [*CONVERTERS, *without_lines()])
        raise UnsupportedError(f"no check of NHC's{f' (did you mean {similar}?)' if similar else ''}: {name}")


def _check(command: str, part: dict[str, Any], variables: dict[str, str], names: dict[str, int]) -> Check:
    """Return the check of a part. Its name has no limits in it: where they change, a drain by it stays ours."""
    about, reports_only = part.pop("about", ""), part.pop("reports_only", False)
    slug = re.sub(r"[^a-z0-9]+", "-", f"{command.rpartition('/')[2].removeprefix('check_')} {about}".lower()).strip("-")
    if len(slug) > _NAME_LENGTH:
        slug = f"{slug[: _NAME_LENGTH - 9].rstrip('-')}-{zlib.crc32(slug.encode()):08x}"
    name = f"nhc-{slug}"
    names[name] = names.get(name, 0) + 1
    if names[name] > 1:
        name = f"{name}-{names[name]}"
    if reports_only or variables.get("MARK_OFFLINE") == "0":
        part.update(level="warning", action="report")
    return Check(name=name, source="nhc.conf", **part)
