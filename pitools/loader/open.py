"""A version's arrays wherever it is: in a folder, or in an object store with the node's cache before it.

s3://bucket/name/version ──a shard when it is first read──▶ cache/.tmp/version.partial ──all──▶ cache/objects/version
                                                                  │ verified                        │
loaders of the node   ◀──────────────── descriptors ──────────────┴─────────────────────────────────┘
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pitools.core import units
from pitools.core.errors import ConfigError, UsageError
from pitools.loader.on_demand.client import RemoteOpener
from pitools.stage.cache.disk_quota import QuotaLimits
from pitools.stage.sources.open import find_version_dir, is_url
from pitools.store.reader.array_reader import CheckMode
from pitools.store.reader.version_reader import RESIDENT_BYTES, VersionReader
from pitools.store.zarr import metadata

# At once, at opening.
_PREFETCH_THREADS = 8


def open_version(
    location: str | Path,
    *,
    cache: Path | None = None,
    check: CheckMode = "first",
    resident_bytes: int = RESIDENT_BYTES,
    limits: QuotaLimits | None = None,
) -> VersionReader:
    """A version's arrays. location: as `pitools.store.resolve` says, such as `ROOT/NAME@TAG`, or a URL (that of a
    dataset of one version too), such as s3://….

    Of a URL, metadata and small arrays are brought to `cache`, a staging root of this node, now, and a shard of a large
    array when it is first read, by whichever loader of the node; the second time, it is read from there. Once all
    of it is there, it is a staged version. limits: of that root; those of PIT_STAGE_QUOTA and PIT_STAGE_MIN_FREE.

    Raises UsageError for a name that fits none, DataError when it is no version, and of a URL NoSpace, TryLater,
    Unreachable, ClusterError.
    """
    if not is_url(location):
        return VersionReader(find_version_dir(Path(location)), check_mode=check, resident_bytes=resident_bytes)
    if cache is None:
        hint = "name a folder of this node's own disk: open_arrays(url, cache=Path(…))"
        raise UsageError("an object store is read through a cache", where="cache", hint=hint)
    remote = RemoteOpener(str(location), cache, limits or _cache_limits())
    arrays = VersionReader(remote.path, check_mode=check, resident_bytes=resident_bytes, opener=remote)
    if not remote.is_complete():
        _prefetch_small_arrays(arrays, remote, resident_bytes)
    return arrays


def _prefetch_small_arrays(arrays: VersionReader, remote: RemoteOpener, resident_bytes: int) -> None:
    """Have what every job reads: one request after another, as they are read, would take a while."""
    sizes = dict.fromkeys(arrays.manifest.arrays, 0)
    files = {entry.path: _array_of_path(entry.path, sizes) for entry in arrays.manifest.files}
    for entry in arrays.manifest.files:
        if name := files[entry.path]:
            sizes[name] += entry.bytes
    small = [
        path
        for path, name in files.items()
        if not name or sizes[name] <= resident_bytes or path.rpartition("/")[2] == metadata.V3
    ]
    with ThreadPoolExecutor(_PREFETCH_THREADS) as threads:
        for _ in threads.map(lambda path: os.close(remote(path)), small):
            pass


def _array_of_path(path: str, names: dict[str, int]) -> str:
    """The array that a file is of, "" for one of none."""
    for group in metadata.parent_groups(path):
        if group in names:
            return group
    return ""


def _cache_limits() -> QuotaLimits:
    quota, free = (os.environ.get(f"PIT_STAGE_{name}", "") for name in ("QUOTA", "MIN_FREE"))
    try:
        return QuotaLimits(
            quota_bytes=units.parse_size(quota) if quota else None, min_free_bytes=units.parse_size(free) if free else 0
        )
    except UsageError as error:
        raise ConfigError(error.message, where="PIT_STAGE_QUOTA, PIT_STAGE_MIN_FREE", hint=error.hint) from error
