"""Check one version: its files, its values, and their drift from the parent version.

manifest ─▶ files, sizes, metadata ─▶ every shard once, in a few threads ─▶ findings about values and frames
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

from pitools.core.errors import DataError, PitError
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
from pitools.store.reader.array_reader import open_below
from pitools.store.reader.version_reader import VersionReader
from pitools.store.version_list import is_version
from pitools.store.zarr.chunk_layout import chunk_layout

# Arrays of more columns are sampled, as frames are.
_MAX_VECTOR_COLUMNS = 256
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
    """Yield the findings about the version in folder `path`, and finally a summary of what was read.

    thresholds: limits of the checks. parent: folder of the version to compare with; None for the recorded parent, if it
    is in the same root. deep: check every frame and every large item, not a sample. readers: threads. Raises DataError
    if one of the two folders is not a dataset; ClusterError or Unreachable for a file that cannot be judged.
    """
    started, thresholds = time.monotonic(), thresholds or Thresholds()
    manifest, data = manifests.load_manifest(path, verify=False)
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
        part_of=manifest.subset.whole if manifest.subset else "",
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
    is_intact = not any(finding.level == "damage" for finding in inventory.findings)
    # With an opener it does not compare the manifest's digest with the folder's name, which is a finding here.
    store = VersionReader(path, checksums="always", opener=partial(open_below, path))
    # Without believable metadata, or beginnings of episodes, shards can be judged but values belong nowhere.
    offsets, offset_findings = (
        episodes.read_offsets(store) if is_intact or _is_present(inventory, manifests.EPISODE_OFFSETS) else (None, [])
    )
    yield from offset_findings
    gathered = {} if offsets is None else _make_collectors(manifest, inventory, offsets, bounds, deep=deep)
    examined = _read_shards(path, store, inventory, gathered, tally, readers, quiet)
    clean = True
    for finding in examined:
        clean = clean and finding.level != "damage"
        yield finding
    tally.frames = sum(collector.checked for collector in gathered.values() if isinstance(collector, CameraFrames))
    if offsets is not None:
        lengths = np.diff(offsets)
        yield from _check_episodes(store, manifest, lengths, bounds)
        yield from _check_values(store, gathered, offsets, bounds, is_intact=is_intact and clean)
        yield from _check_frames(store, gathered, offsets, bounds, is_intact=is_intact and clean)
    parent, parent_findings = (against, []) if against else _parent(path, manifest)
    yield from parent_findings
    yield from _check_drift(manifest, parent, offsets, bounds)


def _is_present(inventory: file_inventory.Inventory, name: str) -> bool:
    return name in inventory.arrays and any(shard.array.name == name for shard in inventory.shards)


def _make_collectors(
    manifest: Manifest,
    inventory: file_inventory.Inventory,
    offsets: NDArray[np.int64],
    bounds: Thresholds,
    *,
    deep: bool,
) -> Collectors:
    """Return the collectors of statistics for each array along steps, by the array's kind."""
    gathered: Collectors = {}
    # Of these a shape is only a claim, and memory is not to be taken for it.
    incomplete = {finding.array for finding in inventory.findings if finding.check == "manifest"}
    for name, array in inventory.arrays.items():
        row, last = array.shape[1:], name.rpartition("/")[2]
        if name in incomplete or not manifest.along_steps(name) or not all(array.shape):
            continue
        layout = chunk_layout(array)
        chunk = layout.chunk if layout else array.file_chunk[0]
        try:
            kind = np.dtype(array.dtype).kind
        except TypeError:  # a Zarr type that NumPy does not have, and that the reader cannot read either
            continue
        if cameras.is_camera(name, row, array.dtype):
            gathered[name] = CameraFrames(name, offsets, chunk, deep=deep)
        elif kind in "biuf" and np.prod(row) <= _MAX_VECTOR_COLUMNS:
            gathered[name] = VectorStats(name, offsets, row, keep_values=last in bounds.times and np.prod(row) == 1)
        elif kind == "f":
            gathered[name] = SampledArray(name, offsets, chunk, deep=deep)
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

            def check_shard(shard: file_inventory.ShardFile) -> ShardResult:
                collector = gathered.get(shard.array.name)
                try:
                    return examiner(shard, collector.add_steps if collector else None, shown)
                except DataError as error:  # an encoding that only the reader supports
                    return ShardResult([damage_finding(shard, error.message, "")], shard.entry.bytes)

            done: SimpleQueue[Future[ShardResult]] = SimpleQueue()
            with defer_sigint():
                for shard in inventory.shards:
                    pool.submit(check_shard, shard).add_done_callback(done.put)
            for _ in inventory.shards:
                findings, read_bytes = done.get().result()
                tally.files, tally.read_bytes = tally.files + 1, tally.read_bytes + read_bytes
                shown.add_file()
                yield from findings
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _check_episodes(
    store: VersionReader, manifest: Manifest, lengths: NDArray[np.int64], bounds: Thresholds
) -> Iterator[Finding]:
    records, wrong = episodes.read_episode_json(store, lengths)
    yield from wrong
    yield from episodes.find_odd_lengths(lengths, bounds)
    if records is not None:
        yield from episodes.find_missing_instructions(records)
    yield from episodes.check_splits(store, manifest.episodes)


