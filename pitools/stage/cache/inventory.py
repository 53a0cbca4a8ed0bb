"""List the contents of a root: complete, damaged, partial and quarantined sets, and the bytes each takes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pitools.core import timestamps
from pitools.core.errors import PitError, UsageError, suggest
from pitools.core.fs import open_regular
from pitools.core.record import Record
from pitools.stage.cache import lease, records
from pitools.stage.cache.layout import OBJECTS, QUARANTINE, is_leased, lock_owner
from pitools.stage.sources.base import DatasetVersion
from pitools.stage.sources.find import load_version
from pitools.stage.sources.local import translate_errors
from pitools.store.manifest import MANIFEST_FILE, Subset
from pitools.store.publish import BUILD_DIR
from pitools.store.resolve import PREFIX_DIGITS

State = Literal["present", "damaged", "partial", "quarantined"]


class StagedSet(Record, frozen=True, kw_only=True, tag="pit.stage-set/1"):
    """One version at a root.

    state: by names and sizes; `partial` is being copied (then it is `locked`) or was interrupted. files, bytes: of a
    present set as listed in its manifest, else as measured on disk. source: where it was staged from, "" when unknown,
    which protects it from eviction. staged, last_used: when, or "". leased: a process reads it. locked: a process
    stages, repairs or evicts it. pinned: never evicted. part: the selected arrays and steps, of a part of a version.
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
    """The space a folder takes. own_bytes: of files with one name. linked_bytes: of hard-linked files, by inode."""

    files: int
    own_bytes: int
    linked_bytes: dict[tuple[int, int], int]


def list_sets(root: Path) -> Iterator[StagedSet]:
    """Yield the versions at a root, sorted, present or damaged; then partial and quarantined ones.

    Raises UsageError when the folder is no staging root, ClusterError.
    """
    root = root.absolute()
    require_root(root, allow_empty=True)
    for folder in _subfolders(root / OBJECTS):
        yield describe_set(root, folder.name)
    for folder in partial_copies(root):
        yield _describe_partial(root, folder, folder.name.partition(".")[0], "partial")
    for folder in _subfolders(root / QUARANTINE):
        yield _describe_partial(root, folder, folder.name.partition(".")[0], "quarantined")


def require_root(root: Path, *, allow_empty: bool = False) -> None:
    """Raise UsageError for a folder that is no staging root; `allow_empty` accepts an absent or empty one.

    Raises ClusterError.
    """
    with translate_errors(root):
        if (root / OBJECTS).is_dir() or (
            allow_empty and not (root.exists() and (not root.is_dir() or any(root.iterdir())))
        ):
            return
    raise UsageError("not a staging root", where=str(root), hint="give the ROOT of `pit-stage run --to ROOT`")


def describe_set(root: Path, version: str) -> StagedSet:
    """Return the record of the set staged as this version."""
    folder = root / OBJECTS / version
    try:
        dataset = load_version(folder)
        # A stager writes the manifest last.
        written = _format_time((folder / MANIFEST_FILE).stat().st_mtime)
    except (PitError, OSError):
        return _describe_partial(root, folder, version, "damaged")
    return _make_staged_set(
        root,
        folder,
        version,
        "present" if matches_sizes(folder, dataset) else "damaged",
        dataset=dataset.manifest.name,
        files=len(dataset.manifest.files),
        n_bytes=dataset.manifest.total_bytes,
        written=written,
        part=_format_subset(dataset.manifest.subset),
    )


def matches_sizes(folder: Path, dataset: DatasetVersion) -> bool:
    """Whether `folder` holds this manifest and a file of the right size for each entry; contents are not read."""
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            return False
        with open_regular(folder / MANIFEST_FILE) as file:
            if file.read() != dataset.data:
                return False
        # os.stat of joined text, for speed: every job whose data is present checks every file here.
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


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _describe_partial(root: Path, folder: Path, version: str, state: State) -> StagedSet:
    usage = disk_usage(folder)
    return _make_staged_set(root, folder, version, state, files=usage.files, n_bytes=total_bytes([usage]))


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
    is_apart = state == "quarantined"  # the records, leases and locks are those of a set in `objects`
    record = records.StageRecord() if is_apart else records.read_stage_record(root, version)
    last_used = 0 if is_apart else lease.last_used(root, version)
    return StagedSet(
        dataset=dataset,
        version=version,
        path=str(folder),
        state=state,
        files=files,
        bytes=n_bytes,
        staged=(record.staged or written) if state in ("present", "damaged") else "",
        source=record.source,
        last_used=_format_time(last_used) if last_used else "",
        leased=not is_apart and is_leased(root, version),
        locked=not is_apart and lock_owner(root, version) is not None,
        pinned=record.pinned,
        part=part,
    )


