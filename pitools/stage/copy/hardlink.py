"""What a new version shares with versions that are staged already: hard links instead of copies."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

from pitools.core.errors import PitError
from pitools.core.fs import open_regular
from pitools.core.record import decode_json
from pitools.stage.cache.layout import OBJECTS
from pitools.stage.sources.base import Dataset, all_folders
from pitools.stage.sources.open import load_dataset
from pitools.store.manifest import FILE_NAME, FileEntry

# The newest few of a dataset's versions hold nearly all that a next one has in common with any.
_MAX_OLDER = 4


class _Name(msgspec.Struct, frozen=True):
    """The one field of a manifest that says whose version it is; the rest is not decoded."""

    name: str


def link_shared(dataset: Dataset, root: Path, target: Path, skip: set[int]) -> set[int]:
    """Link into the folder `target` the files that other versions of this dataset at `root` have with the same content;
    returns their places in the manifest.

    A file is believed to hold what its version's manifest says while nothing has written to it since it was staged:
    its size is right, and it is no younger than the manifest, which is written last. Never raises for what is wrong
    with another version: its files are then copied.
    """
    older = _older_versions(dataset, root)
    if not older:
        return set()
    wanted: dict[str, list[int]] = {}
    for index, entry in enumerate(dataset.manifest.files):
        if entry.digest and index not in skip:
            wanted.setdefault(entry.digest, []).append(index)
    linked: set[int] = set()
    for folder in older if wanted else ():
        if not linked:
            for inside in sorted(all_folders(dataset.manifest.files)):
                (target / inside).mkdir(exist_ok=True)
                (target / inside).chmod(0o755)  # whatever the umask; who may enter is for the root to say
        linked |= _link_from(folder, target, dataset.manifest.files, wanted)
    return linked


def _older_versions(dataset: Dataset, root: Path) -> list[Path]:
    """Return the newest staged versions of the same name or the parent, newest first."""
    versions = []
    for folder in (root / OBJECTS).iterdir():
        try:
            with open_regular(folder / FILE_NAME) as file:
                staged = os.fstat(file.fileno()).st_mtime_ns
                name = decode_json(file.read(), _Name).name
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue
        if folder.name != dataset.version and (name == dataset.manifest.name or folder.name == dataset.manifest.parent):
            versions.append((staged, folder))
    return [folder for _, folder in sorted(versions, reverse=True)[:_MAX_OLDER]]


def _link_from(folder: Path, to: Path, files: tuple[FileEntry, ...], wanted: dict[str, list[int]]) -> set[int]:
    linked: set[int] = set()
    try:
        older = load_dataset(folder)
        staged = (folder / FILE_NAME).stat().st_mtime_ns
    except (PitError, OSError):
        return linked
    for entry in older.manifest.files:
        if entry.digest not in wanted or not _is_untouched(f"{folder}/{entry.path}", entry, staged):
            continue
        try:
            for index in wanted[entry.digest]:
                _link_one(f"{folder}/{entry.path}", f"{to}/{files[index].path}")
                linked.add(index)
        except OSError:  # too many links, or a file system that has none
            continue
        del wanted[entry.digest]
    return linked


def _is_untouched(path: str, entry: FileEntry, staged_ns: int) -> bool:
    try:
        status = os.stat(path, follow_symlinks=False)  # noqa: PTH116 - a hundred thousand of them
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == entry.bytes and status.st_mtime_ns <= staged_ns


def _link_one(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:  # an interrupted copy left it
        os.unlink(target)  # noqa: PTH108
        os.link(source, target, follow_symlinks=False)
