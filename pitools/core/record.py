"""The base class of all records that commands print or files contain, and their decoder."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_DECODERS_LOCK = threading.Lock()
_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema"):
    """A frozen, keyword-only record whose first JSON key is its schema.

    A subclass names its schema with `tag="pit.node/1"`, and repeats `frozen=True, kw_only=True` for the type checker.
    Keys end with their unit (`wall_s`, `free_bytes`); times are RFC 3339 text in UTC. Fields are only added, each with
    a default.
    """


def decode_json(data: bytes | str | msgspec.Raw, kind: type[T]) -> T:
    """Decode JSON as a type; from any thread. Raises msgspec.DecodeError if it does not fit.

    msgspec 0.22 crashes the process when two threads first decode a type at the same time: a lock prevents that.
    """
    key: Any = kind
    decoder = _DECODERS.get(key)
    if decoder is None:
        with _DECODERS_LOCK:
            decoder = _DECODERS[key] = msgspec.json.Decoder(key)
    try:
        decoded: T = decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # raised by msgspec for invalid UTF-8 and deep nesting
        raise msgspec.DecodeError(str(error)) from error
    return decoded
