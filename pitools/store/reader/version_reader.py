"""Read the arrays of one version by name; small arrays stay in memory, large ones are read from files."""

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

from pitools.core.errors import DataError, PitError, UsageError, suggest
from pitools.core.fs import access_error
from pitools.core.record import decode_json
from pitools.store import digest
from pitools.store import manifest as manifests
from pitools.store.manifest import EPISODE_JSON, EPISODE_OFFSETS, EPISODE_PREFIX, FileEntry
from pitools.store.reader.array_reader import DAMAGE_HINT, ArrayReader, ChecksumMode, ChunkNotStored, Opener, open_below
from pitools.store.reader.resident import ResidentArray, missing_steps_error
from pitools.store.zarr import metadata
from pitools.store.zarr.chunk_layout import chunk_layout

# Arrays up to this size, such as action and state, are read once; then a window is an indexing operation.
RESIDENT_BYTES = 64 << 20


class VersionReader:
    """A reader of one version or of a staged subset. Safe for threads and across forks."""

    def __init__(
        self,
        path: Path,
        *,
        checksums: ChecksumMode = "first",
        resident_bytes: int = RESIDENT_BYTES,
        opener: Opener | None = None,
        verify_digests: bool = False,
    ) -> None:
        """opener: returns a descriptor of a file of the version ("": of its folder), if they are not all in `path`.
        checksums: when to compare a chunk with its CRC-32C, as of `ArrayReader`. verify_digests: compare the manifest
        with the folder's name, and each file with its digest at the first open. This detects a
        valid shard at the path of another one, in which every checksum matches.

        Raises DataError if the folder is not a dataset, and the errors of the opener.
        """
        self.path, self._verify_digests = path, verify_digests
        self._opener, self._given = opener or partial(open_below, path), opener
        self._check, self._resident_bytes = checksums, resident_bytes
        if opener:
            data = self.read_file(manifests.MANIFEST_FILE)
            self.manifest = manifests.decode_manifest(data, str(path / manifests.MANIFEST_FILE))
        else:
            self.manifest, data = manifests.load_manifest(path)
        self.version = manifests.version_of(data)
        if verify_digests:
            named = {entry.path: entry for entry in self.manifest.files}
            self._opener = partial(_open_verified, path, self._opener, named, {})
        self._known: dict[str, metadata.ArrayMetadata] = {}
        self._readers: dict[str, ArrayReader | None] = {}
        self._resident: dict[str, ResidentArray | None] = {}
        # By process id too: a lock that another thread held during a fork is never released in the child.
        self._holding: dict[tuple[int, str], Lock] = {}
        self._named: dict[str, dict[int, list[str]]] = {}
        # Not cached_property: in Python 3.11 it has such a lock, shared by all instances.
        self._offsets: NDArray[np.int64] | None = None
        self._attributes: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments: another process opens the version again."""
        reopen = partial(
            VersionReader,
            checksums=self._check,
            resident_bytes=self._resident_bytes,
            opener=self._given,
            verify_digests=self._verify_digests,
        )
        return reopen, (self.path,)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Return (episodes + 1,) offsets: episode i consists of steps [offsets[i], offsets[i + 1]).

        Raises UsageError if the version has none, DataError unless they ascend from 0 to the version's steps.
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
        """Return the metadata of the episodes, one line of JSON each. Raises UsageError if the version has none."""
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
        """Return the attributes in the store's `zarr.json`. Raises DataError."""
        if self._attributes is None:
            try:
                self._attributes = dict(json.loads(self.read_file(metadata.V3_FILE))["attributes"])
            except (ValueError, KeyError, TypeError) as error:
                problem = f"{metadata.V3_FILE}: no attributes: {error}"
                raise DataError(problem, where=str(self.path), hint=DAMAGE_HINT) from error
        return self._attributes

    @property
    def splits(self) -> dict[str, list[int]]:
        """Return the numbers of each split's episodes. Raises DataError unless the version has all of them."""
        try:
            splits = msgspec.convert(self.attributes.get("splits") or {}, dict[str, list[int]])
        except msgspec.ValidationError as error:
            raise self._episode_error("splits", f"not lists of episode numbers: {error}") from error
        for name, numbers in splits.items():
            if numbers and not 0 <= min(numbers) <= max(numbers) < self.manifest.episodes:
                got = f"(expected 0 to {self.manifest.episodes - 1}, got {min(numbers)} to {max(numbers)})"
                raise self._episode_error("splits", f"{name}: no such episode {got}")
        return splits

    def metadata_of(self, name: str) -> metadata.ArrayMetadata:
        """Return the Zarr metadata of an array. Raises UsageError if it is missing, DataError."""
        if name not in self._known:
            if name not in self.manifest.arrays:
                names = [known for known in self.manifest.arrays if not known.startswith(EPISODE_PREFIX)]
                raise UsageError(f"no array {name!r}", where=str(self.path), hint=suggest(name, names))
            where = f"{name}/{metadata.V3_FILE}"
            parsed = metadata.parse_metadata(name, self.read_file(where), str(self.path / where))
            if parsed is None:
                raise DataError(f"{name}: a group (expected an array)", where=str(self.path), hint=DAMAGE_HINT)
            schema = self.manifest.arrays[name]
            if (parsed.shape, parsed.dtype) != (schema.shape, schema.dtype):
                problem = f"{where}: differs from the manifest "
                problem += f"(expected {schema.dtype} {schema.shape}, got {parsed.dtype} {parsed.shape})"
                raise DataError(problem, where=str(self.path), hint=DAMAGE_HINT)
            self._known[name] = parsed
        return self._known[name]

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype of an array."""
        return np.dtype(self.metadata_of(name).dtype)

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Return steps [start, stop) as (stop - start, *row). Raises as `read_into`."""
        if not 0 <= start <= stop <= self.metadata_of(name).shape[0]:
            steps = self.metadata_of(name).shape[0]
            raise IndexError(f"steps [{start}, {stop}) of {name}: out of range (expected at most {steps})")
        out = np.empty((stop - start, *self.metadata_of(name).shape[1:]), self.dtype(name))
        self.read_into(name, out, start, stop)
        return out

    def read_into(self, name: str, out: NDArray[Any], start: int, stop: int) -> None:
        """Fill `out` with steps [start, stop). Raises IndexError for absent steps, DataError for damaged files."""
        start, stop = int(start), int(stop)  # NumPy integers have no `to_bytes`
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
        """Return a whole small array; None for a large array, or without some of its steps. Raises as `read_into`."""
        rows = self.resident_rows(name)
        return rows.rows if rows and rows.is_complete else None

    def resident_rows(self, name: str) -> ResidentArray | None:
        """Return the present steps of a small array, read once; None for a large array. Raises as `read_into`."""
        if name not in self._resident:
            with self._holding.setdefault((os.getpid(), name), Lock()):
                if name not in self._resident:
                    self._resident[name] = self._load_resident(name)
        return self._resident[name]

    def _load_resident(self, name: str) -> ResidentArray | None:
        shape, ranges = self.metadata_of(name).shape, self.manifest.present_ranges(name)
        steps = sum(stop - start for start, stop in ranges)
        if steps * int(np.prod(shape[1:])) * self.dtype(name).itemsize > self._resident_bytes:
            return None
        rows, filled = np.empty((steps, *shape[1:]), self.dtype(name)), 0
        for start, stop in ranges:
            self.read_into(name, rows[filled : filled + stop - start], start, stop)
            filled += stop - start
        return ResidentArray(name, rows, ranges, is_complete=ranges == ((0, shape[0]),))

    def _reader(self, name: str) -> ArrayReader | None:
        if name not in self._readers:
            layout = chunk_layout(self.metadata_of(name))
            self._readers[name] = (
                ArrayReader(self.path, name, layout, checksums=self._check, opener=self._opener) if layout else None
            )
        return self._readers[name]

    def _require_present(self, name: str, start: int, stop: int) -> None:
        """Raise IndexError for steps that a subset does not have: Zarr would read them as fill values."""
        ranges = self.manifest.present_ranges(name)
        index = bisect_right(ranges, start, key=lambda present: present[0]) - 1
        if start < stop and (index < 0 or stop > ranges[index][1]):
            raise missing_steps_error(name, start, stop, ranges)

    def _open(self, path: str) -> int:
        try:
            return self._opener(path)
        except OSError as error:
            raise self._unreadable(path, error) from error

    def read_file(self, path: str) -> bytes:
        """Return the content of a small file, such as metadata. Raises DataError."""
        descriptor = self._open(path)
        try:
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()
        except OSError as error:
            raise self._unreadable(path, error) from error
        finally:
            os.close(descriptor)

    def _unreadable(self, path: str, error: OSError) -> PitError:
        if access := access_error(error, self.path / path):
            return access
        reason = "missing" if isinstance(error, FileNotFoundError) else os.strerror(error.errno or 0)
        return DataError(f"{path}: {reason}", where=str(self.path), hint=DAMAGE_HINT)

    def _read_with_zarr(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Read by zarr-python, after opening every file needed: it would read a missing file as zeros."""
        import zarr

        chunk = self.metadata_of(name).file_chunk[0]
        for number in range(start // chunk, -(-stop // chunk)) if start < stop else ():
            for path in self._files(name).get(number, ()):
                os.close(self._open(path))
        # By descriptor: a folder that is still being filled is renamed when it is complete.
        folder = self._open("")
        try:
            opened = zarr.open_array(Path(f"/proc/self/fd/{folder}", name), mode="r", zarr_format=3)
            return np.asarray(opened[start:stop])
        except (ValueError, RuntimeError, OSError) as error:
            problem = f"{name}: steps {start} to {stop} cannot be decoded: {error}"
            raise DataError(problem, where=str(self.path), hint=DAMAGE_HINT) from error
        finally:
            os.close(folder)

    def _files(self, name: str) -> dict[int, list[str]]:
        """Return the array's files in the manifest, by chunk number along the first axis."""
        if name not in self._named:
            by_folder: defaultdict[int, list[str]] = defaultdict(list)
            # `c/2/0`, or `2.0` in the v2 chunk key encoding.
            number = re.compile(rf"{re.escape(name)}/(?:c[./])?(\d+)(?:[./]\d+)*")
            for entry in self.manifest.files:
                if matched := number.fullmatch(entry.path):
                    by_folder[int(matched[1])].append(entry.path)
            self._named[name] = dict(by_folder)
        return self._named[name]


def repair_hint(folder: Path) -> str:
    """Return the hint for a damaged version."""
    return f"use an intact copy, or repair it: `pit dataset rebuild {folder} --from RECORDINGS --publish`"


def _open_verified(
    folder: Path, opener: Opener, named: dict[str, FileEntry], verified: dict[str, tuple[int, ...]], path: str
) -> int:
    """Return a descriptor of a file with the manifest's size and digest; path "": of the folder.

    verified: by path the state of a file at its verification: zarr-python opens a shard once per block that it reads.
    Raises OSError, DataError.
    """
    descriptor = opener(path)
    try:
        if path:
            entry = named.get(path)
            if entry is None:
                raise DataError(f"{path}: not in the manifest", where=str(folder), hint=repair_hint(folder))
            status = os.fstat(descriptor)
            state = (status.st_dev, status.st_ino, status.st_ctime_ns, status.st_size)
            if verified.get(path) == state:
                return descriptor
            if digest.digest_descriptor(descriptor, like_digest=entry.digest) != (entry.bytes, entry.digest):
                problem = f"{path}: damaged: size or digest differ from the manifest"
                raise DataError(problem, where=str(folder), hint=repair_hint(folder))
            verified[path] = state
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
