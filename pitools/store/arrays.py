"""The arrays of one version by name: small ones held in memory, large ones read where they lie."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError, UsageError, nearest
from pitools.store import manifest as manifests
from pitools.store import zarr as metadata
from pitools.store.array import Absent, ArrayReader, Check
from pitools.store.layout import layout

# Action, state and the like: read once, and then a window is an indexing operation.
RESIDENT_BYTES = 64 << 20
_HINT = "stage it again"


class Arrays:
    """One version, whole or a part. Any threads may read at once, and forked processes may go on."""

    def __init__(self, path: Path, *, check: Check = "first", resident_bytes: int = RESIDENT_BYTES) -> None:
        """Raises DataError when the folder is no dataset."""
        self.path = path
        self.manifest, data = manifests.load(path)
        self.version = manifests.version(data)
        self._check, self._resident_bytes = check, resident_bytes
        self._known: dict[str, metadata.Array] = {}
        self._readers: dict[str, ArrayReader | None] = {}
        self._held: dict[str, NDArray[Any]] = {}
        self._named: dict[str, dict[int, list[str]]] = {}

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """(episodes + 1,): episode i is steps [offsets[i], offsets[i + 1])."""
        return self.read("episode_offsets", 0, self.manifest.episodes + 1).astype(np.int64)

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """The store's own attributes, as in its `zarr.json`. Raises DataError."""
        try:
            return dict(json.loads((self.path / metadata.V3).read_bytes())["attributes"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{metadata.V3} is not readable: {error}", where=str(self.path), hint=_HINT) from error

    def array(self, name: str) -> metadata.Array:
        """What the store says of an array. Raises UsageError for one that is not there, DataError."""
        if name not in self._known:
            if name not in self.manifest.arrays:
                names = [known for known in self.manifest.arrays if not known.startswith("episode_")]
                raise UsageError(f"no array {name!r}", where=str(self.path), hint=nearest(name, names))
            where = f"{name}/{metadata.V3}"
            try:
                data = (self.path / where).read_bytes()
            except OSError as error:
                raise DataError(f"{where}: {error.strerror}", where=str(self.path), hint=_HINT) from error
            found = metadata.parse(name, data, str(self.path / where))
            if found is None:
                raise DataError(f"{name} is a group, not an array", where=str(self.path), hint=_HINT)
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
        """All of a small array, None for a large one, or of a version of which steps were left out."""
        if name not in self._held:
            shape = self.array(name).shape
            n_bytes = int(np.prod(shape)) * self.dtype(name).itemsize
            if n_bytes > self._resident_bytes or list(self.manifest.runs(name)) != [(0, shape[0])]:
                return None
            self._held[name] = self.read(name, 0, shape[0])
        return self._held[name]

    def _reader(self, name: str) -> ArrayReader | None:
        if name not in self._readers:
            known = layout(self.array(name))
            self._readers[name] = ArrayReader(self.path, name, known, check=self._check) if known else None
        return self._readers[name]

    def _require(self, name: str, start: int, stop: int) -> None:
        """Refuse steps that a part of a version does not have: Zarr would read them as fill values."""
        runs = self.manifest.runs(name)
        at = bisect_right(runs, start, key=lambda run: run[0]) - 1
        if start < stop and (at < 0 or stop > runs[at][1]):
            here = ", ".join(f"{first}:{last}" for first, last in runs[:8]) + (", …" if len(runs) > 8 else "")
            raise IndexError(f"steps [{start}, {stop}) of {name} were left out of this subset, which has {here}")

    def _by_zarr(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """What zarr-python reads, after a look at whether every file it would need, and take for zeros, is there."""
        import zarr

        chunk = self.array(name).chunk[0]
        for number in range(start // chunk, -(-stop // chunk)) if start < stop else ():
            for path in self._files(name).get(number, ()):
                if not (self.path / path).is_file():
                    raise DataError(f"{path}: missing", where=str(self.path), hint=_HINT)
        try:
            return np.asarray(zarr.open_array(self.path / name, mode="r", zarr_format=3)[start:stop])
        except (ValueError, RuntimeError, OSError) as error:
            what = f"{name}: steps {start} to {stop} are damaged: {error}"
            raise DataError(what, where=str(self.path), hint=_HINT) from error

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
