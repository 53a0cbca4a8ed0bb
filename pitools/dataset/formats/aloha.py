"""ALOHA: one HDF5 file an episode, `action`, `observations/{qpos, qvel, …}` and `observations/images/<camera>`.

Frames are raw, or each one picture file: in rows padded to one length, or in rows of a length of their own. Depth lies
in `observations/images_depth/<camera>` or `observations/depth/<camera>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import h5py
import msgspec

from pitools.core.errors import DataError
from pitools.dataset.formats import hdf5
from pitools.dataset.formats.attributes import array_attributes
from pitools.dataset.formats.model import (
    Episode,
    Hdf5Source,
    Recording,
    is_skipped,
    make_episode,
    rejection,
    take_language,
)

_SUFFIXES = {"observations/images/": "_image", "observations/images_depth/": "_depth", "observations/depth/": "_depth"}


def scan_aloha(path: Path, file: h5py.File, skip: Sequence[str], *, expected: str) -> Recording:
    """What the file holds. Raises DataError when it is not of this layout."""
    action = hdf5.get_child(file, "action", h5py.Dataset)
    if action is None or hdf5.get_child(file, "observations", h5py.Group) is None:
        raise DataError(f"not ALOHA's layout: it needs {expected}", where=str(path), hint="give --layout auto")
    found = Recording(path=path, layout="aloha", episodes=(), files=(path,))
    try:
        with hdf5.translate_errors(path):
            episode = _episode(hdf5.column_source(path), file, hdf5.step_count(action), skip)
    except DataError as error:
        return msgspec.structs.replace(found, rejected=(rejection(path.stem, path, error),))
    return msgspec.structs.replace(found, episodes=(episode,))


def _episode(place: Hdf5Source, file: h5py.File, steps: int, skip: Sequence[str]) -> Episode:
    columns, about = [], {}
    for key, dataset in hdf5.walk_datasets(file):
        name, camera = _name(key)
        # compress_len is where a picture ends in its padded row; the picture says so itself.
        if key.rpartition("/")[2] == "compress_len" or is_skipped(name, skip, key):
            continue
        columns.append((name, hdf5.describe_column_or_images(dataset, steps, place, camera=camera)))
        about[name] = array_attributes(hdf5.attributes(dataset))
    kept = hdf5.attributes(file)
    return make_episode(
        place.path.stem,
        place.path,
        steps,
        columns,
        "action",
        str(place.path),
        language=take_language(kept),
        attributes=kept,
        array_attributes=about,
    )


def _name(key: str) -> tuple[str, bool]:
    """The array's name, and whether it is a camera's."""
    for folder, suffix in _SUFFIXES.items():
        if key.startswith(folder):
            return f"obs/{key.removeprefix(folder)}{suffix}", True
    return (f"obs/{key.removeprefix('observations/')}" if key.startswith("observations/") else key), False
