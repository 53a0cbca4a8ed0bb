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

import msgspec
import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError, UsageError, suggest
from pitools.core.record import decode_json
from pitools.store import digest
from pitools.store import manifest as manifests
from pitools.store.manifest import EPISODE_JSON, EPISODE_OFFSETS, EPISODE_PREFIX, FileEntry
from pitools.store.reader.array_reader import ArrayReader, CheckMode, ChunkNotStored, Opener, open_below
from pitools.store.reader.resident import ResidentArray, missing_steps_error
from pitools.store.version_list import is_version
from pitools.store.zarr import metadata
from pitools.store.zarr.chunk_layout import chunk_layout

# Action, state and the like: read once, and then a window is an indexing operation.
RESIDENT_BYTES = 64 << 20
_RETRY_HINT = "stage it again"


class VersionReader:
    """One version, whole or a part. Any threads may read at once, and forked processes may go on."""

    def __init__(
        self,
        path: Path,
        *,
        check_mode: CheckMode = "first",
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
        self._opener, self._given = opener or partial(open_below, path), opener
        self._check, self._resident_bytes = check_mode, resident_bytes
        if opener:
            data = self.read_file(manifests.FILE_NAME)
            self.manifest = manifests.decode_manifest(data, str(path / manifests.FILE_NAME))
        else:
            self.manifest, data = manifests.load_manifest(path)
        self.version = manifests.version_of(data)
        if verify:
            _check_name(path, self.version)
            named = {entry.path: entry for entry in self.manifest.files}
            self._opener = partial(_open_verified, path, self._opener, named, {})
        self._known: dict[str, metadata.ArrayMetadata] = {}
        self._readers: dict[str, ArrayReader | None] = {}
        self._resident: dict[str, ResidentArray | None] = {}
        # By process too: a lock that another thread held while this process was forked is never given back here.
        self._holding: dict[tuple[int, str], Lock] = {}
        self._named: dict[str, dict[int, list[str]]] = {}
        # Not cached properties, which in Python 3.11 have such a lock, one for all versions.
        self._offsets: NDArray[np.int64] | None = None
        self._attributes: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """What another process opens it by."""
        again = partial(
            VersionReader,
            check_mode=self._check,
            resident_bytes=self._resident_bytes,
            opener=self._given,
            verify=self._verify,
        )
        return again, (self.path,)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Return (episodes + 1,): episode i is steps [offsets[i], offsets[i + 1]).

        Raises UsageError where the version has none, DataError unless they ascend from 0 to the version's steps.
        """
        if self._offsets is None:
            self._offsets = self._read_offsets()
        return self._offsets

    def _read_offsets(self) -> NDArray[np.int64]:
        steps, rows = self.manifest.steps, self.manifest.episodes + 1
        if (shape := self.metadata_of(EPISODE_OFFSETS).shape) != (rows,):
            raise self._episode_error(EPISODE_OFFSETS, f"wrong shape (expected ({rows},), got {shape})")
        offsets = self.read(EPISODE_OFFSETS, 0, rows).astype(np.int64)
        first, last = int(offsets[0]), int(offsets[-1])
        if (first, last) != (0, steps):
            problem = f"wrong first and last step (expected 0 and {steps}, got {first} and {last})"
            raise self._episode_error(EPISODE_OFFSETS, problem)
        if len(backward := np.flatnonzero(np.diff(offsets) < 0)):
            episode = int(backward[0])
            start, stop = offsets[episode : episode + 2]
            problem = f"episode {episode} ends before it begins (expected {start} or more, got {stop})"
            raise self._episode_error(EPISODE_OFFSETS, problem)
        return offsets

    @property
    def episode_json(self) -> bytes:
        """Return what was recorded of the episodes, one line of JSON each. Raises UsageError where there is none."""
        return self.read(EPISODE_JSON, 0, self.metadata_of(EPISODE_JSON).shape[0]).tobytes()

    def episode_records(self) -> list[dict[str, Any]]:
        """Decode `episode_json`. Raises as `episode_json`, and DataError unless it has one object for each episode."""
        try:
            records = [decode_json(line, dict[str, Any]) for line in self.episode_json.split(b"\n")[:-1]]
        except msgspec.DecodeError as error:
            raise self._episode_error(EPISODE_JSON, f"not JSON Lines: {error}") from error
        if len(records) != self.manifest.episodes:
            problem = f"wrong number of lines (expected {self.manifest.episodes}, got {len(records)})"
            raise self._episode_error(EPISODE_JSON, problem)
        return records

    def _episode_error(self, name: str, problem: str) -> DataError:
        return DataError(f"{name}: {problem}", where=str(self.path), hint=repair_hint(self.path))

    @property
    def attributes(self) -> dict[str, Any]:
        """The store's own attributes, as in its `zarr.json`. Raises DataError."""
        if self._attributes is None:
            try:
                self._attributes = dict(json.loads(self.read_file(metadata.V3))["attributes"])
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{metadata.V3} is not readable: {error}", where=str(self.path), hint=_RETRY_HINT
                ) from error
        return self._attributes

    def metadata_of(self, name: str) -> metadata.ArrayMetadata:
        """What the store says of an array. Raises UsageError for one that is not there, DataError."""
        if name not in self._known:
            if name not in self.manifest.arrays:
                names = [known for known in self.manifest.arrays if not known.startswith(EPISODE_PREFIX)]
                raise UsageError(f"no array {name!r}", where=str(self.path), hint=suggest(name, names))
            where = f"{name}/{metadata.V3}"
            found = metadata.parse_metadata(name, self.read_file(where), str(self.path / where))
            if found is None:
                raise DataError(f"{name} is a group, not an array", where=str(self.path), hint=_RETRY_HINT)
            known = self.manifest.arrays[name]
            if (found.shape, found.dtype) != (known.shape, known.dtype):
                what = f"{where}: {found.dtype} {found.shape}, where the manifest says {known.dtype} {known.shape}"
                raise DataError(what, where=str(self.path), hint=_RETRY_HINT)
            self._known[name] = found
        return self._known[name]

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type of an array's items."""
        return np.dtype(self.metadata_of(name).dtype)

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Steps [start, stop): (stop - start, *row). Raises as `read_into`."""
        if not 0 <= start <= stop <= self.metadata_of(name).shape[0]:
            raise IndexError(f"steps [{start}, {stop}) of {name}, which has {self.metadata_of(name).shape[0]}")
        out = np.empty((stop - start, *self.metadata_of(name).shape[1:]), self.dtype(name))
        self.read_into(name, out, start, stop)
        return out

    def read_into(self, name: str, out: NDArray[Any], start: int, stop: int) -> None:
        """Fill `out` with these steps. Raises IndexError for steps that are not here, DataError for damage."""
        start, stop = int(start), int(stop)  # NumPy's own have no `to_bytes`
        self._require_present(name, start, stop)
        reader = self._reader(name)
        if reader is None:
            out[:] = self._read_with_zarr(name, start, stop)
            return
        try:
            reader.read_into(out, start, stop)
        except ChunkNotStored:
            out[:] = self._read_with_zarr(name, start, stop)

    def resident(self, name: str) -> NDArray[Any] | None:
        """All of a small array, None for a large one, or one of which steps were left out. Raises as `read_into`."""
        held = self.resident_rows(name)
        return held.rows if held and held.is_complete else None

    def resident_rows(self, name: str) -> ResidentArray | None:
        """The steps of a small array that are here, read once; None for a large one. Raises as `read_into`."""
        if name not in self._resident:
            with self._holding.setdefault((os.getpid(), name), Lock()):
                if name not in self._resident:
                    self._resident[name] = self._load_resident(name)
        return self._resident[name]

    def _load_resident(self, name: str) -> ResidentArray | None:
        shape, runs = self.metadata_of(name).shape, self.manifest.runs(name)
        steps = sum(stop - start for start, stop in runs)
        if steps * int(np.prod(shape[1:])) * self.dtype(name).itemsize > self._resident_bytes:
            return None
        rows, at = np.empty((steps, *shape[1:]), self.dtype(name)), 0
        for start, stop in runs:
            self.read_into(name, rows[at : at + stop - start], start, stop)
            at += stop - start
        return ResidentArray(name, rows, runs, is_complete=runs == ((0, shape[0]),))

    def _reader(self, name: str) -> ArrayReader | None:
        if name not in self._readers:
            known = chunk_layout(self.metadata_of(name))
            self._readers[name] = (
                ArrayReader(self.path, name, known, check_mode=self._check, opener=self._opener) if known else None
            )
        return self._readers[name]

    def _require_present(self, name: str, start: int, stop: int) -> None:
        """Refuse steps that a part of a version does not have: Zarr would read them as fill values."""
        runs = self.manifest.runs(name)
        at = bisect_right(runs, start, key=lambda run: run[0]) - 1
        if start < stop and (at < 0 or stop > runs[at][1]):
            raise missing_steps_error(name, start, stop, runs)

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
        return DataError(f"{path}: {reason}", where=str(self.path), hint=_RETRY_HINT)

    def _read_with_zarr(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """What zarr-python reads, after a look at whether every file it would need, and take for zeros, is there."""
        import zarr

        chunk = self.metadata_of(name).chunk[0]
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
            raise DataError(what, where=str(self.path), hint=_RETRY_HINT) from error
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


def repair_hint(folder: Path) -> str:
    """What to do about a version that is damaged."""
    return f"take one that is whole, or repair it: `pit dataset rebuild {folder} --from RECORDINGS --publish`"


def _check_name(path: Path, version: str) -> None:
    name = path.resolve().name
    if is_version(name) and name != version:
        what = f"its manifest is that of {version}, not the one that the folder is named after"
        raise DataError(what, where=str(path), hint=repair_hint(path))


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
                raise DataError(f"{path}: the manifest does not name it", where=str(folder), hint=repair_hint(folder))
            now = os.fstat(descriptor)
            state = (now.st_dev, now.st_ino, now.st_ctime_ns, now.st_size)
            if seen.get(path) == state:
                return descriptor
            if digest.digest_descriptor(descriptor, like_digest=entry.digest) != (entry.bytes, entry.digest):
                what = f"{path} is damaged: its content is not what the manifest says"
                raise DataError(what, where=str(folder), hint=repair_hint(folder))
            seen[path] = state
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
