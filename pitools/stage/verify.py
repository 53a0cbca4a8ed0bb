"""Verify a version on disk against its manifest: quickly by names and sizes, or fully by content."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from msgspec import structs

from pitools.core import forked_pool
from pitools.core.errors import ClusterError, DataError, PitError
from pitools.core.progress import Advance, progress_bar
from pitools.core.record import Record
from pitools.core.shared_progress import WorkerSlot
from pitools.stage.cache.inventory import matches_sizes
from pitools.stage.cache.layout import OBJECTS
from pitools.stage.cache.lease import try_lease
from pitools.stage.copy.tasks import CopyTask, split_tasks
from pitools.stage.sources.base import DatasetVersion, SourceFile
from pitools.stage.sources.find import dataset_version_dirs, find_version_dir, load_version
from pitools.stage.sources.local import LocalSource, translate_errors
from pitools.store.digest import hasher_for
from pitools.store.manifest import MANIFEST_FILE, FileEntry
from pitools.store.version_list import PUBLISHED_FILE

FileProblem = Literal["missing", "size", "digest", "extra", "unreadable"]


class FileFinding(Record, frozen=True, kw_only=True, tag="pit.stage-finding/1"):
    """One file that differs from the manifest. path: relative to the version's folder."""

    dataset: str
    version: str
    path: str
    problem: FileProblem
    expected: str
    got: str


class CheckTotals(Record, frozen=True, kw_only=True, tag="pit.stage-check/1"):
    """The totals of a check. sets: checked versions. files, bytes: as listed in their manifests."""

    path: str
    sets: int
    files: int
    bytes: int
    findings: int
    wall_s: float


def matches_content(folder: Path, dataset: DatasetVersion, *, readers: int, advance: Advance) -> bool:
    """Whether every byte in `folder` matches this manifest. If not, its bytes are taken back from the progress."""
    total = 0

    def count_bytes(count: int) -> None:
        nonlocal total
        total += count
        advance(count)

    copied = structs.replace(dataset, source=LocalSource(folder=folder))
    if matches_sizes(folder, dataset) and not verify_files(copied, readers=readers, advance=count_bytes, extras=False):
        return True
    advance(-total)
    return False


def verify_files(dataset: DatasetVersion, *, readers: int, advance: Advance, extras: bool = True) -> list[FileFinding]:
    """Read all files of a version; return those that differ from the manifest, sorted by path."""
    files = dataset.manifest.files
    findings: list[FileFinding] = []
    tasks = split_tasks(files, range(len(files)), {}, ranged=False, in_order=False)
    forked_pool.run_tasks(tasks, partial(_VerifyWorker, dataset), findings.extend, readers=readers, advance=advance)
    if extras and isinstance(dataset.source, LocalSource):
        findings += _find_extra_files(dataset, dataset.source.folder)
    return sorted(findings, key=lambda finding: finding.path)


class _VerifyWorker:
    """One thread's share of a check: its reader and its buffer."""

    def __init__(self, dataset: DatasetVersion, slot: WorkerSlot) -> None:
        self._dataset, self._slot = dataset, slot
        self._reader = dataset.source.connect()
        self._buffer = memoryview(mmap.mmap(-1, dataset.source.block))

    def __call__(self, task: CopyTask) -> list[FileFinding]:
        """Return the findings of the task's files."""
        files = self._dataset.manifest.files
        return [finding for index in task.files if (finding := self._check_file(files[index]))]

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def _check_file(self, entry: FileEntry) -> FileFinding | None:
        finding = partial(_finding, self._dataset, entry.path)
        try:
            file = self._reader.open(entry.path)
        except DataError as error:
            return finding("missing", "a regular file", error.message)
        except ClusterError as error:
            return finding("unreadable", "a regular file", error.message)
        try:
            if file.size != entry.bytes:
                return finding("size", str(entry.bytes), str(file.size))
            size, digest = self._read(file, entry)
        except ClusterError as error:
            return finding("unreadable", entry.digest, error.message)
        finally:
            file.close()
        if size != entry.bytes:
            return finding("size", str(entry.bytes), str(size))
        return None if digest == entry.digest else finding("digest", entry.digest, digest)

    def _read(self, file: SourceFile, entry: FileEntry) -> tuple[int, str]:
        """Read a file, at most the manifest's size; return the byte count and the digest."""
        hasher, total = hasher_for(entry.digest), 0
        while total < entry.bytes and (count := file.read_into(self._buffer[: entry.bytes - total], total)):
            hasher.update(self._buffer[:count])
            self._slot.add_bytes(count)
            total += count
        return total, hasher.digest()


def _find_extra_files(dataset: DatasetVersion, root: Path) -> Iterator[FileFinding]:
    expected = {entry.path for entry in dataset.manifest.files} | {MANIFEST_FILE, PUBLISHED_FILE}
    for folder, folders, names in os.walk(root):
        # os.walk lists a link to a folder as a folder, and does not enter it: report it as an extra file.
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in names + links:
            path = (Path(folder) / name).relative_to(root).as_posix()
            if path not in expected:
                yield _finding(dataset, path, "extra", "nothing", "a link" if name in links else "a file")


def _finding(dataset: DatasetVersion, path: str, problem: FileProblem, expected: str, got: str) -> FileFinding:
    return FileFinding(
        dataset=dataset.manifest.name, version=dataset.version, path=path, problem=problem, expected=expected, got=got
    )


def check_targets(path: Path) -> list[Path]:
    """Return the version folders to check: all objects of a staging root, all versions of `<root>/<name>`, or `path`.

    Raises UsageError or DataError when `path` is none of these.
    """
    path = path.absolute()
    with translate_errors(path):
        if not os.path.lexists(path / MANIFEST_FILE):
            if (path / OBJECTS).is_dir():
                return sorted((path / OBJECTS).iterdir())
            if path.is_dir() and (version_dirs := dataset_version_dirs(path)):
                return version_dirs
    return [find_version_dir(path)]


def check_versions(path: Path, *, readers: int) -> Iterator[FileFinding | CheckTotals]:
    """Yield findings by version, with a progress bar each on a terminal, then one CheckTotals. Raises as
    `check_targets`.

    A staged set is leased while it is read; a set evicted before that is skipped.
    """
    started = time.monotonic()
    n_sets = files = n_bytes = findings = 0
    for folder in check_targets(path):
        with try_lease(folder, touch=False):
            if not os.path.lexists(folder):
                continue
            dataset, findings_of_set = _check_version(folder, readers)
        n_sets += 1
        if dataset:
            files += len(dataset.manifest.files)
            n_bytes += dataset.manifest.total_bytes
        findings += len(findings_of_set)
        yield from findings_of_set
    yield CheckTotals(
        path=str(path.absolute()),
        sets=n_sets,
        files=files,
        bytes=n_bytes,
        findings=findings,
        wall_s=time.monotonic() - started,
    )


def _check_version(folder: Path, readers: int) -> tuple[DatasetVersion | None, list[FileFinding]]:
    """Return a version and its findings; None as the version when its manifest cannot be read."""
    try:
        dataset = load_version(folder)
    except PitError as error:
        problem: FileProblem = "digest" if os.path.lexists(folder / MANIFEST_FILE) else "missing"
        if not isinstance(error, DataError):
            problem = "unreadable"
        return None, [
            FileFinding(
                dataset="",
                version=folder.name,
                path=MANIFEST_FILE,
                problem=problem,
                expected="the version's manifest",
                got=error.message,
            )
        ]
    with progress_bar(dataset.manifest.name, dataset.manifest.total_bytes) as advance:
        return dataset, verify_files(dataset, readers=readers, advance=advance)
