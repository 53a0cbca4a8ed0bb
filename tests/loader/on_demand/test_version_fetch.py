"""Of a large file, the ranges that an interrupted `pit-stage run` wrote are not fetched again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from pitools.core.errors import DataError, NoSpace
from pitools.loader.on_demand.version_fetch import VersionFetch
from pitools.stage.cache.layout import create_root, journal_path, partial_path, staged_path, version_lock
from pitools.stage.cache.space import RootLimits
from pitools.stage.copy import resume
from pitools.stage.copy.journal import CopyJournal
from pitools.stage.copy.resume import find_missing
from pitools.stage.sources.base import DatasetVersion
from pitools.stage.sources.find import load_version
from pitools.store import digest, manifest
from pitools.store.digest import RANGE_BYTES
from pitools.store.manifest import FileEntry, Manifest

LAST_BYTES = 1 << 20


@pytest.fixture
def dataset(tmp_path: Path) -> DatasetVersion:
    """A version of one file of two ranges, the last of them short."""
    folder = tmp_path / "data" / "new"
    folder.mkdir(parents=True)
    with (folder / "L").open("wb") as file:
        for _ in range(RANGE_BYTES // LAST_BYTES + 1):
            file.write(os.urandom(LAST_BYTES))
    size, text = digest.digest_file(folder / "L")
    data = manifest.encode_manifest(
        Manifest(name="pick", episodes=1, steps=1, arrays={}, files=(FileEntry(path="L", bytes=size, digest=text),))
    )
    (folder / manifest.MANIFEST_FILE).write_bytes(data)
    return load_version(folder.rename(tmp_path / "data" / manifest.version_of(data)))


def write_first_range(dataset: DatasetVersion, root: Path, data: bytes) -> None:
    """What a stager that was killed has left: a file with these bytes, and a journal that lists its first range."""
    create_root(root)
    folder = partial_path(root, dataset.version)
    folder.mkdir()
    (folder / "L").write_bytes(data)
    (folder / "L").chmod(0o600)
    hasher = digest.Hasher()
    hasher.update(data[:RANGE_BYTES])
    journal = CopyJournal(journal_path(root, dataset.version), dataset.version, durable=True, append=False)
    journal.add_range(0, 0, bytes.fromhex(hasher.digest().partition(":")[2]))
    journal.close()


@contextmanager
def fetching(
    dataset: DatasetVersion, root: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[VersionFetch, list[int]]]:
    """A fetch of the version into a root, and the sizes of the parts that it asks its source for."""
    parts: list[int] = []
    fetch_range = VersionFetch._fetch_range

    def count(self: VersionFetch, file: object, descriptor: int, offset: int, length: int) -> None:
        parts.append(length)
        fetch_range(self, file, descriptor, offset, length)  # type: ignore[arg-type]

    monkeypatch.setattr(VersionFetch, "_fetch_range", count)
    with version_lock(root, dataset.version, timeout_s=1) as report_progress:
        yield VersionFetch(dataset, root, RootLimits(), report_progress), parts


def read_file(fetch: VersionFetch) -> bytes:
    with os.fdopen(fetch.open_file("L"), "rb") as file:
        return file.read()


def test_only_the_missing_range_is_fetched(
    dataset: DatasetVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is whole, read-only and published afterwards."""
    source, root = Path(dataset.source.label) / "L", tmp_path / "nvme"
    write_first_range(dataset, root, source.read_bytes()[:RANGE_BYTES])
    with fetching(dataset, root, monkeypatch) as (fetch, parts):
        assert read_file(fetch) == source.read_bytes()
        assert sum(parts) == LAST_BYTES
        fetch.finish()
    assert fetch.published
    assert (staged_path(root, dataset.version) / "L").stat().st_mode & 0o777 == 0o444


def test_a_wrong_range_is_fetched_again(
    dataset: DatasetVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal may list a range whose file was begun anew: the digest of the whole file decides."""
    source, root = Path(dataset.source.label) / "L", tmp_path / "nvme"
    write_first_range(dataset, root, bytes(RANGE_BYTES))
    with fetching(dataset, root, monkeypatch) as (fetch, parts):
        freed: list[int] = []
        monkeypatch.setattr(fetch, "_report_used", freed.append)
        assert read_file(fetch) == source.read_bytes()
        assert sum(parts) == RANGE_BYTES + 2 * LAST_BYTES
        fetch.finish()
    assert freed == [LAST_BYTES], "the first range was on the disk before, and is not reserved"


def test_a_file_that_could_not_be_recorded_can_be_written_again(
    dataset: DatasetVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full for a moment: the next request opens the file for writing, also where it was whole."""
    source, root = Path(dataset.source.label) / "L", tmp_path / "nvme"
    write_first_range(dataset, root, source.read_bytes()[:RANGE_BYTES])

    def flush(_: CopyJournal) -> None:
        raise NoSpace("full")

    with fetching(dataset, root, monkeypatch) as (fetch, _):
        with monkeypatch.context() as full:
            full.setattr(CopyJournal, "flush", flush)
            assert read_file(fetch) == source.read_bytes()
            fetch._record_threads.shutdown()
        assert (partial_path(root, dataset.version) / "L").stat().st_mode & 0o777 == 0o600
        fetch._record_threads = ThreadPoolExecutor(1)
        assert read_file(fetch) == source.read_bytes()
        fetch.finish()
    assert fetch.published


def test_ranges_of_a_file_that_fails_its_digest_are_forgotten(
    dataset: DatasetVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is removed; begun again and killed, it would count as written up to there."""
    source, root = Path(dataset.source.label) / "L", tmp_path / "nvme"
    write_first_range(dataset, root, source.read_bytes()[:RANGE_BYTES])
    source.write_bytes(bytes(source.stat().st_size))
    with fetching(dataset, root, monkeypatch) as (fetch, _), pytest.raises(DataError, match="digest"):
        read_file(fetch)
    assert find_missing(dataset, root).range_bytes == 0
    (partial_path(root, dataset.version) / "L").touch()
    assert find_missing(dataset, root).range_bytes == 0


def test_too_few_inodes_are_told_before_the_first_byte(
    dataset: DatasetVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `pit-stage run`."""
    create_root(tmp_path / "nvme")
    monkeypatch.setattr(resume, "free_inodes", lambda _: 0)
    with pytest.raises(NoSpace, match="inodes"), fetching(dataset, tmp_path / "nvme", monkeypatch):
        pass
