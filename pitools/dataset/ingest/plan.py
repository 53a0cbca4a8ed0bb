"""What there is to do in an ingest: shards to make, ranges of the recordings' files to hash, in a good order.

steps:   0 ──── parent ────┤── recording 0 ──┤── recording 1 ──┤
shards:  │ linked │ linked │ again  │  new   │  new   │ new    │     each made whole by one worker
ranges:                     ▲   ▲   ▲   ▲   ▲ ▲   ▲   ▲   ▲   ▲      hashed just before they are read, or just
                                                                     after: in the page cache, they come from the
                                                                     disk once
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pitools.dataset.formats.model import Episode, Recording
from pitools.dataset.ingest.chunking import ChunkGrid, shard_path
from pitools.dataset.ingest.statistics import PartialStats
from pitools.store.digest import RANGE_BYTES


class ShardJob(NamedTuple):
    """One shard of an array, by its number along the steps."""

    array: str
    shard_index: int


class HashJob(NamedTuple):
    """RANGE bytes of a source file, by their number in it; the last one may be shorter."""

    file: int
    range_index: int


Job = ShardJob | HashJob


class RecordingFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is read, and what it was when it was scanned: (inode, bytes, time of last change in ns)."""

    path: Path
    fingerprint: tuple[int, int, int]

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.fingerprint[1]

    @property
    def ranges(self) -> int:
        """How many ranges it has; an empty file has one."""
        return max(1, math.ceil(self.bytes / RANGE_BYTES))


class IngestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker needs to know, in whatever process or node it is.

    grids: by name of the arrays along steps. offsets: (episodes + 1,), first steps of the episodes that come in,
    counted from the parent's. sources: files that they lie in. parent: version that this one begins with, whose first
    `reusable_shards` shards of each array are taken as they are. base_statistics: the fold of their statistics, where
    it has kept that.
    """

    grids: dict[str, ChunkGrid]
    episodes: tuple[Episode, ...]
    offsets: tuple[int, ...]
    sources: tuple[RecordingFile, ...]
    jobs: tuple[Job, ...]
    parent: Path | None = None
    reusable_shards: dict[str, int] = {}
    base_statistics: dict[str, PartialStats] = {}

    def job_key(self, job: Job) -> str:
        """What the journal calls a job: a shard's path in the store, or a range's numbers."""
        if isinstance(job, HashJob):
            return range_key(job.file, job.range_index)
        return shard_path(job.array, job.shard_index, len(self.grids[job.array].shape))

    def shard_steps(self, job: ShardJob) -> tuple[int, int]:
        """[start, stop) of the steps in a shard."""
        grid = self.grids[job.array]
        return job.shard_index * grid.shard, min((job.shard_index + 1) * grid.shard, grid.shape[0])

    def raw_bytes(self, job: Job) -> int:
        """Bytes of a shard's steps; 0 of a range."""
        if isinstance(job, HashJob):
            return 0
        start, stop = self.shard_steps(job)
        return (stop - start) * self.grids[job.array].row_bytes


def range_key(file: int, number: int) -> str:
    """What the journal calls a range of a source file."""
    return f"#{file}/{number}"


def jobs_in_order(
    grids: Mapping[str, ChunkGrid],
    recordings: Sequence[Recording],
    sources: Sequence[Sequence[int]],
    files: Sequence[RecordingFile],
    first_steps: int,
) -> tuple[Job, ...]:
    """All jobs by the steps they begin at, so that what lies close together is read close in time.

    sources: numbers in `files` of each recording's files. first_steps: the step that the first recording begins at.
    """
    placed: list[tuple[float, int, int, Job]] = []
    for number, (name, grid) in enumerate(grids.items()):
        placed += ((index * grid.shard, 1, number, ShardJob(name, index)) for index in range(grid.shards))
    for recording, numbers in zip(recordings, sources, strict=True):
        steps = sum(episode.steps for episode in recording.episodes)
        ranges = [HashJob(file, number) for file in numbers for number in range(files[file].ranges)]
        placed += ((first_steps + steps * i / len(ranges), 0, i, job) for i, job in enumerate(ranges))
        first_steps += steps
    return tuple(job for *_, job in sorted(placed, key=lambda item: item[:3]))
