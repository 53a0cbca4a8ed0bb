"""The manifest: every file of a dataset version, its size and digest. Its own digest is the version's name.

<root>/<name>/<version>/          a dataset: a plain Zarr v3 store that any reader opens
    zarr.json, <array>/…
    manifest.json                 pit.manifest/1: written last; without it the folder is not a dataset
"""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from pitools.core.errors import DataError
from pitools.core.record import Record

FILE_NAME = "manifest.json"


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a version.

    path: relative to the dataset's folder, `/`-separated. bytes: its size. digest: `xxh3_128:<32 hex>`.
    """

    path: str
    bytes: int
    digest: str


class ArraySchema(msgspec.Struct, frozen=True, kw_only=True):
    """One array: its shape (first axis is steps, but for the `episode_*` arrays) and its NumPy dtype name."""

    shape: tuple[int, ...]
    dtype: str


class Manifest(Record, frozen=True, kw_only=True, tag="pit.manifest/1"):
    """What a version is made of, and where it came from.

    It holds no time and no machine: the same input and options give the same bytes, hence the same version.
    episodes, steps: counts. arrays: schema by array name. files: sorted by path. source: one provenance record
    (file, bytes, digest, layout) per ingested file. parent: version this one was derived from, or "".
    """

    name: str
    episodes: int
    steps: int
    arrays: dict[str, ArraySchema]
    files: tuple[FileEntry, ...]
    source: tuple[dict[str, Any], ...] = ()
    parent: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, the manifest itself not counted."""
        return sum(entry.bytes for entry in self.files)


def encode(manifest: Manifest) -> bytes:
    """The manifest's bytes: the same record always gives the same bytes, so that their digest can be its name."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def version(data: bytes) -> str:
    """A version's name: the first 32 hex digits of the SHA-256 of its manifest's bytes."""
    return hashlib.sha256(data).hexdigest()[:32]


def decode(data: bytes, where: str) -> Manifest:
    """The manifest in these bytes. Raises DataError when they are not one, or name a path outside the dataset."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"not a manifest: {error}", where=where, hint="ingest or stage the dataset again") from error
    seen = set()
    for entry in manifest.files:
        parts = PurePosixPath(entry.path).parts
        # A manifest may come from anywhere; what it names becomes a path we write to.
        if (
            not parts
            or parts[0] == "/"
            or ".." in parts
            or "\0" in entry.path
            or str(PurePosixPath(entry.path)) != entry.path
        ):
            raise DataError(f"the manifest names a path outside the dataset: {entry.path!r}", where=where)
        if entry.path in seen or entry.path == FILE_NAME or entry.bytes < 0:
            raise DataError(f"the manifest's entry for {entry.path!r} is not possible", where=where)
        seen.add(entry.path)
    return manifest


def load(dataset: Path) -> tuple[Manifest, bytes]:
    """The manifest of a dataset folder, and its exact bytes. Raises DataError when there is none."""
    path = dataset / FILE_NAME
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "give the folder of one version, such as <root>/<name>/<version>"
        raise DataError("not a dataset: it has no manifest.json", where=str(dataset), hint=hint) from error
    except OSError as error:
        raise DataError(f"its manifest cannot be read: {error.strerror}", where=str(path)) from error
    return decode(data, str(path)), data
