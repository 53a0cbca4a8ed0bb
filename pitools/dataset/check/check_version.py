"""Check one version: its files, what is in them, and what they are compared with the version before.

manifest ─▶ files, sizes, metadata ─▶ every shard once, in a few threads ─▶ what was gathered of values and frames
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.core.progress import progress_bar
from pitools.core.signals import defer_sigint
from pitools.dataset.check import cameras, drift, episodes, file_inventory, values
from pitools.dataset.check.cameras import CameraFrames, SampledArray
from pitools.dataset.check.finding import CheckSummary, Finding, ReadCounts
from pitools.dataset.check.shards import ShardChecker, ShardResult, damage_finding
from pitools.dataset.check.thresholds import Thresholds
from pitools.dataset.check.vectors import VectorStats
from pitools.store import manifest as manifests
from pitools.store.manifest import Manifest
from pitools.store.reader.version_reader import VersionReader
from pitools.store.version_list import is_version
from pitools.store.zarr.chunk_layout import chunk_layout

# What has more columns is looked at in a sample, as frames are.
MAX_COLUMNS = 256
MAX_READERS = 4
Collectors = dict[str, VectorStats | SampledArray]


def check_version(
    path: Path,
    *,
    thresholds: Thresholds | None = None,
    parent: Path | None = None,
    deep: bool = False,
    readers: int = 0,
    quiet: bool = False,
) -> Iterator[Finding | CheckSummary]:
    """What is wrong with the version in folder `path`, and at last a Summary of what was read.

    thresholds: what is still all right. parent: another version's folder to compare values with; the parent, where that
    lies beside this one, when None. deep: look at every frame and every large item, not at some. readers: threads.
    Raises DataError where one of the two folders is not a dataset at all.
    """
    started, thresholds = time.monotonic(), thresholds or Thresholds()
    manifest, data = manifests.load_manifest(path)
    if parent:
        manifests.load_manifest(parent)  # before all is read
    count = {"damage": 0, "fault": 0, "warning": 0}
    tally = ReadCounts()
    for finding in thresholds.apply_levels(
        _findings(path, manifest, data, thresholds, parent, tally, deep, readers, quiet)
    ):
        count[finding.level] += 1
        yield finding
    yield CheckSummary(
        name=manifest.name,
        version=manifests.version_of(data),
        path=str(path),
        episodes=manifest.episodes,
        steps=manifest.steps,
        files=tally.files,
        read_bytes=tally.read_bytes,
        frames=tally.frames,
        damage=count["damage"],
        faults=count["fault"],
        warnings=count["warning"],
        deep=deep,
        wall_s=round(time.monotonic() - started, 3),
    )


def _findings(
    path: Path,
    manifest: Manifest,
    data: bytes,
    bounds: Thresholds,
    against: Path | None,
    tally: ReadCounts,
    deep: bool,
    readers: int,
    quiet: bool,
) -> Iterator[Finding]:
    inventory = file_inventory.take_inventory(path, manifest, data)
    yield from inventory.findings
    yield from episodes.find_unequal_lengths(manifest)
    whole = not any(finding.level == "damage" for finding in inventory.findings)
    store = VersionReader(path, check_mode="always")
    # Without believable metadata, or beginnings of episodes, shards can be judged but values belong nowhere.
    where, wrong = (
        episodes.read_offsets(store) if whole or _is_present(inventory, manifests.EPISODE_OFFSETS) else (None, [])
    )
    yield from wrong
    gathered = {} if where is None else _make_collectors(manifest, inventory, where, bounds, deep=deep)
    examined = _read_shards(path, store, inventory, gathered, tally, readers, quiet)
    clean = True
    for finding in examined:
        clean = clean and finding.level != "damage"
        yield finding
    tally.frames = sum(known.looked for known in gathered.values() if isinstance(known, CameraFrames))
    if where is not None:
        lengths = np.diff(where)
        yield from _check_episodes(store, manifest, lengths, bounds)
        yield from _check_values(store, gathered, where, bounds, whole=whole and clean)
        yield from _check_frames(store, gathered, where, bounds, whole=whole and clean)
    other, wrong = (against, []) if against else _parent(path, manifest)
    yield from wrong
    yield from _check_drift(manifest, other, where, bounds)


def _is_present(inventory: file_inventory.Inventory, name: str) -> bool:
    return name in inventory.arrays and any(shard.array.name == name for shard in inventory.shards)


def _make_collectors(
    manifest: Manifest, inventory: file_inventory.Inventory, where: NDArray[np.int64], bounds: Thresholds, *, deep: bool
) -> Collectors:
    """Who looks at the values of each array along steps, by what the array is."""
    gathered: Collectors = {}
    # Of these a shape is only a claim, and memory is not to be taken for it.
    incomplete = {finding.array for finding in inventory.findings if finding.check == "manifest"}
    for name, array in inventory.arrays.items():
        row, last = array.shape[1:], name.rpartition("/")[2]
        if name in incomplete or not manifest.along_steps(name) or not all(array.shape):
            continue
        known = chunk_layout(array)
        chunk = known.chunk if known else array.chunk[0]
        try:
            kind = np.dtype(array.dtype).kind
        except TypeError:  # a type of Zarr's that NumPy does not have: the reader would not know it either
            continue
        if cameras.is_camera(name, row, array.dtype):
            gathered[name] = CameraFrames(name, where, chunk, deep=deep)
        elif kind in "biuf" and np.prod(row) <= MAX_COLUMNS:
            gathered[name] = VectorStats(name, where, row, keep_values=last in bounds.times and np.prod(row) == 1)
        elif kind == "f":
            gathered[name] = SampledArray(name, where, chunk, deep=deep)
    return gathered


def _read_shards(
    path: Path,
    store: VersionReader,
    inventory: file_inventory.Inventory,
    gathered: Collectors,
    tally: ReadCounts,
    readers: int,
    quiet: bool,
) -> Iterator[Finding]:
    """Read every shard, several at a time; findings as they are made."""
    examiner = ShardChecker(path, store)
    total = sum(shard.entry.bytes for shard in inventory.shards)
    pool = ThreadPoolExecutor(readers or min(MAX_READERS, len(os.sched_getaffinity(0))))
    try:
        with progress_bar("check", total, parts=len(inventory.shards), quiet=quiet) as shown:

            def one(shard: file_inventory.ShardFile) -> ShardResult:
                known = gathered.get(shard.array.name)
                try:
                    return examiner(shard, known.add_steps if known else None, shown)
                except DataError as error:  # of a form that only the reader knows
                    return ShardResult([damage_finding(shard, error.message, "")], shard.entry.bytes)

            done: SimpleQueue[Future[ShardResult]] = SimpleQueue()
            with defer_sigint():
                for shard in inventory.shards:
                    pool.submit(one, shard).add_done_callback(done.put)
            for _ in inventory.shards:
                found, read_bytes = done.get().result()
                tally.files, tally.read_bytes = tally.files + 1, tally.read_bytes + read_bytes
                shown.add_file()
                yield from found
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _check_episodes(
    store: VersionReader, manifest: Manifest, lengths: NDArray[np.int64], bounds: Thresholds
) -> Iterator[Finding]:
    records, wrong = episodes.read_episode_json(store, lengths)
    yield from wrong
    yield from episodes.find_odd_lengths(lengths, bounds)
    if records is not None:
        yield from episodes.find_missing_language(records)
    yield from episodes.check_splits(store, manifest.episodes)


def _check_values(
    store: VersionReader, gathered: Collectors, where: NDArray[np.int64], bounds: Thresholds, *, whole: bool
) -> Iterator[Finding]:
    """whole: nothing is damaged."""
    lengths, told = np.diff(where), store.manifest.statistics or {}
    whole = whole and not store.manifest.subset
    vectors = [known for known in gathered.values() if isinstance(known, VectorStats)]
    for known in gathered.values():
        yield from values.find_non_finite(known, where)
    for array in vectors:
        yield from values.find_constant(array)
        yield from values.find_motionless(array, lengths)
        if whole:
            rows = partial(_episode_rows, store, array.name, where)
            yield from values.find_outliers(array, bounds, rows)
        if array.values is not None:
            yield from episodes.check_clock(array, where, bounds)
        if whole and array.name in told:
            yield from values.check_statistics(array, told[array.name])
    if whole:
        frames = (known for known in gathered.values() if isinstance(known, CameraFrames))
        yield from values.find_duplicates(vectors, frames, lengths)


def _episode_rows(store: VersionReader, name: str, where: NDArray[np.int64], episode: int) -> NDArray[Any]:
    return store.read(name, int(where[episode]), int(where[episode + 1]))


def _check_frames(
    store: VersionReader, gathered: Collectors, where: NDArray[np.int64], bounds: Thresholds, *, whole: bool
) -> Iterator[Finding]:
    action = next((known for name, known in gathered.items() if values.is_action(name)), None)
    for camera in gathered.values():
        if isinstance(camera, CameraFrames):
            yield from cameras.find_blank(camera, where, bounds)
            if isinstance(action, VectorStats) and whole:
                yield from episodes.find_frozen_frames(camera, action.name, action.deviation, store, where, bounds)


def _check_drift(
    manifest: Manifest, parent_dir: Path | None, where: NDArray[np.int64] | None, bounds: Thresholds
) -> Iterator[Finding]:
    if parent_dir is None:
        return
    parent = manifests.load_manifest(parent_dir)[0]
    yield from drift.check_drift(manifest, parent, bounds)
    parent_offsets, _ = episodes.read_offsets(VersionReader(parent_dir))
    if where is None or parent_offsets is None:
        return
    first = parent.episodes if drift.new_part(manifest, parent).appended else 0
    yield from episodes.compare_lengths(np.diff(where)[first:], np.diff(parent_offsets), bounds)


def _parent(path: Path, manifest: Manifest) -> tuple[Path | None, list[Finding]]:
    """The folder of the parent, None where there is none beside this version to compare with, and why not.

    A parent that is damaged takes nothing from what is found in this version.
    """
    other = path.resolve().parent / manifest.parent
    if not is_version(manifest.parent) or not os.path.lexists(other):
        return None, []
    try:
        _, data = manifests.load_manifest(other)
    except DataError as error:
        problem, got = error.message, ""
    else:
        problem, got = "its manifest is not the one that its folder is named after", manifests.version_of(data)
        if got == manifest.parent:
            return other, []
    what = f"values are not compared with the parent: {problem}"
    return None, [
        Finding(
            level="warning",
            check="parent",
            file=f"{other}/{manifests.FILE_NAME}",
            problem=what,
            got=got,
            expected=manifest.parent,
        )
    ]