def _check_values(
    store: VersionReader, gathered: Collectors, offsets: NDArray[np.int64], bounds: Thresholds, *, is_intact: bool
) -> Iterator[Finding]:
    """is_intact: nothing is damaged."""
    lengths, recorded = np.diff(offsets), store.manifest.statistics or {}
    is_intact = is_intact and not store.manifest.subset
    vectors = [known for known in gathered.values() if isinstance(known, VectorStats)]
    for collector in gathered.values():
        yield from values.find_non_finite(collector, offsets)
    for array in vectors:
        yield from values.find_constant(array)
        yield from values.find_motionless(array, lengths)
        if is_intact:
            rows = partial(_episode_rows, store, array.name, offsets)
            yield from values.find_outliers(array, bounds, rows)
        if array.values is not None:
            yield from episodes.check_clock(array, offsets, bounds)
        if is_intact and array.name in recorded:
            yield from values.check_statistics(array, recorded[array.name])
    if is_intact:
        frames = (known for known in gathered.values() if isinstance(known, CameraFrames))
        yield from values.find_duplicates(vectors, frames, lengths)


def _episode_rows(store: VersionReader, name: str, offsets: NDArray[np.int64], episode: int) -> NDArray[Any]:
    return store.read(name, int(offsets[episode]), int(offsets[episode + 1]))


def _check_frames(
    store: VersionReader, gathered: Collectors, offsets: NDArray[np.int64], bounds: Thresholds, *, is_intact: bool
) -> Iterator[Finding]:
    action = next((collector for name, collector in gathered.items() if values.is_action(name)), None)
    for camera in gathered.values():
        if isinstance(camera, CameraFrames):
            yield from cameras.find_blank(camera, offsets, bounds)
            if isinstance(action, VectorStats) and is_intact:
                yield from episodes.find_frozen_frames(camera, action.name, action.deviation, store, offsets, bounds)


def _check_drift(
    manifest: Manifest, parent_dir: Path | None, offsets: NDArray[np.int64] | None, bounds: Thresholds
) -> Iterator[Finding]:
    if parent_dir is None:
        return
    parent = manifests.load_manifest(parent_dir)[0]
    yield from drift.check_drift(manifest, parent, bounds)
    parent_offsets, _ = episodes.read_offsets(VersionReader(parent_dir))
    if offsets is None or parent_offsets is None:
        return
    first = parent.episodes if drift.new_part(manifest, parent).appended else 0
    yield from episodes.compare_lengths(np.diff(offsets)[first:], np.diff(parent_offsets), bounds)


def _parent(path: Path, manifest: Manifest) -> tuple[Path | None, list[Finding]]:
    """Return the parent's folder, or None, and findings about why it is not compared.

    A damaged parent does not change the findings about this version.
    """
    parent = path.resolve().parent / manifest.parent
    if not is_version(manifest.parent) or not os.path.lexists(parent):
        return None, []
    try:
        _, data = manifests.load_manifest(parent, verify=False)
    except PitError as error:
        problem, got = error.message, ""
    else:
        problem, got = "the manifest does not match its folder's name", manifests.version_of(data)
        if got == manifest.parent:
            return parent, []
    message = f"values are not compared with the parent: {problem}"
    return None, [
        Finding(
            level="warning",
            check="parent",
            file=f"{parent}/{manifests.MANIFEST_FILE}",
            problem=message,
            got=got,
            expected=manifest.parent,
        )
    ]
