"""robomimic: one HDF5 file of many episodes, `data/<demo>/{actions, obs/…}` and the splits as lists of names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import h5py

from pitools.core.errors import DataError
from pitools.dataset.formats import hdf5
from pitools.dataset.formats.attributes import array_attributes
from pitools.dataset.formats.model import (
    SINGULAR,
    SKIPPED_NEXT_OBS,
    Episode,
    Hdf5Source,
    Recording,
    RejectedEpisode,
    is_skipped,
    make_episode,
    natural_sort_key,
    partition_by_schema,
    rejection,
    take_language,
)


def scan_robomimic(path: Path, file: h5py.File, skip: Sequence[str], *, keep_next_obs: bool) -> Recording:
    """What the file holds. Raises DataError when it is not of this layout."""
    data = hdf5.get_child(file, "data", h5py.Group)
    if data is None:
        raise DataError("not robomimic's layout: it has no group data", where=str(path), hint="give --layout auto")
    names = sorted((key for key in data if hdf5.get_child(data, key, h5py.Group) is not None), key=natural_sort_key)
    if not names:
        raise DataError("it has no demos: its group data is empty", where=str(path), hint="record some first")
    kept = hdf5.attributes(file) | hdf5.attributes(data)
    kept.pop("total", None)  # the sum of the episodes' steps
    spoken, place = take_language(kept), hdf5.column_source(path)
    whole: list[Episode] = []
    refused: list[RejectedEpisode] = []
    for name in names:
        try:
            with hdf5.translate_errors(path):
                whole.append(_make_demo(place, data[name], skip, spoken, keep_next_obs))
        except DataError as error:
            refused.append(rejection(name, path, error))
    episodes, odd = partition_by_schema(whole)
    leaves_out = (
        not keep_next_obs and not is_skipped("next_obs/", skip) and any("next_obs" in data[name] for name in names)
    )
    splits = _read_masks(file, names, {episode.name for episode in episodes})
    return Recording(
        path=path,
        layout="robomimic",
        episodes=episodes,
        splits=splits,
        attributes=kept,
        rejected=(*refused, *odd),
        files=(path,),
        notes=(SKIPPED_NEXT_OBS,) * leaves_out,
    )


def _make_demo(file: Hdf5Source, demo: h5py.Group, skip: Sequence[str], spoken: str, keep_next_obs: bool) -> Episode:
    where = f"{file.path}: {demo.name}"
    actions = hdf5.get_child(demo, "actions", h5py.Dataset)
    if actions is None:
        raise DataError("the demo has no actions", where=where, hint="remove the demo, or record it again")
    steps = hdf5.step_count(actions)
    columns, about = [], {}
    for key, dataset in hdf5.walk_datasets(demo):
        head, _, _ = key.partition("/")
        name = SINGULAR.get(key, key)
        # next_obs is obs, one step later; storing it would double the dataset.
        if (keep_next_obs or head != "next_obs") and not is_skipped(name, skip, key):
            columns.append((name, hdf5.describe_column_or_images(dataset, steps, file)))
            about[name] = array_attributes(hdf5.attributes(dataset))
    kept = hdf5.attributes(demo)
    claimed = kept.pop("num_samples", steps)
    if claimed != steps:
        problem = f"num_samples says {claimed} steps where actions has {steps}"
        raise DataError(problem, where=where, hint="the demo was cut: copy it again, or correct its num_samples")
    return make_episode(
        demo.name.rpartition("/")[2],
        file.path,
        steps,
        columns,
        "actions",
        where,
        language=take_language(kept) or spoken,
        attributes=kept,
        array_attributes=about,
    )


def _read_masks(file: h5py.File, names: Sequence[str], rejected: set[str]) -> dict[str, tuple[str, ...]]:
    """The demos of each mask, but for those that are refused. Raises DataError for one that is not in the file."""
    mask = hdf5.get_child(file, "mask", h5py.Group)
    splits = {}
    for key, dataset in hdf5.walk_datasets(mask) if mask is not None else ():
        with hdf5.translate_errors(Path(file.filename), f"{file.filename}: mask/{key}"):
            members = sorted(hdf5.read_texts(dataset), key=natural_sort_key)
        unknown = set(members).difference(names)
        if unknown:
            problem = f"mask {key} names {min(unknown)}, and there is no such demo"
            raise DataError(problem, where=file.filename, hint="copy that demo too, or take it out of the mask")
        splits[key] = tuple(name for name in members if name in rejected)
    return splits
