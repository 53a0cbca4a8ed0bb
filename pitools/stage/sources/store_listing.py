"""A Zarr store that has no manifest of ours: listed, described by one, and judged once it is copied.

    survey ──▶ describe: a manifest without digests ──▶ copy ──▶ findings on the copy ──▶ complete: with the digests
       └─ signature: what it was; surveyed again after the copy, another one means that somebody was writing

What is copied: every regular file below the store, such as a README too. Left out, and said: what was being written
(`*.partial`, as zarr's LocalStore and rclone name it) and what NFS keeps of deleted files (`.nfs` and hex digits).
Refused: links, FIFOs, devices, names that are not UTF-8. Nothing can prove that a missing chunk was once there, since
Zarr leaves out chunks of nothing but the fill value: how many are missing is therefore always said.
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
from pitools.store.manifest import EPISODE_PREFIX, FILE_NAME, ArraySchema, FileEntry, Manifest
from pitools.store.version_list import lost_manifest
from pitools.store.zarr import metadata

# Consolidated metadata of some thousand arrays are a few MiB.
METADATA_BYTES = 64 << 20
# Arrays that say where episodes lie, by name, and how many numbers they have beyond one an episode.
OFFSET_ARRAYS = {"episode_offsets": 1, "meta/episode_ends": 0}
# Folders of one depth that are worth the forks, and entries of one folder between two signs of life.
_MANY, _LOOK = 64, 100
_UNFINISHED = re.compile(r".*\.partial|\.nfs[0-9a-fA-F]+")


# A file's path below the store, its bytes, and its tag.
Listed = tuple[str, int, str]


class StoreFile(NamedTuple):
    """One file of a store. etag: what changes when it is written again: its time in ns, or an object's ETag."""

    path: str
    bytes: int
    etag: str


class StoreListing(NamedTuple):
    """What a store is made of, sorted by path. left_out: paths of what was unfinished there. where: the store."""

    name: str
    entries: tuple[StoreFile, ...]
    left_out: tuple[str, ...]
    where: str

    @property
    def signature(self) -> str:
        """`sha256:<64 hex>` of the listing: the same as long as no file is written, added or removed."""
        state = hashlib.sha256()
        for path, size, tag in self.entries:
            state.update(f"{path}\0{size}\0{tag}\n".encode())
        return f"sha256:{state.hexdigest()}"


def is_store(names: Iterable[str]) -> bool:
    """Whether a folder that holds these names is a Zarr store (and has no manifest, which would come first)."""
    known = set(names)
    return FILE_NAME not in known and not known.isdisjoint((metadata.V3, metadata.V2_GROUP, metadata.V2_ARRAY))


def list_store(folder: Path) -> StoreListing:
    """List a store in a folder. Raises DataError for what cannot be staged, Unreachable, ClusterError."""
    return list_remote_store(folder.absolute().name, _walk_files(str(folder)), str(folder))


def list_remote_store(name: str, listed: Iterable[Listed], where: str) -> StoreListing:
    """The same of a listing, such as an object store's: (path, bytes, tag) of every file. Raises DataError."""
    entries: list[StoreFile] = []
    left_out: list[str] = []
    for path, size, tag in listed:
        if _UNFINISHED.fullmatch(path.rpartition("/")[2]):
            left_out.append(path)
            continue
        if not _is_text(path):
            raise DataError(f"a name that is not UTF-8: {path!r}", where=where, hint="rename it")
        entries.append(StoreFile(path, size, tag))
    if not is_store(entry.path for entry in entries):
        hint = "give the folder that holds its zarr.json, .zgroup or .zarray"
        raise DataError("not a Zarr store", where=where, hint=hint)
    return StoreListing(_dataset_name(name), tuple(sorted(entries)), tuple(sorted(left_out)), where)


