"""Scan Zarr stores, v2 or v3, of arrays along the steps of all episodes, with an array of episode ends.

    a replay buffer          data/<array>, meta/episode_ends, as diffusion-policy writes it; names lose their `data/`
    any other group          arrays along steps, and episode_offsets or episode_ends, in the group or in `meta`

Zarr writes no file for a chunk of only the fill value, so a lost chunk and an empty one look alike. In images and
actions, a missing chunk rejects its episodes, since no recording has a chunk of only black frames or only zero actions.
In other arrays, such as rewards, it stands for the fill value, with a note.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.dataset.formats import zarr_reader
from pitools.dataset.formats.attributes import drop_storage_attributes
from pitools.dataset.formats.model import (
    SINGULAR,
    SKIPPED_NEXT_OBS,
    Column,
    Episode,
    Recording,
    RejectedEpisode,
    ZarrSource,
    check_row,
    is_skipped,
    list_files,
    make_episode,
    rejection,
)
from pitools.store.version_list import lost_manifest_of
from pitools.store.zarr import chunk_keys, metadata
from pitools.store.zarr.metadata import ArrayMetadata

_END_ARRAYS = ("episode_offsets", "episode_ends", "meta/episode_offsets", "meta/episode_ends")
_SKIP_HINT = "leave it out with --skip-array"
# Metadata may declare any shape, and chunks without a file are read as the fill value. What is declared beyond the
# first may be at most so many times the bytes of the files.
_FREE_BYTES, _MAX_RATIO = 1 << 30, 4096
_ASCENDING = "expected the end (exclusive) of each episode, ascending; copy the store again if it is incomplete"


def scan_zarr_store(path: Path, skip: Sequence[str], *, keep_next_obs: bool = False) -> Recording:
    """Return the store's episodes. Raises DataError if it is no Zarr store, or has no array of episode ends."""
    if manifest_error := lost_manifest_of(path):
        raise manifest_error
    files = list_files(path)
    arrays = _read_arrays(path, files)
    offsets, ends = _read_offsets(path, arrays, files)
    columns = _columns_by_store_name(arrays, int(offsets[-1]), ends, skip, path, keep_next_obs)
    _require_plausible(path, columns.values(), files)
    holes, notes = _find_missing_steps(columns, files)
    attributes_by_array = read_array_attributes(path, columns)
    left_out = [key for key in arrays if key.removeprefix("data/").startswith("next_obs/")]
    if not keep_next_obs and any(not is_skipped(key.removeprefix("data/"), skip, key) for key in left_out):
        notes.append(SKIPPED_NEXT_OBS)
    episodes: list[Episode] = []
    rejected: list[RejectedEpisode] = []
    for number, (low, high) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        try:
            _require_no_missing(path, number, low, high, holes)
            episodes.append(
                make_zarr_episode(path, f"episode_{number}", columns, low, high, array_attributes=attributes_by_array)
            )
        except DataError as error:
            rejected.append(rejection(f"episode_{number}", path, error))
    return Recording(
        path=path,
        layout="zarr",
        episodes=tuple(episodes),
        attributes=_read_attributes(path),
        rejected=tuple(rejected),
        files=tuple(path / name for name in files),
        notes=tuple(notes),
    )


def make_zarr_episode(
    path: Path,
    name: str,
    columns: dict[str, ArrayMetadata],
    low: int,
    high: int,
    *,
    is_own_version: bool = False,
    **rest: Any,
) -> Episode:
    """Return the episode of rows [low, high) of these arrays. Raises DataError if that is no row."""
    steps = high - low
    described = [
        (
            key,
            Column(
                dataset=array.path,
                steps=steps,
                row=array.shape[1:],
                dtype=array.dtype,
                source=ZarrSource(path=path, name=array.path, first_row=low, is_own_version=is_own_version),
            ),
        )
        for key, array in columns.items()
    ]
    return make_episode(name, path, steps, described, "it", f"{path}: {name}", **rest)


def _read_arrays(path: Path, files: Sequence[str]) -> dict[str, ArrayMetadata]:
    """Return the arrays of a store by path. Raises DataError."""
    kinds = (metadata.V3_FILE, metadata.V2_ARRAY)
    metadata_files = [path / name for name in files if name.rpartition("/")[2] in kinds]
    arrays = {}
    for file in metadata_files:
        name = file.parent.relative_to(path).as_posix()
        with zarr_reader.translate_errors(path, name):
            array = metadata.parse_metadata("" if name == "." else name, file.read_bytes(), str(file))
        if array is not None:
            arrays[name] = array
    if not arrays:
        raise DataError("no arrays", where=str(path), hint="give the folder of the store itself")
    return arrays


def _require_plausible(path: Path, arrays: Iterable[ArrayMetadata], files: Sequence[str]) -> None:
    """Raise DataError for arrays that declare far more bytes than the store's files can hold: reading them would
    exhaust memory or the destination's disk."""
    declared, limit = sum(map(_declared_bytes, arrays)), _FREE_BYTES
    for name in files:
        if declared <= limit:
            return
        with zarr_reader.translate_errors(path, name):
            limit += _MAX_RATIO * (path / name).stat().st_size
    if declared > limit:
        problem = f"metadata: the arrays have {declared} bytes (expected at most {limit} from files of this size)"
        raise DataError(
            problem, where=str(path), hint="check that the store is complete, or leave arrays out: --skip-array"
        )


