"""What a training state is made of: names, types and shapes, in a file beside it and as a fingerprint.

The fingerprint says that two differ, the file says where.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from pitools.checkpoint.store import layout, owner
from pitools.core.errors import ConfigError
from pitools.core.fs import plain_file
from pitools.core.record import decode_json
from pitools.store.digest import of_bytes

FILE_NAME = "model.json"
_MAX_BYTES = 64 << 20
_HINT = "resume with the model it was made with, or give another checkpoint folder"


def fingerprint(table: Mapping[str, str]) -> str:
    """Of name → type and shape."""
    return of_bytes(_encoded(table))


def write(place: Path, table: Mapping[str, str]) -> None:
    """Put the table beside the state; it is sealed with it."""
    (place / FILE_NAME).write_bytes(_encoded(table))


def require_same(folder: Path, table: Mapping[str, str]) -> None:
    """Raises ConfigError naming the first difference where a folder's checkpoints are of another model.

    Where no file says what that model was, it is left to `owner.claim`.
    """
    whose = owner.read(folder)
    if whose is None or whose.model == fingerprint(table):
        return
    for step in layout.steps(folder):
        path = layout.step_path(folder, step) / FILE_NAME
        try:
            with plain_file(path) as file:
                theirs = decode_json(file.read(_MAX_BYTES), dict[str, str])
        except (OSError, msgspec.DecodeError):
            continue
        if fingerprint(theirs) == whose.model:
            raise ConfigError(_difference(theirs, table), where=str(path.parent), hint=_HINT)


def _difference(theirs: Mapping[str, str], mine: Mapping[str, str]) -> str:
    for name in sorted(theirs.keys() | mine.keys()):
        found, wanted = (table.get(name, "nothing") for table in (theirs, mine))
        if found != wanted:
            return f'of another model: "{name}" is {found} there, {wanted} here'
    return "of another model"


def _encoded(table: Mapping[str, str]) -> bytes:
    return msgspec.json.encode(dict(sorted(table.items())))
