from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.stage.copy.tasks import SMALL_FILE_BYTES, range_count, split_tasks
from pitools.store.digest import RANGE_BYTES
from pitools.store.manifest import FileEntry

sizes = st.one_of(st.integers(0, 3 * SMALL_FILE_BYTES), st.integers(RANGE_BYTES - 2, 3 * RANGE_BYTES + 2))


@given(st.lists(st.tuples(sizes, st.sampled_from(["xxh3_128:", "xxh3_128x64m:", ""])), max_size=30), st.booleans())
def test_tasks_cover_every_byte_of_every_file_once(described: list[tuple[int, str]], ranged: bool):
    """Whole files once each, or ranges that follow each other to the end; as many as `range_count` says."""
    files = [FileEntry(path=str(i), bytes=size, digest=text) for i, (size, text) in enumerate(described)]
    todo = split_tasks(files, range(len(files)), {}, ranged=ranged, in_order=False)
    full = [index for task in todo if task.length < 0 for index in task.files]
    assert len(full) == len(set(full))
    for index, entry in enumerate(files):
        parts = sorted((task.offset, task.length) for task in todo if task.length >= 0 and task.files == (index,))
        if index in full:
            assert not parts
            continue
        assert len(parts) == range_count(entry) > 1
        assert [offset for offset, _ in parts] == [RANGE_BYTES * n for n in range(len(parts))]
        assert sum(length for _, length in parts) == entry.bytes


def test_small_files_go_in_batches_and_large_ones_first():
    """A task a file would cost thousands of small files more than the copy itself."""
    files = [
        FileEntry(path=f"{i:05}", bytes=50_000 if i else 5 * SMALL_FILE_BYTES, digest="xxh3_128:0") for i in range(2000)
    ]
    todo = split_tasks(files, reversed(range(2000)), {}, ranged=True, in_order=False)
    assert todo[0].files == (0,)
    assert len(todo) < 20


@pytest.mark.parametrize("readers", [1, 8, 16])
@pytest.mark.parametrize("size", [4_000, 400_000])
def test_readers_at_work_hold_an_eighth_of_the_small_files(readers: int, size: int):
    """What is killed before it is written down is small, also where many readers begin a batch at once."""
    files = [FileEntry(path=f"{i:05}", bytes=size, digest="xxh3_128:0") for i in range(45_000_000 // size)]
    todo = split_tasks(files, range(len(files)), {}, ranged=True, in_order=False, readers=readers)
    batches = sorted((len(task.files) for task in todo), reverse=True)
    assert sum(batches) == len(files)
    assert sum(batches[:readers]) <= max(len(files) / 8, readers)


def test_an_order_that_is_asked_for_is_kept():
    """A fan-out begins with its own share, whatever the sizes."""
    files = [FileEntry(path=str(i), bytes=(i + 1) * SMALL_FILE_BYTES, digest="xxh3_128:0") for i in range(5)]
    order = [3, 0, 4, 1, 2]
    assert [task.files[0] for task in split_tasks(files, order, {}, ranged=False, in_order=True)] == order


def test_digests_of_older_manifests_keep_large_files_in_one_piece():
    """A digest of the whole file can only be had by reading it from the first byte to the last."""
    old = FileEntry(path="a", bytes=3 * RANGE_BYTES, digest="xxh3_128:0")
    new = FileEntry(path="a", bytes=3 * RANGE_BYTES, digest="xxh3_128x64m:0")
    assert (range_count(old), range_count(new)) == (1, 3)
