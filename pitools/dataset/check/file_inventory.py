"""A version's files against its manifest: by names, sizes and, of metadata, content."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from itertools import islice
from math import prod
from pathlib import Path

import msgspec

from pitools.core.errors import DataError
from pitools.core.fs import access_error, open_regular
from pitools.dataset.check.finding import Finding
from pitools.store import digest
from pitools.store import manifest as manifests
from pitools.store.manifest import FileEntry, Manifest
from pitools.store.version_list import PUBLISHED_FILE, is_version
from pitools.store.zarr import chunk_keys, metadata
from pitools.store.zarr.metadata import ArrayMetadata, Coordinate

_METADATA_BYTES = 1 << 30  # the root's names every recording, and the episodes of every split
_MAX_NAMED = 16


class ShardFile(msgspec.Struct, frozen=True, kw_only=True):
    """An existing file of an array, of the right size. coordinate: of its chunk."""

    entry: FileEntry
    array: ArrayMetadata
    coordinate: Coordinate


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """The files to read, and the findings so far. arrays: arrays with valid metadata."""

    arrays: dict[str, ArrayMetadata]
    shards: tuple[ShardFile, ...]
    findings: tuple[Finding, ...]


def take_inventory(path: Path, manifest: Manifest, data: bytes) -> Inventory:
    """Compare a version's folder with its manifest; shards are not read. Raises ClusterError or Unreachable for a file
    that cannot be judged, as this user may not read it."""
    findings = list(_misnamed(path, data))
    present: list[FileEntry] = []
    texts: dict[str, bytes] = {}
    for entry in manifest.files:
        if wrong := _check_size(path, entry):
            findings.append(wrong)
        elif entry.path.rpartition("/")[2] in metadata.METADATA_NAMES:
            try:
                texts[entry.path] = _metadata(path, entry)
            except DataError as error:
                findings.append(_damage_finding(entry.path, error.message, expected=entry.digest))
        else:
            present.append(entry)
    arrays, wrong_arrays = _arrays(manifest, texts)
    findings += wrong_arrays
    for name, array in arrays.items():
        findings += _find_missing_chunks(manifest, name, array)
    shards, foreign = _shards(manifest, arrays, present)
    return Inventory(
        arrays=arrays, shards=tuple(shards), findings=(*findings, *foreign, *_find_extra_files(path, manifest))
    )


def _misnamed(path: Path, data: bytes) -> Iterator[Finding]:
    name, version = path.resolve().name, manifests.version_of(data)
    if is_version(name) and name != version:
        yield Finding(
            level="damage",
            check="manifest",
            file=manifests.MANIFEST_FILE,
            got=version,
            expected=name,
            problem="the manifest does not match the folder's name",
        )


def _check_size(path: Path, entry: FileEntry) -> Finding | None:
    try:
        status = os.lstat(f"{path}/{entry.path}")
    except OSError as error:
        if access := access_error(error, path / entry.path):
            raise access from error
        return _damage_finding(entry.path, "the file is missing", got=os.strerror(error.errno or 0), check="file")
    if not stat.S_ISREG(status.st_mode):
        return _damage_finding(entry.path, "not a regular file", check="file")
    if status.st_size != entry.bytes:
        return _damage_finding(
            entry.path,
            "the file has another size",
            got=f"{status.st_size} bytes",
            check="file",
            expected=f"{entry.bytes} bytes",
        )
    return None


def _metadata(path: Path, entry: FileEntry) -> bytes:
    """Read a metadata file, and compare its digest: with stale metadata, good shards would seem damaged."""
    if entry.bytes > _METADATA_BYTES:
        raise DataError(f"metadata of {entry.bytes} bytes")
    try:
        with open_regular(path / entry.path) as file:
            text = file.read(entry.bytes)
    except OSError as error:
        if access := access_error(error, path / entry.path):
            raise access from error
        raise DataError(f"the file cannot be read: {error.strerror}") from error
    hasher = digest.hasher_for(entry.digest)
    hasher.update(text)
    if hasher.digest() != entry.digest:
        raise DataError("the metadata differ from the manifest")
    return text


def _arrays(manifest: Manifest, texts: dict[str, bytes]) -> tuple[dict[str, ArrayMetadata], list[Finding]]:
    """Return the arrays whose metadata agree with the manifest's schema, by name, and findings about the others."""
    findings: list[Finding] = []
    arrays: dict[str, ArrayMetadata] = {}
    for path, text in texts.items():
        try:
            array = metadata.parse_metadata(path.rpartition("/")[0], text, path)
        except DataError as error:
            findings.append(_damage_finding(path, error.message))
            continue
        if array is not None:
            arrays[array.name] = array
    valid = {}
    for name, schema in manifest.arrays.items():
        array_metadata = arrays.get(name)
        if array_metadata is None:
            findings.append(Finding(level="damage", check="schema", array=name, problem="no valid metadata"))
        elif (array_metadata.shape, array_metadata.dtype) != (schema.shape, schema.dtype):
            got, expected = (
                _format_type(array_metadata.dtype, array_metadata.shape),
                _format_type(schema.dtype, schema.shape),
            )
            findings.append(
                Finding(
                    level="damage",
                    check="schema",
                    array=name,
                    problem="the shape or dtype differs from the manifest's",
                    got=got,
                    expected=expected,
                )
            )
        else:
            valid[name] = array_metadata
    return valid, findings


