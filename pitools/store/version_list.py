"""List the published versions of a root by their folders alone, and tell when each was published.

<root>/<name>/<version>/
    manifest.json       without it the folder is no version
    published.json      pit.publication/1: when it was published; no content, so not in the manifest
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from pitools.core import timestamps
from pitools.core.errors import DataError
from pitools.core.fs import open_regular
from pitools.core.record import Record, decode_json
from pitools.store.manifest import MANIFEST_FILE
from pitools.store.manifest import is_version as is_version

PUBLISHED_FILE = "published.json"
SCHEMA = "pit.zarr/1"  # attribute `schema` of a version's group
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Publication(Record, frozen=True, kw_only=True, tag="pit.publication/1"):
    """When a version was published, by the clock of its file system. A copy keeps it."""

    published_at: str


def is_name(name: str) -> bool:
    """Whether `name` is a valid dataset name."""
    return _NAME.fullmatch(name) is not None


def version_dirs(root: Path, name: str | None = None) -> Iterator[Path]:
    """Yield the folders of published versions in a root, or of dataset `name`, ordered by name, then oldest first.

    Skips unreadable and removed folders, and links that are not named as a version, such as `latest`.
    """
    folders = []
    for home, folder in _published_folders(root, name):
        with contextlib.suppress(OSError):
            folders.append((home, published_ns(root / home / folder), folder))
    yield from (root / home / folder for home, _, folder in sorted(folders))


def has_versions(root: Path, name: str | None = None) -> bool:
    """Whether `version_dirs` yields any; reads no time of publication."""
    return any(True for _ in _published_folders(root, name))


def _published_folders(root: Path, name: str | None) -> Iterator[tuple[str, str]]:
    for home in _list_dir(root) if name is None else [name]:
        for folder in _list_dir(root / home) if is_name(home) else ():
            with contextlib.suppress(OSError):
                path = root / home / folder
                if is_version(folder) or not path.is_symlink():
                    (path / MANIFEST_FILE).stat()
                    yield home, folder


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
    hint = "copy manifest.json back from another copy, ingest its recordings again, or remove the folder"
    return DataError("version: lost its manifest.json, so its files cannot be verified", where=where, hint=hint)


def lost_manifest_of(folder: Path) -> DataError | None:
    """Return `lost_manifest` of a folder."""

    def metadata() -> bytes:
        with open_regular(folder / "zarr.json") as file:
            return file.read()

    return lost_manifest(folder.resolve().name, metadata, str(folder))


def lost_versions(root: Path, name: str) -> Iterator[tuple[Path, DataError]]:
    """Yield the folders of a dataset's versions that have lost their manifest, each with its error."""
    for folder in sorted(_list_dir(root / name)):
        path = root / name / folder
        if is_version(folder) and not os.path.lexists(path / MANIFEST_FILE) and (error := lost_manifest_of(path)):
            yield path, error


def published_ns(folder: Path) -> int:
    """Return when a version was published, in ns since 1970: as its `published.json` says, which copies keep; without
    one, the mtime of its manifest. Raises OSError where both are missing."""
    try:
        with open_regular(folder / PUBLISHED_FILE) as file:
            moment = datetime.fromisoformat(decode_json(file.read(), Publication).published_at)
        return round(moment.timestamp() * 1000) * 1_000_000
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return (folder / MANIFEST_FILE).stat().st_mtime_ns


def published_at(folder: Path) -> str:
    """Return when a version was published, as RFC 3339. Raises OSError, as `published_ns`."""
    return format_ns(published_ns(folder))


def format_ns(time_ns: int) -> str:
    """Return a time in ns since 1970 as RFC 3339, to the millisecond."""
    return timestamps.unix_to_rfc3339(time_ns // 1_000_000 / 1000)


def _list_dir(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError:
        return []
