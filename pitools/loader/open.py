"""Open a dataset version in a folder, or in an object store through this node's cache.

s3://bucket/name/version ──a shard at its first read──▶ cache/.tmp/version.partial ──all──▶ cache/objects/version
                                                              │ verified                        │
loaders of the node   ◀────────────── descriptors ────────────┴─────────────────────────────────┘
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pitools.core import units
from pitools.core.errors import ConfigError, UsageError
from pitools.loader.on_demand.client import ObjectStoreOpener
from pitools.stage.cache.space import RootLimits
from pitools.stage.sources.find import find_version_dir, is_url
from pitools.store.reader.array_reader import ChecksumMode
from pitools.store.reader.version_reader import RESIDENT_BYTES, VersionReader
from pitools.store.zarr import metadata

_PREFETCH_THREADS = 8


def open_version(
    location: str | Path,
    *,
    cache: Path | None = None,
    checksums: ChecksumMode = "first",
    resident_bytes: int = RESIDENT_BYTES,
    limits: RootLimits | None = None,
) -> VersionReader:
    """Open a version and return its reader.

    location: a path or name as in `pitools.store.resolve`, such as `ROOT/NAME@TAG`; or a URL such as s3://… of a
    version or of a dataset with a single version. cache: staging root on this node's disk, required for a URL:
    metadata and small arrays are fetched now, a shard of a large array at its first read by any loader of the node.
    A completely fetched version is a staged version. checksums, resident_bytes: as of `VersionReader`. limits: of the
    cache; None: PIT_STAGE_QUOTA and PIT_STAGE_MIN_FREE.

    Raises UsageError for an unknown name, DataError if the location is no version; for a URL also NoSpace, TryLater,
    Unreachable, ClusterError.
    """
    if not is_url(location):
        return VersionReader(find_version_dir(Path(location)), checksums=checksums, resident_bytes=resident_bytes)
    if cache is None:
        hint = "pass a folder on this node's disk: open_version(url, cache=Path(…))"
        raise UsageError("cache: missing (required for an object store)", where="cache", hint=hint)
    remote = ObjectStoreOpener(str(location), cache, limits or _cache_limits())
    reader = VersionReader(remote.path, checksums=checksums, resident_bytes=resident_bytes, opener=remote)
    if not remote.is_complete():
        _prefetch_small_arrays(reader, remote, resident_bytes)
    return reader


def _prefetch_small_arrays(reader: VersionReader, remote: ObjectStoreOpener, resident_bytes: int) -> None:
    """Fetch concurrently the files that every job reads; one request after another takes longer."""
    sizes = dict.fromkeys(reader.manifest.arrays, 0)
    files = {entry.path: _array_of_path(entry.path, sizes) for entry in reader.manifest.files}
    for entry in reader.manifest.files:
        if name := files[entry.path]:
            sizes[name] += entry.bytes
    small = [
        path
        for path, name in files.items()
        if not name or sizes[name] <= resident_bytes or path.rpartition("/")[2] == metadata.V3_FILE
    ]
    with ThreadPoolExecutor(_PREFETCH_THREADS) as threads:
        for _ in threads.map(lambda path: os.close(remote(path)), small):
            pass


def _array_of_path(path: str, names: dict[str, int]) -> str:
    """Return the array that a file belongs to; "" if none."""
    for group in metadata.parent_groups(path):
        if group in names:
            return group
    return ""


def _cache_limits() -> RootLimits:
    quota, free = (os.environ.get(f"PIT_STAGE_{name}", "") for name in ("QUOTA", "MIN_FREE"))
    try:
        return RootLimits(
            quota_bytes=units.parse_size(quota) if quota else None, min_free_bytes=units.parse_size(free) if free else 0
        )
    except UsageError as error:
        raise ConfigError(error.message, where="PIT_STAGE_QUOTA, PIT_STAGE_MIN_FREE", hint=error.hint) from error
