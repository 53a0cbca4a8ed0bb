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

SCHEMA_FILE = "model.json"
_MAX_BYTES = 64 << 20
_HINT = "resume with the model it was made with, or give another checkpoint folder"


def schema_fingerprint(schema: Mapping[str, str]) -> str:
    """Return the digest of a schema: name → type and shape."""
    return digest_bytes(_encoded(schema))


def write_schema(building: Path, schema: Mapping[str, str]) -> None:
    """Write the schema into the building folder; the manifest's seal covers it."""
    (building / SCHEMA_FILE).write_bytes(_encoded(schema))


def require_same_schema(folder: Path, schema: Mapping[str, str]) -> None:
    """Raise ConfigError with the first difference if a folder's checkpoints are of another model.

    Without a schema file nothing is compared; `owner.claim_folder` compares the fingerprint.
    """
    folder_owner = owner.read_owner(folder)
    if folder_owner is None or folder_owner.model == schema_fingerprint(schema):
        return
    for step in layout.listed_steps(folder):
        path = layout.step_path(folder, step) / SCHEMA_FILE
        try:
            with open_regular(path) as file:
                theirs = decode_json(file.read(_MAX_BYTES), dict[str, str])
        except (OSError, msgspec.DecodeError):
            continue
        if schema_fingerprint(theirs) == folder_owner.model:
            raise ConfigError(_first_difference(theirs, schema), where=str(path.parent), hint=_HINT)


def _first_difference(saved: Mapping[str, str], current: Mapping[str, str]) -> str:
    for name in sorted(saved.keys() | current.keys()):
        saved_type, current_type = (schema.get(name, "nothing") for schema in (saved, current))
        if saved_type != current_type:
            return f'of another model: "{name}" is {saved_type} there, {current_type} here'
    return "of another model"


def _encoded(schema: Mapping[str, str]) -> bytes:
    return msgspec.json.encode(dict(sorted(schema.items())))
