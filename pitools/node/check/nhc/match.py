"""NHC's options, sizes and match strings: a glob, a /regular expression/ or {node[01-10]}; after `!` its opposite."""

from __future__ import annotations

import getopt
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

_NODE = re.compile(r"[-\w]+\d+[-.a-zA-Z0-9]*")
_RANGE = re.compile(r"([-\w]+)\[([0-9]{1,18})-([0-9]{1,18})\]([-.a-zA-Z0-9]*)")
_SIZE = re.compile(r"([0-9]{1,18})\s*([kmgtpe]?)b?", re.IGNORECASE)
_PERCENTAGE = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?%?")
_CLASSES = {
    "space": r"\s", "blank": r" \t", "digit": r"\d", "alpha": "a-zA-Z", "alnum": "a-zA-Z0-9",
    "upper": "A-Z", "lower": "a-z", "xdigit": "0-9a-fA-F",
}  # fmt: skip
_POWERS = "kmgtpe"


Fields = Iterator[dict[str, Any] | str]
"""The fields of a check, with `about` for its name, and `reports_only` if it drains nothing; or what is left out."""

Converter = Callable[[list[str], dict[str, str]], Fields]
"""From a check's arguments and the file's variables to its parts. Raises UnsupportedError."""

NO_SIDE_EFFECTS = "nothing is started, ended or mounted"


class UnsupportedError(Exception):
    """A line, or a part of it, of which no check of ours can be made: why. is_shipped: a shipped check does it."""

    def __init__(self, why: str, *, is_shipped: bool = False) -> None:
        super().__init__(why)
        self.is_shipped = is_shipped


def is_target(host: str, target: str) -> bool:
    """Return whether a line's target means a host. Raises UnsupportedError for what is no target."""
    negated, body = target.startswith("!"), target.removeprefix("!")
    if len(body) > 1 and body[0] == "{" and body[-1] == "}":
        return _is_in_ranges(host, body[1:-1]) != negated
    if body[:1] + body[-1:] != "//" and set(body) & set("{}/"):  # no host's name has these: it would mean no host
        raise UnsupportedError(f"{target} is no target (expected a glob, {{n[01-10]}} or /expression/)")
    return re.fullmatch(match_regex(target), host) is not None


def _is_in_ranges(host: str, ranges: str) -> bool:
    for one in ranges.split(","):
        if _NODE.fullmatch(one):
            if host == one:
                return True
        elif match := _RANGE.fullmatch(one):
            prefix, first, last, suffix = match.groups()
            width = max(len(first), len(last))
            inner = re.fullmatch(f"{re.escape(prefix)}([0-9]{{{width}}}){re.escape(suffix)}", host)
            low, high = sorted((int(first), int(last)))
            if inner and low <= int(inner[1]) <= high:
                return True
        else:
            raise UnsupportedError(f"{one} is no node or range of nodes (expected n01 or n[01-10], a range in each)")
    return False


def match_regex(text: str, *, of_line: bool = False, of_first_word: bool = False) -> str:
    """Return a match string as a regular expression for a whole value. Raises UnsupportedError if it is none.

    of_line: one line of the value has to match, or with `!` none may. of_first_word: its first word has to.
    """
    negated, body = text.startswith("!"), text.removeprefix("!")
    if len(body) > 1 and body[0] == body[-1] == "/":
        body = _python_regex(body[1:-1])
        if of_first_word:
            body = re.sub(r"(?<!\\)\$$", "(?= |$)", body)
            body = f"[^ ]*(?:{body})[^ ]*(?: .*)?"
        else:
            body = f"(?s:.*)(?m-s:{body})(?s:.*)"
    elif of_line:
        body = f"(?s:.*)(?m-s:^{glob_regex(body)}$)(?s:.*)"
    elif of_first_word:
        body = f"{glob_regex(body, any_sign='[^ ]')}(?: .*)?"
    else:
        body = f"(?s:{glob_regex(body)})"
    if negated:
        body = f"(?!(?:{body})\\Z)(?s:.*)"
    try:
        with warnings.catch_warnings():  # of what Python may read otherwise one day, as a set within a set
            warnings.simplefilter("error", FutureWarning)
            re.compile(body)
    except (re.error, RecursionError, OverflowError, FutureWarning) as error:
        raise UnsupportedError(f"{text} is no regular expression: {error}") from error
    return body


