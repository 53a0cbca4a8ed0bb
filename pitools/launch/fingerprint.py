"""The same failure at the same place has the same fingerprint, whichever run, rank, node or day it was.

It is made of the exception's type, the innermost frames (file names without their folders, and functions; no line
numbers, which an edit elsewhere in the file would move), and the message with everything taken out that differs from
one time to the next.
"""

from __future__ import annotations

import hashlib
import re

_TOP_FRAMES = 3
_FRAME = re.compile(r'File "([^"\n]{0,500})", line \d+(?:, in (\S{1,200}))?')
_VARYING = (
    (re.compile(r"0x[0-9a-fA-F]+"), "0x"),
    (re.compile(r"\b[0-9a-fA-F]{8,}(?:-[0-9a-fA-F]{4,})*\b"), "#"),
    (re.compile(r"(?:[\w.+-]*/)+[\w.+-]*"), "/"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b"), "@"),
    (re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"), "0"),
    (re.compile(r"\s+"), " "),
)


def fingerprint_exception(error: str, message: str, trace: str) -> str:
    """16 hex digits for an exception's type, message and traceback; "" for no type at all."""
    if not error:
        return ""
    frames = [f"{path.rpartition('/')[2]}:{function}" for path, function in _FRAME.findall(trace)][-_TOP_FRAMES:]
    text = "\n".join([error.rpartition(".")[2], normalize_message(message), *frames])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def fingerprint_exit(description: str) -> str:
    """The same for an end without an exception, such as `exit code 7` or `Segmentation fault`."""
    return hashlib.blake2b(normalize_exit(description).encode(), digest_size=8).hexdigest()


def normalize_message(message: str) -> str:
    """A message without numbers, addresses and paths, which differ from one time to the next."""
    text = message[:2000]
    for pattern, instead in _VARYING:
        text = pattern.sub(instead, text)
    return text.strip()


def normalize_exit(what: str) -> str:
    """The words of an end; its numbers are its meaning and stay."""
    return " ".join(what[:2000].split())
