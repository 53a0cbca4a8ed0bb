"""The versions in a root, and what one holds: by their manifests alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from pitools.core import clock
from pitools.core.errors import DataError, UsageError
from pitools.core.record import Record
from pitools.store import manifest as manifests
from pitools.store.manifest import Manifest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Version(Record, frozen=True, kw_only=True, tag="pit.dataset/1"):
    """One version of a dataset. source_bytes: of the recordings it came from. new: this command published it.

    published: when it came to be here, which is no part of its content.
    """

    name: str
    version: str
    path: str
    episodes: int
    steps: int
    bytes: int
    files: int
    source_bytes: int
    published: str
    new: bool = False


class Array(Record, frozen=True, kw_only=True, tag="pit.array/1"):
    """One array of a version. bytes, files: on disk, metadata not counted."""

    array: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    files: int


def check_name(name: str) -> str:
    """The name, when a folder can have it. Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"a dataset cannot be named {name!r}",
            where="--name",
            hint="use up to 100 letters, digits, dots, dashes and underscores, a letter or digit first",
        )
    return name


def versions(root: Path, name: str = "*") -> Iterator[Path]:
    """Folders of published versions in a root, by dataset name, then oldest first."""
    found = [path.parent for path in root.glob(f"{name}/*/{manifests.FILE_NAME}") if _NAME.fullmatch(path.parts[-3])]
    yield from sorted(found, key=lambda path: (path.parts[-2], path.stat().st_mtime_ns, path.name))


def describe(path: Path, *, new: bool = False) -> tuple[Version, Manifest]:
    """A version's record, and its manifest. Raises DataError when the folder is not a dataset."""
    manifest, data = manifests.load(path)
    moment = datetime.fromtimestamp((path / manifests.FILE_NAME).stat().st_mtime, UTC)
    return Version(
        name=manifest.name,
        version=manifests.version(data),
        path=str(path),
        episodes=manifest.episodes,
        steps=manifest.steps,
        bytes=manifest.total_bytes,
        files=len(manifest.files),
        source_bytes=sum(int(source.get("bytes", 0)) for source in manifest.source),
        published=clock.text(moment),
        new=new,
    ), manifest


def arrays(manifest: Manifest) -> Iterator[Array]:
    """What a version holds, one record an array, by name."""
    for name, schema in sorted(manifest.arrays.items()):
        sizes = [file.bytes for file in manifest.files if file.path.startswith(f"{name}/c/")]
        yield Array(array=name, shape=schema.shape, dtype=schema.dtype, bytes=sum(sizes), files=len(sizes))


def check_complete(path: Path, manifest: Manifest) -> None:
    """Raises DataError when a file of the manifest is missing or has another size: Zarr would read zeros there."""
    for file in manifest.files:
        try:
            size = (path / file.path).stat().st_size
        except OSError as error:
            raise _damaged(path, f"{file.path} is missing: {error.strerror}") from error
        if size != file.bytes:
            raise _damaged(path, f"{file.path} has {size} bytes, not {file.bytes}")


def _damaged(path: Path, what: str) -> DataError:
    return DataError(what, where=str(path), hint="remove this version, and ingest or stage it again")
