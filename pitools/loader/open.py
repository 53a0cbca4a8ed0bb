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
from pitools.loader.on_demand.client import Remote
from pitools.stage.cache.disk_quota import Limits
from pitools.stage.sources.open import find_folder, is_url
from pitools.store.reader.array_reader import Check
from pitools.store.reader.version_reader import RESIDENT_BYTES, Arrays
from pitools.store.zarr import metadata

# At once, at opening.
_REQUESTS = 8


def open_arrays(
    where: str | Path,
    *,
    cache: Path | None = None,
    check: Check = "first",
    resident_bytes: int = RESIDENT_BYTES,
    limits: Limits | None = None,
) -> Arrays:
    """A version's arrays. where: as `pitools.store.resolve` says, such as `ROOT/NAME@TAG`, or a URL (that of a dataset
    of one version too), such as s3://….

    Of a URL, metadata and small arrays are brought to `cache`, a staging root of this node, now, and a shard of a large
    array when it is first read, by whichever loader of the node; the second time, it is read from there. Once all
    of it is there, it is a staged version. limits: of that root; those of PIT_STAGE_QUOTA and PIT_STAGE_MIN_FREE.

    Raises UsageError for a name that fits none, DataError when it is no version, and of a URL NoSpace, TryLater,
    Unreachable, ClusterError.
    """
    if not is_url(where):
        return Arrays(find_folder(Path(where)), check=check, resident_bytes=resident_bytes)
    if cache is None:
        hint = "name a folder of this node's own disk: open_arrays(url, cache=Path(…))"
        raise UsageError("an object store is read through a cache", where="cache", hint=hint)
    remote = Remote(str(where), cache, limits or _limits())
    arrays = Arrays(remote.path, check=check, resident_bytes=resident_bytes, opener=remote)
    if not remote.stands():
        _bring_small(arrays, remote, resident_bytes)
    return arrays


def _bring_small(arrays: Arrays, remote: Remote, resident_bytes: int) -> None:
    """Have what every job reads: one request after another, as they are read, would take a while."""
    sizes = dict.fromkeys(arrays.manifest.arrays, 0)
    files = {entry.path: _array(entry.path, sizes) for entry in arrays.manifest.files}
    for entry in arrays.manifest.files:
        if name := files[entry.path]:
            sizes[name] += entry.bytes
    small = [
        path
        for path, name in files.items()
        if not name or sizes[name] <= resident_bytes or path.rpartition("/")[2] == metadata.V3
    ]
    with ThreadPoolExecutor(_REQUESTS) as threads:
        for _ in threads.map(lambda path: os.close(remote(path)), small):
            pass


def _array(path: str, names: dict[str, int]) -> str:
    """The array that a file is of, "" for one of none."""
    for group in metadata.above(path):
        if group in names:
            return group
    return ""


def _limits() -> Limits:
    quota, free = (os.environ.get(f"PIT_STAGE_{name}", "") for name in ("QUOTA", "MIN_FREE"))
    try:
        return Limits(quota_bytes=units.size(quota) if quota else None, min_free_bytes=units.size(free) if free else 0)
    except UsageError as error:
        raise ConfigError(error.what, where="PIT_STAGE_QUOTA, PIT_STAGE_MIN_FREE", hint=error.hint) from error
