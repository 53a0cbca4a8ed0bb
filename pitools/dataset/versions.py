"""Describe a version by its manifest alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pitools.core.errors import DataError, UsageError
from pitools.core.record import Record
from pitools.store import manifest as manifests
from pitools.store.manifest import Manifest, Statistics
from pitools.store.version_list import is_name, published_at


class VersionInfo(Record, frozen=True, kw_only=True, tag="pit.dataset-version/1"):
    """One version of a dataset. recording_bytes: size of its recordings. published: time of publication, which is not
    part of the content. new: whether this command published it.
    """

    name: str
    version: str
    path: str
    episodes: int
    steps: int
    bytes: int
    files: int
    recording_bytes: int
    published: str
    new: bool = False


class ArrayInfo(Record, frozen=True, kw_only=True, tag="pit.array/1"):
    """One array of a version. bytes, files: of its shards on disk, without metadata.

    minimum, maximum, non_finite: over all columns; None for an array without statistics. statistics: by column.
    """

    array: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    files: int
    minimum: float | None = None
    maximum: float | None = None
    non_finite: int | None = None
    statistics: Statistics | None = None


def check_name(name: str) -> str:
    """Return a dataset name that is valid as a folder. Raises UsageError."""
    if not is_name(name):
        raise UsageError(
            f"dataset name: invalid: {name!r}",
            where="--name",
            hint="use up to 100 letters, digits, dots, dashes and underscores, a letter or digit first",
        )
    return name


def describe_version(path: Path, *, new: bool = False) -> tuple[VersionInfo, Manifest]:
    """Return a version's record and manifest. Raises DataError when the folder is not a dataset."""
    manifest, data = manifests.load_manifest(path)
    return VersionInfo(
        name=manifest.name,
        version=manifests.version_of(data),
        path=str(path),
        episodes=manifest.episodes,
        steps=manifest.steps,
        bytes=manifest.total_bytes,
        files=len(manifest.files),
        recording_bytes=recording_bytes(manifest),
        published=published_at(path),
        new=new,
    ), manifest


def recording_bytes(manifest: Manifest) -> int:
    """Return the bytes of the recordings that a manifest names."""
    return sum(size for record in manifest.recordings if isinstance(size := record.get("bytes"), int))


def list_arrays(manifest: Manifest) -> Iterator[ArrayInfo]:
    """Yield one record per array, by name."""
    statistics_by_array = manifest.statistics or {}
    for name, schema in sorted(manifest.arrays.items()):
        sizes = [file.bytes for file in manifest.files if file.path.startswith(f"{name}/c/")]
        statistics = statistics_by_array.get(name)
        yield ArrayInfo(
            array=name,
            shape=schema.shape,
            dtype=schema.dtype,
            bytes=sum(sizes),
            files=len(sizes),
            minimum=min(statistics.minimum, default=None) if statistics else None,
            maximum=max(statistics.maximum, default=None) if statistics else None,
            non_finite=statistics.non_finite if statistics else None,
            statistics=statistics,
        )


def check_complete(path: Path, manifest: Manifest) -> None:
    """Raise DataError when a file of the manifest is missing or has another size: Zarr would read zeros there."""
    for file in manifest.files:
        try:
            size = (path / file.path).stat().st_size
        except OSError as error:
            raise _damaged_error(path, f"{file.path}: missing: {error.strerror}") from error
        if size != file.bytes:
            raise _damaged_error(path, f"{file.path}: wrong size (expected {file.bytes} bytes, got {size})")


def _damaged_error(path: Path, problem: str) -> DataError:
    from pitools.store.reader.version_reader import repair_hint  # imports NumPy, which `list` does not need

    return DataError(problem, where=str(path), hint=repair_hint(path))
