"""The arrays of one version by name: small ones held in memory, large ones read where they lie."""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections import defaultdict
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError, UsageError, nearest
from pitools.store import digest
from pitools.store import manifest as manifests
from pitools.store.manifest import FileEntry
from pitools.store.reader.array_reader import Absent, ArrayReader, Check, Opener, open_in
from pitools.store.reader.resident import Held, left_out
from pitools.store.version_list import is_version
from pitools.store.zarr import metadata
from pitools.store.zarr.chunk_layout import layout

# Action, state and the like: read once, and then a window is an indexing operation.
RESIDENT_BYTES = 64 << 20
_HINT = "stage it again"


class Arrays:
    """One version, whole or a part. Any threads may read at once, and forked processes may go on."""

    def __init__(
        self,
        path: Path,
        *,
        check: Check = "first",
        resident_bytes: int = RESIDENT_BYTES,
        opener: Opener | None = None,
        verify: bool = False,
    ) -> None:
        """opener: opens the version's files, and "" its folder, where they are not all in `path` from the beginning.
        verify: compare the manifest with the folder's name, and each file with its digest there when it is opened as
        what it was not before: for a shard in another one's place, which has the checksums of what it is.

        Raises DataError when the folder is no dataset, and what the opener raises.
        """
        self.path, self._verify = path, verify
        self._opener, self._given = opener or partial(open_in, path), opener
        self._check, self._resident_bytes = check, resident_bytes
        if opener:
            data = self.read_file(manifests.FILE_NAME)
            self.manifest = manifests.decode(data, str(path / manifests.FILE_NAME))
        else:
            self.manifest, data = manifests.load(path)
        self.version = manifests.version(data)
        if verify:
            _check_name(path, self.version)
            named = {entry.path: entry for entry in self.manifest.files}
            self._opener = partial(_open_verified, path, self._opener, named, {})
        self._known: dict[str, metadata.Array] = {}
        self._readers: dict[str, ArrayReader | None] = {}
        self._held: dict[str, Held | None] = {}
        # By process too: a lock that another thread held while this process was forked is never given back here.
        self._holding: dict[tuple[int, str], Lock] = {}
        self._named: dict[str, dict[int, list[str]]] = {}
        # Not cached properties, which in Python 3.11 have such a lock, one for all versions.
        self._offsets: NDArray[np.int64] | None = None
        self._attributes: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """What another process opens it by."""
        again = partial(
            Arrays, check=self._check, resident_bytes=self._resident_bytes, opener=self._given, verify=self._verify
        )
        return again, (self.path,)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """(episodes + 1,): episode i is steps [offsets[i], offsets[i + 1]). Raises DataError for what cannot be."""
        if self._offsets is None:
            if self.array("episode_offsets").shape != (self.manifest.episodes + 1,):
                what = f"episode_offsets has shape {self.array('episode_offsets').shape}, of {self.manifest.episodes}"
                raise DataError(f"{what} episodes", where=str(self.path), hint=_HINT)
            found = self.read("episode_offsets", 0, self.manifest.episodes + 1).astype(np.int64)
            if found[0] != 0 or found[-1] != self.manifest.steps or (np.diff(found) < 0).any():
                what = f"episode_offsets do not ascend from 0 to the version's {self.manifest.steps} steps"
                raise DataError(what, where=str(self.path), hint="ingest the dataset again")
            self._offsets = found
        return self._offsets

    @property
    def attributes(self) -> dict[str, Any]:
        """The store's own attributes, as in its `zarr.json`. Raises DataError."""
        if self._attributes is None:
            try:
                self._attributes = dict(json.loads(self.read_file(metadata.V3))["attributes"])
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{metadata.V3} is not readable: {error}", where=str(self.path), hint=_HINT) from error
        return self._attributes

    def array(self, name: str) -> metadata.Array:
        """What the store says of an array. Raises UsageError for one that is not there, DataError."""
        if name not in self._known:
            if name not in self.manifest.arrays:
                names = [known for known in self.manifest.arrays if not known.startswith("episode_")]
                raise UsageError(f"no array {name!r}", where=str(self.path), hint=nearest(name, names))
            where = f"{name}/{metadata.V3}"
            found = metadata.parse(name, self.read_file(where), str(self.path / where))
            if found is None:
                raise DataError(f"{name} is a group, not an array", where=str(self.path), hint=_HINT)
            known = self.manifest.arrays[name]
            if (found.shape, found.dtype) != (known.shape, known.dtype):
                what = f"{where}: {found.dtype} {found.shape}, where the manifest says {known.dtype} {known.shape}"
                raise DataError(what, where=str(self.path), hint=_HINT)
            self._known[name] = found
        return self._known[name]

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type of an array's items."""
        return np.dtype(self.array(name).dtype)

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Steps [start, stop): (stop - start, *row). Raises as `read_into`."""
        if not 0 <= start <= stop <= self.array(name).shape[0]:
            raise IndexError(f"steps [{start}, {stop}) of {name}, which has {self.array(name).shape[0]}")
        out = np.empty((stop - start, *self.array(name).shape[1:]), self.dtype(name))
        self.read_into(name, out, start, stop)
        return out

    def read_into(self, name: str, out: NDArray[Any], start: int, stop: int) -> None:
        """Fill `out` with these steps. Raises IndexError for steps that are not here, DataError for damage."""
        start, stop = int(start), int(stop)  # NumPy's own have no `to_bytes`
        self._require(name, start, stop)
        reader = self._reader(name)
        if reader is None:
            out[:] = self._by_zarr(name, start, stop)
            return
        try:
            reader.read_into(out, start, stop)
        except Absent:
            out[:] = self._by_zarr(name, start, stop)

    def resident(self, name: str) -> NDArray[Any] | None:
        """All of a small array, None for a large one, or one of which steps were left out. Raises as `read_into`."""
        held = self.held(name)
        return held.rows if held and held.whole else None

    def held(self, name: str) -> Held | None:
        """The steps of a small array that are here, read once; None for a large one. Raises as `read_into`."""
        if name not in self._held:
            with self._holding.setdefault((os.getpid(), name), Lock()):
                if name not in self._held:
                    self._held[name] = self._hold(name)
        return self._held[name]

    def _hold(self, name: str) -> Held | None:
        shape, runs = self.array(name).shape, self.manifest.runs(name)
        steps = sum(stop - start for start, stop in runs)
        if steps * int(np.prod(shape[1:])) * self.dtype(name).itemsize > self._resident_bytes:
            return None
        rows, at = np.empty((steps, *shape[1:]), self.dtype(name)), 0
        for start, stop in runs:
            self.read_into(name, rows[at : at + stop - start], start, stop)
            at += stop - start
        return Held(name, rows, runs, whole=runs == ((0, shape[0]),))

    def _reader(self, name: str) -> ArrayReader | None:
        if name not in self._readers:
            known = layout(self.array(name))
            self._readers[name] = (
                ArrayReader(self.path, name, known, check=self._check, opener=self._opener) if known else None
            )
        return self._readers[name]

    def _require(self, name: str, start: int, stop: int) -> None:
        """Refuse steps that a part of a version does not have: Zarr would read them as fill values."""
        runs = self.manifest.runs(name)
        at = bisect_right(runs, start, key=lambda run: run[0]) - 1
        if start < stop and (at < 0 or stop > runs[at][1]):
            raise left_out(name, start, stop, runs)

    def _open(self, path: str) -> int:
        try:
            return self._opener(path)
        except OSError as error:
            raise self._unreadable(path, error) from error

    def read_file(self, path: str) -> bytes:
        """All bytes of a small file, such as metadata. Raises DataError."""
        descriptor = self._open(path)
        try:
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()
        except OSError as error:
            raise self._unreadable(path, error) from error
        finally:
            os.close(descriptor)

    def _unreadable(self, path: str, error: OSError) -> DataError:
        reason = "missing" if isinstance(error, FileNotFoundError) else os.strerror(error.errno or 0)
        return DataError(f"{path}: {reason}", where=str(self.path), hint=_HINT)

    def _by_zarr(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """What zarr-python reads, after a look at whether every file it would need, and take for zeros, is there."""
        import zarr

        chunk = self.array(name).chunk[0]
        for number in range(start // chunk, -(-stop // chunk)) if start < stop else ():
            for path in self._files(name).get(number, ()):
                os.close(self._open(path))
        # By descriptor: what is still being brought here is renamed when all of it is.
        folder = self._open("")
        try:
            found = zarr.open_array(Path(f"/proc/self/fd/{folder}", name), mode="r", zarr_format=3)
            return np.asarray(found[start:stop])
        except (ValueError, RuntimeError, OSError) as error:
            what = f"{name}: steps {start} to {stop} are damaged: {error}"
            raise DataError(what, where=str(self.path), hint=_HINT) from error
        finally:
            os.close(folder)

    def _files(self, name: str) -> dict[int, list[str]]:
        """The files that the manifest names for an array, by their number along the first axis."""
        if name not in self._named:
            found: defaultdict[int, list[str]] = defaultdict(list)
            # `c/2/0` or, of another chunk key encoding, `2.0`.
            number = re.compile(rf"{re.escape(name)}/(?:c[./])?(\d+)(?:[./]\d+)*")
            for entry in self.manifest.files:
                if matched := number.fullmatch(entry.path):
                    found[int(matched[1])].append(entry.path)
            self._named[name] = dict(found)
        return self._named[name]


def repair(folder: Path) -> str:
    """What to do about a version that is damaged."""
    return f"take one that is whole, or repair it: `pit dataset rebuild {folder} --from RECORDINGS --publish`"


def _check_name(path: Path, version: str) -> None:
    name = path.resolve().name
    if is_version(name) and name != version:
        what = f"its manifest is that of {version}, not the one that the folder is named after"
        raise DataError(what, where=str(path), hint=repair(path))


def _open_verified(
    folder: Path, opener: Opener, named: dict[str, FileEntry], seen: dict[str, tuple[int, ...]], path: str
) -> int:
    """A descriptor of a file that is what the manifest says; of the folder for "". Raises OSError, DataError.

    seen: what files were when they were verified: a shard that zarr-python reads in blocks is opened for each.
    """
    descriptor = opener(path)
    try:
        if path:
            entry = named.get(path)
            if entry is None:
                raise DataError(f"{path}: the manifest does not name it", where=str(folder), hint=repair(folder))
            now = os.fstat(descriptor)
            state = (now.st_dev, now.st_ino, now.st_ctime_ns, now.st_size)
            if seen.get(path) == state:
                return descriptor
            if digest.of_descriptor(descriptor, like=entry.digest) != (entry.bytes, entry.digest):
                what = f"{path} is damaged: its content is not what the manifest says"
                raise DataError(what, where=str(folder), hint=repair(folder))
            seen[path] = state
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
