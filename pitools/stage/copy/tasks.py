"""Split a version's files into tasks for workers: a range of a large file, one file, or many small ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pitools.store.digest import ALGORITHM, RANGE_BYTES
from pitools.store.manifest import FileEntry

# A smaller file fits a reader's buffer, and costs more in system calls than in bytes.
SMALL_FILE_BYTES = 1 << 20
_BATCH_BYTES, _BATCH_FILES = 8 << 20, 256
# A batch is journalled when it is finished: a kill loses at most one per reader, an eighth of all files.
_BATCHES_PER_READER = 8


class CopyTask(NamedTuple):
    """Files to copy, by manifest index; a range of a single file unless `length` is -1.

    expected_digest: of a range written by an earlier copy, to verify in place.
    """

    files: tuple[int, ...]
    offset: int = 0
    length: int = -1
    expected_digest: bytes = b""


def split_tasks(
    files: Sequence[FileEntry],
    indexes: Iterable[int],
    written_ranges: Mapping[int, Mapping[int, bytes]],
    *,
    ranged: bool,
    in_order: bool,
    readers: int = 1,
) -> list[CopyTask]:
    """Split the files `indexes` into tasks, large ones first by size, small ones batched in the order of their folders.

    written_ranges: digests of written ranges, by file and range. ranged: split large files into ranges if their digest
    allows it. in_order: keep the order of `indexes`, for a fan-out. readers: how many share the tasks.
    """
    indexes = list(indexes)
    n_small = sum(files[index].bytes < SMALL_FILE_BYTES for index in indexes)
    batch_files = max(1, min(_BATCH_FILES, n_small // (_BATCHES_PER_READER * readers)))
    large: list[CopyTask] = []
    batches: list[CopyTask] = []
    batch: list[int] = []
    batch_bytes = 0
    for index in indexes:
        entry = files[index]
        if entry.bytes >= SMALL_FILE_BYTES:
            large += _tasks_of_large(index, entry, written_ranges.get(index, {}), ranged=ranged)
            continue
        batch.append(index)
        batch_bytes += entry.bytes
        if batch_bytes >= _BATCH_BYTES or len(batch) == batch_files:
            batches.append(CopyTask(files=tuple(batch)))
            batch, batch_bytes = [], 0
    if batch:
        batches.append(CopyTask(files=tuple(batch)))
    if not in_order:
        # So that no large file is left for one reader at the end.
        large.sort(key=lambda task: -(task.length if task.length >= 0 else files[task.files[0]].bytes))
    return large + batches


def range_count(entry: FileEntry) -> int:
    """Return the number of ranges of a file: 1 when it is not split."""
    if entry.bytes <= RANGE_BYTES or entry.digest.startswith(f"{ALGORITHM}:"):
        return 1
    return -(-entry.bytes // RANGE_BYTES)


def _tasks_of_large(
    index: int, entry: FileEntry, expected_digests: Mapping[int, bytes], *, ranged: bool
) -> list[CopyTask]:
    if not ranged or range_count(entry) == 1:
        return [CopyTask(files=(index,))]
    return [
        CopyTask(
            (index,), offset, min(RANGE_BYTES, entry.bytes - offset), expected_digests.get(offset // RANGE_BYTES, b"")
        )
        for offset in range(0, entry.bytes, RANGE_BYTES)
    ]
