"""Cut a version's files into tasks for workers: a range of a large file, one file, or many small ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pitools.store.digest import ALGORITHM, RANGE_BYTES
from pitools.store.manifest import FileEntry

# A file below this is a small one: it fits a reader's buffer, and costs more in system calls than in bytes.
SMALL_FILE_BYTES = 1 << 20
_BATCH_BYTES, _BATCH_FILES = 8 << 20, 256
# A batch is written down when it is done: what a kill costs is at most one for each reader, an eighth of all files.
_BATCHES_EACH = 8


class CopyTask(NamedTuple):
    """Files to move, by their place in the manifest; of a single one a range if `length` is not -1.

    known_digest: the digest of a range that an earlier copy wrote: it is looked for where it was written.
    """

    files: tuple[int, ...]
    offset: int = 0
    length: int = -1
    known_digest: bytes = b""


def split_tasks(
    files: Sequence[FileEntry],
    todo: Iterable[int],
    known_ranges: Mapping[int, Mapping[int, bytes]],
    *,
    ranged: bool,
    in_order: bool,
    readers: int = 1,
) -> list[CopyTask]:
    """Split the files `todo` into tasks, the largest first and the small ones batched in their folders' order.

    known_ranges: digests of ranges already written, by file and range. ranged: cut large files into ranges where their
    digest allows it. in_order: keep the order of `todo`, as a fan-out wants it. readers: how many share the tasks.
    """
    todo = list(todo)
    small = sum(files[index].bytes < SMALL_FILE_BYTES for index in todo)
    batch_files = max(1, min(_BATCH_FILES, small // (_BATCHES_EACH * readers)))
    large: list[CopyTask] = []
    batches: list[CopyTask] = []
    batch: list[int] = []
    batch_bytes = 0
    for index in todo:
        entry = files[index]
        if entry.bytes >= SMALL_FILE_BYTES:
            large += _tasks_of_large(index, entry, known_ranges.get(index, {}), ranged=ranged)
            continue
        batch.append(index)
        batch_bytes += entry.bytes
        if batch_bytes >= _BATCH_BYTES or len(batch) == batch_files:
            batches.append(CopyTask(files=tuple(batch)))
            batch, batch_bytes = [], 0
    if batch:
        batches.append(CopyTask(files=tuple(batch)))
    if not in_order:
        # So that no reader is left alone with a large one at the end.
        large.sort(key=lambda task: -(task.length if task.length >= 0 else files[task.files[0]].bytes))
    return large + batches


def range_count(entry: FileEntry) -> int:
    """Return the number of ranges of a file: 1 when it is not split."""
    if entry.bytes <= RANGE_BYTES or entry.digest.startswith(f"{ALGORITHM}:"):
        return 1
    return -(-entry.bytes // RANGE_BYTES)


def _tasks_of_large(
    index: int, entry: FileEntry, known_digests: Mapping[int, bytes], *, ranged: bool
) -> list[CopyTask]:
    if not ranged or range_count(entry) == 1:
        return [CopyTask(files=(index,))]
    return [
        CopyTask(
            (index,), offset, min(RANGE_BYTES, entry.bytes - offset), known_digests.get(offset // RANGE_BYTES, b"")
        )
        for offset in range(0, entry.bytes, RANGE_BYTES)
    ]
