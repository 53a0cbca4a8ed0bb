"""Open the parent of an append: reusable shards, and what must agree."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pitools.core.errors import DataError, UsageError
from pitools.dataset.formats.attributes import drop_storage_attributes
from pitools.dataset.formats.model import RESERVED_PREFIX, Episode, RejectedEpisode
from pitools.dataset.ingest import chunking
from pitools.dataset.ingest.chunking import ChunkGrid
from pitools.dataset.ingest.statistics import PartialStats, column_count
from pitools.dataset.versions import check_complete, describe_version
from pitools.store.manifest import ArraySchema
from pitools.store.reader.version_reader import VersionReader
from pitools.store.zarr.chunk_layout import chunk_layout

STATISTICS = "statistics"  # attribute of an array: the fold over its full shards, for whoever appends
_CODECS = {"raw": "raw", "blosc": "lz4", "zstd": "zstd"}


class ParentVersion:
    """A whole version of ours, open to be appended to. What is read of it is compared with its manifest's digests."""

    def __init__(self, path: Path, name: str) -> None:
        """Raises UsageError for a version of another dataset, DataError for a damaged one or a part of one."""
        described, self.manifest = describe_version(path)
        where, self.path, self.version = str(path), path, described.version
        if self.manifest.name != name:
            problem = f'it is a version of "{self.manifest.name}", not of "{name}"'
            raise UsageError(problem, where=where, hint=f"--name {self.manifest.name}")
        if self.manifest.subset:
            raise DataError("it is a part of a version", where=where, hint="append to the whole one")
        check_complete(path, self.manifest)
        self._store = VersionReader(path, verify=True)
        self.arrays: dict[str, ArraySchema] = {
            key: schema for key, schema in self.manifest.arrays.items() if not key.startswith(RESERVED_PREFIX)
        }

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return self.manifest.steps

    @cached_property
    def codec(self) -> str:
        """The codec of its arrays, by our name. Raises DataError where they are not all of one that we write."""
        found = {
            known.codec if (known := chunk_layout(self._store.metadata_of(name))) else None for name in self.arrays
        }
        if len(found) != 1 or None in found:
            raise DataError("its arrays are not of one codec of ours", where=str(self.path), hint="ingest anew")
        return _CODECS[str(found.pop())]

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """Return the group's attributes."""
        return dict(self._metadata("")["attributes"])

    @cached_property
    def array_attributes(self) -> dict[str, dict[str, Any]]:
        """What its arrays say of themselves, by name, but for what an ingest writes."""
        return {name: drop_storage_attributes(self._metadata(name)["attributes"]) for name in self.arrays}

    @property
    def offsets(self) -> list[int]:
        """Return the episodes' offsets, (episodes + 1,)."""
        return [int(offset) for offset in self._store.offsets]

    @property
    def episode_json(self) -> bytes:
        """Return the recorded JSON objects of its episodes, one a line."""
        return self._store.episode_json

    def reusable_shards(self, grids: Mapping[str, ChunkGrid]) -> dict[str, int]:
        """How many first shards of each array are, byte for byte, those of the larger one: its full ones, where both
        are cut and encoded in the same way."""
        counts = {}
        for name, new in grids.items():
            mine = msgspec.structs.replace(new, shape=(self.steps, *new.shape[1:]))
            stored = self._metadata(name) | {"attributes": {}}
            stored.pop("dimension_names", None)  # like attributes, no part of how chunks are stored
            same = stored == json.loads(chunking.encode(chunking.array_metadata(mine)))
            counts[name] = self.steps // new.shard if same else 0
        return counts

    def base_statistics(self, linked: Mapping[str, int]) -> dict[str, PartialStats]:
        """The statistics of those shards, folded, of each array that has kept them."""
        found = {}
        for name, count in linked.items():
            kept = self._metadata(name)["attributes"].get(STATISTICS)
            if count and isinstance(kept, dict) and kept.get("shards") == count:
                partial = msgspec.convert({key: kept[key] for key in kept if key != "shards"}, PartialStats)
                if len(partial.count) == column_count(self.arrays[name].shape[1:]):
                    found[name] = partial
        return found

    def _metadata(self, name: str) -> dict[str, Any]:
        """An array's metadata, or the group's for "": as they were written, for what is wrong there would be passed on.

        Raises DataError.
        """
        path = f"{name}/zarr.json".lstrip("/")
        try:
            return dict(json.loads(self._store.read_file(path)))
        except ValueError as error:
            raise DataError(f"{path} is not readable: {error}", where=str(self.path), hint="ingest anew") from error

    def incompatibility(self, episode: Episode) -> RejectedEpisode | None:
        """Why an episode cannot be appended, None when it has the parent's arrays."""
        if reason := _array_difference(self.arrays, episode):
            hint = "ingest it apart, or make it alike with --skip or --schema"
            where = f"{episode.path}: {episode.name}"
            return RejectedEpisode(name=episode.name, path=episode.path, reason=reason, hint=hint, where=where)
        return None

    def require_new(self, source: Sequence[Mapping[str, Any]]) -> None:
        """Raises UsageError for a recording that it has already."""
        mine = {known["digest"]: known["file"] for known in self.manifest.source if "digest" in known}
        for record in source:
            if record["digest"] in mine:
                problem = f"{record['file']} is in it already, as {mine[record['digest']]}"
                raise UsageError(
                    problem, where=str(self.path), hint="leave it out; an append takes new recordings alone"
                )

    def may_contain(self, sizes: Sequence[int]) -> bool:
        """Whether a recording of one of these sizes could be in it."""
        return bool({known.get("bytes") for known in self.manifest.source} & set(sizes))


def statistics_attribute(shards: int, partial: PartialStats) -> dict[str, Any]:
    """The attribute by which an append goes on from an array's full shards; none where there is none."""
    return {STATISTICS: {"shards": shards, **msgspec.to_builtins(partial)}} if shards else {}


def _array_difference(arrays: Mapping[str, ArraySchema], episode: Episode) -> str:
    for name in sorted(arrays.keys() ^ episode.columns.keys()):
        return f"it has no {name}, which the parent has" if name in arrays else f"the parent has no {name}"
    for name, column in episode.columns.items():
        theirs = arrays[name]
        if (column.row, np.dtype(column.dtype)) != (theirs.shape[1:], np.dtype(theirs.dtype)):
            return (
                f"a step of {name} is {column.dtype} {column.row}, but {theirs.dtype} {theirs.shape[1:]} in the parent"
            )
    return ""
