"""A dataset version wherever it is: found by what a user names it, and its manifest read."""

from __future__ import annotations

import os
from pathlib import Path

from pitools.core.errors import DataError, UsageError, most_similar
from pitools.stage.sources.base import Dataset, Source, checked
from pitools.stage.sources.local import OBJECTS, LocalSource, reading
from pitools.store import manifest as manifests
from pitools.store import resolve
from pitools.store.manifest import FILE_NAME

# By what a folder is seen to be a Zarr store.
_MARKS = ("zarr.json", ".zgroup", ".zarray")
_PACKED = {".zip", ".tar", ".gz", ".tgz", ".zst"}


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
