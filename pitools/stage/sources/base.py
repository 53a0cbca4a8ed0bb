"""What a source of a version's bytes is, and the version that is read from one."""

from __future__ import annotations

from typing import Protocol

import msgspec

from pitools.core.errors import DataError
from pitools.store import manifest as manifests
from pitools.store.digest import ALGORITHM, RANGED_ALGORITHM
from pitools.store.manifest import FILE_NAME, FileEntry, Manifest
from pitools.store.version_list import is_version


class SourceFile(Protocol):
    """One open file of a source. size: bytes, when it was opened."""

    size: int

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read at `offset` into `view`; the count, 0 at the end. Raises PitError."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class SourceReader(Protocol):
    """Opens a source's files for one thread, created in the process that reads."""

    def open(self, path: str) -> SourceFile:
        """Open a file by its path in the manifest. Raises DataError when there is none, Unreachable, ClusterError."""
        ...

    def close(self) -> None:
        """Close connections and descriptors."""
        ...


class Source(Protocol):
    """Where a version's bytes come from: plain data that a fork may take along, and that holds no secret."""

    @property
    def label(self) -> str:
        """What a user would call it: a folder or a URL. It goes into records, errors and logs."""
        ...

    @property
    def block(self) -> int:
        """Bytes to ask for in one read: a multiple of 128 KiB."""
        ...

    def connect(self) -> SourceReader:
        """Open a reader, for one thread of the calling process. Raises PitError."""
        ...


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """One version. data: the exact bytes of its manifest, whose digest is the version."""

    source: Source
    manifest: Manifest
    data: bytes
    version: str


def make_dataset(source: Source, manifest: Manifest, data: bytes, *, name: str) -> Dataset:
    """Return the dataset of a manifest that was read. name: of its folder, which may be its version.

    Raises DataError when that claim is wrong, or the manifest's digests are none that we know.
    """
    where = f"{source.label}/{FILE_NAME}"
    version = manifests.version_of(data)
    if is_version(name) and name != version:
        message = f"the manifest belongs to version {version}, not to the folder it is in"
        raise DataError(message, where=where, hint="it was changed after it was written: ingest or stage again")
    _refuse_other_digests(manifest.files, where)
    return Dataset(source=source, manifest=manifest, data=data, version=version)


def _refuse_other_digests(files: tuple[FileEntry, ...], where: str) -> None:
    """What cannot be compared must not pass for verified."""
    kinds = (f"{ALGORITHM}:", f"{RANGED_ALGORITHM}:")
    for entry in files:
        if not entry.digest.startswith(kinds):
            message = f"the digest of {entry.path!r} is of a kind that is not known here: {entry.digest!r}"
            raise DataError(
                message,
                where=where,
                hint=f"known are {ALGORITHM} and {RANGED_ALGORITHM}: ingest again, or update pitools",
            )


def all_folders(files: tuple[FileEntry, ...]) -> set[str]:
    """Return every folder that these files are in, below the dataset's own."""
    folders: set[str] = set()
    for folder in {entry.path.rpartition("/")[0] for entry in files}:
        above = folder
        while above and above not in folders:
            folders.add(above)
            above = above.rpartition("/")[0]
    return folders
