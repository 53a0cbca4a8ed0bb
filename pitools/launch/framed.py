"""A rank's log without the lines that submitit writes around what the program says."""

from __future__ import annotations

import re

# Just these four, which 1.5 writes of a job that goes well. The second form is what a program's `logging.basicConfig()`
# makes of them as well.
_MARKS = ("submitit INFO (", "INFO:submitit:")
_FORM = r"(submitit INFO \([\d :,-]{23}\) - |INFO:submitit:)"
_BEFORE = re.compile(_FORM + r"(Starting with JobEnvironment\(.*\)|Loading pickle: .*)")
_AFTER = re.compile(_FORM + r"(Job completed successfully|Exiting after successful completion)")


class Unframed:
    """Takes a log piece by piece, and gives what is the program's own.

    submitit's lines are left out only before the first line of another's, and after the last: a line that may be the
    last is held back until another follows.
    """

    def __init__(self) -> None:
        self._held, self._is_first = "", True

    def feed(self, text: str) -> str:
        """What can be said for certain after this piece."""
        *lines, rest = (self._held + text).split("\n")
        while self._is_first and lines and _BEFORE.fullmatch(lines[0]):
            del lines[0]
        keep = len(lines)
        if any(rest.startswith(mark) or mark.startswith(rest) for mark in _MARKS):
            while keep and _AFTER.fullmatch(lines[keep - 1]):
                keep -= 1
            self._held = "\n".join([*lines[keep:], rest])
            lines = [*lines[:keep], ""] if keep else []
        else:
            self._held = ""
            lines = [*lines, rest]
        self._is_first = self._is_first and not lines
        return "\n".join(lines)

    def end(self) -> str:
        """What was held back and is not submitit's, once nothing more comes."""
        held, self._held = self._held, ""
        rest = held.rpartition("\n")[2]
        is_frame = not rest or _AFTER.fullmatch(rest) or (self._is_first and _BEFORE.fullmatch(rest))
        return "" if is_frame else held
