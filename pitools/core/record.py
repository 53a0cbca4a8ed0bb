"""The base of every record that leaves a command or is kept in a file, and how one is read."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_DECODERS_LOCK = threading.Lock()
_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema"):
    """A frozen, keyword-only record whose first JSON key is its schema.

    A subclass names its schema with `tag="pit.node/1"`, and says `frozen=True, kw_only=True` again for the type
    checker. Units stand in key names (`wall_s`, `free_bytes`), times are RFC 3339 UTC text. Fields are only ever
    added, each with a default.
    """


def decode_json(data: bytes | str | msgspec.Raw, kind: type[T]) -> T:
    """Decode JSON as a type; in any thread. Raises msgspec.DecodeError for whatever is none.

    msgspec 0.22 crashes the process where two threads decode a type for the first time at once: it is prepared here
    by one of them.
    """
    key: Any = kind
    decoder = _DECODERS.get(key)
    if decoder is None:
        with _DECODERS_LOCK:
            decoder = _DECODERS[key] = msgspec.json.Decoder(key)
    try:
        decoded: T = decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec's own for text that is no UTF-8, or nested deeply
        raise msgspec.DecodeError(str(error)) from error
    return decoded
