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
from pitools.core.progress import bar
from pitools.core.signals import held_back
from pitools.dataset.check import cameras, drift, episodes, file_inventory, values
from pitools.dataset.check.cameras import Bulk, Camera
from pitools.dataset.check.finding import Finding, Summary, Tally
from pitools.dataset.check.shards import Examined, Examiner, damage
from pitools.dataset.check.thresholds import Bounds
from pitools.dataset.check.vectors import Vectors
from pitools.store import manifest as manifests
from pitools.store.manifest import Manifest
from pitools.store.reader.version_reader import Arrays
from pitools.store.version_list import is_version
from pitools.store.zarr.chunk_layout import layout

# What has more columns is looked at in a sample, as frames are.
MAX_COLUMNS = 256
MAX_READERS = 4
Gathered = dict[str, Vectors | Bulk]


def version(
    path: Path,
    *,
    bounds: Bounds | None = None,
    against: Path | None = None,
    deep: bool = False,
    readers: int = 0,
    quiet: bool = False,
) -> Iterator[Finding | Summary]:
    """What is wrong with the version in folder `path`, and at last a Summary of what was read.

    bounds: what is still all right. against: another version's folder to compare values with; the parent, where that
    lies beside this one, when None. deep: look at every frame and every large item, not at some. readers: threads.
    Raises DataError where one of the two folders is not a dataset at all.
    """
    started, bounds = time.monotonic(), bounds or Bounds()
    manifest, data = manifests.load(path)
    if against:
        manifests.load(against)  # before all is read
    count = {"damage": 0, "fault": 0, "warning": 0}
    tally = Tally()
    for finding in bounds.judged(_findings(path, manifest, data, bounds, against, tally, deep, readers, quiet)):
        count[finding.level] += 1
        yield finding
    yield Summary(
        name=manifest.name,
        version=manifests.version(data),
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
    bounds: Bounds,
    against: Path | None,
    tally: Tally,
    deep: bool,
    readers: int,
    quiet: bool,
) -> Iterator[Finding]:
    inventory = file_inventory.take(path, manifest, data)
    yield from inventory.findings
    yield from episodes.unequal(manifest)
    whole = not any(finding.level == "damage" for finding in inventory.findings)
    store = Arrays(path, check="always")
    # Without believable metadata, or beginnings of episodes, shards can be judged but values belong nowhere.
    where, wrong = episodes.offsets(store) if whole or _there(inventory, episodes.OFFSETS) else (None, [])
    yield from wrong
    gathered = {} if where is None else _gatherers(manifest, inventory, where, bounds, deep=deep)
    examined = _examine(path, store, inventory, gathered, tally, readers, quiet)
    clean = True
    for finding in examined:
        clean = clean and finding.level != "damage"
        yield finding
    tally.frames = sum(known.looked for known in gathered.values() if isinstance(known, Camera))
    if where is not None:
        lengths = np.diff(where)
        yield from _episodes(store, manifest, lengths, bounds)
        yield from _values(store, gathered, where, bounds, whole=whole and clean)
        yield from _frames(store, gathered, where, bounds, whole=whole and clean)
    other, wrong = (against, []) if against else _parent(path, manifest)
    yield from wrong
    yield from _drift(manifest, other, where, bounds)


def _there(inventory: file_inventory.Inventory, name: str) -> bool:
    return name in inventory.arrays and any(shard.array.name == name for shard in inventory.shards)


def _gatherers(
    manifest: Manifest, inventory: file_inventory.Inventory, where: NDArray[np.int64], bounds: Bounds, *, deep: bool
) -> Gathered:
    """Who looks at the values of each array along steps, by what the array is."""
    gathered: Gathered = {}
    # Of these a shape is only a claim, and memory is not to be taken for it.
    incomplete = {finding.array for finding in inventory.findings if finding.check == "manifest"}
    for name, array in inventory.arrays.items():
        row, last = array.shape[1:], name.rpartition("/")[2]
        if name in incomplete or not manifest.along_steps(name) or not all(array.shape):
            continue
        known = layout(array)
        chunk = known.chunk if known else array.chunk[0]
        try:
            kind = np.dtype(array.dtype).kind
        except TypeError:  # a type of Zarr's that NumPy does not have: the reader would not know it either
            continue
        if cameras.is_camera(name, row, array.dtype):
            gathered[name] = Camera(name, where, chunk, deep=deep)
        elif kind in "biuf" and np.prod(row) <= MAX_COLUMNS:
            gathered[name] = Vectors(name, where, row, keep=last in bounds.times and np.prod(row) == 1)
        elif kind == "f":
            gathered[name] = Bulk(name, where, chunk, deep=deep)
    return gathered


