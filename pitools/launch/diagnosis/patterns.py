"""The table of patterns, read once: what words in logs, exceptions, signals and exit codes stand for."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec

from pitools.core import strict_toml
from pitools.run.attempt_records import Kind

Role = Literal["word", "fault", "cascade", "end", "warning"]
Sure = Literal["certain", "likely", "guess"]
Source = Literal["slurm", "rank", "stage", "job"]


class Pattern(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Words in a log. has: literal texts, one of which is there; line: what the line must fit as well, "" for any.

    codes: the exit codes that the line explains; () for any end.
    """

    name: str
    kind: Kind
    role: Role
    source: tuple[Source, ...] = msgspec.field(name="from")
    has: tuple[str, ...]
    line: str = ""
    codes: tuple[int, ...] = ()
    sure: Sure = "guess"
    local: bool = False


class Raised(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An uncaught exception. foreign: not one that the user's own `raise` made."""

    name: str
    kind: Kind
    type: str
    message: str = ""
    role: Role = "fault"
    sure: Sure = "guess"
    local: bool = False
    foreign: bool = False


class Ending(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a rank ended: by a signal, or with a code."""

    kind: Kind
    because: str
    signal: int = 0
    code: int = 0
    role: Role = "fault"
    sure: Sure = "guess"
    local: bool = False

    @property
    def name(self) -> str:
        """The rule's name in evidence."""
        return f"signal-{self.signal}" if self.signal else f"code-{self.code}"


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of patterns.toml."""

    pattern: tuple[Pattern, ...]
    exception: tuple[Raised, ...]
    ending: tuple[Ending, ...]
    local_paths: tuple[str, ...]
    states: dict[str, Kind]


@lru_cache(maxsize=1)
def table() -> Table:
    """The package's table."""
    path = Path(__file__).with_name("patterns.toml")
    return strict_toml.convert(strict_toml.read(path), Table, str(path))


@lru_cache(maxsize=512)
def compiled(expression: str) -> re.Pattern[str]:
    """A regular expression of the table."""
    return re.compile(expression)


def of_exception(error: str, message: str, *, own_raise: bool) -> Raised | None:
    """The first table that fits an exception; None where none does. own_raise: the user's own code raised it."""
    name = error.rpartition(".")[2]
    for raised in table().exception:
        if raised.foreign and own_raise:
            continue
        if compiled(raised.type).fullmatch(name) and compiled(raised.message).match(message):
            return raised
    return None


def of_end(exit_code: int) -> Ending | None:
    """What an exit code stands for, or the signal behind one of 128 and more; None for a program's own code."""
    for ending in table().ending:
        if ending.signal and exit_code in (128 + ending.signal, -ending.signal):
            return ending
        if ending.code and exit_code == ending.code:
            return ending
    return None


def sure_of(rule: str) -> Sure:
    """How much a pattern's line says by itself."""
    return _by_name()[rule].sure if rule in _by_name() else "guess"


def is_local(rule: str) -> bool:
    """Whether the node that a pattern's line is from, or names, is at fault."""
    return rule in _by_name() and _by_name()[rule].local


def codes(rule: str) -> tuple[int, ...]:
    """Return the exit codes that a pattern's line explains; () for any end."""
    return _by_name()[rule].codes if rule in _by_name() else ()


def of_job(line: str) -> Pattern | None:
    """Return the first pattern that fits a line of a job's own output, written before any attempt; None for none."""
    for pattern in table().pattern:
        is_asked = pattern.role == "fault" and {"job", "slurm"} & set(pattern.source) and not pattern.codes
        if is_asked and any(words in line for words in pattern.has) and compiled(pattern.line).search(line):
            return pattern
    return None


def because(rule: str) -> str:
    """What is to be said of an end by this signal or with this code; "" for other rules."""
    return next((ending.because for ending in table().ending if ending.name == rule), "")


@lru_cache(maxsize=1)
def _by_name() -> dict[str, Pattern]:
    return {pattern.name: pattern for pattern in table().pattern}
