"""Zarr stores, v2 or v3, whose arrays run along the steps of all episodes, and which say where each ends.

    a replay buffer          data/<array>, meta/episode_ends, as diffusion-policy writes it; names lose their `data/`
    any other group          its arrays along steps, and episode_offsets or episode_ends in it or in `meta`

Zarr writes no file for a chunk of nothing but the fill value, so that a lost file and an empty chunk look the same. Of
images and actions a hole refuses the episodes it is in: nobody records black frames, nor zeros for a chunk. Of other
arrays, such as rewards, it is taken for the fill value, and `notes` says so.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.dataset.formats import zarr_reader
from pitools.dataset.formats.attributes import array_attributes
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
    listed,
    make_episode,
    rejection,
)
from pitools.store.version_list import lost_manifest_of
from pitools.store.zarr import chunk_keys, metadata
from pitools.store.zarr.metadata import ArrayMetadata

_END_ARRAYS = ("episode_offsets", "episode_ends", "meta/episode_offsets", "meta/episode_ends")
_HINT = "leave it out with --skip"
_ASCENDING = "it has to be the step after each episode's last, in order; is the copy complete?"


def scan_zarr_store(path: Path, skip: Sequence[str], *, keep_next_obs: bool = False) -> Recording:
    """What the store holds. Raises DataError when it is not one, or does not say where its episodes end."""
    if lost := lost_manifest_of(path):
        raise lost
    files = listed(path)
    found = _arrays(path, files)
    offsets, ends = _read_offsets(path, found)
    columns = _columns_by_store_name(found, int(offsets[-1]), ends, skip, path, keep_next_obs)
    holes, notes = _find_missing_steps(columns, files)
    about = read_array_attributes(path, columns)
    left_out = [key for key in found if key.removeprefix("data/").startswith("next_obs/")]
    if not keep_next_obs and any(not is_skipped(key.removeprefix("data/"), skip, key) for key in left_out):
        notes.append(SKIPPED_NEXT_OBS)
    whole: list[Episode] = []
    refused: list[RejectedEpisode] = []
    for number, (low, high) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        try:
            _require_no_missing(path, number, low, high, holes)
            whole.append(make_zarr_episode(path, f"episode_{number}", columns, low, high, array_attributes=about))
        except DataError as error:
            refused.append(rejection(f"episode_{number}", path, error))
    return Recording(
        path=path,
        layout="zarr",
        episodes=tuple(whole),
        attributes=_attributes(path),
        rejected=tuple(refused),
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
    published: bool = False,
    **rest: Any,
) -> Episode:
    """The episode of rows [low, high) of these arrays. Raises DataError when it has none."""
    steps = high - low
    made = [
        (
            key,
            Column(
                dataset=array.path,
                steps=steps,
                row=array.shape[1:],
                dtype=array.dtype,
                source=ZarrSource(path=path, name=array.path, first_row=low, is_own_version=published),
            ),
        )
        for key, array in columns.items()
    ]
    return make_episode(name, path, steps, made, "it", f"{path}: {name}", **rest)


def _arrays(path: Path, listed: Sequence[str]) -> dict[str, ArrayMetadata]:
    """The arrays in a store, by name. Raises DataError."""
    kinds = (metadata.V3, metadata.V2_ARRAY)
    files = [path / name for name in listed if name.rpartition("/")[2] in kinds]
    found = {}
    for file in files:
        name = file.parent.relative_to(path).as_posix()
        with zarr_reader.translate_errors(path, name):
            array = metadata.parse_metadata("" if name == "." else name, file.read_bytes(), str(file))
        if array is not None:
            found[name] = array
    if not found:
        raise DataError("it has no arrays", where=str(path), hint="give the folder of the store itself")
    return found


def _read_offsets(path: Path, arrays: dict[str, ArrayMetadata]) -> tuple[NDArray[np.int64], str]:
    """(episodes + 1,) from 0, and the array they come from. Raises DataError."""
    name = next((name for name in _END_ARRAYS if name in arrays), "")
    if not name:
        problem = f"it has none of {', '.join(_END_ARRAYS)}, to tell where an episode ends"
        raise DataError(
            problem, where=str(path), hint="write an array meta/episode_ends: the step after each one's last"
        )
    values = zarr_reader.read_array(path, name)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise DataError(f"{name} is not a list of step numbers", where=str(path), hint=_ASCENDING)
    values = values.astype(np.int64)
    if name.endswith("_ends") or not values.size or values[0]:
        values = np.concatenate([np.zeros(1, np.int64), values])
    if len(values) < 2 or (np.diff(values) < 0).any():
        raise DataError(f"{name} has no episodes, or does not ascend", where=str(path), hint=_ASCENDING)
    return values, name


def _columns_by_store_name(
    arrays: dict[str, ArrayMetadata], steps: int, ends: str, skip: Sequence[str], path: Path, keep_next_obs: bool
) -> dict[str, ArrayMetadata]:
    """The arrays along steps by the names that they have in a version. Raises DataError, also for two of one name."""
    columns: dict[str, ArrayMetadata] = {}
    for key, array in arrays.items():
        name = key.removeprefix("data/")
        name = SINGULAR.get(name, name)
        if key == ends or is_skipped(name, skip, key) or (name.startswith("next_obs/") and not keep_next_obs):
            continue
        if name in columns:
            problem = f"{columns[name].path} and {key} would both be {name!r}"
            raise DataError(problem, where=str(path), hint=f"leave one of them out: --skip {key}")
        where = f"{path}: {key}"
        try:
            kind = np.dtype(array.dtype).kind
        except TypeError:
            kind = "O"
        if kind not in "biufc":
            raise DataError(f"dtype {array.dtype} is not one of numbers", where=where, hint=_HINT)
        if array.shape[:1] != (steps,):
            problem = f"its shape is {array.shape}, where {ends} says there are {steps} steps"
            raise DataError(problem, where=where, hint=_HINT)
        check_row(array.shape[1:], array.dtype, where)
        zarr_reader.check_readable(path, array)
        columns[name] = array
    return columns


def _find_missing_steps(
    columns: dict[str, ArrayMetadata], listed: Sequence[str]
) -> tuple[dict[str, list[tuple[int, int]]], list[str]]:
    """Steps [low, high) of images and actions that no file holds, by array; and what to say of holes in others."""
    holes: dict[str, list[tuple[int, int]]] = {}
    notes = []
    for name, array in columns.items():
        find, chunk = chunk_keys.make_key_parser(array), array.chunk[0]
        stored = Counter(place[0] for place in map(find, listed) if place)
        missing = math.prod(array.grid) - stored.total()
        if missing and zarr_reader.must_be_stored(array.path, array.shape[1:]):
            whole = sorted(number for number, count in stored.items() if count == math.prod(array.grid[1:]))
            gaps = pairwise([-1, *whole, array.grid[0]])
            holes[name] = [((a + 1) * chunk, min(b * chunk, array.shape[0])) for a, b in gaps if b - a > 1]
        elif missing:
            notes.append(f"{name}: {missing} chunks have no file: taken for the fill value")
    return holes, notes


def _require_no_missing(path: Path, number: int, low: int, high: int, holes: dict[str, list[tuple[int, int]]]) -> None:
    for name, runs in holes.items():
        for first, last in runs:
            if first < high and low < last:
                raise DataError(
                    f"{name}: no file holds steps {first} to {last}",
                    where=f"{path}: episode_{number}",
                    hint="copy the store again; were it nothing but fill values, write it with write_empty_chunks",
                )


def read_array_attributes(path: Path, columns: dict[str, ArrayMetadata]) -> dict[str, dict[str, Any]]:
    """What the arrays say of themselves, by their names in a version. Raises DataError."""
    return {name: array_attributes(_attributes(path / array.path)) for name, array in columns.items()}


def _attributes(path: Path) -> dict[str, Any]:
    """A group's, or an array's. Raises DataError."""
    v3, v2 = path / metadata.V3, path / metadata.V2_ATTRIBUTES
    with zarr_reader.translate_errors(path, "its attributes"):
        found = json.loads(v3.read_bytes()).get("attributes") if v3.is_file() else None
        found = json.loads(v2.read_bytes()) if found is None and v2.is_file() else found
    return dict(found) if isinstance(found, dict) else {}
