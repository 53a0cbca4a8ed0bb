"""A local index of the versions in a root, so that a search does not read every manifest.

It is used as long as a dataset's folder and its catalog have not changed; of a changed dataset, only the changes are
read. A change in a version's own folder, such as a lost manifest, changes neither: who lists a version has to ask
`has_changed`. An index that is damaged, of another release, or of another user is ignored.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
import zlib
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

import msgspec

from pitools.core import user_dirs
from pitools.core.errors import ClusterError, PitError
from pitools.core.fs import from_os_error, open_regular, write_atomic
from pitools.core.progress import progress_bar
from pitools.dataset.versions import recording_bytes
from pitools.store import manifest as manifests
from pitools.store import retirement, tags, version_state
from pitools.store.version_list import is_name, is_version, lost_manifest_of, published_ns

FORMAT = 5  # of the file
_CHECKSUM_BYTES = 4
# Two changes within one tick of the file system's clock cannot be told apart: a folder this young is read again.
_TICK_NS = 2_000_000_000
_PROGRESS_AFTER = 500


class VersionRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One version. folder: its name, and version: "" where that is the same. mtime_ns: of its manifest. arrays_index,
    instructions_index: into `arrays` and `instructions` of its dataset."""

    folder: str
    version: str
    mtime_ns: int
    published_ns: int
    episodes: int
    steps: int
    bytes: int
    files: int
    recording_bytes: int
    parent: str
    arrays_index: int
    instructions_index: int


