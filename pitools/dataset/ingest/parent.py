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
from pitools.dataset.formats.model import Episode, RejectedEpisode
from pitools.dataset.ingest import chunking
from pitools.dataset.ingest.chunking import ArraySpec
from pitools.dataset.ingest.statistics import PartialStats, column_count
from pitools.dataset.versions import check_complete, describe_version
from pitools.store.manifest import EPISODE_PREFIX, ArraySchema
from pitools.store.reader.version_reader import VersionReader
from pitools.store.zarr.chunk_layout import chunk_layout

STATISTICS = "statistics"  # attribute of an array: statistics of its full shards, for a later append
_CODECS = {"raw": "raw", "blosc": "lz4", "zstd": "zstd"}


class ParentVersion:
    """A complete version, opened as the parent of an append. Reads are verified against the manifest's digests."""

    def __init__(self, path: Path, name: str) -> None:
        """Raises UsageError for a version of another dataset, DataError for a damaged version or a subset."""
        described, self.manifest = describe_version(path)
        where, self.path, self.version = str(path), path, described.version
        home = path.resolve().parent.name  # not the manifest's name alone: a dataset's folder may have been renamed
        if name not in (home, self.manifest.name):
            problem = f'parent: a version of "{home}" (expected one of "{name}")'
            raise UsageError(problem, where=where, hint=f"--name {home}")
        if self.manifest.subset:
            raise DataError("parent: is a subset of a version", where=where, hint="append to the complete version")
        check_complete(path, self.manifest)
        self._store = VersionReader(path, verify_digests=True)
        self.splits = self._store.splits
        self.arrays: dict[str, ArraySchema] = {
            key: schema for key, schema in self.manifest.arrays.items() if not key.startswith(EPISODE_PREFIX)
        }

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return self.manifest.steps

    @cached_property
    def codec(self) -> str:
        """Return the common codec of the arrays, as named in CODECS. Raises DataError if there is no such codec."""
        layouts = (chunk_layout(self._store.metadata_of(name)) for name in self.arrays)
        codecs = {layout.codec if layout else None for layout in layouts}
        if len(codecs) != 1 or None in codecs:
            problem = f"arrays: expected one codec of {', '.join(chunking.CODECS)}"
            raise DataError(problem, where=str(self.path), hint="ingest the recordings without --append")
        return _CODECS[str(codecs.pop())]

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """Return the group's attributes."""
        return dict(self._metadata("")["attributes"])

    @cached_property
    def array_attributes(self) -> dict[str, dict[str, Any]]:
        """Return the attributes of each array by name, without those that an ingest writes."""
        return {name: drop_storage_attributes(self._metadata(name)["attributes"]) for name in self.arrays}

    @property
    def offsets(self) -> list[int]:
        """Return the episodes' offsets, (episodes + 1,)."""
        return [int(offset) for offset in self._store.offsets]

    @property
    def episode_json(self) -> bytes:
        """Return the recorded JSON objects of its episodes, one a line."""
        return self._store.episode_json

    def reusable_shards(self, specs: Mapping[str, ArraySpec]) -> dict[str, int]:
        """Return how many leading shards of each array can be linked: all full ones, if chunks and codecs are equal."""
        counts = {}
        for name, new in specs.items():
            expected = msgspec.structs.replace(new, shape=(self.steps, *new.shape[1:]))
            stored = self._metadata(name) | {"attributes": {}}
            stored.pop("dimension_names", None)  # like attributes, no part of how chunks are stored
            same = stored == json.loads(chunking.encode(chunking.array_metadata(expected)))
            counts[name] = self.steps // new.shard if same else 0
        return counts

    def base_statistics(self, linked: Mapping[str, int]) -> dict[str, PartialStats]:
        """Return the stored statistics of the linked shards, by array. linked: number of shards, by array."""
        partials = {}
        for name, count in linked.items():
            stored = self._metadata(name)["attributes"].get(STATISTICS)
            if count and isinstance(stored, dict) and stored.get("shards") == count:
                partial = msgspec.convert({key: stored[key] for key in stored if key != "shards"}, PartialStats)
                if len(partial.count) == column_count(self.arrays[name].shape[1:]):
                    partials[name] = partial
        return partials

    def _metadata(self, name: str) -> dict[str, Any]:
        """Return the verified metadata of an array, or of the group for "". Raises DataError."""
        path = f"{name}/zarr.json".lstrip("/")
        try:
            return dict(json.loads(self._store.read_file(path)))
        except ValueError as error:
            hint = "ingest the recordings without --append"
            raise DataError(f"{path}: not valid JSON: {error}", where=str(self.path), hint=hint) from error

    def incompatibility(self, episode: Episode) -> RejectedEpisode | None:
        """Return why an episode cannot be appended, or None if its arrays are the parent's."""
        if reason := _array_difference(self.arrays, episode):
            hint = "ingest it as another dataset, or change its arrays with --skip-array or --transform"
            where = f"{episode.path}: {episode.name}"
            return RejectedEpisode(name=episode.name, path=episode.path, reason=reason, hint=hint, where=where)
        return None

    def require_new(self, provenance: Sequence[Mapping[str, Any]]) -> None:
        """Raise UsageError for a recording that the parent contains."""
        files = {own["digest"]: own["file"] for own in self.manifest.recordings if "digest" in own}
        for record in provenance:
            if record["digest"] in files:
                problem = f"{record['file']}: the parent contains it, as {files[record['digest']]}"
                raise UsageError(problem, where=str(self.path), hint="leave it out; append new recordings only")

    def may_contain(self, sizes: Sequence[int]) -> bool:
        """Return whether the parent has a recording of one of these sizes, in bytes."""
        return bool({own.get("bytes") for own in self.manifest.recordings} & set(sizes))


def statistics_attribute(shards: int, partial: PartialStats) -> dict[str, Any]:
    """Return the attribute with the statistics of an array's full shards; empty without a full shard."""
    return {STATISTICS: {"shards": shards, **msgspec.to_builtins(partial)}} if shards else {}


def _array_difference(arrays: Mapping[str, ArraySchema], episode: Episode) -> str:
    for name in sorted(arrays.keys() ^ episode.columns.keys()):
        return f"it has no {name}, which the parent has" if name in arrays else f"the parent has no {name}"
    for name, column in episode.columns.items():
        array = arrays[name]
        if (column.row, np.dtype(column.dtype)) != (array.shape[1:], np.dtype(array.dtype)):
            return f"a step of {name} is {column.dtype} {column.row}, but {array.dtype} {array.shape[1:]} in the parent"
    return ""
