"""The protocol of a source of a version's bytes, and the version read from it."""

from __future__ import annotations

from typing import Protocol

import msgspec

from pitools.core.errors import DataError
from pitools.store import manifest as manifests
from pitools.store.digest import ALGORITHM, RANGED_ALGORITHM
from pitools.store.manifest import MANIFEST_FILE, FileEntry, Manifest
from pitools.store.version_list import is_version


class SourceFile(Protocol):
    """One open file of a source. size: bytes when it was opened."""

    size: int

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read at `offset` into `view`; return the count, 0 at the end. Raises PitError."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class SourceReader(Protocol):
    """Opens a source's files for one thread; created in the process that reads."""

    def open(self, path: str) -> SourceFile:
        """Open a file by its path in the manifest. Raises DataError when there is none, Unreachable, ClusterError."""
        ...

    def close(self) -> None:
        """Close connections and descriptors."""
        ...


class Source(Protocol):
    """The origin of a version's bytes: plain data that survives a fork, without secrets."""

    @property
    def label(self) -> str:
        """Return the folder or URL, for records, errors and logs."""
        ...

    @property
    def block(self) -> int:
        """Return the bytes of one read: a multiple of 128 KiB."""
        ...

    def connect(self) -> SourceReader:
        """Open a reader, for one thread of the calling process. Raises PitError."""
        ...


class DatasetVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a dataset. data: the exact bytes of its manifest, whose digest is the version."""

    source: Source
    manifest: Manifest
    data: bytes
    version: str


def make_version(source: Source, manifest: Manifest, data: bytes, *, name: str) -> DatasetVersion:
    """Return the version of a manifest. name: of its folder, which may be its version's digest.

    Raises DataError when the folder's version is wrong, or a digest's algorithm is unknown.
    """
    where = f"{source.label}/{MANIFEST_FILE}"
    version = manifests.version_of(data)
    if is_version(name) and name != version:
        message = f"the manifest is of version {version} (expected {name}, the folder's name)"
        raise DataError(message, where=where, hint="the manifest was changed: ingest or stage again")
    _require_known_digests(manifest.files, where)
    return DatasetVersion(source=source, manifest=manifest, data=data, version=version)


def _require_known_digests(files: tuple[FileEntry, ...], where: str) -> None:
    """Refuse digests of unknown algorithms: files could not be verified."""
    prefixes = (f"{ALGORITHM}:", f"{RANGED_ALGORITHM}:")
    for entry in files:
        if not entry.digest.startswith(prefixes):
            message = f"{entry.path!r}: unknown digest {entry.digest!r} (expected {ALGORITHM} or {RANGED_ALGORITHM})"
            raise DataError(message, where=where, hint="ingest again, or update pitools")


def all_folders(files: tuple[FileEntry, ...]) -> set[str]:
    """Return every folder that these files are in, below the dataset's folder."""
    folders: set[str] = set()
    for folder in {entry.path.rpartition("/")[0] for entry in files}:
        parent = folder
        while parent and parent not in folders:
            folders.add(parent)
            parent = parent.rpartition("/")[0]
    return folders