def _walk_files(root: str) -> list[Listed]:
    """List every file below a folder, with several processes where there are many folders: each of them is a round trip
    on a network file system. Raises as `survey`.
    """
    found: list[Listed] = []
    level = [""]
    while level and len(level) < _MANY:
        below: list[str] = []
        for folder in level:
            found += _list(root, folder, below)
        level = below
    share = -(-len(level) // _MANY)
    shares = [level[at : at + share] for at in range(0, len(level), share or 1)]
    try:
        rest: list[Listed] = []
        forked_pool.run_tasks(
            shares, partial(_Lister, root), rest.extend, readers=forked_pool.default_readers(), advance=lambda _: None
        )
    except OSError:  # no process could be started: this one lists the rest
        rest = _list_below(root, level, lambda: None)
    return found + rest


class _Lister:
    """One thread's share: all that is below some folders."""

    def __init__(self, root: str, slot: WorkerSlot) -> None:
        self._root, self._slot = root, slot

    def __call__(self, task: list[str]) -> list[Listed]:
        """The files below these folders."""
        return _list_below(self._root, task, self._slot.heartbeat)

    def close(self) -> None:
        """Nothing is open."""


def _list_below(root: str, folders: list[str], alive: Callable[[], None]) -> list[Listed]:
    found: list[Listed] = []
    while folders:
        found += _list(root, folders.pop(), folders, alive)
    return found


def _list(root: str, folder: str, below: list[str], alive: Callable[[], None] = lambda: None) -> Iterator[Listed]:
    """The files of one folder; the folders in it go to `below`. alive: called now and then."""
    alive()
    try:
        with os.scandir(f"{root}/{folder}") as found:
            for number, entry in enumerate(found, 1):
                if not number % _LOOK:
                    alive()
                path = f"{folder}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    below.append(f"{path}/")
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
    """What to say of a store that is not, after the copy, what it was before."""
    return DataError("the store changed while it was read", where=where, hint="stage it when nobody writes to it")


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _dataset_name(folder: str) -> str:
    """A dataset's name of a folder's: without `.zarr`, and of what a name may be made of."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.removesuffix(".zarr")).lstrip("._-")
    return name[:100] or "store"


def read_file(reader: SourceReader, path: str, limit: int = METADATA_BYTES) -> bytes:
    """All bytes of a file of a source. Raises DataError when it has more than `limit`, and as the source does."""
    file = reader.open(path)
    try:
        if file.size > limit:
            raise DataError(f"{file.size} bytes, where {limit} are the most that is read at once", where=path)
        view, have = memoryview(bytearray(file.size)), 0
        while have < file.size and (count := file.read_into(view[have:], have)):
            have += count
        if have < file.size:
            raise changed_error(path)
        return bytes(view)
    finally:
        file.close()


def make_manifest(listing: StoreListing, read_metadata: Callable[[str], bytes]) -> Manifest:
    """The manifest of a store, its digests "" until `with_digests`. read_metadata: the bytes of a metadata file.

    The same files under the same name give the same manifest. Raises DataError, and what `read_metadata` raises.
    """
    if any(entry.path == metadata.V3 for entry in listing.entries) and (
        lost := lost_manifest(listing.name, lambda: read_metadata(metadata.V3), listing.where)
    ):
        raise lost
    arrays = metadata.read_arrays((entry.path for entry in listing.entries), read_metadata)
    if not arrays:
        raise DataError("a Zarr store without an array", where=listing.where, hint="is it complete?")
    manifest = Manifest(
        name=listing.name,
        episodes=_episodes(arrays),
        steps=_steps(arrays),
        arrays={array.name: ArraySchema(shape=array.shape, dtype=array.dtype) for array in arrays.values()},
        files=tuple(FileEntry(path=entry.path, bytes=entry.bytes, digest="") for entry in listing.entries),
    )
    manifests.check_manifest(manifest, listing.where)  # an object store's keys may be anything
    return manifest


def with_digests(manifest: Manifest, digests: Mapping[int, str]) -> Manifest:
    """The manifest with the digest that was found of each file without one, by its place."""
    found = ((entry, entry.digest or digests[place]) for place, entry in enumerate(manifest.files))
    return structs.replace(manifest, files=tuple(structs.replace(entry, digest=text) for entry, text in found))


def _episodes(arrays: Mapping[str, metadata.ArrayMetadata]) -> int:
    """As many as the arrays say that hold episodes' boundaries; 0 where there is none."""
    for name, extra in OFFSET_ARRAYS.items():
        if name in arrays and len(arrays[name].shape) == 1:
            return max(0, arrays[name].shape[0] - extra)
    return 0


def _steps(arrays: Mapping[str, metadata.ArrayMetadata]) -> int:
    """The length of the first axis that most arrays share; of two such lengths the greater."""
    shared = Counter(
        array.shape[0]
        for array in arrays.values()
        if array.shape and not array.name.rpartition("/")[2].startswith(EPISODE_PREFIX)
    )
    return max(shared, key=lambda length: (shared[length], length), default=0)
