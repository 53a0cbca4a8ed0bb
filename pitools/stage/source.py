"""A dataset version on disk: found, its manifest read, its files opened without following a link out of it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import msgspec

from pitools.core.errors import ClusterError, DataError, PitError, Unreachable, UsageError
from pitools.store import manifest as manifests
from pitools.store.manifest import FILE_NAME, FileEntry, Manifest

# O_NONBLOCK: a FIFO put where a file should be would otherwise hold the open for ever.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """One version on disk. data: the exact bytes of its manifest."""

    folder: Path
    manifest: Manifest
    data: bytes
    version: str


def find(path: Path) -> Path:
    """The version folder that `path` means: itself, or the only version inside `<root>/<name>`.

    Raises UsageError when it is no folder or holds several versions, DataError when it holds none, else as `reading`.
    """
    path = path.absolute()
    with reading(path):
        if path.is_file():
            hint = f"first: pit dataset ingest {path.name} --to DIR --name NAME"
            raise UsageError("a file, not a dataset", where=str(path), hint=hint)
        if not path.is_dir():
            raise UsageError("no such folder", where=str(path), hint="give <root>/<name>/<version>")
        if os.path.lexists(path / FILE_NAME):
            return path
        inside = versions(path)
    if not inside:
        hint = "give the folder of one version, such as <root>/<name>/<version>"
        raise DataError("not a dataset: it has no manifest.json", where=str(path), hint=hint)
    if len(inside) > 1:
        names = ", ".join(folder.name for folder in inside)
        raise UsageError(f"there are {len(inside)} versions: {names}", where=str(path), hint="name one of them")
    return inside[0]


def versions(path: Path) -> list[Path]:
    """The version folders inside `<root>/<name>`, sorted; links to one of them (`latest`) do not count again."""
    return sorted(entry for entry in path.iterdir() if not entry.is_symlink() and os.path.lexists(entry / FILE_NAME))


def load(folder: Path) -> Dataset:
    """Read and check a version's manifest. Raises DataError when it is not one, or not of the folder's name."""
    path = folder / FILE_NAME
    with opened(folder) as root:
        os.close(open_file(root, FILE_NAME, where=path))  # a link or a FIFO is refused before anything reads it
    manifest, data = manifests.load(folder)
    version = manifests.version(data)
    if _is_version(folder.name, like=version) and folder.name != version:
        what = f"the manifest belongs to version {version}, not to the folder it is in"
        raise DataError(what, where=str(path), hint="it was changed after it was written: ingest or stage again")
    _refuse_file_as_folder(manifest.files, path)
    return Dataset(folder=folder, manifest=manifest, data=data, version=version)


def _is_version(name: str, *, like: str) -> bool:
    return len(name) == len(like) and set(name) <= set("0123456789abcdef")


def _refuse_file_as_folder(files: tuple[FileEntry, ...], where: Path) -> None:
    names = {entry.path for entry in files} | {FILE_NAME}
    folders = {str(parent) for entry in files for parent in PurePosixPath(entry.path).parents}
    if both := names & folders:
        raise DataError(f"the manifest names {min(both)!r} both as a file and as a folder", where=str(where))


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A descriptor of a folder, to open files beneath. Raises as `reading`."""
    with reading(folder):
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(root: int, path: str, *, where: Path) -> int:
    """Open a regular file beneath `root` for reading; no part of `path` may be a link. Returns a descriptor.

    Raises DataError when it is missing, a link or not a regular file, else as `reading`.
    """
    *folders, name = PurePosixPath(path).parts
    at = root
    try:
        with reading(where):
            for folder in folders:
                # O_NOFOLLOW speaks of the last part only, so each part is opened as a last part.
                below = os.open(folder, _FOLDER, dir_fd=at)
                if at != root:
                    os.close(at)
                at = below
            descriptor = os.open(name, _FILE, dir_fd=at)
    finally:
        if at != root:
            os.close(at)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError("not a regular file", where=str(where), hint="a dataset holds plain files only")
    return descriptor


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """OSErrors of reading `path` become DataError (gone, or a link), Unreachable (no answer) or ClusterError."""
    try:
        yield
    except OSError as error:
        raise read_error(error, path) from error


def read_error(error: OSError, path: Path) -> PitError:
    """What a failed open or read means: gone or a link → data is wrong, no answer → later, else refused."""
    if error.errno in (errno.ENOENT, errno.ENXIO):
        return DataError("missing", where=str(path), hint="the manifest names it: ingest or stage again")
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        what = "a symbolic link, or not a folder where one should be"
        return DataError(what, where=str(path), hint="a dataset holds plain files and folders only")
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.ESTALE, errno.ETIMEDOUT):
        return Unreachable(f"cannot read: {reason}", where=str(path))
    return ClusterError(f"cannot read: {reason}", where=str(path))
