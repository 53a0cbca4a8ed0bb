"""Judge a version on disk against its manifest: quickly by names and sizes, or fully by content."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event
from typing import Literal

from msgspec import structs

from pitools.core.errors import ClusterError, DataError
from pitools.core.progress import Advance, bar
from pitools.core.record import Record
from pitools.stage.root import OBJECTS
from pitools.stage.source import Dataset, find, load, open_file, opened, read_error, reading, versions
from pitools.stage.workers import for_each, pump
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


def looks_whole(folder: Path, dataset: Dataset) -> bool:
    """Whether `folder` holds this manifest and a file of the right size for each entry; contents are not read."""
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode) or (folder / FILE_NAME).read_bytes() != dataset.data:
            return False
        # os.stat of joined text: this is the path of every job that finds its data there, over every file.
        prefix = f"{folder}/"
        for entry in dataset.manifest.files:
            found = os.stat(prefix + entry.path, follow_symlinks=False)  # noqa: PTH116
            if found.st_size != entry.bytes or not stat.S_ISREG(found.st_mode):
                return False
    except OSError:
        return False
    return True


def is_whole(folder: Path, dataset: Dataset, *, readers: int, advance: Advance) -> bool:
    """Whether every byte in `folder` is what this manifest says."""
    return looks_whole(folder, dataset) and not problems(
        structs.replace(dataset, folder=folder), readers=readers, advance=advance, extras=False
    )


def problems(dataset: Dataset, *, readers: int, advance: Advance, extras: bool = True) -> list[Finding]:
    """Every file of a version that is not what its manifest says, all content read; sorted by path."""
    found: list[Finding] = []
    with opened(dataset.folder) as root:
        work = partial(_judge, dataset, root, found, advance)
        for_each(sorted(dataset.manifest.files, key=lambda entry: -entry.bytes), work, threads=readers)
    if extras:
        found += _extras(dataset)
    return sorted(found, key=lambda finding: finding.path)


def _judge(
    dataset: Dataset, root: int, found: list[Finding], advance: Advance,
    entry: FileEntry, buffer: memoryview, stop: Event,
) -> None:  # fmt: skip
    say = partial(_finding, dataset, entry.path)
    where = dataset.folder / entry.path
    try:
        descriptor = open_file(root, entry.path, where=where)
    except DataError as error:
        found.append(say("missing", "a regular file", error.what))
        return
    except ClusterError as error:
        found.append(say("unreadable", "a regular file", error.what))
        return
    try:
        if (size := os.fstat(descriptor).st_size) != entry.bytes:
            found.append(say("size", str(entry.bytes), str(size)))
            return
        size, digest = pump(descriptor, buffer, lambda block: advance(len(block)), limit=entry.bytes, stop=stop)
        if size != entry.bytes:
            found.append(say("size", str(entry.bytes), str(size)))
        elif digest != entry.digest:
            found.append(say("digest", entry.digest, digest))
    except OSError as error:
        found.append(say("unreadable", entry.digest, read_error(error, where).what))
    finally:
        os.close(descriptor)


def _extras(dataset: Dataset) -> Iterator[Finding]:
    known = {entry.path for entry in dataset.manifest.files} | {FILE_NAME}
    for folder, folders, names in os.walk(dataset.folder):
        # os.walk does not enter linked folders but lists them as folders; to us such a link is a stray file.
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in names + links:
            path = (Path(folder) / name).relative_to(dataset.folder).as_posix()
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
    return [find(path)]


def check(path: Path, *, readers: int) -> Iterator[Finding | Check]:
    """Findings, a version at a time (a bar each, on a terminal), then one Check. Raises as `targets`."""
    started = time.monotonic()
    folders = targets(path)
    files = n_bytes = findings = 0
    for folder in folders:
        try:
            dataset = load(folder)
        except DataError as error:
            findings += 1
            problem: Problem = "digest" if os.path.lexists(folder / FILE_NAME) else "missing"
            yield Finding(dataset="", version=folder.name, path=FILE_NAME, problem=problem,
                          expected="the version's manifest", got=error.what)  # fmt: skip
            continue
        files += len(dataset.manifest.files)
        n_bytes += dataset.manifest.total_bytes
        with bar(dataset.manifest.name, dataset.manifest.total_bytes) as advance:
            found = problems(dataset, readers=readers, advance=advance)
        findings += len(found)
        yield from found
    yield Check(path=str(path.absolute()), datasets=len(folders), files=files, bytes=n_bytes, findings=findings,
                wall_s=time.monotonic() - started)  # fmt: skip
