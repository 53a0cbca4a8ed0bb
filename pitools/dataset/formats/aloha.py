"""Scan ALOHA's layout: an HDF5 file per episode.

It has `action`, `observations/{qpos, qvel, …}` and `observations/images/<camera>`. Frames are raw, or encoded images in
rows of equal (padded) or variable length. Depth is in `observations/images_depth/<camera>` or
`observations/depth/<camera>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import h5py
import msgspec

from pitools.core.errors import DataError
from pitools.dataset.formats import hdf5
from pitools.dataset.formats.attributes import drop_storage_attributes
from pitools.dataset.formats.model import (
    Episode,
    Hdf5Source,
    Recording,
    is_skipped,
    make_episode,
    rejection,
    take_instruction,
)

_SUFFIXES = {"observations/images/": "_image", "observations/images_depth/": "_depth", "observations/depth/": "_depth"}


def scan_aloha(path: Path, file: h5py.File, skip: Sequence[str], *, expected: str) -> Recording:
    """Return the file's episode. Raises DataError for another layout."""
    action = hdf5.get_child(file, "action", h5py.Dataset)
    if action is None or hdf5.get_child(file, "observations", h5py.Group) is None:
        raise DataError(f"not ALOHA's layout (expected {expected})", where=str(path), hint="give --layout auto")
    recording = Recording(path=path, layout="aloha", episodes=(), files=(path,))
    try:
        with hdf5.translate_errors(path):
            episode = _describe_episode(hdf5.column_source(path), file, hdf5.step_count(action), skip)
    except DataError as error:
        return msgspec.structs.replace(recording, rejected=(rejection(path.stem, path, error),))
    return msgspec.structs.replace(recording, episodes=(episode,))


def _describe_episode(source: Hdf5Source, file: h5py.File, steps: int, skip: Sequence[str]) -> Episode:
    columns, attributes_by_array = [], {}
    for key, dataset in hdf5.walk_datasets(file):
        name, camera = _array_name(key)
        # compress_len is the length of each image in its padded row; the image's end marker suffices.
        if is_skipped(name, skip, key) or key.rpartition("/")[2] == "compress_len":
            continue
        columns.append((name, hdf5.describe_column_or_images(dataset, steps, source, camera=camera)))
        attributes_by_array[name] = drop_storage_attributes(hdf5.read_attributes(dataset))
    attributes = hdf5.read_attributes(file)
    return make_episode(
        source.path.stem,
        source.path,
        steps,
        columns,
        "action",
        str(source.path),
        instruction=take_instruction(attributes),
        attributes=attributes,
        array_attributes=attributes_by_array,
    )


def _array_name(key: str) -> tuple[str, bool]:
    """Return an array's name in a version, and whether it holds camera frames."""
    for folder, suffix in _SUFFIXES.items():
        if key.startswith(folder):
            return f"obs/{key.removeprefix(folder)}{suffix}", True
    return (f"obs/{key.removeprefix('observations/')}" if key.startswith("observations/") else key), False
