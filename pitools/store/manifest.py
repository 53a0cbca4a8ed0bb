"""The manifest: all files of a dataset version with size and digest. Its own digest is the version's name.

<root>/<name>/<version>/          a dataset: a plain Zarr v3 store that any reader opens
    zarr.json, <array>/…
    manifest.json                 pit.manifest/2: written last; without it the folder is not a dataset
"""

from __future__ import annotations

import hashlib
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from pitools.core.errors import DataError
from pitools.core.fs import access_error, open_regular
from pitools.core.record import Record, decode_json
from pitools.store.zarr.metadata import V2_CONSOLIDATED, V3_FILE

MANIFEST_FILE = "manifest.json"
# The first axis of arrays with this prefix, in any group, is episodes or bytes, never steps.
EPISODE_PREFIX = "episode_"
EPISODE_OFFSETS, EPISODE_JSON = "episode_offsets", "episode_json"
# Limits of a path: a file system's longest name; half of the kernel's PATH_MAX, which leaves the other half for the
# folders above; and fewer folders than Python's limit of recursion.
MAX_NAME_BYTES, MAX_PATH_BYTES, MAX_PARTS = 255, 2048, 128
_VERSION = re.compile(r"[0-9a-f]{32}")
_SAFE_LENGTH = MAX_NAME_BYTES // 4


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One file of a version.

    path: relative to the dataset's folder, `/`-separated. bytes: its size. digest: `xxh3_128:<32 hex>`, or above 64 MiB
    `xxh3_128x64m:<32 hex>`.
    """

    path: str
    bytes: int
    digest: str


class ArraySchema(msgspec.Struct, frozen=True, kw_only=True):
    """One array: its shape (first axis is steps, but for the `episode_*` arrays) and its NumPy dtype name."""

    shape: tuple[int, ...]
    dtype: str


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of an array: a number for each column of a vector or channel (last axis) of an image; a single number
    if there are more than 4,096.

    rows: examined; images are sampled. non_finite: NaN or infinite items, which the other fields ignore. finite: the
    finite items of each column, unset where all are. deviation: standard deviation of the population. A column without
    finite values has zeros. Mean and deviation are meaningless if a sum of squares overflows float64 (values beyond
    1e154).
    """

    rows: int
    minimum: tuple[float, ...]
    maximum: tuple[float, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    non_finite: int = 0
    finite: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


class Subset(msgspec.Struct, frozen=True, kw_only=True):
    """A part of another version: some of its files, unchanged except for `metadata`.

    whole: that version; "" for a store without a version. arrays: names of the arrays present. steps: present ranges
    [start, stop) of the arrays along steps, ascending, not adjacent. metadata: path → text of files that differ from
    the whole's: consolidated metadata of groups, without absent arrays.
    """

    whole: str
    arrays: tuple[str, ...]
    steps: tuple[tuple[int, int], ...]
    metadata: dict[str, str] | msgspec.UnsetType = msgspec.UNSET

    @property
    def inline_files(self) -> dict[str, bytes]:
        """Return path → content of the files that differ from the whole's."""
        return {path: text.encode() for path, text in (self.metadata or {}).items()}


class Manifest(Record, frozen=True, kw_only=True, tag="pit.manifest/2"):
    """The content and provenance of a version.

    It contains no time and no host: the same input, options and release of pitools give the same bytes, hence the
    same version.

    episodes, steps: counts. arrays: schema by array name. files: sorted by path. recordings: one provenance record
    (file, bytes, digest, layout, options) per recording, a file or a folder. parent: version that this one begins
    with (an append), or "". subset: set where this is a part of another version; episodes, steps and shapes are then
    still those of the whole, and so are statistics (by array name) and instructions (text → episodes that have it),
    which include episodes in quarantine.
    """

    name: str
    episodes: int
    steps: int
    arrays: dict[str, ArraySchema]
    files: tuple[FileEntry, ...]
    recordings: tuple[dict[str, Any], ...] = ()
    parent: str = ""
    # Unset fields are not encoded, so versions without them keep their names.
    subset: Subset | msgspec.UnsetType = msgspec.UNSET
    statistics: dict[str, Statistics] | msgspec.UnsetType = msgspec.UNSET
    instructions: dict[str, int] | msgspec.UnsetType = msgspec.UNSET

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all files except the manifest."""
        return sum(entry.bytes for entry in self.files)

    def along_steps(self, name: str) -> bool:
        """Whether this array's first axis is the dataset's steps, so that a range of steps is a range of its rows."""
        shape = self.arrays[name].shape
        return shape[:1] == (self.steps,) and not name.rpartition("/")[2].startswith(EPISODE_PREFIX)

    def present_ranges(self, name: str) -> tuple[tuple[int, int], ...]:
        """Return the present ranges [start, stop) of this array's first axis: a single one, except in a subset."""
        if self.subset and self.along_steps(name):
            return self.subset.steps or ((0, 0),)
        return ((0, (*self.arrays[name].shape, 1)[0]),)


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest. Equal records give equal bytes, whose digest is the version's name."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def version_of(data: bytes) -> str:
    """Return a version's name: the first 32 hex digits of the SHA-256 of its manifest's bytes."""
    return hashlib.sha256(data).hexdigest()[:32]


def is_version(name: str) -> bool:
    """Whether `name` is a version: 32 lower-case hex digits."""
    return _VERSION.fullmatch(name) is not None


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Decode and check a manifest. Raises DataError."""
    try:
        manifest = decode_json(data, Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"not a manifest: {error}", where=where, hint="ingest or stage the dataset again") from error
    check_manifest(manifest, where)
    return manifest


def check_manifest(manifest: Manifest, where: str) -> None:
    """Raise DataError for a path outside the dataset, a duplicate, a path below a file, or an invalid subset."""
    # Manifests are untrusted, and staging writes to their paths.
    paths = [entry.path for entry in manifest.files]
    _check_paths(paths, where)
    _check_entries(manifest.files, paths, where)
    if manifest.subset:
        _check_subset(manifest, manifest.subset, where)


def _check_paths(paths: list[str], where: str) -> None:
    # All paths are joined by NUL, so that 100,000 are searched in milliseconds. An empty part, "." or ".." is found
    # between two slashes, as is a leading or trailing slash.
    if paths and not _is_inside("/\0/".join(paths), names=len(paths)):
        outside = next(path for path in paths if not _is_inside(path, names=1))
        raise DataError(f"the manifest names a path outside the dataset: {outside!r}", where=where)

    # A shorter path cannot exceed a limit.
    for path in (path for path in paths if len(path) > _SAFE_LENGTH):
        _check_length(path, where)


def _check_length(path: str, where: str) -> None:
    parts = os.fsencode(path).split(b"/")
    problem = ""
    if len(parts) > MAX_PARTS:
        problem = f"{len(parts) - 1} folders deep (expected at most {MAX_PARTS - 1})"
    elif (longest := max(map(len, parts))) > MAX_NAME_BYTES:
        problem = f"a name of {longest} bytes (expected at most {MAX_NAME_BYTES})"
    elif (length := len(os.fsencode(path))) > MAX_PATH_BYTES:
        problem = f"{length} bytes long (expected at most {MAX_PATH_BYTES})"
    if problem:
        hint = "give arrays and folders shorter names, and ingest again"
        raise DataError(f"the manifest names a path {problem}: {path[:60]!r} …", where=where, hint=hint)


def _is_inside(text: str, *, names: int) -> bool:
    text = f"/{text}/"
    return text.count("\0") == names - 1 and not ("//" in text or "/./" in text or "/../" in text)


def _check_entries(files: tuple[FileEntry, ...], paths: list[str], where: str) -> None:
    if len({*paths, MANIFEST_FILE}) <= len(paths) or min((entry.bytes for entry in files), default=0) < 0:
        seen = {MANIFEST_FILE}
        for entry in files:
            if entry.path in seen or entry.bytes < 0:
                raise DataError(
                    f"the manifest's entry for {entry.path!r} is repeated, or of a negative size", where=where
                )
            seen.add(entry.path)
    # With NUL in place of slashes, paths below a file sort directly after it.
    ordered = sorted([path.replace("/", "\0") for path in (*paths, MANIFEST_FILE)])
    if any(map(str.startswith, ordered[1:], [f"{path}\0" for path in ordered])):
        both = next(low for low, high in pairwise(ordered) if high.startswith(f"{low}\0")).replace("\0", "/")
        raise DataError(f"the manifest names {both!r} both as a file and as a folder", where=where)


def _check_subset(manifest: Manifest, subset: Subset, where: str) -> None:
    # Ranges are not adjacent, so their concatenated bounds strictly ascend.
    bounds = [bound for present in subset.steps for bound in present]
    ascending = all(low < high for low, high in pairwise(bounds))
    inside = (bounds[0] >= 0 and bounds[-1] <= manifest.steps) if bounds else manifest.steps == 0
    if not ascending or not inside:
        raise DataError(f"the manifest's subset of steps is not possible: {subset.steps}", where=where)
    if set(subset.arrays) != manifest.arrays.keys():
        raise DataError("the manifest's subset and its schema name different arrays", where=where)
    paths = {entry.path for entry in manifest.files if entry.path.endswith((V3_FILE, V2_CONSOLIDATED))}
    for path in subset.inline_files:
        folder, _, name = path.rpartition("/")
        if path not in paths or name not in (V3_FILE, V2_CONSOLIDATED) or folder in manifest.arrays:
            problem = f"the manifest's subset has the text of {path!r}, which is none of its groups' metadata"
            raise DataError(problem, where=where)


def load_manifest(dataset: Path, *, verify: bool = True) -> tuple[Manifest, bytes]:
    """Return the manifest of a version's folder, and its bytes.

    verify: compare its digest with the name of a folder named as a version. Raises DataError if it is missing, invalid
    or of another version; ClusterError or Unreachable if it cannot be read.
    """
    path = dataset / MANIFEST_FILE
    try:
        with open_regular(path) as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "pass the folder of a version, such as <root>/<name>/<version>"
        raise DataError("not a dataset: it has no manifest.json", where=str(dataset), hint=hint) from error
    except OSError as error:
        access = access_error(error, path)
        raise access or DataError(f"manifest: cannot be read: {error.strerror}", where=str(path)) from error
    manifest, name = decode_manifest(data, str(path)), dataset.resolve().name
    if verify and is_version(name) and name != version_of(data):
        problem = f"manifest: changed: its digest is {version_of(data)} (expected {name}, the folder's name)"
        hint = "copy manifest.json back from another copy of this version, or ingest its recordings again"
        raise DataError(problem, where=str(path), hint=hint)
    return manifest, data