def _declared_bytes(array: ArrayMetadata) -> int:
    """Return the bytes of a decoded array, or of a decoded chunk if that is larger."""
    chain = array.codecs.sharding.inner if array.codecs.sharding else array.codecs
    try:
        itemsize = np.dtype(array.dtype).itemsize
    except TypeError:  # a dtype that NumPy lacks
        itemsize = 1
    return max(math.prod(array.shape) * itemsize, chain.raw_bytes or 0)


def _read_offsets(path: Path, arrays: dict[str, ArrayMetadata], files: Sequence[str]) -> tuple[NDArray[np.int64], str]:
    """Return the episode offsets, (episodes + 1,) from 0, and the name of their array. Raises DataError."""
    name = next((name for name in _END_ARRAYS if name in arrays), "")
    if not name:
        hint = "write an array meta/episode_ends: the end (exclusive) of each episode"
        raise DataError(f"no episode ends (expected one of {', '.join(_END_ARRAYS)})", where=str(path), hint=hint)
    _require_plausible(path, [arrays[name]], files)
    values = zarr_reader.read_array(path, name)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise DataError(f"{name} is not a one-dimensional array of integers", where=str(path), hint=_ASCENDING)
    values = values.astype(np.int64)
    if name.endswith("_ends") or not values.size or values[0]:
        values = np.concatenate([np.zeros(1, np.int64), values])
    if len(values) < 2 or (np.diff(values) < 0).any():
        raise DataError(f"{name} is empty, or not ascending", where=str(path), hint=_ASCENDING)
    return values, name


def _columns_by_store_name(
    arrays: dict[str, ArrayMetadata], steps: int, ends: str, skip: Sequence[str], path: Path, keep_next_obs: bool
) -> dict[str, ArrayMetadata]:
    """Return the arrays along steps by their names in a version. Raises DataError, also for two of the same name."""
    columns: dict[str, ArrayMetadata] = {}
    for key, array in arrays.items():
        name = key.removeprefix("data/")
        name = SINGULAR.get(name, name)
        if is_skipped(name, skip, key) or key == ends or (name.startswith("next_obs/") and not keep_next_obs):
            continue
        if name in columns:
            problem = f"{columns[name].path} and {key} would both be {name!r}"
            raise DataError(problem, where=str(path), hint=f"leave one of them out: --skip-array {key}")
        where = f"{path}: {key}"
        try:
            kind = np.dtype(array.dtype).kind
        except TypeError:
            kind = "O"
        if kind not in "biufc":
            raise DataError(f"dtype {array.dtype} (expected numbers)", where=where, hint=_SKIP_HINT)
        if array.shape[:1] != (steps,):
            problem = f"the shape is {array.shape} (expected {steps} steps: {ends})"
            raise DataError(problem, where=where, hint=_SKIP_HINT)
        check_row(array.shape[1:], array.dtype, where)
        zarr_reader.check_readable(path, array)
        columns[name] = array
    return columns


def _find_missing_steps(
    columns: dict[str, ArrayMetadata], files: Sequence[str]
) -> tuple[dict[str, list[tuple[int, int]]], list[str]]:
    """Return the missing steps [low, high) of images and actions, by array, and notes on missing chunks of others."""
    holes: dict[str, list[tuple[int, int]]] = {}
    notes = []
    for name, array in columns.items():
        parse_key, chunk = chunk_keys.make_key_parser(array), array.file_chunk[0]
        stored = Counter(place[0] for place in map(parse_key, files) if place)
        missing = math.prod(array.grid) - stored.total()
        if missing and zarr_reader.must_be_stored(array.path, array.shape[1:]):
            complete = sorted(number for number, count in stored.items() if count == math.prod(array.grid[1:]))
            gaps = pairwise([-1, *complete, array.grid[0]])
            holes[name] = [((a + 1) * chunk, min(b * chunk, array.shape[0])) for a, b in gaps if b - a > 1]
        elif missing:
            notes.append(f"{name}: {missing} chunks without a file are read as the fill value")
    return holes, notes


def _require_no_missing(path: Path, number: int, low: int, high: int, holes: dict[str, list[tuple[int, int]]]) -> None:
    for name, runs in holes.items():
        for first, last in runs:
            if first < high and low < last:
                raise DataError(
                    f"{name}: no file for steps {first} to {last}",
                    where=f"{path}: episode_{number}",
                    hint="copy the store again; if all values are the fill value, write it with write_empty_chunks",
                )


def read_array_attributes(path: Path, columns: dict[str, ArrayMetadata]) -> dict[str, dict[str, Any]]:
    """Return the arrays' attributes, by their names in a version. Raises DataError."""
    return {name: drop_storage_attributes(_read_attributes(path / array.path)) for name, array in columns.items()}


def _read_attributes(path: Path) -> dict[str, Any]:
    """Read the attributes of a group or an array. Raises DataError."""
    v3, v2 = path / metadata.V3_FILE, path / metadata.V2_ATTRIBUTES
    with zarr_reader.translate_errors(path, "its attributes"):
        attributes = json.loads(v3.read_bytes()).get("attributes") if v3.is_file() else None
        attributes = json.loads(v2.read_bytes()) if attributes is None and v2.is_file() else attributes
    return dict(attributes) if isinstance(attributes, dict) else {}
