"""Fingerprints of failures: the same failure at the same place has the same one in every run, rank, node and day.

A hash over the exception's type, the innermost frames (file name without folder, and function; no line numbers, because
an edit elsewhere in the file moves them), and the message without its varying parts: numbers, addresses, paths.
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
    """Return 16 hex digits for an exception's type, message and traceback; "" without a type."""
    if not error:
        return ""
    frames = [f"{path.rpartition('/')[2]}:{function}" for path, function in _FRAME.findall(trace)][-_TOP_FRAMES:]
    text = "\n".join([error.rpartition(".")[2], normalize_message(message), *frames])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def fingerprint_exit(description: str) -> str:
    """Return 16 hex digits for an end without an exception, such as `exit code 7` or `Segmentation fault`."""
    return hashlib.blake2b(normalize_exit(description).encode(), digest_size=8).hexdigest()


def normalize_message(message: str) -> str:
    """Return a message with its numbers, addresses and paths replaced by placeholders."""
    text = message[:2000]
    for pattern, placeholder in _VARYING:
        text = pattern.sub(placeholder, text)
    return text.strip()


def normalize_exit(description: str) -> str:
    """Return the description of an end with single spaces. Its numbers tell ends apart, and stay."""
    return " ".join(description[:2000].split())
