"""List the published versions of a root, `<root>/<name>/<version>/manifest.json`, by their folders alone."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from pitools.core import timestamps
from pitools.core.errors import DataError
from pitools.core.fs import open_regular
from pitools.core.record import decode_json
from pitools.store.manifest import MANIFEST_FILE

SCHEMA = "pit.zarr/1"  # attribute `schema` of a version's group
_VERSION = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def is_name(name: str) -> bool:
    """Whether `name` is a valid dataset name."""
    return _NAME.fullmatch(name) is not None


def is_version(name: str) -> bool:
    """Whether `name` has the form of a version, which is a digest."""
    return _VERSION.fullmatch(name) is not None


def version_dirs(root: Path, name: str | None = None) -> Iterator[Path]:
    """Yield the folders of published versions in a root, or of dataset `name`, ordered by name, then oldest first.

    Skips unreadable and removed folders, and links that are not named as a version, such as `latest`.
    """
    folders = []
    for home in _list_dir(root) if name is None else [name]:
        for folder in _list_dir(root / home) if is_name(home) else ():
            with contextlib.suppress(OSError):
                path = root / home / folder
                if _VERSION.fullmatch(folder) or not path.is_symlink():
                    folders.append((home, (path / MANIFEST_FILE).stat().st_mtime_ns, folder))
    yield from (root / home / folder for home, _, folder in sorted(folders))


class _Group(msgspec.Struct):
    """The part of a group's `zarr.json` that is read."""

    attributes: dict[str, Any] = {}


def lost_manifest(name: str, metadata: Callable[[], bytes], where: str) -> DataError | None:
    """Return the error for a version that has lost its manifest; None for any other store without one.

    name: of the folder. metadata: reads its `zarr.json`.
    """
    if not is_version(name):
        return None
    try:
        schema = decode_json(metadata(), _Group).attributes.get("schema")
    except (OSError, msgspec.DecodeError):
        return None
    if schema != SCHEMA:
        return None
    hint = "copy manifest.json back from another copy of this version, or ingest its recordings again"
    return DataError("version: lost its manifest.json, so its files cannot be verified", where=where, hint=hint)


def lost_manifest_of(folder: Path) -> DataError | None:
    """Return `lost_manifest` of a folder."""

    def metadata() -> bytes:
        with open_regular(folder / "zarr.json") as file:
            return file.read()

    return lost_manifest(folder.resolve().name, metadata, str(folder))


def published_at(mtime_ns: int) -> str:
    """Return a version's time of publication, which is the mtime of its manifest."""
    return timestamps.to_rfc3339(datetime.fromtimestamp(mtime_ns // 1_000_000 / 1000, UTC))


def _list_dir(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError:
        return []