def _format_type(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} ({', '.join(map(str, shape))})"


def _find_missing_chunks(manifest: Manifest, name: str, array: ArrayMetadata) -> Iterator[Finding]:
    """Yield the chunks that the manifest does not name: Zarr would read zeros there."""
    named = {entry.path for entry in manifest.files}
    ranges = manifest.present_ranges(name)
    rest = prod(array.grid[1:])
    count = sum(len(chunk_keys.chunk_numbers(array, *present)) for present in ranges) * rest if array.shape else 1
    missing = (
        key
        for present in ranges
        for key in chunk_keys.chunk_keys(array, present if array.shape else None)
        if key not in named
    )
    # Metadata may claim 2^60 chunks, so at most as many are checked as can be reported.
    for key in islice(missing, min(_MAX_NAMED, count)):
        yield Finding(level="damage", check="manifest", array=name, file=key, problem="the manifest lacks this file")


def _shards(
    manifest: Manifest, arrays: dict[str, ArrayMetadata], entries: list[FileEntry]
) -> tuple[list[ShardFile], list[Finding]]:
    """Return the files by array; files of arrays without valid metadata are left out."""
    finders = {name: chunk_keys.make_key_parser(array) for name, array in arrays.items()}
    by_path = {array.path: array for array in arrays.values()}
    shards: list[ShardFile] = []
    findings: list[Finding] = []
    owners = chunk_keys.arrays_of_paths(by_path, [entry.path for entry in entries])
    for entry, (_, owner) in zip(entries, owners, strict=True):
        coordinate = finders[owner.name](entry.path) if owner else None
        if owner is not None and coordinate is not None:
            shards.append(ShardFile(entry=entry, array=owner, coordinate=coordinate))
        elif owner is not None or not any(entry.path.startswith(f"{name}/") for name in manifest.arrays):
            findings.append(
                Finding(level="warning", check="extra", file=entry.path, problem="the file belongs to no array")
            )
    return shards, findings


def _find_extra_files(path: Path, manifest: Manifest) -> Iterator[Finding]:
    listed = {entry.path for entry in manifest.files} | {manifests.MANIFEST_FILE, PUBLISHED_FILE}
    for folder, folders, names in os.walk(path):
        links = [name for name in folders if os.path.islink(f"{folder}/{name}")]  # noqa: PTH114
        for name in names + links:
            relative = os.path.relpath(f"{folder}/{name}", path)
            if relative not in listed:
                yield Finding(
                    level="fault", check="extra", file=relative, problem="the manifest does not name this file"
                )


def _damage_finding(file: str, problem: str, *, got: str = "", expected: str = "", check: str = "manifest") -> Finding:
    return Finding(level="damage", check=check, file=file, problem=problem, got=got, expected=expected)