class DatasetIndex(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One dataset. stamps: ctime by folder path, 0 if it was too recent to be reliable. rows: versions, oldest first.

    arrays, instructions: array names and instructions of its versions, one per line. tags: version by tag. quarantined:
    number of episodes by version, -1 for a whole version. damaged: folders of versions with an unreadable manifest.
    """

    stamps: dict[str, int]
    rows: tuple[VersionRow, ...]
    arrays: tuple[str, ...] = ()
    instructions: tuple[str, ...] = ()
    tags: dict[str, str] = {}
    retired: tuple[str, ...] = ()
    quarantined: dict[str, int] = {}
    damaged: tuple[str, ...] = ()


class RootIndex(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All datasets of a root, by name."""

    format: int
    root: str
    datasets: dict[str, DatasetIndex]


def load_index(
    root: Path, *, rebuild: bool = False, changed_names: Container[str] = ()
) -> tuple[RootIndex, list[PitError]]:
    """Return a root's index, brought up to date, and the errors of damaged versions. rebuild: read all manifests.
    changed_names: datasets of which a version `has_changed`."""
    cached = {} if rebuild else _read_index(root)
    names = sorted(folder.name for folder in os.scandir(root) if is_name(folder.name) and folder.is_dir())
    datasets: dict[str, DatasetIndex] = {}
    errors: list[PitError] = []
    changed = len(names) != len(cached)
    for name in names:
        entry = cached.get(name)
        if entry is None or name in changed_names or entry.damaged or not _is_current(entry.stamps):
            entry = index_dataset(root, name, entry, errors)
            changed = True
        datasets[name] = entry
    index = RootIndex(FORMAT, str(root.absolute()), datasets)
    if changed:
        _write_index(root, index)
    return index, errors


def has_changed(home: Path, row: VersionRow) -> bool:
    """Return whether the manifest of a version of the dataset in folder `home` is lost, or not the indexed one."""
    try:
        return os.stat(f"{home}/{row.folder}/{manifests.MANIFEST_FILE}").st_mtime_ns != row.mtime_ns  # noqa: PTH116
    except OSError:
        return True


def index_path(root: Path) -> Path:
    """Return the path of a root's index. Two roots may share a path: the index contains the root's."""
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
    """Return the index of a dataset. previous: its last index, to reuse. errors: damaged versions are appended here."""
    stamps = _dir_ctimes(root, name)
    try:
        folders = sorted(folder for folder in os.listdir(root / name) if not folder.startswith("."))
    except OSError as error:
        errors.append(ClusterError(f"cannot be read: {error.strerror}", where=str(root / name)))
        return DatasetIndex(stamps, (), damaged=(name,))
    old_rows = {row.folder: row for row in previous.rows} if previous else {}
    arrays = _TextTable(previous.arrays if previous else ())
    instructions = _TextTable(previous.instructions if previous else ())
    damaged: list[str] = []
    rows = []
    for folder, mtime_ns in _manifests(root / name, folders, quiet=len(folders) - len(old_rows) < _PROGRESS_AFTER):
        if not mtime_ns:
            if lost_manifest := lost_manifest_of(root / name / folder):
                errors.append(lost_manifest)
                damaged.append(folder)
            continue
        row = old_rows.get(folder)
        if row is None or row.mtime_ns != mtime_ns:
            try:
                row = _version_row(root / name / folder, mtime_ns, arrays, instructions)
            except PitError as error:
                errors.append(error)
                damaged.append(folder)
                continue
        rows.append(row)
    tagged: dict[str, str] = {}
    gone: tuple[str, ...] = ()
    quarantined: dict[str, int] = {}
    try:
        tagged = {tag: value.version for tag, value in tags.read_tags(root, name).items()}
        gone = tuple(retirement.read_retirements(root, name))
        quarantine_names = version_state.list_names(version_state.quarantine_file(root, name, "").parent, ".json")
        quarantined = {
            path.stem: count for path in quarantine_names if (count := _quarantined_count(root / name / path.stem))
        }
    except (PitError, OSError) as error:
        errors.append(
            error if isinstance(error, PitError) else from_os_error(error, version_state.catalog_dir(root, name))
        )
        damaged.append(version_state.CATALOG)
    rows.sort(key=lambda row: (row.published_ns, row.folder))
    return DatasetIndex(
        stamps,
        tuple(rows),
        tuple(arrays.numbers),
        tuple(instructions.numbers),
        tagged,
        gone,
        quarantined,
        tuple(damaged),
    )


class _TextTable:
    """Texts by number. Most versions of a dataset have the same."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self.numbers = {text: number for number, text in enumerate(texts)}

    def __call__(self, lines: list[str]) -> int:
        return self.numbers.setdefault("\n".join(lines), len(self.numbers))


def _dir_ctimes(root: Path, name: str) -> dict[str, int]:
    """Return the ctimes of the folders that affect a dataset's index; a missing one changes its parent when created."""
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
    """Yield the folders of versions, each with its manifest's mtime, 0 without a manifest."""
    with progress_bar(f"index {home.name}", len(folders), unit="versions", quiet=quiet) as advance:
        for folder in folders:
            advance(1)
            try:
                mtime_ns = os.stat(f"{home}/{folder}/{manifests.MANIFEST_FILE}").st_mtime_ns  # noqa: PTH116 (thousands)
            except OSError:  # no version
                if not is_version(folder):
                    continue
                mtime_ns = 0
            yield folder, mtime_ns


def _quarantined_count(path: Path) -> int:
    record = version_state.read_quarantine(path)
    return 0 if record is None else -1 if record.whole_version else len(record.episodes)


def _version_row(path: Path, mtime_ns: int, arrays: _TextTable, instructions: _TextTable) -> VersionRow:
    manifest, data = manifests.load_manifest(path)
    version = manifests.version_of(data)
    return VersionRow(
        path.name,
        "" if version == path.name else version,
        mtime_ns,
        published_ns(path),
        manifest.episodes,
        manifest.steps,
        manifest.total_bytes,
        len(manifest.files),
        recording_bytes(manifest),
        manifest.parent,
        arrays(sorted(name for name in manifest.arrays if not name.startswith(manifests.EPISODE_PREFIX))),
        instructions(sorted(" ".join(text.split()) for text in (manifest.instructions or ()))),
    )
