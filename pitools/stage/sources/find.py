"""Find a dataset version by a path or URL, and read its manifest."""

from __future__ import annotations

import os
from pathlib import Path

from pitools.core.errors import DataError, UsageError, most_similar
from pitools.stage.sources.base import DatasetVersion, Source, make_version
from pitools.stage.sources.local import OBJECTS, LocalSource, translate_errors
from pitools.store import manifest as manifests
from pitools.store import resolve
from pitools.store.manifest import MANIFEST_FILE

# Files that mark a folder as a Zarr store.
_ZARR_MARKERS = ("zarr.json", ".zgroup", ".zarray")
_ARCHIVE_SUFFIXES = {".zip", ".tar", ".gz", ".tgz", ".zst"}


def find_source(location: str | Path) -> str | Path:
    """Return the version that `location` names, as `pitools.store.resolve` does; in an object store a version, or the
    only version below `<root>/<name>`.

    Raises UsageError for no or several versions, DataError for a folder without a version, else as the source.
    """
    if is_url(location):
        from pitools.stage.sources.object_store import remote

        return remote.find_remote_version(str(location))
    return find_version_dir(Path(location))


def find_version_dir(path: Path) -> Path:
    """Return the version folder that `path` names. Raises as `find_source`."""
    path = path.absolute()
    with translate_errors(path):
        # A staging root's objects are of many datasets, so the newest one must not be chosen.
        if (
            path.name == OBJECTS
            and len(version_dirs := dataset_version_dirs(path)) > 1
            and not os.path.lexists(path / MANIFEST_FILE)
        ):
            names = ", ".join(folder.name for folder in version_dirs)
            raise UsageError(
                f"there are {len(version_dirs)} versions: {names}", where=str(path), hint="name one of them"
            )
        if version_dir := resolve.find_version(path):
            return version_dir
        if path.is_file():
            packed = path.suffix in _ARCHIVE_SUFFIXES
            hint = "unpack it first" if packed else f"first: pit dataset ingest {path.name} --to DIR --name NAME"
            raise UsageError("a file, not a dataset", where=str(path), hint=hint)
        if not path.is_dir():
            raise UsageError("no such folder", where=str(path), hint=_missing_dir_hint(path))
        raise DataError("not a dataset: no manifest.json", where=str(path), hint=_not_a_dataset_hint(path))


def _missing_dir_hint(path: Path) -> str:
    """Return the hint for a folder that does not exist."""
    if ":/" in str(path):
        return "give a path of this machine, or an object store's URL"
    if not path.parent.is_dir():
        return "give <root>/<name>/<version>"
    names = [entry.name for entry in path.parent.iterdir() if not entry.name.startswith(".")]
    similar = most_similar(path.name.partition("@")[0], names)
    return f'did you mean "{similar}"?' if similar else "give <root>/<name>/<version>"


def _not_a_dataset_hint(path: Path) -> str:
    """Return the hint for a folder that is no dataset."""
    if is_zarr_store(path):
        return "it is a Zarr store without a manifest: stage it to verify it"
    names = sorted(
        entry.name
        for entry in path.iterdir()
        if entry.is_dir() and (is_zarr_store(entry) or dataset_version_dirs(entry))
    )
    if not names:
        return "give the folder of one version, such as <root>/<name>/<version>, or a Zarr store"
    return f"it contains {', '.join(names[:5])}{' …' if len(names) > 5 else ''}: name one"


def is_zarr_store(folder: Path) -> bool:
    """Whether a folder has a Zarr store's metadata file."""
    return any((folder / mark).exists() for mark in _ZARR_MARKERS)


def dataset_version_dirs(path: Path) -> list[Path]:
    """Return the version folders inside `<root>/<name>`, sorted, without links such as `latest`."""
    return sorted(
        entry for entry in path.iterdir() if not entry.is_symlink() and os.path.lexists(entry / MANIFEST_FILE)
    )


def is_url(location: str | Path) -> bool:
    """Whether this is an object store's URL, not a path."""
    return isinstance(location, str) and "://" in location


def source_of(label: str) -> Source:
    """Return the source of this label. Raises UsageError for a bad URL."""
    if is_url(label):
        from pitools.stage.sources.object_store import remote

        return remote.ObjectStoreSource(label)
    return LocalSource(folder=Path(label))


def load_version(location: str | Path) -> DatasetVersion:
    """Read and check the manifest of a version's folder or URL.

    Raises DataError when there is none or it does not match the folder's name, else as the source.
    """
    if is_url(location):
        from pitools.stage.sources.object_store import remote

        return remote.load_remote_version(str(location))
    folder = Path(location)
    source = LocalSource(folder=folder)
    reader = source.connect()
    try:
        reader.open(MANIFEST_FILE).close()  # refuses a link or a FIFO before it is read
    finally:
        reader.close()
    return make_version(source, *manifests.load_manifest(folder), name=folder.name)
