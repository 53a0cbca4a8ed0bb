"""What a search needs to know of every version, in one local file that is only ever a shortcut.

It is believed as far as the folders it was made from have not changed since; of a dataset that did, only what changed
is read again. A file that is damaged, of another release, or somebody else's counts for nothing.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pitools.core import user_dirs
from pitools.core.errors import ClusterError, PitError
from pitools.core.fs import from_os_error, open_regular, write_atomic
from pitools.core.progress import progress_bar
from pitools.dataset.versions import source_bytes
from pitools.store import manifest as manifests
from pitools.store import retirement, tags, version_state
from pitools.store.version_list import is_name, is_version, lost_manifest_of

FORMAT = 2  # of the file
_CHECKSUM_BYTES = 4
# Two changes within one tick of the file system's clock look like one: so young a folder is read again.
_TICK_NS = 2_000_000_000
_PROGRESS_AFTER = 500


class VersionRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One version. folder: its name, and version: "" where that is the same. fields, tasks: numbers in its home's."""

    folder: str
    version: str
    mtime_ns: int
    episodes: int
    steps: int
    bytes: int
    files: int
    source_bytes: int
    parent: str
    fields: int
    tasks: int


class DatasetIndex(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One dataset. stamps: when a folder last changed (ctime), by its path; 0 where that was too recent to tell. rows:
    oldest first.

    fields, tasks: what its versions have, names of arrays and instructions, one a line. tags: version by tag.
    quarantined: number of episodes by version, -1 for all of it. damaged: folders of versions whose manifest could not
    be read.
    """

    stamps: dict[str, int]
    rows: tuple[VersionRow, ...]
    fields: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    tags: dict[str, str] = {}
    retired: tuple[str, ...] = ()
    quarantined: dict[str, int] = {}
    damaged: tuple[str, ...] = ()


class RootIndex(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All datasets of a root, by name."""

    format: int
    root: str
    datasets: dict[str, DatasetIndex]


def load_index(root: Path, *, rebuild: bool = False) -> tuple[RootIndex, list[PitError]]:
    """What is in a root now, and what of it is damaged. rebuild: from the versions themselves."""
    cached = {} if rebuild else _read_index(root)
    names = sorted(folder.name for folder in os.scandir(root) if is_name(folder.name) and folder.is_dir())
    datasets: dict[str, DatasetIndex] = {}
    errors: list[PitError] = []
    changed = len(names) != len(cached)
    for name in names:
        entry = cached.get(name)
        if entry is None or entry.damaged or not _is_current(entry.stamps):
            entry = index_dataset(root, name, entry, errors)
            changed = True
        datasets[name] = entry
    index = RootIndex(FORMAT, str(root.absolute()), datasets)
    if changed:
        _write_index(root, index)
    return index, errors


def index_path(root: Path) -> Path:
    """Where the index of a root is kept. Two roots may have one file: whose it is stands in it."""
    folder = user_dirs.xdg_dir("XDG_CACHE_HOME", ".cache") / "pitools" / "datasets"
    return folder / f"{zlib.crc32(os.fsencode(root.absolute())):08x}.msgpack"


def _read_index(root: Path) -> dict[str, DatasetIndex]:
    try:
        with open_regular(index_path(root)) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return {}
            data = file.read()
        if data[:_CHECKSUM_BYTES] != _checksum(data[_CHECKSUM_BYTES:]):
            return {}
        index = msgspec.msgpack.decode(data[_CHECKSUM_BYTES:], type=RootIndex)
    except (OSError, RuntimeError, ValueError):  # msgspec's errors are ValueErrors
        return {}
    return index.datasets if index.format == FORMAT and index.root == str(root.absolute()) else {}


def _write_index(root: Path, index: RootIndex) -> None:
    path = index_path(root)
    with contextlib.suppress(OSError, PitError):  # it is a shortcut; a home that is full or read-only has none
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = msgspec.msgpack.encode(index)
        write_atomic(path, _checksum(data) + data, mode=0o600, durable=False)


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(_CHECKSUM_BYTES, "big")


def _is_current(stamps: dict[str, int]) -> bool:
    try:
        # Not mtime, which a copy of a root, or `rsync` into it, sets back.
        return all(os.stat(path).st_ctime_ns == stamp for path, stamp in stamps.items())  # noqa: PTH116 (thousands)
    except OSError:
        return False


def index_dataset(root: Path, name: str, previous: DatasetIndex | None, errors: list[PitError]) -> DatasetIndex:
    """What is there of a dataset. previous: what was known of it. errors: what is damaged is added here."""
    stamps = _dir_mtimes(root, name)
    try:
        folders = sorted(folder for folder in os.listdir(root / name) if not folder.startswith("."))
    except OSError as error:
        errors.append(ClusterError(f"cannot be read: {error.strerror}", where=str(root / name)))
        return DatasetIndex(stamps, (), damaged=(name,))
    known = {row.folder: row for row in previous.rows} if previous else {}
    fields, tasks = _TextTable(previous.fields if previous else ()), _TextTable(previous.tasks if previous else ())
    damaged: list[str] = []
    rows = []
    for folder, mtime_ns in _manifests(root / name, folders, quiet=len(folders) - len(known) < _PROGRESS_AFTER):
        if not mtime_ns:
            if lost := lost_manifest_of(root / name / folder):
                errors.append(lost)
                damaged.append(folder)
            continue
        row = known.get(folder)
        if row is None or row.mtime_ns != mtime_ns:
            try:
                row = _version_row(root / name / folder, mtime_ns, fields, tasks)
            except PitError as error:
                errors.append(error)
                damaged.append(folder)
                continue
        rows.append(row)
    tagged: dict[str, str] = {}
    gone: tuple[str, ...] = ()
    held: dict[str, int] = {}
    try:
        tagged = {tag: value.version for tag, value in tags.read_tags(root, name).items()}
        gone = tuple(retirement.read_retirements(root, name))
        kept = version_state.list_names(version_state.quarantine_file(root, name, "").parent, ".json")
        held = {path.stem: count for path in kept if (count := _quarantined_count(root / name / path.stem))}
    except (PitError, OSError) as error:
        errors.append(
            error if isinstance(error, PitError) else from_os_error(error, version_state.catalog_dir(root, name))
        )
        damaged.append(version_state.CATALOG)
    rows.sort(key=lambda row: (row.mtime_ns, row.folder))
    return DatasetIndex(
        stamps, tuple(rows), tuple(fields.numbers), tuple(tasks.numbers), tagged, gone, held, tuple(damaged)
    )


class _TextTable:
    """Texts by number. Most versions of a dataset have the same."""

    def __init__(self, known: tuple[str, ...]) -> None:
        self.numbers = {text: number for number, text in enumerate(known)}

    def __call__(self, lines: list[str]) -> int:
        return self.numbers.setdefault("\n".join(lines), len(self.numbers))


def _dir_mtimes(root: Path, name: str) -> dict[str, int]:
    """The folders that a dataset's part is made of; one that is missing shows in the one above when it is made."""
    home = version_state.catalog_dir(root, name)
    folders = [root / name]
    if home.is_dir():
        folders += [
            home,
            version_state.retired_file(root, name, "").parent,
            version_state.quarantine_file(root, name, "").parent,
        ]
        named = version_state.tags_dir(root, name)
        folders += [named, *version_state.list_names(named)]
    young = time.time_ns() - _TICK_NS
    stamps = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            changed_ns = folder.stat().st_ctime_ns
            stamps[str(folder.absolute())] = changed_ns if changed_ns < young else 0
    return stamps


def _manifests(home: Path, folders: Sequence[str], *, quiet: bool) -> Iterator[tuple[str, int]]:
    """The folders of versions and their manifests' times of last write, 0 for one that has none."""
    with progress_bar(f"index {home.name}", len(folders), unit="versions", quiet=quiet) as advance:
        for folder in folders:
            advance(1)
            try:
                mtime_ns = os.stat(f"{home}/{folder}/{manifests.FILE_NAME}").st_mtime_ns  # noqa: PTH116 (thousands)
            except OSError:  # no version
                if not is_version(folder):
                    continue
                mtime_ns = 0
            yield folder, mtime_ns


def _quarantined_count(path: Path) -> int:
    record = version_state.read_quarantine(path)
    return 0 if record is None else -1 if record.whole_version else len(record.episodes)


def _version_row(path: Path, mtime_ns: int, fields: _TextTable, tasks: _TextTable) -> VersionRow:
    manifest, data = manifests.load_manifest(path)
    version = manifests.version_of(data)
    return VersionRow(
        path.name,
        "" if version == path.name else version,
        mtime_ns,
        manifest.episodes,
        manifest.steps,
        manifest.total_bytes,
        len(manifest.files),
        source_bytes(manifest),
        manifest.parent,
        fields(sorted(name for name in manifest.arrays if not name.startswith(manifests.EPISODE_PREFIX))),
        tasks(sorted(" ".join(task.split()) for task in (manifest.tasks or ()))),
    )