def find_versions(root: Path, identifiers: Iterable[str], *, partial: bool) -> list[str]:
    """Return the versions that identifiers name, each once. partial: also those of which there is only a partial copy.

    identifiers: versions, unique prefixes of at least six digits, or names of datasets with one version.

    Raises UsageError for an identifier of none or several.
    """
    root = root.absolute()
    names = {folder.name.partition(".")[0]: "" for folder in (partial_copies(root) if partial else ())}
    names |= {folder.name: "" for folder in _subfolders(root / OBJECTS)}
    versions: dict[str, None] = {}
    for identifier in identifiers:
        if identifier not in names:  # not before: reading every manifest is slow
            names = {name: dataset or dataset_name(root / OBJECTS / name) for name, dataset in names.items()}
        matches = [
            name
            for name, dataset in names.items()
            if (len(identifier) >= PREFIX_DIGITS and name.startswith(identifier))
            or (identifier and dataset == identifier)
        ]
        if identifier in names:
            matches = [identifier]
        if len(matches) > 1:
            message = f'"{identifier}" is {len(matches)} versions: {", ".join(sorted(matches))}'
            raise UsageError(message, where=str(root), hint="name one of them")
        if not matches:
            raise UsageError(
                f'no {"" if partial else "staged "}version "{identifier}"',
                where=str(root),
                hint=suggest(identifier, {*names.values()} - {""}),
            )
        versions[matches[0]] = None
    return list(versions)


def partial_copies(root: Path) -> list[Path]:
    """Return the partial copies at a root, sorted."""
    return [folder for folder in _subfolders(root / BUILD_DIR) if folder.suffix == ".partial"]


def disk_usage(path: Path) -> DiskUsage:
    """Measure the space a file or folder takes; files that vanish meanwhile are skipped."""
    files = own_bytes = 0
    linked: dict[tuple[int, int], int] = {}
    try:
        own_bytes = path.lstat().st_blocks * 512
        folders = [str(path)] if path.is_dir() and not path.is_symlink() else []
    except OSError:
        return DiskUsage(0, 0, {})
    while folders:
        try:
            entries = os.scandir(folders.pop())
        except OSError:
            continue
        with entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    files += 1
                if status.st_nlink > 1 and not entry.is_dir(follow_symlinks=False):
                    linked[status.st_dev, status.st_ino] = status.st_blocks * 512
                else:
                    own_bytes += status.st_blocks * 512
    return DiskUsage(files, own_bytes, linked)


def total_bytes(usages: Iterable[DiskUsage]) -> int:
    """Sum the bytes of folders; a file linked into several of them counts once."""
    own_bytes = 0
    linked: dict[tuple[int, int], int] = {}
    for usage in usages:
        own_bytes += usage.own_bytes
        linked |= usage.linked_bytes
    return own_bytes + sum(linked.values())


def _subfolders(parent: Path) -> list[Path]:
    with translate_errors(parent):
        try:
            return sorted(parent.iterdir())
        except FileNotFoundError:
            return []
        except PermissionError:
            if parent.name == OBJECTS:
                raise
            return []  # only the owner of a shared root may list its partial copies


def dataset_name(folder: Path) -> str:
    """Return the name of a set's dataset; "" when its manifest cannot be read."""
    try:
        return load_version(folder).manifest.name
    except (PitError, OSError):
        return ""


def _format_time(seconds: float) -> str:
    try:
        return timestamps.unix_to_rfc3339(seconds)
    except (ValueError, OverflowError, OSError):  # out of range, from a wrong clock
        return ""
