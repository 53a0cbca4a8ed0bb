"""The layouts we read, robomimic and ALOHA, and the names that both have in a store: `action`, `obs/…`, `reward`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import h5py
import msgspec

from pitools.core.errors import DataError
from pitools.dataset.sources import hdf5, jpeg
from pitools.dataset.sources.recording import Column, Episode, Recording, check_episode, check_names, natural, skipped

LAYOUTS = ("robomimic", "aloha")
EXPECTED = {
    "robomimic": "data/<demo>/actions",
    "aloha": "action and observations/",
}
_SINGULAR = {"actions": "action", "rewards": "reward", "dones": "done", "states": "state"}
_IMAGES = "observations/images/"


def scan(path: Path, layout: str, skip: Sequence[str] = ()) -> Recording:
    """What a file holds, by its metadata alone; `layout` may be "auto".

    Raises DataError for a file that is not of the layout, or whose episodes are not whole.
    """
    with hdf5.opened(path) as file:
        found = detect(file) if layout == "auto" else layout
        return (_robomimic if found == "robomimic" else _aloha)(path, file, skip)


def detect(file: h5py.File) -> str:
    """The layout of an open file. Raises DataError when it is none that we know."""
    if hdf5.child(file, "data", h5py.Group) is not None:
        return "robomimic"
    if hdf5.child(file, "action", h5py.Dataset) is not None:
        return "aloha"
    hint = "; ".join(f"{layout} has {needs}" for layout, needs in EXPECTED.items())
    raise DataError(f"unknown layout: it has {', '.join(sorted(file)) or 'nothing'}", where=file.filename, hint=hint)


def _robomimic(path: Path, file: h5py.File, skip: Sequence[str]) -> Recording:
    data = hdf5.child(file, "data", h5py.Group)
    if data is None:
        raise DataError("not robomimic's layout: it has no group data", where=str(path), hint="give --layout auto")
    names = sorted((key for key in data if hdf5.child(data, key, h5py.Group) is not None), key=natural)
    if not names:
        raise DataError("it has no demos: its group data is empty", where=str(path), hint="record some first")
    kept = hdf5.attributes(file) | hdf5.attributes(data)
    kept.pop("total", None)  # the sum of the episodes' steps
    language = _language(kept)
    episodes = tuple(_demo(path, data[name], skip, language) for name in names)
    return Recording(path=path, layout="robomimic", episodes=episodes, splits=_masks(file, set(names)), attributes=kept)


def _demo(path: Path, demo: h5py.Group, skip: Sequence[str], language: str) -> Episode:
    where = f"{path}: {demo.name}"
    actions = hdf5.child(demo, "actions", h5py.Dataset)
    if actions is None:
        raise DataError("the demo has no actions", where=where, hint="remove the demo, or record it again")
    steps = _steps(actions)
    columns = []
    for key, dataset in hdf5.walk(demo):
        head, _, _ = key.partition("/")
        name = _SINGULAR.get(key, key)
        # next_obs is obs, one step later; storing it would double the dataset.
        if head != "next_obs" and not skipped(name, skip):
            columns.append((name, hdf5.column(dataset, steps)))
    kept = hdf5.attributes(demo)
    claimed = kept.pop("num_samples", steps)
    if claimed != steps:
        raise DataError(f"num_samples says {claimed} steps where actions has {steps}", where=where)
    return _episode(demo.name.rpartition("/")[2], path, steps, columns, "actions", where,
                    language=_language(kept) or language, attributes=kept)  # fmt: skip


def _masks(file: h5py.File, names: set[str]) -> dict[str, tuple[str, ...]]:
    mask = hdf5.child(file, "mask", h5py.Group)
    splits = {}
    for key, dataset in hdf5.walk(mask) if mask is not None else ():
        members = tuple(sorted(hdf5.texts(dataset), key=natural))
        unknown = [name for name in members if name not in names]
        if unknown:
            raise DataError(f"mask {key} names {unknown[0]}, and there is no such demo", where=file.filename)
        splits[key] = members
    return splits


def _aloha(path: Path, file: h5py.File, skip: Sequence[str]) -> Recording:
    action = hdf5.child(file, "action", h5py.Dataset)
    if action is None or hdf5.child(file, "observations", h5py.Group) is None:
        raise DataError(f"not ALOHA's layout: it needs {EXPECTED['aloha']}", where=str(path), hint="give --layout auto")
    steps = _steps(action)
    columns = []
    for key, dataset in hdf5.walk(file):
        name = _aloha_name(key)
        # compress_len is where a JPEG ends in its padded row; the JPEG says so itself.
        if key != "compress_len" and not skipped(name, skip):
            columns.append((name, _aloha_column(key, dataset, steps)))
    kept = hdf5.attributes(file)
    episode = _episode(path.stem, path, steps, columns, "action", str(path), language=_language(kept), attributes=kept)
    return Recording(path=path, layout="aloha", episodes=(episode,))


def _aloha_name(key: str) -> str:
    if key.startswith(_IMAGES):
        return f"obs/{key.removeprefix(_IMAGES)}_image"
    return f"obs/{key.removeprefix('observations/')}" if key.startswith("observations/") else key


def _aloha_column(key: str, dataset: h5py.Dataset, steps: int) -> Column:
    column = hdf5.column(dataset, steps)
    if not (key.startswith(_IMAGES) and len(column.row) == 1 and column.dtype == "uint8"):
        return column
    row = jpeg.size(dataset[0], f"{dataset.file.filename}: {dataset.name}: row 0") if column.steps else (0, 0, 3)
    return msgspec.structs.replace(column, row=row, jpeg=True)


def _episode(name: str, path: Path, steps: int, columns: list[tuple[str, Column]], lead: str, where: str,
             **rest: object) -> Episode:  # fmt: skip
    check_names([array for array, _ in columns], where)
    episode = Episode(name=name, path=path, steps=steps, columns=dict(sorted(columns)), **rest)  # type: ignore[arg-type]
    check_episode(episode, lead, where)
    return episode


def _steps(dataset: h5py.Dataset) -> int:
    return int(dataset.shape[0]) if dataset.shape else 0


def _language(attributes: dict[str, object]) -> str:
    """The instruction, taken out of the attributes."""
    for key in ("language", "language_instruction"):
        if isinstance(attributes.get(key), str):
            return str(attributes.pop(key))
    return ""
