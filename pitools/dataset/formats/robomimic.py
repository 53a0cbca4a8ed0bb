"""Scan robomimic's layout: one HDF5 file of episodes `data/<demo>/{actions, obs/…}`, splits as lists of names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import h5py

from pitools.core.errors import DataError
from pitools.dataset.formats import hdf5
from pitools.dataset.formats.attributes import drop_storage_attributes
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
    take_instruction,
)


def scan_robomimic(path: Path, file: h5py.File, skip: Sequence[str], *, keep_next_obs: bool) -> Recording:
    """Return the file's episodes. Raises DataError for another layout."""
    data = hdf5.get_child(file, "data", h5py.Group)
    if data is None:
        raise DataError("not robomimic's layout (expected a group data)", where=str(path), hint="give --layout auto")
    names = sorted(data, key=natural_sort_key)
    demos = {name for name in names if hdf5.get_child(data, name, h5py.Group) is not None}
    # Other datasets may stand beside demos, but not one named like them, and no link may hide a demo.
    likenesses = {name.rstrip("0123456789") for name in demos}
    names = [
        name
        for name in names
        if name in demos or name.rstrip("0123456789") in likenesses or not hdf5.is_local(data, name)
    ]
    if not names:
        raise DataError("no demos: group data is empty", where=str(path), hint="record some first")
    attributes = hdf5.read_attributes(file) | hdf5.read_attributes(data)
    claimed_steps = attributes.pop("total", None)
    instruction, source = take_instruction(attributes), hdf5.column_source(path)
    described: list[Episode] = []
    rejected: list[RejectedEpisode] = []
    for name in names:
        try:
            with hdf5.translate_errors(path):
                hdf5.require_local(data, name)
                if name not in demos:
                    raise DataError(
                        "not a group (expected a demo)", where=f"{path}: {data.name}/{name}", hint="move it out of data"
                    )
                described.append(_describe_demo(source, data[name], skip, instruction, keep_next_obs))
        except DataError as error:
            rejected.append(rejection(name, path, error))
    episodes, differing = partition_by_schema(described)
    steps, notes = sum(episode.steps for episode in described), []
    if isinstance(claimed_steps, int) and claimed_steps != steps and not rejected:
        notes.append(f"its demos have {steps} steps (expected {claimed_steps}: total of data): some may be lost")
    skips_next_obs = (
        not keep_next_obs and not is_skipped("next_obs/", skip) and any("next_obs" in data[name] for name in demos)
    )
    notes += [SKIPPED_NEXT_OBS] * skips_next_obs
    splits = _read_masks(file, names, {episode.name for episode in episodes})
    return Recording(
        path=path,
        layout="robomimic",
        episodes=episodes,
        splits=splits,
        attributes=attributes,
        rejected=(*rejected, *differing),
        files=(path,),
        notes=tuple(notes),
    )


def _describe_demo(
    file: Hdf5Source, demo: h5py.Group, skip: Sequence[str], instruction: str, keep_next_obs: bool
) -> Episode:
    where = f"{file.path}: {demo.name}"
    actions = hdf5.get_child(demo, "actions", h5py.Dataset)
    if actions is None:
        hint = "remove the demo, or record it again with one array `actions`"
        raise DataError("no actions", where=where, hint=hint)
    steps = hdf5.step_count(actions)
    columns, attributes_by_array = [], {}
    for key, dataset in hdf5.walk_datasets(demo):
        head, _, _ = key.partition("/")
        name = SINGULAR.get(key, key)
        # next_obs repeats obs one step later; storing it would double the dataset.
        if not is_skipped(name, skip, key) and (keep_next_obs or head != "next_obs"):
            columns.append((name, hdf5.describe_column_or_images(dataset, steps, file)))
            attributes_by_array[name] = drop_storage_attributes(hdf5.read_attributes(dataset))
    attributes = hdf5.read_attributes(demo)
    claimed = attributes.pop("num_samples", steps)
    if claimed != steps:
        problem = f"actions has {steps} steps (expected {claimed}: num_samples)"
        raise DataError(problem, where=where, hint="copy the demo again if it is truncated, or correct its num_samples")
    return make_episode(
        demo.name.rpartition("/")[2],
        file.path,
        steps,
        columns,
        "actions",
        where,
        instruction=take_instruction(attributes) or instruction,
        attributes=attributes,
        array_attributes=attributes_by_array,
    )


def _read_masks(file: h5py.File, names: Sequence[str], accepted: set[str]) -> dict[str, tuple[str, ...]]:
    """Return the accepted demos of each mask. Raises DataError for a demo that is not in the file."""
    mask = hdf5.get_child(file, "mask", h5py.Group)
    splits = {}
    for key, dataset in hdf5.walk_datasets(mask) if mask is not None else ():
        with hdf5.translate_errors(Path(file.filename), f"{file.filename}: mask/{key}"):
            members = sorted(hdf5.read_texts(dataset), key=natural_sort_key)
        unknown = set(members).difference(names)
        if unknown:
            problem = f"mask {key} names {min(unknown)}, which is not in the file"
            raise DataError(problem, where=file.filename, hint="copy that demo too, or remove it from the mask")
        splits[key] = tuple(name for name in members if name in accepted)
    return splits
