"""Hard-link files that a new version shares with versions already staged."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import msgspec

from pitools.core.errors import PitError
from pitools.core.fs import open_regular
from pitools.core.record import decode_json
from pitools.stage.cache.layout import OBJECTS
from pitools.stage.sources.base import DatasetVersion, all_folders
from pitools.stage.sources.find import load_version
from pitools.store.manifest import MANIFEST_FILE, FileEntry

# A new version shares most with the newest few versions of its dataset.
_MAX_OLDER = 4


class _ManifestName(msgspec.Struct, frozen=True):
    """The only field of a manifest needed here; the rest is not decoded."""

    name: str


def find_shared(dataset: DatasetVersion, root: Path, skip: set[int]) -> dict[int, str]:
    """Find files of equal content in other staged versions of this dataset; return their paths by manifest index.

    A file is trusted to match its version's manifest while its size is right and it is no younger than the manifest,
    which is written last. Errors in another version are never raised: its files are copied instead.
    """
    indexes_by_digest: dict[str, list[int]] = {}
    for index, entry in enumerate(dataset.manifest.files):
        if entry.digest and index not in skip:
            indexes_by_digest.setdefault(entry.digest, []).append(index)
    shared: dict[int, str] = {}
    for folder in _older_versions(dataset, root) if indexes_by_digest else ():
        shared |= _find_in(folder, indexes_by_digest)
    return shared


def link_shared(dataset: DatasetVersion, root: Path, target: Path, skip: set[int]) -> set[int]:
    """Link the files that `find_shared` returns into `target`; return their manifest indexes."""
    shared = find_shared(dataset, root, skip)
    for subfolder in sorted(all_folders(dataset.manifest.files)) if shared else ():
        (target / subfolder).mkdir(exist_ok=True)
        (target / subfolder).chmod(0o755)  # regardless of the umask: the root's mode decides on access
    linked: set[int] = set()
    for index, path in shared.items():
        with contextlib.suppress(OSError):  # too many links, or a file system without links
            _link_file(path, f"{target}/{dataset.manifest.files[index].path}")
            linked.add(index)
    return linked


def _older_versions(dataset: DatasetVersion, root: Path) -> list[Path]:
    """Return the newest staged versions of the same name or the parent, newest first."""
    versions = []
    for folder in (root / OBJECTS).glob("*"):
        try:
            with open_regular(folder / MANIFEST_FILE) as file:
                staged_ns = os.fstat(file.fileno()).st_mtime_ns
                name = decode_json(file.read(), _ManifestName).name
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue
        if folder.name != dataset.version and (name == dataset.manifest.name or folder.name == dataset.manifest.parent):
            versions.append((staged_ns, folder))
    return [folder for _, folder in sorted(versions, reverse=True)[:_MAX_OLDER]]


def _find_in(folder: Path, indexes_by_digest: dict[str, list[int]]) -> dict[int, str]:
    """Find files of these digests in a staged version, and remove the digests found."""
    shared: dict[int, str] = {}
    try:
        older_version = load_version(folder)
        staged_ns = (folder / MANIFEST_FILE).stat().st_mtime_ns
    except (PitError, OSError):
        return shared
    for entry in older_version.manifest.files:
        path = f"{folder}/{entry.path}"
        if entry.digest in indexes_by_digest and _is_untouched(path, entry, staged_ns):
            shared |= dict.fromkeys(indexes_by_digest.pop(entry.digest), path)
    return shared


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
