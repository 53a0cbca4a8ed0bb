"""What stands at a root: whole sets, damaged ones, unfinished copies, and the bytes each takes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pitools.core import timestamps
from pitools.core.errors import PitError, UsageError, suggest
from pitools.core.fs import open_regular
from pitools.core.record import Record
from pitools.stage.cache import lease, records
from pitools.stage.cache.layout import OBJECTS, QUARANTINE, is_leased, lock_owner
from pitools.stage.sources.base import Dataset
from pitools.stage.sources.local import translate_errors
from pitools.stage.sources.open import load_dataset
from pitools.store.manifest import FILE_NAME, Subset
from pitools.store.publish import STAGING_DIR

State = Literal["whole", "damaged", "partial", "quarantined"]


class StagedSet(Record, frozen=True, kw_only=True, tag="pit.staged/1"):
    """One version at a root.

    state: by names and sizes; `partial` is being copied (then it is `locked`) or was interrupted. files, bytes: of a
    whole set as its manifest names them, else what is on the disk. source: where it came from, "" where that is not
    known, which keeps it from being evicted. staged, last_used: when, or "". leased: a process reads it. locked: a
    process stages, repairs or evicts it. pinned: never evicted. part: which arrays and steps, of a part of a version.
    """

    dataset: str
    version: str
    path: str
    state: State
    files: int
    bytes: int
    staged: str
    source: str = ""
    last_used: str = ""
    leased: bool = False
    locked: bool = False
    pinned: bool = False
    part: str = ""


class DiskUsage(NamedTuple):
    """Room that a folder takes. own_bytes: bytes of files with one name. linked_bytes: bytes of the others, by
    inode."""

    files: int
    own_bytes: int
    linked_bytes: dict[tuple[int, int], int]


def list_sets(root: Path) -> Iterator[StagedSet]:
    """Yield the versions at a root, sorted, whole or damaged; then unfinished and quarantined ones.

    Raises UsageError when something else stands there, ClusterError.
    """
    root = root.absolute()
    require_root(root, empty=True)
    for folder in _folders(root / OBJECTS):
        yield describe_set(root, folder.name)
    for folder in partial_copies(root):
        yield _describe_partial(root, folder, folder.name.removesuffix(".partial"), "partial")
    for folder in _folders(root / QUARANTINE):
        yield _describe_partial(root, folder, folder.name.partition(".")[0], "quarantined")


def require_root(root: Path, *, empty: bool = False) -> None:
    """Raise UsageError where nothing was ever staged; `empty`: only where anything else stands. Raises ClusterError."""
    with translate_errors(root):
        if (root / OBJECTS).is_dir() or (empty and not (root.exists() and any(root.iterdir()))):
            return
    raise UsageError("not a staging root", where=str(root), hint="give what `pit-stage run --to` was given")


def describe_set(root: Path, version: str) -> StagedSet:
    """Describe the set that stands as this version."""
    folder = root / OBJECTS / version
    try:
        dataset = load_dataset(folder)
        # The manifest is the last file a stager writes.
        written = _text((folder / FILE_NAME).stat().st_mtime)
    except (PitError, OSError):
        return _describe_partial(root, folder, version, "damaged")
    return _make_staged_set(
        root,
        folder,
        version,
        "whole" if matches_sizes(folder, dataset) else "damaged",
        dataset=dataset.manifest.name,
        files=len(dataset.manifest.files),
        n_bytes=dataset.manifest.total_bytes,
        written=written,
        part=_format_subset(dataset.manifest.subset),
    )


def matches_sizes(folder: Path, dataset: Dataset) -> bool:
    """Whether `folder` holds this manifest and a file of the right size for each entry; contents are not read."""
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            return False
        with open_regular(folder / FILE_NAME) as file:
            if file.read() != dataset.data:
                return False
        # os.stat of joined text: this is the path of every job that finds its data there, over every file.
        prefix = f"{folder}/"
        for entry in dataset.manifest.files:
            status = os.stat(prefix + entry.path, follow_symlinks=False)  # noqa: PTH116
            if status.st_size != entry.bytes or not stat.S_ISREG(status.st_mode):
                return False
    except OSError:
        return False
    return True


def _format_subset(subset: Subset | msgspec.UnsetType) -> str:
    if not subset:
        return ""
    steps = [f"{start}:{stop}" for start, stop in subset.steps]
    return f"{_first_names(subset.arrays)}; steps {_first_names(steps) or 'none'}"


def _first_names(words: Sequence[str]) -> str:
    return ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")


def _describe_partial(root: Path, folder: Path, version: str, state: State) -> StagedSet:
    found = disk_usage(folder)
    return _make_staged_set(root, folder, version, state, files=found.files, n_bytes=total_bytes([found]))


def _make_staged_set(
    root: Path,
    folder: Path,
    version: str,
    state: State,
    *,
    files: int,
    n_bytes: int,
    dataset: str = "",
    written: str = "",
    part: str = "",
) -> StagedSet:
    record = records.read_stage_record(root, version)
    used = lease.last_used(root, version)
    return StagedSet(
        dataset=dataset,
        version=version,
        path=str(folder),
        state=state,
        files=files,
        bytes=n_bytes,
        staged=(record.staged or written) if state in ("whole", "damaged") else "",
        source=record.source,
        last_used=_text(used) if used else "",
        leased=is_leased(root, version),
        locked=lock_owner(root, version) is not None,
        pinned=record.pinned,
        part=part,
    )


def find_versions(root: Path, identifiers: Iterable[str]) -> list[str]:
    """Return the versions that identifiers name, each once.

    identifiers: versions, unique prefixes of versions, or datasets of one version.

    Raises UsageError for an identifier of none or several.
    """
    root = root.absolute()
    names = {folder.name.removesuffix(".partial"): "" for folder in partial_copies(root)}
    names |= {folder.name: "" for folder in _folders(root / OBJECTS)}
    versions: dict[str, None] = {}
    for identifier in identifiers:
        if identifier not in names:  # only now: reading every manifest takes a while
            names = {name: dataset or _dataset(root / OBJECTS / name) for name, dataset in names.items()}
        fitting = [
            name
            for name, dataset in names.items()
            if identifier and (name.startswith(identifier) or dataset == identifier)
        ]
        if identifier in names:
            fitting = [identifier]
        if len(fitting) > 1:
            message = f'"{identifier}" is {len(fitting)} versions: {", ".join(sorted(fitting))}'
            raise UsageError(message, where=str(root), hint="name one of them")
        if not fitting:
            raise UsageError(
                f'no version "{identifier}"', where=str(root), hint=suggest(identifier, {*names.values()} - {""})
            )
        versions[fitting[0]] = None
    return list(versions)


def partial_copies(root: Path) -> list[Path]:
    """Return the unfinished copies at a root, sorted."""
    return [folder for folder in _folders(root / STAGING_DIR) if folder.suffix == ".partial"]


def disk_usage(path: Path) -> DiskUsage:
    """Measure what a file or folder takes on its disk; files that vanish meanwhile count nothing."""
    files = own = 0
    linked: dict[tuple[int, int], int] = {}
    try:
        own = path.lstat().st_blocks * 512
        todo = [str(path)] if path.is_dir() and not path.is_symlink() else []
    except OSError:
        return DiskUsage(0, 0, {})
    while todo:
        try:
            entries = os.scandir(todo.pop())
        except OSError:
            continue
        with entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                else:
                    files += 1
                if status.st_nlink > 1 and not entry.is_dir(follow_symlinks=False):
                    linked[status.st_dev, status.st_ino] = status.st_blocks * 512
                else:
                    own += status.st_blocks * 512
    return DiskUsage(files, own, linked)


def total_bytes(usages: Iterable[DiskUsage]) -> int:
    """Sum the bytes of folders; a file linked into several of them counts once."""
    own = 0
    linked: dict[tuple[int, int], int] = {}
    for each in usages:
        own += each.own_bytes
        linked |= each.linked_bytes
    return own + sum(linked.values())


def _folders(home: Path) -> list[Path]:
    with translate_errors(home):
        try:
            return sorted(home.iterdir())
        except FileNotFoundError:
            return []
        except PermissionError:
            if home.name == OBJECTS:
                raise
            return []  # a shared root's unfinished sets are its owner's business


def _dataset(folder: Path) -> str:
    try:
        return load_dataset(folder).manifest.name
    except PitError:
        return ""


def _text(seconds: float) -> str:
    try:
        return timestamps.to_rfc3339(datetime.fromtimestamp(seconds, UTC))
    except (ValueError, OverflowError, OSError):  # a clock gone mad
        return ""
