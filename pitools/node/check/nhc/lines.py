"""Read the configuration of LBNL's Node Health Check, `nhc.conf`: its lines for a node as checks of ours.

A line is `TARGET || check arguments`, or `TARGET || VARIABLE=value`. All checks are made; one fails as NHC's would, and
drains the node (`-0` or MARK_OFFLINE=0: is only reported). Nothing is executed of a line: no repair, no kill, no shell
expression.
"""

from __future__ import annotations

import re
import shlex
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pitools.core import trust
from pitools.core.errors import ConfigError, most_similar
from pitools.node.check.config import Check
from pitools.node.check.coverage import Coverage, reasons
from pitools.node.check.nhc.match import NotTakenError, is_target
from pitools.node.check.nhc.system import MADE
from pitools.node.check.problems import check_problem

_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
_QUOTED_OR_VARIABLE = re.compile(r"'[^']*'|\\.|\$\(|`|\$\{(\w+)\}|\$(\w+)", re.DOTALL)
_OPERATORS = {"&&", "||", "|", "&", ";", "<", ">", ">>", "2>&1", "(", ")"}
_NAME_LENGTH = 60
_MOST_CHARACTERS = 4096  # of a command, with the values of its variables
_UNUSED = {
    "TIMEOUT": "each read has a time-out of its own",
    "DETACHED_MODE": "a result is never that of the run before",
    "DF_FLAGS": "a mount that hangs does not respond, and holds up no other",
    "DFI_FLAGS": "as DF_FLAGS",
}


class NhcLine(NamedTuple):
    """A line that is for this node. note: what of it is not taken, and why; "" if all is."""

    line: int
    text: str
    checks: tuple[Check, ...] = ()
    note: str = ""


def read_nhc(path: Path, node: str) -> list[NhcLine]:
    """Return the lines of a file that are for a node. Raises ConfigError if it cannot be read, or others can write it.

    NHC compares targets with the host's name as the kernel has it, so that of this host is taken if it is the node.
    """
    trust.require_trusted(path, "file of NHC's checks")  # it names programs to run
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from error
    host = socket.gethostname()
    return list(parse_nhc(text, host if host.partition(".")[0] == node else node))


def line_rows(path: Path, node: str) -> list[Coverage]:
    """Return the lines that are for a node as rows: what is made of each, and what is not. Raises ConfigError."""
    return [
        Coverage(
            source=f"{path}:{line.line}",
            check=line.text.partition("||")[2].strip() or line.text,
            way="nhc.conf" if line.checks else "no",
            ours=" ".join(check.name for check in line.checks),
            why=line.note,
        )
        for line in read_nhc(path, node)
    ]


def parse_nhc(text: str, host: str) -> Iterator[NhcLine]:
    """Yield the lines that are for a host, without comments and assignments."""
    variables = {"HOSTNAME": host, "HOSTNAME_S": host.partition(".")[0]}
    names: dict[str, int] = {}
    for number, line in _lines(text):
        target, separator, command = (part.strip() for part in line.partition("||"))
        try:
            if not separator:
                raise NotTakenError("has no ||")
            if not target or not command or not is_target(host, target):
                continue
            words = _words(command, variables)
            if (assigned := _assign(words, variables)) is not None:
                if unused := [f"{name} is not used: {_UNUSED[name]}" for name in assigned if name in _UNUSED]:
                    raise NotTakenError("; ".join(unused))
                continue
            parts = list(_parts(words, variables))
        except NotTakenError as error:
            yield NhcLine(number, line, note=str(error))
            continue
        notes = [part for part in parts if isinstance(part, str)]
        fields = [part for part in parts if not isinstance(part, str)]
        checks = [_check(words[0], {**part, "hint": f"nhc.conf: {line}"}, variables, names) for part in fields]
        wrong = {check.name: problem for check in checks if (problem := check_problem(check))}
        notes += wrong.values()
        taken = tuple(check for check in checks if check.name not in wrong)
        yield NhcLine(number, line, taken, "; ".join(notes) if taken or notes else "asks for nothing")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are no comments, with their number; a backslash at the end continues one, also a comment."""
    begun, first = "", 1
    for number, line in enumerate([*text.splitlines(), ""], 1):
        begun += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        if begun.strip() and not begun.lstrip().startswith("#"):
            yield first, begun.strip()
        begun, first = "", number + 1


def _words(command: str, variables: dict[str, str]) -> list[str]:
    """Split a command as the shell does, with the variables that the file has set."""

    def value(match: re.Match[str]) -> str:
        if match[0][0] in "'\\":
            return match[0]
        name = match[1] or match[2] or ""
        if name not in variables:
            raise NotTakenError(f"{match[0]} is known to the shell only" if name else "has a shell expression")
        return variables[name]

    try:
        expanded = _QUOTED_OR_VARIABLE.sub(value, command)
        if len(expanded) > _MOST_CHARACTERS:
            raise NotTakenError(f"is too long (expected at most {_MOST_CHARACTERS} characters)")
        words = shlex.split(expanded, comments=True)
    except ValueError as error:
        raise NotTakenError(str(error)) from error
    if _OPERATORS.intersection(words) or any(word.endswith(";") for word in words):
        raise NotTakenError("has more than one command, or a redirection")
    return words


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
    if name in MADE:
        yield from MADE[name](words[1:], variables)
    elif name.startswith("/"):
        yield from MADE["check_cmd_status"](words, variables)
    elif why := reasons().get(name):
        raise NotTakenError(why)
    else:
        similar = most_similar(name, [*MADE, *reasons()])
        raise NotTakenError(f"no check of NHC's{f' (did you mean {similar}?)' if similar else ''}: {name}")


def _check(command: str, part: dict[str, Any], variables: dict[str, str], names: dict[str, int]) -> Check:
    """Return the check of a part. Its name has no limits in it: where they change, a drain by it stays ours."""
    about, is_mild = part.pop("about", ""), part.pop("is_mild", False)
    slug = re.sub(r"[^a-z0-9]+", "-", f"{command.rpartition('/')[2].removeprefix('check_')} {about}".lower()).strip("-")
    if len(slug) > _NAME_LENGTH:
        slug = f"{slug[: _NAME_LENGTH - 9].rstrip('-')}-{zlib.crc32(slug.encode()):08x}"
    name = f"nhc-{slug}"
    names[name] = names.get(name, 0) + 1
    if names[name] > 1:
        name = f"{name}-{names[name]}"
    if is_mild or variables.get("MARK_OFFLINE") == "0":
        part.update(level="warning", action="watch")
    return Check(name=name, source="nhc.conf", **part)