def where_value(text: str) -> str:
    """Return a match string as a value of `where`."""
    is_plain = not re.search(r"[*?\[]", text) and text[:1] not in ("!", "{") and not re.fullmatch(r"/.*/", text)
    return text if is_plain else f"re:{match_regex(text)}"


def glob_regex(glob: str, any_sign: str = ".") -> str:
    """Return a shell's glob as a regular expression."""
    glob = re.sub(r"\*+", "*", glob)  # many stars take long to fail
    made = ""
    position = 0
    while position < len(glob):
        sign = glob[position]
        end = glob.find("]", position + 2)
        if sign == "[" and end > 0:
            inside = glob[position + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            inside = f"^{inside[1:]}" if inside[0] in "!^" else inside
            made += f"[{inside}]"
            position = end
        else:
            made += {"*": f"{any_sign}*", "?": any_sign}.get(sign) or re.escape(sign)
        position += 1
    return made


def _python_regex(extended: str) -> str:
    """Return a POSIX extended regular expression as one of Python's."""
    return re.sub(r"\[:(\w+):\]", lambda match: _CLASSES.get(match[1], match[0]), extended)


def size_bytes(text: str) -> int:
    """Return the bytes of `5GB`, `512m` or `1024`, a number of kB as NHC has it. Raises UnsupportedError."""
    number, power = _number(text)
    return int(number * 1024 ** max(1, power))


def count_of(text: str) -> int:
    """Return the number of `1k` or `1M`: thousands and millions. Raises UnsupportedError."""
    number, power = _number(text)
    return int(number * 1000**power)


def share_of(text: str) -> float:
    """Return `5%` as 0.05. Raises UnsupportedError."""
    if not _PERCENTAGE.fullmatch(text):
        raise UnsupportedError(f"{text} is no percentage")
    return float(text.removesuffix("%")) / 100


def _number(text: str) -> tuple[int, int]:
    if not (match := _SIZE.fullmatch(text)):
        raise UnsupportedError(f"{text} is no size (expected 1024, 5GB or 512m)")
    return int(match[1]), 1 + _POWERS.index(match[2].lower()) if match[2] else 0


def above_regex(number: int) -> str:
    """Return a regular expression of the integers above a number of at least 0."""
    digits = str(number)
    longer = f"[1-9][0-9]{{{len(digits)},}}"
    higher = [
        f"{digits[:index]}[{int(digit) + 1}-9][0-9]{{{len(digits) - index - 1}}}"
        for index, digit in enumerate(digits)
        if digit != "9"
    ]
    return "|".join((longer, *higher))


def options_of(arguments: list[str], letters: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Split off the options: pairs of letter and value, then the other arguments. Raises UnsupportedError."""
    try:
        pairs, rest = getopt.getopt(arguments, letters)
    except getopt.GetoptError as error:
        raise UnsupportedError(str(error)) from error
    return [(letter.removeprefix("-"), value) for letter, value in pairs], rest


def option_values(pairs: list[tuple[str, str]], letter: str) -> list[str]:
    """Return all values of an option."""
    return [value for name, value in pairs if name == letter]


def needed(arguments: list[str], number: int) -> list[str]:
    """Return the arguments, filled up with "". Raises UnsupportedError if fewer than `number` are given."""
    if len([argument for argument in arguments[:number] if argument]) < number:
        raise UnsupportedError(f"needs {number} argument{'s' if number > 1 else ''}")
    return [*arguments, "", "", ""]


def limits_of(low: str, high: str, value: Callable[[str], float], slack: str = "") -> dict[str, float]:
    """Return min and max, each if given. slack: NHC's fudge factor, of the actual value or absolute."""
    factor = share_of(slack) if slack.endswith("%") else 0.0
    margin = value(slack) if slack and not factor else 0.0
    given: dict[str, float] = {}
    if low:
        given["min"] = (value(low) - margin) / (1 + factor)
    if high and factor < 1:
        given["max"] = (value(high) + margin) / (1 - factor)
    if not given:
        raise UnsupportedError("has no limit")
    return given
