"""Hard-link files that a new version shares with versions already staged."""

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
from pitools.store.manifest import MANIFEST_FILE, FileEntry

# A new version shares most with the newest few versions of its dataset.
_MAX_OLDER = 4


class _ManifestName(msgspec.Struct, frozen=True):
    """The only field of a manifest needed here; the rest is not decoded."""

    name: str


def link_shared(dataset: Dataset, root: Path, target: Path, skip: set[int]) -> set[int]:
    """Link files of equal content from other staged versions of this dataset into `target`; return their manifest
    indexes.

    A file is trusted to match its version's manifest while its size is right and it is no younger than the manifest,
    which is written last. Errors in another version are never raised: its files are copied instead.
    """
    older_versions = _older_versions(dataset, root)
    if not older_versions:
        return set()
    indexes_by_digest: dict[str, list[int]] = {}
    for index, entry in enumerate(dataset.manifest.files):
        if entry.digest and index not in skip:
            indexes_by_digest.setdefault(entry.digest, []).append(index)
    linked: set[int] = set()
    for folder in older_versions if indexes_by_digest else ():
        if not linked:
            for subfolder in sorted(all_folders(dataset.manifest.files)):
                (target / subfolder).mkdir(exist_ok=True)
                (target / subfolder).chmod(0o755)  # regardless of the umask: the root's mode decides on access
        linked |= _link_from(folder, target, dataset.manifest.files, indexes_by_digest)
    return linked


def _older_versions(dataset: Dataset, root: Path) -> list[Path]:
    """Return the newest staged versions of the same name or the parent, newest first."""
    versions = []
    for folder in (root / OBJECTS).iterdir():
        try:
            with open_regular(folder / MANIFEST_FILE) as file:
                staged_ns = os.fstat(file.fileno()).st_mtime_ns
                name = decode_json(file.read(), _ManifestName).name
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue
        if folder.name != dataset.version and (name == dataset.manifest.name or folder.name == dataset.manifest.parent):
            versions.append((staged_ns, folder))
    return [folder for _, folder in sorted(versions, reverse=True)[:_MAX_OLDER]]


def _link_from(
    folder: Path, target: Path, files: tuple[FileEntry, ...], indexes_by_digest: dict[str, list[int]]
) -> set[int]:
    linked: set[int] = set()
    try:
        older_version = load_dataset(folder)
        staged_ns = (folder / MANIFEST_FILE).stat().st_mtime_ns
    except (PitError, OSError):
        return linked
    for entry in older_version.manifest.files:
        if entry.digest not in indexes_by_digest or not _is_untouched(f"{folder}/{entry.path}", entry, staged_ns):
            continue
        try:
            for index in indexes_by_digest[entry.digest]:
                _link_file(f"{folder}/{entry.path}", f"{target}/{files[index].path}")
                linked.add(index)
        except OSError:  # too many links, or a file system without links
            continue
        del indexes_by_digest[entry.digest]
    return linked


def _is_untouched(path: str, entry: FileEntry, staged_ns: int) -> bool:
    try:
        status = os.stat(path, follow_symlinks=False)  # noqa: PTH116 - a hundred thousand of them
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == entry.bytes and status.st_mtime_ns <= staged_ns


def _link_file(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:  # left by an interrupted copy
        os.unlink(target)  # noqa: PTH108
        os.link(source, target, follow_symlinks=False)
