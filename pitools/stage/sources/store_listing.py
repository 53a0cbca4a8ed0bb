"""List a Zarr store without a manifest of ours, and make a manifest for it.

    list_store ──▶ make_manifest: without digests ──▶ copy ──▶ check the copy ──▶ with_digests
       └─ signature: of the listing; a different one after the copy means that the store was written meanwhile

Copied: every regular file of the store, also a README. Left out, with a note: unfinished writes (`*.partial`, as zarr's
LocalStore and rclone name them) and NFS's remains of deleted files (`.nfs` and hex digits). Refused: links, FIFOs,
devices, names that are not UTF-8. A missing chunk cannot be told from one never written, since Zarr does not store
chunks of only the fill value: the number of missing chunks is therefore always reported.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from pitools.core import forked_pool
from pitools.core.errors import DataError
from pitools.core.shared_progress import WorkerSlot
from pitools.stage.sources.base import SourceReader
from pitools.stage.sources.local import read_error
from pitools.store import manifest as manifests
from pitools.store.manifest import EPISODE_PREFIX, MANIFEST_FILE, ArraySchema, FileEntry, Manifest
from pitools.store.version_list import lost_manifest
from pitools.store.zarr import metadata

# Consolidated metadata of some thousand arrays are a few MiB.
METADATA_BYTES = 64 << 20
# Names of arrays of episode offsets, and how many values they have beyond one per episode.
OFFSET_ARRAYS = {"episode_offsets": 1, "meta/episode_ends": 0}
# Folders of one depth from which on processes are forked, and entries between two heartbeats.
_MIN_PARALLEL_DIRS, _HEARTBEAT_EVERY = 64, 100
_UNFINISHED = re.compile(r".*\.partial|\.nfs[0-9a-fA-F]+")


# A file's path below the store, its bytes, and its tag.
ListedFile = tuple[str, int, str]


class StoreFile(NamedTuple):
    """One file of a store. change_tag: changes when it is rewritten: its mtime in ns, or an object's ETag."""

    path: str
    bytes: int
    change_tag: str


class StoreListing(NamedTuple):
    """The files of a store, sorted by path. left_out: paths of unfinished writes. where: the store."""

    name: str
    entries: tuple[StoreFile, ...]
    left_out: tuple[str, ...]
    where: str

    @property
    def signature(self) -> str:
        """Return `sha256:<64 hex>` of the listing: it changes when a file is written, added or removed."""
        state = hashlib.sha256()
        for path, size, tag in self.entries:
            state.update(f"{path}\0{size}\0{tag}\n".encode())
        return f"sha256:{state.hexdigest()}"


def is_plain_store(names: Iterable[str]) -> bool:
    """Whether a folder with these names is a Zarr store without a manifest of ours."""
    name_set = set(names)
    return MANIFEST_FILE not in name_set and not name_set.isdisjoint(
        (metadata.V3_FILE, metadata.V2_GROUP, metadata.V2_ARRAY)
    )


def list_store(folder: Path) -> StoreListing:
    """List a store in a folder. Raises DataError for files that cannot be staged, Unreachable, ClusterError."""
    return make_listing(folder.absolute().name, _walk_files(str(folder)), str(folder))


def make_listing(name: str, files: Iterable[ListedFile], where: str) -> StoreListing:
    """Return the listing of these files, such as an object store's. Raises DataError."""
    entries: list[StoreFile] = []
    left_out: list[str] = []
    for path, size, tag in files:
        if _UNFINISHED.fullmatch(path.rpartition("/")[2]):
            left_out.append(path)
            continue
        if not _is_utf8(path):
            raise DataError(f"{path!r}: not a UTF-8 name", where=where, hint="rename it")
        entries.append(StoreFile(path, size, tag))
    if not is_plain_store(entry.path for entry in entries):
        hint = "give the folder that holds its zarr.json, .zgroup or .zarray"
        raise DataError("not a Zarr store", where=where, hint=hint)
    return StoreListing(_to_dataset_name(name), tuple(sorted(entries)), tuple(sorted(left_out)), where)


