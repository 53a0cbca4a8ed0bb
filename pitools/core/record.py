"""The base of every record that leaves a command or is kept in a file."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema"):
    """A frozen, keyword-only record whose first JSON key is its schema.

    A subclass names its schema with `tag="pit.node/1"`, and says `frozen=True, kw_only=True` again for the type
    checker. Units stand in key names (`wall_s`, `free_bytes`), times are RFC 3339 UTC text. Fields are only ever
    added, each with a default.
    """
