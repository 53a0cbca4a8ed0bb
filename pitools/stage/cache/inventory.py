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
from pitools.core.errors import PitError, UsageError, nearest
from pitools.core.fs import plain_file
from pitools.core.record import Record
from pitools.stage.cache import lease, records
from pitools.stage.cache.layout import OBJECTS, QUARANTINE, holder, is_leased
from pitools.stage.sources.base import Dataset
from pitools.stage.sources.local import reading
from pitools.stage.sources.open import load
from pitools.store.manifest import FILE_NAME, Subset
from pitools.store.publish import TEMPORARY

State = Literal["whole", "damaged", "partial", "quarantined"]


class Staged(Record, frozen=True, kw_only=True, tag="pit.staged/1"):
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


class Usage(NamedTuple):
    """Room that a folder takes. own: bytes of files with one name. linked: bytes of the others, by inode."""

    files: int
    own: int
    linked: dict[tuple[int, int], int]


def staged(root: Path) -> Iterator[Staged]:
    """The versions at a root, sorted, whole or damaged; then unfinished and quarantined ones.

    Raises UsageError when something else stands there, ClusterError.
    """
    root = root.absolute()
    require_root(root, empty=True)
    for folder in _folders(root / OBJECTS):
        yield describe(root, folder.name)
    for folder in partials(root):
        yield _remains(root, folder, folder.name.removesuffix(".partial"), "partial")
    for folder in _folders(root / QUARANTINE):
        yield _remains(root, folder, folder.name.partition(".")[0], "quarantined")


def require_root(root: Path, *, empty: bool = False) -> None:
    """Raise UsageError where nothing was ever staged; `empty`: only where anything else stands. Raises ClusterError."""
    with reading(root):
        if (root / OBJECTS).is_dir() or (empty and not (root.exists() and any(root.iterdir()))):
            return
    raise UsageError("not a staging root", where=str(root), hint="give what `pit-stage run --to` was given")


def describe(root: Path, version: str) -> Staged:
    """The set that stands as this version."""
    folder = root / OBJECTS / version
    try:
        dataset = load(folder)
        # The manifest is the last file a stager writes.
        written = _text((folder / FILE_NAME).stat().st_mtime)
    except (PitError, OSError):
        return _remains(root, folder, version, "damaged")
    return _known(
        root,
        folder,
        version,
        "whole" if looks_whole(folder, dataset) else "damaged",
        dataset=dataset.manifest.name,
        files=len(dataset.manifest.files),
        n_bytes=dataset.manifest.total_bytes,
        written=written,
        part=_part(dataset.manifest.subset),
    )


def looks_whole(folder: Path, dataset: Dataset) -> bool:
    """Whether `folder` holds this manifest and a file of the right size for each entry; contents are not read."""
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            return False
        with plain_file(folder / FILE_NAME) as file:
            if file.read() != dataset.data:
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


def _part(subset: Subset | msgspec.UnsetType) -> str:
    if not subset:
        return ""
    steps = [f"{start}:{stop}" for start, stop in subset.steps]
    return f"{_some(subset.arrays)}; steps {_some(steps) or 'none'}"


def _some(words: Sequence[str]) -> str:
    return ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")


def _remains(root: Path, folder: Path, version: str, state: State) -> Staged:
    found = usage(folder)
    return _known(root, folder, version, state, files=found.files, n_bytes=total([found]))


def _known(
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
) -> Staged:
    record = records.read(root, version)
    used = lease.last_used(root, version)
    return Staged(
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
        locked=holder(root, version) is not None,
        pinned=record.pinned,
        part=part,
    )


def find(root: Path, words: Iterable[str]) -> list[str]:
    """The versions that words mean, each once: a version, the unique beginning of one, or a dataset of one version.

    Raises UsageError for a word that means none or several.
    """
    root = root.absolute()
    names = {folder.name.removesuffix(".partial"): "" for folder in partials(root)}
    names |= {folder.name: "" for folder in _folders(root / OBJECTS)}
    found: dict[str, None] = {}
    for word in words:
        if word not in names:  # only now: reading every manifest takes a while
            names = {name: dataset or _dataset(root / OBJECTS / name) for name, dataset in names.items()}
        fitting = [name for name, dataset in names.items() if word and (name.startswith(word) or dataset == word)]
        if word in names:
            fitting = [word]
        if len(fitting) > 1:
            what = f'"{word}" is {len(fitting)} versions: {", ".join(sorted(fitting))}'
            raise UsageError(what, where=str(root), hint="name one of them")
        if not fitting:
            raise UsageError(f'no version "{word}"', where=str(root), hint=nearest(word, {*names.values()} - {""}))
        found[fitting[0]] = None
    return list(found)


def partials(root: Path) -> list[Path]:
    """The unfinished copies at a root, sorted."""
    return [folder for folder in _folders(root / TEMPORARY) if folder.suffix == ".partial"]


def usage(path: Path) -> Usage:
    """The room that a file or folder takes on its disk; what vanishes meanwhile takes none."""
    files = own = 0
    linked: dict[tuple[int, int], int] = {}
    try:
        own = path.lstat().st_blocks * 512
        todo = [str(path)] if path.is_dir() and not path.is_symlink() else []
    except OSError:
        return Usage(0, 0, {})
    while todo:
        try:
            entries = os.scandir(todo.pop())
        except OSError:
            continue
        with entries:
            for entry in entries:
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                else:
                    files += 1
                if found.st_nlink > 1 and not entry.is_dir(follow_symlinks=False):
                    linked[found.st_dev, found.st_ino] = found.st_blocks * 512
                else:
                    own += found.st_blocks * 512
    return Usage(files, own, linked)


def total(usages: Iterable[Usage]) -> int:
    """Bytes that folders take together: a file that several of them have counts once."""
    own = 0
    linked: dict[tuple[int, int], int] = {}
    for each in usages:
        own += each.own
        linked |= each.linked
    return own + sum(linked.values())


def _folders(home: Path) -> list[Path]:
    with reading(home):
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
        return load(folder).manifest.name
    except PitError:
        return ""


def _text(seconds: float) -> str:
    try:
        return timestamps.text(datetime.fromtimestamp(seconds, UTC))
    except (ValueError, OverflowError, OSError):  # a clock gone mad
        return ""
