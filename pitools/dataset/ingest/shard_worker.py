"""Do one job of an ingest: write or link a shard, or hash a range of a file."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash
from numpy.typing import NDArray

from pitools.core.errors import DataError, Unreachable
from pitools.core.fs import TRANSIENT_ERRNOS, open_regular
from pitools.dataset.formats.model import ChangedDuringRead, Column, Episode, changed_during_read
from pitools.dataset.formats.readers import open_reader
from pitools.dataset.ingest import shard_writer, statistics
from pitools.dataset.ingest.journal import FinishedJob, IngestJournal
from pitools.dataset.ingest.plan import HashJob, IngestPlan, Job, ShardJob
from pitools.dataset.ingest.statistics import PartialStats
from pitools.dataset.ingest.unreadable_episodes import add_episode
from pitools.dataset.ingest.work_dir import IngestWorkDir
from pitools.store import digest
from pitools.store.manifest import FileEntry
from pitools.store.reader.version_reader import VersionReader, repair_hint

BLOCK_BYTES = 4 << 20  # steps are read, encoded and summarised in blocks that fit the processor's cache
_READ_BYTES = 1 << 20
# link(2): another file system, not supported, not permitted, or too many links.
_NO_LINK_ERRNOS = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}


class EpisodeSpan(NamedTuple):
    """Steps [start, stop) of an episode. offset: their first step in the concatenated array."""

    episode: Episode
    column: Column
    start: int
    stop: int
    offset: int


class ShardWorker:
    """Do jobs of a plan in a working folder, and append each to the journal."""

    def __init__(self, plan: IngestPlan, work_dir: IngestWorkDir, session: str) -> None:
        self._plan, self._work_dir = plan, work_dir
        self._journal = IngestJournal(work_dir.journal, session)
        self._block, self._encoded = shard_writer.PageBuffer(), shard_writer.PageBuffer()
        self._reader = open_reader(plan.episodes[0])
        self._parent = VersionReader(plan.parent, verify_digests=True) if plan.parent else None
        self._parent_files = {entry.path: entry for entry in self._parent.manifest.files} if self._parent else {}

    def close(self) -> None:
        """Close the files."""
        self._reader.close()
        self._journal.close()

    def __call__(self, job: tuple[Job, FinishedJob | None]) -> tuple[Job, FinishedJob]:
        """Do a job, unless another session's entry for it is valid. Raises DataError for a failed read, OSError for a
        failed write."""
        todo, finished = job
        if finished and (isinstance(todo, HashJob) or self._is_written(finished)):
            return todo, finished
        key = self._plan.job_key(todo)
        if isinstance(todo, HashJob):
            entry = self._hash(key, todo)
        elif todo.shard_index < self._plan.reusable_shards.get(todo.array, 0):
            entry = self._link(key, todo)
        else:
            entry = self._make_shard(key, todo)
        self._journal.append(entry)
        return todo, entry

    def _is_written(self, finished: FinishedJob) -> bool:
        """Return whether the shard of a journal entry exists with the entry's size and digest."""
        try:
            path = self._work_dir.store / finished.key
            return path.stat().st_size == finished.bytes and digest.digest_file(path) == (
                finished.bytes,
                finished.digest,
            )
        except OSError:
            return False

    def _make_shard(self, key: str, job: ShardJob) -> FinishedJob:
        spec = self._plan.specs[job.array]
        start, stop = self._plan.shard_steps(job)
        partials: list[PartialStats] = []
        data = shard_writer.encode_shard(self._read_blocks(job.array, start, stop, partials), spec, self._encoded)
        text = self._work_dir.put_file(key, lambda part: shard_writer.write_durable(part, data, direct=True))
        return FinishedJob(key=key, bytes=len(data), digest=text, statistics=self._fold_statistics(job.array, partials))

    def _read_blocks(self, array: str, start: int, stop: int, partials: list[PartialStats]) -> Iterator[NDArray[Any]]:
        """Yield steps [start, stop) in blocks of a few chunks, in reused memory; append their statistics."""
        spec = self._plan.specs[array]
        block_steps = max(1, BLOCK_BYTES // (spec.chunk * spec.row_bytes)) * spec.chunk
        for low in range(start, stop, block_steps):
            block = self._block.array((min(block_steps, stop - low), *spec.shape[1:]), spec.dtype)
            self._fill(array, block, low, low + len(block))
            if statistics.has_statistics(spec.dtype):
                partials.append(statistics.stats_of_block(block, low))
            yield block

    def _fill(self, array: str, block: NDArray[Any], start: int, stop: int) -> None:
        plan, first = self._plan, self._plan.offsets[0]
        if self._parent and start < first:
            end = min(first, stop)
            self._parent.read_into(array, block[: end - start], start, end)
            block, start = block[end - start :], end
        for span in episode_spans(array, plan.episodes, plan.offsets, start, stop):
            row = span.offset - start
            try:
                self._reader.read_into(span.column, block[row : row + span.stop - span.start], span.start, span.stop)
            except ChangedDuringRead:
                raise
            except DataError as error:
                raise add_episode(error, span.episode) from error

    def _fold_statistics(self, array: str, partials: list[PartialStats]) -> PartialStats | None:
        return (
            statistics.fold_stats(partials, statistics.column_count(self._plan.specs[array].shape[1:]))
            if partials
            else None
        )

    def _link(self, key: str, job: ShardJob) -> FinishedJob:
        assert self._parent is not None
        source, entry = self._parent.path / key, self._parent_files[key]
        if not source.is_file() or source.stat().st_size != entry.bytes:
            problem = f"{key}: missing or truncated (expected {entry.bytes} bytes)"
            raise DataError(problem, where=str(self._parent.path), hint="append to a complete version")
        try:
            self._work_dir.put_file(key, lambda part: _link(source, part, entry))
        except OSError as error:
            if error.errno not in _NO_LINK_ERRNOS:
                raise
            self._copy(key, source)
        partials: list[PartialStats] = []
        if job.array not in self._plan.base_statistics:
            for _ in self._read_blocks(job.array, *self._plan.shard_steps(job), partials):
                pass
        return FinishedJob(
            key=key, bytes=entry.bytes, digest=entry.digest, statistics=self._fold_statistics(job.array, partials)
        )

    def _copy(self, key: str, source: Path) -> None:
        entry = self._parent_files[key]
        data = self._encoded.view(entry.bytes)[: entry.bytes]
        with source.open("rb", buffering=0) as file:
            done = 0
            while count := file.readinto(data[done:]):
                done += count

        def write_verified(part: Path) -> str:
            copied = shard_writer.write_durable(part, data, direct=True)
            if copied != entry.digest:
                raise _damaged_error(source, entry)
            return copied

        self._work_dir.put_file(key, write_verified)

    def _hash(self, key: str, job: HashJob) -> FinishedJob:
        file = self._plan.files[job.file]
        return hash_file_range(
            key,
            file.path,
            job.range_index,
            min(digest.RANGE_BYTES, file.bytes - job.range_index * digest.RANGE_BYTES),
        )


def _link(source: Path, part: Path, verified: FileEntry) -> str:
    """Link a shard of the parent and verify its digest. Raises DataError for damage, OSError."""
    with contextlib.suppress(FileExistsError):  # the name is unique: NFS repeats a request after a lost reply
        os.link(source, part)
    with open_regular(part) as file:
        if digest.digest_descriptor(file.fileno(), like_digest=verified.digest)[1] != verified.digest:
            raise _damaged_error(source, verified)
    return verified.digest


def _damaged_error(source: Path, entry: FileEntry) -> DataError:
    parent = source.parents[entry.path.count("/")]
    problem = f"{entry.path}: damaged, its digest differs from the manifest's"
    return DataError(problem, where=str(parent), hint=repair_hint(parent))


def episode_spans(
    name: str, episodes: Sequence[Episode], offsets: Sequence[int], start: int, stop: int
) -> Iterator[EpisodeSpan]:
    """Yield the spans of episodes that make up steps [start, stop) of the concatenated array, in order."""
    index = bisect_right(offsets, start) - 1
    while start < stop:
        first, end = offsets[index], min(stop, offsets[index + 1])
        yield EpisodeSpan(episodes[index], episodes[index].columns[name], start - first, end - first, start)
        start, index = end, index + 1


def hash_file_range(key: str, path: Path, number: int, size: int) -> FinishedJob:
    """Return the digest of range `number` of a file, `size` bytes. Raises DataError for a truncated or unreadable file,
    Unreachable for a transient failure of the file system: the ingest can then be resumed."""
    state, offset, end = xxhash.xxh3_128(), number * digest.RANGE_BYTES, number * digest.RANGE_BYTES + size
    try:
        with path.open("rb", buffering=0) as file, mmap.mmap(-1, _READ_BYTES) as memory, memoryview(memory) as view:
            while offset < end:
                count = os.preadv(file.fileno(), [view[: min(_READ_BYTES, end - offset)]], offset)
                if not count:
                    raise changed_during_read(str(path))
                state.update(view[:count])
                offset += count
    except OSError as error:
        if error.errno in TRANSIENT_ERRNOS:
            raise Unreachable(f"cannot be read: {error.strerror}", where=str(path), hint="run this again") from error
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
    return FinishedJob(key=key, bytes=size, digest=state.hexdigest())