def _walk_files(root: str) -> list[ListedFile]:
    """List every file below a folder; with several processes if there are many folders, as each is a round trip on a
    network file system. Raises as `list_store`.
    """
    files: list[ListedFile] = []
    folders = [""]
    while folders and len(folders) < _MIN_PARALLEL_DIRS:
        subfolders: list[str] = []
        for folder in folders:
            files += _list_folder(root, folder, subfolders)
        folders = subfolders
    share_size = -(-len(folders) // _MIN_PARALLEL_DIRS)
    shares = [folders[start : start + share_size] for start in range(0, len(folders), share_size or 1)]
    try:
        remaining: list[ListedFile] = []
        forked_pool.run_tasks(
            shares,
            partial(_Lister, root),
            remaining.extend,
            readers=forked_pool.default_readers(),
            advance=lambda _: None,
        )
    except OSError:  # no process could be forked: list the rest here
        remaining = _list_below(root, folders, lambda: None)
    return files + remaining


class _Lister:
    """One thread's share: everything below some folders."""

    def __init__(self, root: str, slot: WorkerSlot) -> None:
        self._root, self._slot = root, slot

    def __call__(self, task: list[str]) -> list[ListedFile]:
        """Return the files below these folders."""
        return _list_below(self._root, task, self._slot.heartbeat)

    def close(self) -> None:
        """Nothing to close."""


def _list_below(root: str, folders: list[str], heartbeat: Callable[[], None]) -> list[ListedFile]:
    files: list[ListedFile] = []
    while folders:
        files += _list_folder(root, folders.pop(), folders, heartbeat)
    return files


def _list_folder(
    root: str, folder: str, subfolders: list[str], heartbeat: Callable[[], None] = lambda: None
) -> Iterator[ListedFile]:
    """Yield the files of one folder; append its folders to `subfolders`. heartbeat: called regularly."""
    heartbeat()
    try:
        with os.scandir(f"{root}/{folder}") as entries:
            for number, entry in enumerate(entries, 1):
                if not number % _HEARTBEAT_EVERY:
                    heartbeat()
                path = f"{folder}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    subfolders.append(f"{path}/")
                    continue
                if not entry.is_file(follow_symlinks=False):
                    message = "a link" if entry.is_symlink() else "neither a file nor a folder"
                    raise DataError(message, where=f"{root}/{path}", hint="a dataset holds plain files only")
                status = entry.stat(follow_symlinks=False)
                yield path, status.st_size, str(status.st_mtime_ns)
    except OSError as error:
        if folder and isinstance(error, FileNotFoundError):
            raise changed_error(f"{root}/{folder}") from error
        raise read_error(error, Path(root, folder)) from error


def changed_error(where: str) -> DataError:
    """Return the error of a store that changed during the copy."""
    return DataError("the store changed while it was read", where=where, hint="stage it when no process writes to it")


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _to_dataset_name(folder: str) -> str:
    """Return a dataset's name for a folder's name: without `.zarr`, and with valid characters only."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.removesuffix(".zarr")).lstrip("._-")
    return name[:100] or "store"


def read_file(reader: SourceReader, path: str, limit: int = METADATA_BYTES) -> bytes:
    """Read all bytes of a source's file. Raises DataError when it has more than `limit`, and as the source does."""
    file = reader.open(path)
    try:
        if file.size > limit:
            raise DataError(f"{file.size} bytes (expected at most {limit})", where=path)
        view, filled = memoryview(bytearray(file.size)), 0
        while filled < file.size and (count := file.read_into(view[filled:], filled)):
            filled += count
        if filled < file.size:
            raise changed_error(path)
        return bytes(view)
    finally:
        file.close()


def make_manifest(listing: StoreListing, read_metadata: Callable[[str], bytes]) -> Manifest:
    """Return a store's manifest, its digests "" until `with_digests`. read_metadata: returns a metadata file's bytes.

    Equal files under an equal name give an equal manifest. Raises DataError, and as `read_metadata` does.
    """
    if any(entry.path == metadata.V3_FILE for entry in listing.entries) and (
        error := lost_manifest(listing.name, lambda: read_metadata(metadata.V3_FILE), listing.where)
    ):
        raise error
    arrays = metadata.read_arrays((entry.path for entry in listing.entries), read_metadata)
    if not arrays:
        raise DataError("a Zarr store without an array", where=listing.where, hint="check that the store is complete")
    manifest = Manifest(
        name=listing.name,
        episodes=_episode_count(arrays),
        steps=_step_count(arrays),
        arrays={array.name: ArraySchema(shape=array.shape, dtype=array.dtype) for array in arrays.values()},
        files=tuple(FileEntry(path=entry.path, bytes=entry.bytes, digest="") for entry in listing.entries),
    )
    manifests.check_manifest(manifest, listing.where)  # an object store's keys may be any text
    return manifest


def with_digests(manifest: Manifest, digests: Mapping[int, str]) -> Manifest:
    """Return the manifest with the digest of each file that had none, by its index."""
    entries = ((entry, entry.digest or digests[index]) for index, entry in enumerate(manifest.files))
    return structs.replace(manifest, files=tuple(structs.replace(entry, digest=digest) for entry, digest in entries))


def _episode_count(arrays: Mapping[str, metadata.ArrayMetadata]) -> int:
    """Return the number of episodes, by the arrays of episode offsets; 0 without one."""
    for name, extra in OFFSET_ARRAYS.items():
        if name in arrays and len(arrays[name].shape) == 1:
            return max(0, arrays[name].shape[0] - extra)
    return 0


def _step_count(arrays: Mapping[str, metadata.ArrayMetadata]) -> int:
    """Return the length of the first axis that most arrays share; of two equally common lengths the greater."""
    shared = Counter(
        array.shape[0]
        for array in arrays.values()
        if array.shape and not array.name.rpartition("/")[2].startswith(EPISODE_PREFIX)
    )
    return max(shared, key=lambda length: (shared[length], length), default=0)
