"""Judge a version on disk against its manifest: quickly by names and sizes, or fully by content."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from msgspec import structs

from pitools.core import forked_pool
from pitools.core.errors import ClusterError, DataError, PitError
from pitools.core.progress import Advance, bar
from pitools.core.record import Record
from pitools.core.shared_progress import Seat
from pitools.stage.cache.inventory import looks_whole
from pitools.stage.cache.layout import LEASES, OBJECTS
from pitools.stage.cache.lease import lease
from pitools.stage.copy.tasks import Task, tasks
from pitools.stage.sources.base import Dataset, SourceFile
from pitools.stage.sources.local import LocalSource, reading
from pitools.stage.sources.open import find_folder, load, versions
from pitools.store.digest import hasher_for
from pitools.store.manifest import FILE_NAME, FileEntry

Problem = Literal["missing", "size", "digest", "extra", "unreadable"]


class Finding(Record, frozen=True, kw_only=True, tag="pit.stage-finding/1"):
    """One file that is not what the manifest says. path: relative to the version's folder."""

    dataset: str
    version: str
    path: str
    problem: Problem
    expected: str
    got: str


class Check(Record, frozen=True, kw_only=True, tag="pit.stage-check/1"):
    """What a check went through. files, bytes: as the manifests name them."""

    path: str
    datasets: int
    files: int
    bytes: int
    findings: int
    wall_s: float


def is_whole(folder: Path, dataset: Dataset, *, readers: int, advance: Advance) -> bool:
    """Whether every byte in `folder` is what this manifest says."""
    return looks_whole(folder, dataset) and not problems(
        structs.replace(dataset, source=LocalSource(folder=folder)), readers=readers, advance=advance, extras=False
    )


def problems(dataset: Dataset, *, readers: int, advance: Advance, extras: bool = True) -> list[Finding]:
    """Every file of a version that is not what its manifest says, all content read; sorted by path."""
    files = dataset.manifest.files
    found: list[Finding] = []
    todo = tasks(files, range(len(files)), {}, ranged=False, in_order=False)
    forked_pool.run(todo, partial(_Judge, dataset), found.extend, readers=readers, advance=advance)
    if extras and isinstance(dataset.source, LocalSource):
        found += _extras(dataset, dataset.source.folder)
    return sorted(found, key=lambda finding: finding.path)


class _Judge:
    """One thread's share of a check: its reader and its buffer."""

    def __init__(self, dataset: Dataset, seat: Seat) -> None:
        self._dataset, self._seat = dataset, seat
        self._reader = dataset.source.connect()
        self._buffer = memoryview(mmap.mmap(-1, dataset.source.block))

    def __call__(self, task: Task) -> list[Finding]:
        """What is wrong with the task's files."""
        files = self._dataset.manifest.files
        return [finding for index in task.files if (finding := self._judge(files[index]))]

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def _judge(self, entry: FileEntry) -> Finding | None:
        say = partial(_finding, self._dataset, entry.path)
        try:
            file = self._reader.open(entry.path)
        except DataError as error:
            return say("missing", "a regular file", error.what)
        except ClusterError as error:
            return say("unreadable", "a regular file", error.what)
        try:
            if file.size != entry.bytes:
                return say("size", str(entry.bytes), str(file.size))
            size, digest = self._read(file, entry)
        except ClusterError as error:
            return say("unreadable", entry.digest, error.what)
        finally:
            file.close()
        if size != entry.bytes:
            return say("size", str(entry.bytes), str(size))
        return None if digest == entry.digest else say("digest", entry.digest, digest)

    def _read(self, file: SourceFile, entry: FileEntry) -> tuple[int, str]:
        """All bytes, but of a file that grows not more than it had. Returns their count and digest."""
        hasher, total = hasher_for(entry.digest), 0
        while total < entry.bytes and (count := file.read_into(self._buffer[: entry.bytes - total], total)):
            hasher.update(self._buffer[:count])
            self._seat.moved(count)
            total += count
        return total, hasher.text()


def _extras(dataset: Dataset, root: Path) -> Iterator[Finding]:
    known = {entry.path for entry in dataset.manifest.files} | {FILE_NAME}
    for folder, folders, names in os.walk(root):
        # os.walk does not enter linked folders but lists them as folders; to us such a link is a stray file.
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in names + links:
            path = (Path(folder) / name).relative_to(root).as_posix()
            if path not in known:
                yield _finding(dataset, path, "extra", "nothing", "a link" if name in links else "a file")


def _finding(dataset: Dataset, path: str, problem: Problem, expected: str, got: str) -> Finding:
    return Finding(
        dataset=dataset.manifest.name,
        version=dataset.version,
        path=path,
        problem=problem,
        expected=expected,
        got=got,
    )


def targets(path: Path) -> list[Path]:
    """The version folders to check: of a staging root all objects, of `<root>/<name>` all versions, or itself.

    Raises UsageError or DataError when `path` is none of these.
    """
    path = path.absolute()
    with reading(path):
        if not os.path.lexists(path / FILE_NAME):
            if (path / OBJECTS).is_dir():
                return sorted((path / OBJECTS).iterdir())
            if path.is_dir() and (inside := versions(path)):
                return inside
    return [find_folder(path)]


def check(path: Path, *, readers: int) -> Iterator[Finding | Check]:
    """Findings, a version at a time (a bar each, on a terminal), then one Check. Raises as `targets`.

    A staged set is leased while it is read; one that was evicted before its turn is no finding.
    """
    started = time.monotonic()
    sets = files = n_bytes = findings = 0
    for folder in targets(path):
        with _kept(folder) as stands:
            if not stands:
                continue
            dataset, found = _check_one(folder, readers)
        sets += 1
        if dataset:
            files += len(dataset.manifest.files)
            n_bytes += dataset.manifest.total_bytes
        findings += len(found)
        yield from found
    yield Check(
        path=str(path.absolute()),
        datasets=sets,
        files=files,
        bytes=n_bytes,
        findings=findings,
        wall_s=time.monotonic() - started,
    )


def _check_one(folder: Path, readers: int) -> tuple[Dataset | None, list[Finding]]:
    """A version, None where its manifest cannot be read, and what is wrong with it."""
    try:
        dataset = load(folder)
    except DataError as error:
        problem: Problem = "digest" if os.path.lexists(folder / FILE_NAME) else "missing"
        return None, [
            Finding(
                dataset="",
                version=folder.name,
                path=FILE_NAME,
                problem=problem,
                expected="the version's manifest",
                got=error.what,
            )
        ]
    with bar(dataset.manifest.name, dataset.manifest.total_bytes) as advance:
        return dataset, problems(dataset, readers=readers, advance=advance)


@contextmanager
def _kept(folder: Path) -> Iterator[bool]:
    """Lease what is a staged set; yields whether it stands. What cannot be leased is read all the same."""
    with contextlib.ExitStack() as stack:
        if folder.parent.name == OBJECTS and (folder.parent.parent / LEASES).is_dir():
            with contextlib.suppress(PitError):  # no set, or a root that this user may only read
                stack.enter_context(lease(folder, use=False))
        yield os.path.lexists(folder)
