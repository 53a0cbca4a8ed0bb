"""Parse Python tracebacks in a rank's output, and tell whether the user's own code raised the exception."""

from __future__ import annotations

import re
from typing import NamedTuple

from pitools.launch.diagnosis import patterns

_START = "Traceback (most recent call last):"
_PREFIX = re.compile(r"^(?:\[?(?:rank|Rank)?\s?\d+\]?: ?|\d+: )")  # torch's `[rank0]: `, srun's `0: `
_LAST = re.compile(r"^(?P<type>[A-Za-z_][\w.]{0,200})(?:: (?P<message>.*))?$")
_FRAME = re.compile(r'^\s+File "(?P<file>[^"\n]{0,1000})", line (?P<line>\d+)')
_RAISE = re.compile(r"(?:^|[:;]\s*)(?:raise|assert)\b")
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "/pitools/")
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")


class ParsedException(NamedTuple):
    """An uncaught exception. offset: of its traceback in the text, in characters."""

    error: str
    message: str
    trace: str
    offset: int
    raised_by_user: bool


def last_traceback(text: str) -> list[ParsedException]:
    """Return the exception chain of the last traceback in a rank's output, the original one first; [] without one."""
    start = text.rfind(_START)
    if start < 0:
        return []
    chain = [start]
    while len(chain) < 8:  # the exception during whose handling it was raised, or its cause, is printed before it
        previous = text.rfind(_START, 0, chain[0])
        if previous < 0 or not any(phrase in text[previous : chain[0]][-400:] for phrase in _CHAIN):
            break
        chain.insert(0, previous)
    ends = [*chain[1:], min(len(text), start + 65536)]
    exceptions = [_parse_block(text[begin:end], begin) for begin, end in zip(chain, ends, strict=True)]
    return [raised for raised in exceptions if raised]


def blank_tracebacks(text: str) -> str:
    """Return the text with its tracebacks blanked: they quote lines of source, which are no output."""
    out, inside = [], False
    for line in text.split("\n"):
        if _START in line:
            inside = True
        bare = _PREFIX.sub("", line[:200], count=1)
        out.append("" if inside else line)
        if inside and bare[:1].strip() and _START not in line:
            inside = False
    return "\n".join(out)


def parse_record(error: str, message: str, trace: str) -> list[ParsedException]:
    """Return the exception chain of a rank's failure record; without a traceback, the exception alone."""
    if chain := last_traceback(trace):
        return chain
    return [ParsedException(error, message, trace, 0, _is_raised_by_user(trace.splitlines()))] if error else []


def explaining_exception(chain: list[ParsedException]) -> tuple[ParsedException, patterns.ExceptionRule | None]:
    """Return the exception of a chain that explains it, and its rule: the first with a rule, else the last and None."""
    for raised in chain:
        if rule := patterns.match_exception(raised.error, raised.message, own_raise=raised.raised_by_user):
            return raised, rule
    return chain[-1], None


def _parse_block(block: str, offset: int) -> ParsedException | None:
    lines = [_PREFIX.sub("", line[:2000], count=1) for line in block[:65536].splitlines()]
    inside = 1
    while inside < len(lines) and (lines[inside].startswith((" ", "\t")) or not lines[inside].strip()):
        inside += 1
    if inside >= len(lines):
        return None
    end = _LAST.match(lines[inside])
    if not end:
        return None
    message = (end["message"] or "").strip()
    if not message and inside + 1 < len(lines):
        message = lines[inside + 1].strip()
    return ParsedException(
        end["type"], message, "\n".join(lines[: inside + 1]), offset, _is_raised_by_user(lines[:inside])
    )


def _is_raised_by_user(lines: list[str]) -> bool:
    """Whether the innermost frame is user code at a `raise` or `assert`."""
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return False
    frame = _FRAME.match(lines[frames[-1]])
    if not frame or any(part in frame["file"] for part in _LIBRARY):
        return False
    source = [line.strip() for line in lines[frames[-1] + 1 :] if line.strip().strip("^~ ")]
    return bool(source) and _RAISE.search(source[0]) is not None
