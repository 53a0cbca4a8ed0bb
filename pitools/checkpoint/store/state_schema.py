"""The schema of a training state: names, types and shapes, in a file beside it, and as a fingerprint.

The fingerprint detects a difference, the file names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from pitools.checkpoint.store import layout, owner
from pitools.core.errors import ConfigError
from pitools.core.fs import open_regular
from pitools.core.record import decode_json
from pitools.store.digest import digest_bytes

STATE_SCHEMA_FILE = "model.json"
_MAX_BYTES = 64 << 20
_HINT = "resume with the model it was made with, or give another checkpoint folder"


def schema_fingerprint(table: Mapping[str, str]) -> str:
    """Of name → type and shape."""
    return digest_bytes(_encoded(table))


def write_schema(building: Path, table: Mapping[str, str]) -> None:
    """Put the table beside the state; it is sealed with it."""
    (building / STATE_SCHEMA_FILE).write_bytes(_encoded(table))


def require_same_schema(folder: Path, table: Mapping[str, str]) -> None:
    """Raise ConfigError with the first difference if a folder's checkpoints are of another model.

    Without a schema file nothing is compared; `owner.claim_folder` compares the fingerprint.
    """
    folder_owner = owner.read_owner(folder)
    if folder_owner is None or folder_owner.model == schema_fingerprint(table):
        return
    for step in layout.listed_steps(folder):
        path = layout.step_path(folder, step) / STATE_SCHEMA_FILE
        try:
            with open_regular(path) as file:
                theirs = decode_json(file.read(_MAX_BYTES), dict[str, str])
        except (OSError, msgspec.DecodeError):
            continue
        if schema_fingerprint(theirs) == folder_owner.model:
            raise ConfigError(_first_difference(theirs, table), where=str(path.parent), hint=_HINT)


def _first_difference(saved: Mapping[str, str], current: Mapping[str, str]) -> str:
    for name in sorted(saved.keys() | current.keys()):
        saved_type, current_type = (table.get(name, "nothing") for table in (saved, current))
        if saved_type != current_type:
            return f'of another model: "{name}" is {saved_type} there, {current_type} here'
    return "of another model"


def _encoded(table: Mapping[str, str]) -> bytes:
    return msgspec.json.encode(dict(sorted(table.items())))
