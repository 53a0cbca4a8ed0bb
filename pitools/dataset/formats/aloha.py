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
from pitools.dataset.formats.attributes import of_array
from pitools.dataset.formats.model import Episode, Hdf5, Recording, describe, language, refusal, skipped

_SUFFIXES = {
    "observations/images/": "_image",
    "observations/images_depth/": "_depth",
    "observations/depth/": "_depth",
}


def scan(path: Path, file: h5py.File, skip: Sequence[str], *, expected: str) -> Recording:
    """What the file holds. Raises DataError when it is not of this layout."""
    action = hdf5.child(file, "action", h5py.Dataset)
    if action is None or hdf5.child(file, "observations", h5py.Group) is None:
        raise DataError(f"not ALOHA's layout: it needs {expected}", where=str(path), hint="give --layout auto")
    found = Recording(path=path, layout="aloha", episodes=(), files=(path,))
    try:
        with hdf5.reading(path):
            episode = _episode(hdf5.place(path), file, hdf5.steps(action), skip)
    except DataError as error:
        return msgspec.structs.replace(found, refused=(refusal(path.stem, path, error),))
    return msgspec.structs.replace(found, episodes=(episode,))


def _episode(place: Hdf5, file: h5py.File, steps: int, skip: Sequence[str]) -> Episode:
    columns, about = [], {}
    for key, dataset in hdf5.walk(file):
        name, camera = _name(key)
        # compress_len is where a picture ends in its padded row; the picture says so itself.
        if key.rpartition("/")[2] == "compress_len" or skipped(name, skip, key):
            continue
        columns.append((name, hdf5.column_or_pictures(dataset, steps, place, camera=camera)))
        about[name] = of_array(hdf5.attributes(dataset))
    kept = hdf5.attributes(file)
    return describe(
        place.path.stem,
        place.path,
        steps,
        columns,
        "action",
        str(place.path),
        language=language(kept),
        attributes=kept,
        array_attributes=about,
    )


def _name(key: str) -> tuple[str, bool]:
    """The array's name, and whether it is a camera's."""
    for folder, suffix in _SUFFIXES.items():
        if key.startswith(folder):
            return f"obs/{key.removeprefix(folder)}{suffix}", True
    return (f"obs/{key.removeprefix('observations/')}" if key.startswith("observations/") else key), False
