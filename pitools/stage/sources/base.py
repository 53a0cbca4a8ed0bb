"""A dataset version wherever it is: its manifest, and the source its bytes are read from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import msgspec

from pitools.core.errors import DataError, UsageError, most_similar
from pitools.stage.cache.layout import OBJECTS
from pitools.stage.sources.local import LocalSource, reading
from pitools.store import manifest as manifests
from pitools.store import resolve
from pitools.store.digest import ALGORITHM, RANGED
from pitools.store.manifest import FILE_NAME, FileEntry, Manifest
from pitools.store.version_list import is_version

# By what a folder is seen to be a Zarr store.
_MARKS = ("zarr.json", ".zgroup", ".zarray")
_PACKED = {".zip", ".tar", ".gz", ".tgz", ".zst"}


class SourceFile(Protocol):
    """One open file of a source. size: bytes, when it was opened."""

    size: int

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read at `offset` into `view`; the count, 0 at the end. Raises PitError."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class Reader(Protocol):
    """One thread's hands on a source, made in the process that reads."""

    def open(self, path: str) -> SourceFile:
        """A file by its path in the manifest. Raises DataError when there is none, Unreachable, ClusterError."""
        ...

    def close(self) -> None:
        """Let go of connections and descriptors."""
        ...


class Source(Protocol):
    """Where a version's bytes come from: plain data that a fork may take along, and that holds no secret."""

    @property
    def label(self) -> str:
        """What a user would call it: a folder or a URL. It goes into records, errors and logs."""
        ...

    @property
    def block(self) -> int:
        """Bytes to ask for in one read: a multiple of 128 KiB."""
        ...

    def connect(self) -> Reader:
        """A reader, for one thread of the process that calls. Raises PitError."""
        ...


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """One version. data: the exact bytes of its manifest, whose digest is the version."""

    source: Source
    manifest: Manifest
    data: bytes
    version: str


def find(place: str | Path) -> str | Path:
    """Return the version that `place` means, as `pitools.store.resolve` says; in an object store a version, or the only
    one inside `<root>/<name>`.

    Raises UsageError when it names none or several, DataError for a folder that holds none, else as its source.
    """
    if is_url(place):
        from pitools.stage.sources.object_store import remote

        return remote.find(str(place))
    return find_folder(Path(place))


def find_folder(path: Path) -> Path:
    """`find`, of a folder."""
    path = path.absolute()
    with reading(path):
        # A staging root's objects are of many datasets: the newest of them is not what is meant.
        if path.name == OBJECTS and len(inside := versions(path)) > 1 and not os.path.lexists(path / FILE_NAME):
            names = ", ".join(folder.name for folder in inside)
            raise UsageError(f"there are {len(inside)} versions: {names}", where=str(path), hint="name one of them")
        if found := resolve.find(path):
            return found
        if path.is_file():
            packed = path.suffix in _PACKED
            hint = "unpack it first" if packed else f"first: pit dataset ingest {path.name} --to DIR --name NAME"
            raise UsageError("a file, not a dataset", where=str(path), hint=hint)
        if not path.is_dir():
            raise UsageError("no such folder", where=str(path), hint=_what_is_there(path))
        raise DataError("not a dataset: it has no manifest.json", where=str(path), hint=_what_is_inside(path))


def _what_is_there(path: Path) -> str:
    """What to give in place of a folder that does not exist."""
    if ":/" in str(path):
        return "a path of this machine is wanted: mount it, or use an object store's URL"
    if not path.parent.is_dir():
        return "give <root>/<name>/<version>"
    names = [entry.name for entry in path.parent.iterdir() if not entry.name.startswith(".")]
    near = most_similar(path.name.partition("@")[0], names)
    return f'did you mean "{near}"?' if near else "give <root>/<name>/<version>"


def _what_is_inside(path: Path) -> str:
    """What to give in place of a folder that is no dataset."""
    if is_store(path):
        return "it is a Zarr store, which has none: it is checked as it is staged"
    found = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and (is_store(entry) or versions(entry)))
    if not found:
        return "give the folder of one version, such as <root>/<name>/<version>, or a Zarr store"
    return f"inside it are {', '.join(found[:5])}{' …' if len(found) > 5 else ''}: name one"


def is_store(folder: Path) -> bool:
    """Whether this looks like a Zarr store."""
    return any((folder / mark).exists() for mark in _MARKS)


def versions(path: Path) -> list[Path]:
    """The version folders inside `<root>/<name>`, sorted; links to one of them (`latest`) do not count again."""
    return sorted(entry for entry in path.iterdir() if not entry.is_symlink() and os.path.lexists(entry / FILE_NAME))


def is_url(place: str | Path) -> bool:
    """Whether this is an object store's URL, not a path."""
    return isinstance(place, str) and "://" in place


def source_of(label: str) -> Source:
    """The source that calls itself `label`. Raises UsageError for a URL that is none."""
    if is_url(label):
        from pitools.stage.sources.object_store import remote

        return remote.RemoteSource(label)
    return LocalSource(folder=Path(label))


def load(place: str | Path) -> Dataset:
    """Read and check the manifest of a version's folder, or of a URL of one.

    Raises DataError when there is none, or it is not of the folder's name, else as its source does.
    """
    if is_url(place):
        from pitools.stage.sources.object_store import remote

        return remote.load(str(place))
    folder = Path(place)
    source = LocalSource(folder=folder)
    reader = source.connect()
    try:
        reader.open(FILE_NAME).close()  # a link or a FIFO is refused before anything reads it
    finally:
        reader.close()
    return checked(source, *manifests.load(folder), name=folder.name)


def checked(source: Source, manifest: Manifest, data: bytes, *, name: str) -> Dataset:
    """The dataset of a manifest that was read. name: of the folder it is in, which may claim to be its version.

    Raises DataError when that claim is wrong, or the manifest's digests are none that we know.
    """
    where = f"{source.label}/{FILE_NAME}"
    version = manifests.version(data)
    if is_version(name) and name != version:
        what = f"the manifest belongs to version {version}, not to the folder it is in"
        raise DataError(what, where=where, hint="it was changed after it was written: ingest or stage again")
    _refuse_other_digests(manifest.files, where)
    return Dataset(source=source, manifest=manifest, data=data, version=version)


def _refuse_other_digests(files: tuple[FileEntry, ...], where: str) -> None:
    """What cannot be compared must not pass for verified."""
    kinds = (f"{ALGORITHM}:", f"{RANGED}:")
    for entry in files:
        if not entry.digest.startswith(kinds):
            what = f"the digest of {entry.path!r} is of a kind that is not known here: {entry.digest!r}"
            raise DataError(
                what, where=where, hint=f"known are {ALGORITHM} and {RANGED}: ingest again, or update pitools"
            )


def folders_of(files: tuple[FileEntry, ...]) -> set[str]:
    """Every folder that files of these paths are in, below the dataset's own."""
    folders: set[str] = set()
    for folder in {entry.path.rpartition("/")[0] for entry in files}:
        above = folder
        while above and above not in folders:
            folders.add(above)
            above = above.rpartition("/")[0]
    return folders