def _examine(
    path: Path,
    store: Arrays,
    inventory: file_inventory.Inventory,
    gathered: Gathered,
    tally: Tally,
    readers: int,
    quiet: bool,
) -> Iterator[Finding]:
    """Read every shard, several at a time; findings as they are made."""
    examiner = Examiner(path, store)
    total = sum(shard.entry.bytes for shard in inventory.shards)
    pool = ThreadPoolExecutor(readers or min(MAX_READERS, len(os.sched_getaffinity(0))))
    try:
        with bar("check", total, parts=len(inventory.shards), quiet=quiet) as shown:

            def one(shard: file_inventory.Shard) -> Examined:
                known = gathered.get(shard.array.name)
                try:
                    return examiner(shard, known.look if known else None, shown)
                except DataError as error:  # of a form that only the reader knows
                    return Examined([damage(shard, error.what, "")], shard.entry.bytes)

            done: SimpleQueue[Future[Examined]] = SimpleQueue()
            with held_back():
                for shard in inventory.shards:
                    pool.submit(one, shard).add_done_callback(done.put)
            for _ in inventory.shards:
                found, read_bytes = done.get().result()
                tally.files, tally.read_bytes = tally.files + 1, tally.read_bytes + read_bytes
                shown.part()
                yield from found
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _episodes(store: Arrays, manifest: Manifest, lengths: NDArray[np.int64], bounds: Bounds) -> Iterator[Finding]:
    told, wrong = episodes.lines(store, lengths)
    yield from wrong
    yield from episodes.length(lengths, bounds)
    if told is not None:
        yield from episodes.language(told)
    yield from episodes.splits(store, manifest.episodes)


def _values(
    store: Arrays, gathered: Gathered, where: NDArray[np.int64], bounds: Bounds, *, whole: bool
) -> Iterator[Finding]:
    """whole: nothing is damaged."""
    lengths, told = np.diff(where), store.manifest.statistics or {}
    whole = whole and not store.manifest.subset
    vectors = [known for known in gathered.values() if isinstance(known, Vectors)]
    for known in gathered.values():
        yield from values.bad(known, where)
    for array in vectors:
        yield from values.constant(array)
        yield from values.still(array, lengths)
        if whole:
            rows = partial(_episode_rows, store, array.name, where)
            yield from values.outliers(array, bounds, rows)
        if array.values is not None:
            yield from episodes.clock(array, where, bounds)
        if whole and array.name in told:
            yield from values.statistics(array, told[array.name])
    if whole:
        frames = (known for known in gathered.values() if isinstance(known, Camera))
        yield from values.duplicates(vectors, frames, lengths)


def _episode_rows(store: Arrays, name: str, where: NDArray[np.int64], episode: int) -> NDArray[Any]:
    return store.read(name, int(where[episode]), int(where[episode + 1]))


def _frames(
    store: Arrays, gathered: Gathered, where: NDArray[np.int64], bounds: Bounds, *, whole: bool
) -> Iterator[Finding]:
    action = next((known for name, known in gathered.items() if values.is_action(name)), None)
    for camera in gathered.values():
        if isinstance(camera, Camera):
            yield from cameras.blank(camera, where, bounds)
            if isinstance(action, Vectors) and whole:
                yield from episodes.frozen(camera, action.name, action.deviation, store, where, bounds)


def _drift(
    manifest: Manifest, other: Path | None, where: NDArray[np.int64] | None, bounds: Bounds
) -> Iterator[Finding]:
    if other is None:
        return
    parent = manifests.load(other)[0]
    yield from drift.gate(manifest, parent, bounds)
    before, _ = episodes.offsets(Arrays(other))
    if where is None or before is None:
        return
    first = parent.episodes if drift.compared(manifest, parent).appended else 0
    yield from episodes.length_shift(np.diff(where)[first:], np.diff(before), bounds)


def _parent(path: Path, manifest: Manifest) -> tuple[Path | None, list[Finding]]:
    """The folder of the parent, None where there is none beside this version to compare with, and why not.

    A parent that is damaged takes nothing from what is found in this version.
    """
    other = path.resolve().parent / manifest.parent
    if not is_version(manifest.parent) or not os.path.lexists(other):
        return None, []
    try:
        _, data = manifests.load(other)
    except DataError as error:
        problem, got = error.what, ""
    else:
        problem, got = "its manifest is not the one that its folder is named after", manifests.version(data)
        if got == manifest.parent:
            return other, []
    what = f"values are not compared with the parent: {problem}"
    return None, [
        Finding(
            level="warning",
            check="parent",
            file=f"{other}/{manifests.FILE_NAME}",
            what=what,
            got=got,
            expected=manifest.parent,
        )
    ]
