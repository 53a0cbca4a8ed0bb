"""Plan the jobs of an ingest: shards to write and ranges of files to hash, ordered by step.

steps:   0 ──── parent ────┤── recording 0 ──┤── recording 1 ──┤
shards:  │ linked │ linked │rewrite │  new   │  new   │ new    │     each written by one worker
ranges:                     ▲   ▲   ▲   ▲   ▲ ▲   ▲   ▲   ▲   ▲      hashed shortly before or after the shard is
                                                                     read: the page cache then serves one of the
                                                                     two reads
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pitools.dataset.formats.model import Episode, Recording
from pitools.dataset.ingest.chunking import ArraySpec, shard_path
from pitools.dataset.ingest.statistics import PartialStats
from pitools.store.digest import RANGE_BYTES


class ShardJob(NamedTuple):
    """One shard of an array, by its number along the steps."""

    array: str
    shard_index: int


class HashJob(NamedTuple):
    """A range of RANGE_BYTES of a file, by its number; the last range may be shorter."""

    file: int
    range_index: int


Job = ShardJob | HashJob


class RecordingFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a recording. fingerprint: (inode, bytes, mtime in ns) before the scan."""

    path: Path
    fingerprint: tuple[int, int, int]

    @property
    def bytes(self) -> int:
        """Return the size in bytes."""
        return self.fingerprint[1]

    @property
    def ranges(self) -> int:
        """Return the number of ranges; an empty file has one."""
        return max(1, math.ceil(self.bytes / RANGE_BYTES))


class IngestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The input of every worker, on all nodes.

    specs: layouts of the arrays along steps, by name. offsets: (episodes + 1,) first steps of the new episodes, which
    follow the parent's steps. files: of their recordings. parent: version to append to, whose first `reusable_shards`
    shards of each array are linked. base_statistics: stored statistics of those shards, by array.
    """

    specs: dict[str, ArraySpec]
    episodes: tuple[Episode, ...]
    offsets: tuple[int, ...]
    files: tuple[RecordingFile, ...]
    jobs: tuple[Job, ...]
    parent: Path | None = None
    reusable_shards: dict[str, int] = {}
    base_statistics: dict[str, PartialStats] = {}

    def job_key(self, job: Job) -> str:
        """Return a job's key in the journal: a shard's path in the store, or a range's numbers."""
        if isinstance(job, HashJob):
            return range_key(job.file, job.range_index)
        return shard_path(job.array, job.shard_index, len(self.specs[job.array].shape))

    def shard_steps(self, job: ShardJob) -> tuple[int, int]:
        """Return the steps of a shard, [start, stop)."""
        spec = self.specs[job.array]
        return job.shard_index * spec.shard, min((job.shard_index + 1) * spec.shard, spec.shape[0])

    def raw_bytes(self, job: Job) -> int:
        """Return the uncompressed bytes of a shard; 0 for a range."""
        if isinstance(job, HashJob):
            return 0
        start, stop = self.shard_steps(job)
        return (stop - start) * self.specs[job.array].row_bytes


def range_key(file: int, number: int) -> str:
    """Return the journal key of a range of a file."""
    return f"#{file}/{number}"


def jobs_in_order(
    specs: Mapping[str, ArraySpec],
    recordings: Sequence[Recording],
    file_indices: Sequence[Sequence[int]],
    files: Sequence[RecordingFile],
    first_step: int,
) -> tuple[Job, ...]:
    """Return all jobs ordered by their first step, so that neighbouring data are read close in time.

    file_indices: indices into `files` of each recording's files. first_step: that of the first recording.
    """
    placed: list[tuple[float, int, int, Job]] = []
    for number, (name, spec) in enumerate(specs.items()):
        placed += ((index * spec.shard, 1, number, ShardJob(name, index)) for index in range(spec.shards))
    for recording, numbers in zip(recordings, file_indices, strict=True):
        steps = sum(episode.steps for episode in recording.episodes)
        ranges = [HashJob(file, number) for file in numbers for number in range(files[file].ranges)]
        placed += ((first_step + steps * i / len(ranges), 0, i, job) for i, job in enumerate(ranges))
        first_step += steps
    return tuple(job for *_, job in sorted(placed, key=lambda item: item[:3]))
