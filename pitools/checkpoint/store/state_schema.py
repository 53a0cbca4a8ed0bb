"""The schema of a training state: names, types and shapes, in a file beside it, and as a fingerprint.

The fingerprint detects a difference, the file names the leaves that differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from pitools.checkpoint.store import layout, owner
from pitools.core.errors import ConfigError, DataError, Unreachable
from pitools.core.fs import open_regular
from pitools.core.record import decode_json
from pitools.store.digest import digest_bytes

SCHEMA_FILE = "state_schema.json"
_MAX_BYTES = 64 << 20
_MAX_NAMED = 4
_HINT = (
    "restore into a state with all leaves that are saved (an optimizer creates its own at its first step; torch's "
    "get_state_dict creates them: see pitools/checkpoint/README.md); for another state give another checkpoint folder"
)


def schema_fingerprint(schema: Mapping[str, str]) -> str:
    """Return the digest of a schema: name → type and shape."""
    return digest_bytes(_encoded(schema))


def write_schema(unpublished_dir: Path, schema: Mapping[str, str]) -> None:
    """Write the schema into the unpublished folder; the manifest's seal covers it."""
    (unpublished_dir / SCHEMA_FILE).write_bytes(_encoded(schema))


def require_same(expected: Mapping[str, str], schema: Mapping[str, str], where: str) -> None:
    """Raise ConfigError with the names of differing leaves if two schemas differ."""
    nothing = "no such leaf"
    names = [name for name in sorted(expected.keys() | schema.keys()) if expected.get(name) != schema.get(name)]
    if not names:
        return
    leaves = [
        f'"{name}" (expected {expected.get(name, nothing)}, got {schema.get(name, nothing)})'
        for name in names[:_MAX_NAMED]
    ]
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    raise ConfigError(f"state: other leaves: {', '.join(leaves)}{more}", where=where, hint=_HINT)


def require_same_as_saved(step_dir: Path, schema: Mapping[str, str]) -> None:
    """Raise ConfigError with the names of differing leaves if a verified checkpoint is of another state.

    A checkpoint that was published without a schema file is not compared. Raises DataError, Unreachable.
    """
    path = step_dir / SCHEMA_FILE
    try:
        saved = _read(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise Unreachable(f"read failed: {error.strerror}", where=str(path), hint=f"ls {path}") from error
    except msgspec.DecodeError as error:
        raise DataError(f"not a state's schema: {error}", where=str(path)) from error
    require_same(saved, schema, str(step_dir))


def require_same_schema(folder: Path, schema: Mapping[str, str]) -> None:
    """Raise ConfigError with the names of differing leaves if a folder's checkpoints are of another state.

    Without a schema file nothing is compared; `owner.claim_folder` compares the fingerprint.
    """
    folder_owner = owner.read_owner(folder)
    if folder_owner is None or folder_owner.state_fingerprint == schema_fingerprint(schema):
        return
    for step in layout.listed_steps(folder):
        path = layout.step_path(folder, step) / SCHEMA_FILE
        try:
            theirs = _read(path)
        except (OSError, msgspec.DecodeError):
            continue
        if schema_fingerprint(theirs) == folder_owner.state_fingerprint:
            require_same(theirs, schema, str(path.parent))


def _read(path: Path) -> dict[str, str]:
    with open_regular(path) as file:
        return decode_json(file.read(_MAX_BYTES), dict[str, str])


def _encoded(schema: Mapping[str, str]) -> bytes:
    return msgspec.json.encode(dict(sorted(schema.items())))
