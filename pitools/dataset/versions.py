"""What a version holds: by its manifest alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pitools.core.errors import DataError, UsageError
from pitools.core.record import Record
from pitools.store import manifest as manifests
from pitools.store.manifest import Manifest, Statistics
from pitools.store.version_list import is_name, published


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
    """One array of a version. bytes, files: on disk, metadata not counted.

    minimum, maximum, bad: over all its columns, None where no statistics were kept; statistics: of each.
    """

    array: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    files: int
    minimum: float | None = None
    maximum: float | None = None
    bad: int | None = None
    statistics: Statistics | None = None


def check_name(name: str) -> str:
    """The name, when a folder can have it. Raises UsageError."""
    if not is_name(name):
        raise UsageError(
            f"a dataset cannot be named {name!r}",
            where="--name",
            hint="use up to 100 letters, digits, dots, dashes and underscores, a letter or digit first",
        )
    return name


def describe(path: Path, *, new: bool = False) -> tuple[Version, Manifest]:
    """A version's record, and its manifest. Raises DataError when the folder is not a dataset."""
    manifest, data = manifests.load(path)
    return Version(
        name=manifest.name,
        version=manifests.version(data),
        path=str(path),
        episodes=manifest.episodes,
        steps=manifest.steps,
        bytes=manifest.total_bytes,
        files=len(manifest.files),
        source_bytes=source_bytes(manifest),
        published=published((path / manifests.FILE_NAME).stat().st_mtime_ns),
        new=new,
    ), manifest


def source_bytes(manifest: Manifest) -> int:
    """Of the recordings that a version came from, as far as its manifest says."""
    return sum(size for source in manifest.source if isinstance(size := source.get("bytes"), int))


def arrays(manifest: Manifest) -> Iterator[Array]:
    """What a version holds, one record an array, by name."""
    known = manifest.statistics or {}
    for name, schema in sorted(manifest.arrays.items()):
        sizes = [file.bytes for file in manifest.files if file.path.startswith(f"{name}/c/")]
        found = known.get(name)
        yield Array(
            array=name,
            shape=schema.shape,
            dtype=schema.dtype,
            bytes=sum(sizes),
            files=len(sizes),
            minimum=min(found.minimum, default=None) if found else None,
            maximum=max(found.maximum, default=None) if found else None,
            bad=found.bad if found else None,
            statistics=found,
        )


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
