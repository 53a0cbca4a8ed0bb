"""The table patterns.toml, read once: the causes that log lines, exceptions, signals and exit codes stand for."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec

from pitools.core import strict_toml
from pitools.run.attempt_records import CauseKind, Confidence

FaultRole = Literal["slurm-statement", "fault", "cascade", "end", "warning"]
LogSource = Literal["slurm", "rank", "stage", "job"]


class Pattern(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pattern of a log line.

    literals: texts, one of which the line contains. line: a regular expression that the line matches, "" for any.
    codes: the exit codes that the line explains; () for any exit.
    """

    name: str
    kind: CauseKind
    role: FaultRole
    source: tuple[LogSource, ...] = msgspec.field(name="from")
    literals: tuple[str, ...]
    line: str = ""
    codes: tuple[int, ...] = ()
    confidence: Confidence = "guess"
    blames_node: bool = False


class ExceptionRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule for uncaught exceptions. raised_by_library: does not match exceptions of the user's own `raise`."""

    name: str
    kind: CauseKind
    type: str
    message: str = ""
    role: FaultRole = "fault"
    confidence: Confidence = "guess"
    blames_node: bool = False
    raised_by_library: bool = False


class ExitRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule for the exit of a rank: by a signal, or with a code."""

    kind: CauseKind
    reason: str
    signal: int = 0
    code: int = 0
    role: FaultRole = "fault"
    confidence: Confidence = "guess"
    blames_node: bool = False

    @property
    def name(self) -> str:
        """The rule's name in evidence, such as `signal-9`."""
        return f"signal-{self.signal}" if self.signal else f"code-{self.code}"


class PatternTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of patterns.toml."""

    pattern: tuple[Pattern, ...]
    exception: tuple[ExceptionRule, ...]
    exit: tuple[ExitRule, ...]
    local_paths: tuple[str, ...]
    states: dict[str, CauseKind]


@lru_cache(maxsize=1)
def load_table() -> PatternTable:
    """Return the table that comes with the package."""
    path = Path(__file__).with_name("patterns.toml")
    return strict_toml.convert_tables(strict_toml.read_toml(path), PatternTable, str(path))


@lru_cache(maxsize=512)
def compile_cached(expression: str) -> re.Pattern[str]:
    """Compile a regular expression of the table."""
    return re.compile(expression)


def match_exception(error: str, message: str, *, own_raise: bool) -> ExceptionRule | None:
    """Return the first rule that matches an exception, or None. own_raise: the user's own code raised it."""
    name = error.rpartition(".")[2]
    for rule in load_table().exception:
        if rule.raised_by_library and own_raise:
            continue
        if compile_cached(rule.type).fullmatch(name) and compile_cached(rule.message).match(message):
            return rule
    return None


def match_exit_code(exit_code: int) -> ExitRule | None:
    """Return the rule of an exit code, or of the signal that it encodes; None for other codes."""
    for rule in load_table().exit:
        if rule.signal and exit_code in (128 + rule.signal, -rule.signal):
            return rule
        if rule.code and exit_code == rule.code:
            return rule
    return None


def confidence_of(rule: str) -> Confidence:
    """Return the confidence of a pattern; "guess" for other rules."""
    return _by_name()[rule].confidence if rule in _by_name() else "guess"


def blames_node(rule: str) -> bool:
    """Whether the node that wrote a matching line, or that the line names, is at fault."""
    return rule in _by_name() and _by_name()[rule].blames_node


def explained_codes(rule: str) -> tuple[int, ...]:
    """Return the exit codes that a matching line explains; () for any exit."""
    return _by_name()[rule].codes if rule in _by_name() else ()


def match_job_output(line: str) -> Pattern | None:
    """Return the first pattern that matches a line of the output of a job without an attempt, or None."""
    for pattern in load_table().pattern:
        applies = pattern.role == "fault" and {"job", "slurm"} & set(pattern.source) and not pattern.codes
        if (
            applies
            and any(literal in line for literal in pattern.literals)
            and compile_cached(pattern.line).search(line)
        ):
            return pattern
    return None


def exit_reason(rule: str) -> str:
    """Return the explanation of an exit rule, such as `signal-9`; "" for other rules."""
    return next((exit_rule.reason for exit_rule in load_table().exit if exit_rule.name == rule), "")


@lru_cache(maxsize=1)
def _by_name() -> dict[str, Pattern]:
    return {pattern.name: pattern for pattern in load_table().pattern}
