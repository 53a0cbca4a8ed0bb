"""Recordings to one Zarr v3 store, published whole under the digest of what it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pitools import __version__
from pitools.core.errors import DataError, UsageError
from pitools.core.files import write_atomic
from pitools.core.progress import bar
from pitools.dataset import catalog
from pitools.dataset.catalog import Version
from pitools.dataset.sources import layouts
from pitools.dataset.sources.recording import Episode, Recording, check_alike, natural
from pitools.dataset.write import assemble, grid, shards
from pitools.dataset.write.grid import Grid
from pitools.store import digest
from pitools.store import manifest as manifests
from pitools.store.manifest import ArraySchema, FileEntry, Manifest
from pitools.store.publish import publish, unfinished

OFFSETS = "episode_offsets"
EPISODES = "episode_json"
MAX_WORKERS = 4  # each holds one shard, up to 64 MiB of images, and its encoded form

Block = Callable[[int, int], NDArray[Any]]


def ingest(
    files: Sequence[Path], *, root: Path, name: str, layout: str = "auto", codec: str = "lz4", skip: Sequence[str] = ()
) -> Version:
    """Write the recordings to `<root>/<name>/<version>/`; the same content and options again change nothing.

    files: in natural order of their names, whatever order they are given in. skip: globs of array names to leave out.
    Raises UsageError, DataError for a bad recording, NoSpace or ClusterError for a bad destination. No failure leaves
    a trace.
    """
    catalog.check_name(name)
    paths = _in_order(files)
    before = [_stamp(path) for path in paths]
    recordings = [layouts.scan(path, layout, skip) for path in paths]
    episodes = [episode for recording in recordings for episode in recording.episodes]
    for episode in episodes[1:]:
        check_alike(episodes[0], episode)
    with unfinished(root, name) as folder:
        source = _provenance(recordings, codec, skip)
        known = _published(root / name, source)
        if known is not None:
            return known
        manifest = _write(folder, name, recordings, episodes, codec, source)
        for path, stamp in zip(paths, before, strict=True):
            if _stamp(path) != stamp:
                raise DataError("it changed while it was read", where=str(path), hint="ingest it when it is complete")
        data = manifests.encode(manifest)
        write_atomic(folder / manifests.FILE_NAME, data)
        final = root / name / manifests.version(data)
        new = publish(folder, final)
    return catalog.describe(final, new=new)[0]


def _in_order(files: Sequence[Path]) -> list[Path]:
    if not files or len({path.resolve() for path in files}) != len(files):
        raise UsageError("a recording is given twice" if files else "no recording is given")
    # By name as given: a link's own name is the recording's, what it points to may be a hash.
    return sorted(files, key=lambda path: (natural(path.name), natural(str(path))))


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
    return status.st_ino, status.st_size, status.st_mtime_ns


def _provenance(recordings: Sequence[Recording], codec: str, skip: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """One record a file. It holds no folder and no time: where a recording lay is no part of what it is."""
    records = []
    with bar("digest", sum(recording.path.stat().st_size for recording in recordings)) as advance:
        for recording in recordings:
            try:
                size, text = digest.of_file(recording.path, advance)
            except OSError as error:
                raise DataError(f"cannot be read: {error.strerror}", where=str(recording.path)) from error
            records.append({"file": recording.path.name, "bytes": size, "digest": text, "layout": recording.layout,
                            "codec": codec, "skip": sorted(skip), "pitools": __version__})  # fmt: skip
    return tuple(records)


def _published(folder: Path, source: tuple[dict[str, Any], ...]) -> Version | None:
    """The version that an earlier ingest made of the same recordings and options. Raises DataError if it is damaged."""
    for path in catalog.versions(folder.parent, folder.name):
        try:
            version, manifest = catalog.describe(path)
        except DataError:
            continue  # another version's damage is no matter here
        if manifest.source == source and version.version == path.name:
            catalog.check_complete(path, manifest)
            return version
    return None


def _write(folder: Path, name: str, recordings: Sequence[Recording], episodes: Sequence[Episode], codec: str,
           source: tuple[dict[str, Any], ...]) -> Manifest:  # fmt: skip
    """Fill the folder with every file but the manifest, and return that."""
    offsets = list(accumulate((episode.steps for episode in episodes), initial=0))
    text = np.frombuffer(_episode_lines(recordings), np.uint8)
    blocks: dict[str, Block] = {
        OFFSETS: lambda start, stop: np.array(offsets[start:stop], np.int64),
        EPISODES: lambda start, stop: text[start:stop],
    }
    grids = {
        OFFSETS: grid.choose((len(offsets),), "int64", codec),
        EPISODES: grid.choose(text.shape, "uint8", codec),
    }
    for array, column in episodes[0].columns.items():
        blocks[array] = partial(assemble.read, array, episodes, offsets)
        grids[array] = grid.choose((offsets[-1], *column.row), column.dtype, codec)
    files = [
        *_write_metadata(folder, grids, _attributes(recordings, episodes)),
        *_write_shards(folder, grids, blocks),
    ]
    return Manifest(
        name=name,
        episodes=len(episodes),
        steps=offsets[-1],
        arrays={key: ArraySchema(shape=known.shape, dtype=known.dtype) for key, known in grids.items()},
        files=tuple(sorted(files, key=lambda file: file.path)),
        source=source,
    )


def _write_metadata(folder: Path, grids: dict[str, Grid], attributes: dict[str, Any]) -> Iterator[FileEntry]:
    """The `zarr.json` of every array and of every group above one."""
    groups = {str(group) for name in grids for group in PurePosixPath(name).parents} - {"."}
    nodes = {
        "zarr.json": grid.group_metadata(attributes),
        **{f"{group}/zarr.json": grid.group_metadata({}) for group in groups},
        **{f"{name}/zarr.json": grid.array_metadata(known) for name, known in grids.items()},
    }
    for path, data in nodes.items():
        yield shards.write_file(folder, path, [data])


def _write_shards(folder: Path, grids: dict[str, Grid], blocks: dict[str, Block]) -> list[FileEntry]:
    """Every shard of every array, several at a time; the first failure stops the rest."""

    def one(name: str, index: int) -> tuple[FileEntry, int]:
        known = grids[name]
        steps = blocks[name](index * known.shard, min((index + 1) * known.shard, known.shape[0]))
        return shards.write(folder, name, known, index, steps), steps.nbytes

    pool = ThreadPoolExecutor(min(MAX_WORKERS, len(os.sched_getaffinity(0))))
    try:
        with bar("ingest", sum(known.nbytes for known in grids.values())) as advance:
            jobs = [pool.submit(one, name, index) for name in grids for index in range(grids[name].shards)]
            files = []
            for job in as_completed(jobs):
                entry, size = job.result()
                files.append(entry)
                advance(size)
            return files
    finally:
        # The folder is removed after a failure or Ctrl-C: by then nobody may be writing in it.
        pool.shutdown(wait=True, cancel_futures=True)


def _attributes(recordings: Sequence[Recording], episodes: Sequence[Episode]) -> dict[str, Any]:
    """The group's attributes: counts, the splits as episode numbers, and what each recording says of itself."""
    splits: dict[str, list[int]] = {}
    first = 0
    for recording in recordings:
        numbers = {episode.name: first + i for i, episode in enumerate(recording.episodes)}
        for split, names in recording.splits.items():
            splits.setdefault(split, []).extend(numbers[name] for name in names)
        first += len(numbers)
    sources = [{"file": recording.path.name, "attributes": recording.attributes} for recording in recordings]
    return {"schema": "pit.zarr/1", "episodes": len(episodes), "splits": splits, "sources": sources}


def _episode_lines(recordings: Sequence[Recording]) -> bytes:
    """JSON Lines, one object an episode, in order."""
    return b"".join(
        msgspec.json.encode({"name": episode.name, "source": i, "steps": episode.steps, "language": episode.language,
                             "attributes": episode.attributes}) + b"\n"
        for i, recording in enumerate(recordings)
        for episode in recording.episodes
    )  # fmt: skip
