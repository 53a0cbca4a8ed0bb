"""The errors that a user can get, grouped by what a caller would do about them.

    PitError
    ├── UsageError     2   the command line is wrong          → read the help
    ├── ConfigError    3   a file of the user is wrong        → edit that file
    ├── ClusterError   4   the cluster or machine refused     → request something else
    │   └── ToolMissing    a program or package is missing    → install it
    ├── DataError      5   data are damaged                   → do not use them
    └── TryLater      75   the request is valid               → run it again later
        ├── Unreachable    no answer in time
        └── NoSpace        the destination is full
    other exceptions  70   an error in pitools itself         → report its traceback

The exit code is the class's. Codes are never reused for another meaning.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Self

INTERNAL = 70  # EX_SOFTWARE of sysexits.h


class PitError(Exception):
    """An error with its place and its remedy.

    Args:
        message: one sentence that names the wrong value.
        where: file, key, line, host or command; "" where unknown.
        hint: what to do next, as a command to type or a thing to change.
    """

    exit_code = 4
    retry = False

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message)  # pickle calls this with the message alone, then sets the attributes
        self.message = message
        self.where = where
        self.hint = hint
        if hint:
            self.add_note(f"next: {hint}")  # a traceback prints it below the message

    def with_hint(self, hint: str) -> Self:
        """Return this error with one more hint after its own."""
        error = copy.copy(self)
        error.hint = f"{self.hint}; {hint}" if self.hint else hint
        error.__notes__ = [f"next: {error.hint}"]
        return error

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class UsageError(PitError):
    """The command line is wrong."""

    exit_code = 2


class ConfigError(PitError):
    """A user's file (TOML, script) is wrong. key: the wrong key, with dots between tables; "" where no key is wrong."""

    exit_code = 3

    def __init__(self, message: str, *, where: str = "", hint: str = "", key: str = "") -> None:
        super().__init__(message, where=where, hint=hint)
        self.key = key


class ClusterError(PitError):
    """The cluster, or the machine, refused."""

    exit_code = 4


class ToolMissing(ClusterError):
    """A program or package that this command needs is not installed."""


class DataError(PitError):
    """Data are damaged, or differ from their description."""

    exit_code = 5


class TryLater(PitError):
    """Nothing is wrong with the request; the same command may work later."""

    exit_code = 75
    retry = True


class Unreachable(TryLater):
    """A host, controller or file system did not answer in time."""


class NoSpace(TryLater):
    """The destination has no room."""


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return `did you mean "x"?`, or the choices if none is similar; "" without choices."""
    ordered = sorted(choices)
    if close := most_similar(name, ordered):
        return f'did you mean "{close}"?'
    return f"known: {', '.join(ordered)}" if ordered else ""


def most_similar(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the choice that is most similar to `name`; "" if none is similar. cutoff: least likeness, of 0 to 1."""
    import difflib  # costs 5 ms, and is needed only for errors

    return next(iter(difflib.get_close_matches(name, sorted(choices), n=1, cutoff=cutoff)), "")
