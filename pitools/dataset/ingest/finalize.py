"""From shards that are all there to a version: metadata, what is said of episodes, provenance, the manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pitools.dataset.formats.model import Recording, Refused
from pitools.dataset.ingest import chunking, shard_writer, statistics
from pitools.dataset.ingest.chunking import Grid, shard_path
from pitools.dataset.ingest.journal import Entry
from pitools.dataset.ingest.parent import Parent, statistics_attribute
from pitools.dataset.ingest.plan import Plan, Source, range_key
from pitools.dataset.ingest.staging_dir import Place
from pitools.dataset.ingest.statistics import Partial
from pitools.store import digest
from pitools.store import manifest as manifests
from pitools.store.manifest import ArraySchema, FileEntry, Manifest
from pitools.store.version_list import SCHEMA
from pitools.store.zarr import metadata

OFFSETS = "episode_offsets"
EPISODES = "episode_json"


def manifest(
    name: str,
    plan: Plan,
    place: Place,
    entries: Mapping[str, Entry],
    recordings: Sequence[Recording],
    source: tuple[dict[str, Any], ...],
    parent: Parent | None,
    codec: str,
    array_attributes: Mapping[str, dict[str, Any]],
) -> bytes:
    """Write every file but the shards of steps, the manifest last; returns its bytes. Raises OSError.

    array_attributes: what the recordings say of arrays, by name.
    """
    lines = (parent.lines if parent else b"") + episode_lines(recordings, _sources_before(parent))
    offsets = [*(parent.offsets[:-1] if parent else ()), *plan.offsets]
    blocks: dict[str, NDArray[Any]] = {OFFSETS: np.array(offsets, np.int64), EPISODES: np.frombuffer(lines, np.uint8)}
    grids = {key: chunking.choose(block.shape, block.dtype.name, codec) for key, block in blocks.items()}
    folds = {key: _folded(plan, key, entries) for key in plan.grids if statistics.has_statistics(plan.grids[key].dtype)}
    files = [
        *_shard_entries(plan, entries),
        *_episode_arrays(place, blocks, grids),
        *_metadata(place, plan, grids, folds, attributes(recordings, parent), array_attributes),
    ]
    grids = plan.grids | grids
    made = Manifest(
        name=name,
        episodes=len(offsets) - 1,
        steps=offsets[-1],
        arrays={key: ArraySchema(shape=known.shape, dtype=known.dtype) for key, known in grids.items()},
        files=tuple(sorted(files, key=lambda file: file.path)),
        source=(*parent.manifest.source, *source) if parent else source,
        parent=parent.version if parent else "",
        statistics={key: statistics.finish(whole) for key, (_, whole) in folds.items()},
        tasks=tasks(lines),
    )
    data = manifests.encode(made)
    place.put(manifests.FILE_NAME, lambda part: shard_writer.write(part, data))
    return data


def provenance(
    recordings: Sequence[Recording],
    places: Sequence[Sequence[int]],
    sources: Sequence[Source],
    ranges: Mapping[str, Entry],
    asked: Mapping[str, Any],
    refused: Sequence[Refused],
) -> tuple[dict[str, Any], ...]:
    """One record a recording. It holds no folder and no time: where a recording lay is no part of what it is.

    ranges: digests of all ranges of the sources. asked: options, the same for each. refused: episodes left out.
    """
    records = []
    for recording, numbers in zip(recordings, places, strict=True):
        size = sum(sources[number].bytes for number in numbers)
        text = _digest(recording, [(sources[number], _of_file(number, sources[number], ranges)) for number in numbers])
        record = {"file": recording.path.name, "bytes": size, "digest": text, "layout": recording.layout, **asked}
        if left_out := sorted(item.name for item in refused if item.path == recording.path):
            record["refused"] = left_out
        records.append(record)
    return tuple(records)


def _of_file(number: int, source: Source, ranges: Mapping[str, Entry]) -> str:
    found = [ranges[range_key(number, i)].digest for i in range(source.ranges)]
    return f"{digest.ALGORITHM}:{found[0]}" if len(found) == 1 else digest.of_ranges(map(bytes.fromhex, found))


def _digest(recording: Recording, files: Sequence[tuple[Source, str]]) -> str:
    """A file's own digest; a folder's is that of the list of its files, as `sha256sum` would write one."""
    if [source.path for source, _ in files] == [recording.path]:
        return files[0][1]
    lines = (f"{text}  {source.path.relative_to(recording.path)}\n" for source, text in files)
    return digest.of_bytes("".join(sorted(lines)).encode())


def attributes(recordings: Sequence[Recording], parent: Parent | None) -> dict[str, Any]:
    """The group's attributes: counts, the splits as episode numbers, and what each recording says of itself."""
    before = parent.attributes if parent else {}
    splits = {split: list(numbers) for split, numbers in before.get("splits", {}).items()}
    first = parent.manifest.episodes if parent else 0
    for recording in recordings:
        numbers = {episode.name: first + i for i, episode in enumerate(recording.episodes)}
        for split, names in recording.splits.items():
            splits.setdefault(split, []).extend(numbers[name] for name in names if name in numbers)
        first += len(numbers)
    sources = [{"file": recording.path.name, "attributes": recording.attributes} for recording in recordings]
    sources = [*before.get("sources", []), *sources]
    return {"schema": SCHEMA, "episodes": first, "splits": splits, "sources": sources}


def episode_lines(recordings: Sequence[Recording], sources_before: int = 0) -> bytes:
    """JSON Lines, one object an episode, in order."""
    return b"".join(
        msgspec.json.encode(
            {
                "name": episode.name,
                "source": i,
                "steps": episode.steps,
                "language": episode.language,
                "attributes": episode.attributes,
            }
        )
        + b"\n"
        for i, recording in enumerate(recordings, sources_before)
        for episode in recording.episodes
    )


def tasks(lines: bytes) -> dict[str, int]:
    """How many episodes have each instruction, by instruction; those without one are not counted."""
    languages = (msgspec.json.decode(line).get("language", "") for line in lines.splitlines())
    return dict(sorted(Counter(language for language in languages if language).items()))


def _sources_before(parent: Parent | None) -> int:
    return len(parent.attributes.get("sources", ())) if parent else 0


def _folded(plan: Plan, array: str, entries: Mapping[str, Entry]) -> tuple[Partial, Partial]:
    known = plan.grids[array]
    base = plan.base.get(array)
    first = plan.linked[array] if base else 0
    keys = [shard_path(array, index, len(known.shape)) for index in range(first, known.shards)]
    partials = [partial for key in keys if (partial := entries[key].partial)]
    return statistics.folded(known, partials, base)


def _shard_entries(plan: Plan, entries: Mapping[str, Entry]) -> Iterator[FileEntry]:
    for array, known in plan.grids.items():
        for index in range(known.shards):
            entry = entries[shard_path(array, index, len(known.shape))]
            yield FileEntry(path=entry.key, bytes=entry.bytes, digest=entry.digest)


def _episode_arrays(place: Place, blocks: Mapping[str, Any], grids: Mapping[str, Grid]) -> Iterator[FileEntry]:
    buffer = shard_writer.Buffer()
    for name, known in grids.items():
        for index in range(known.shards):
            block = blocks[name][index * known.shard : (index + 1) * known.shard]
            yield _file(place, shard_path(name, index, 1), shard_writer.encode([block], known, buffer))


def _metadata(
    place: Place,
    plan: Plan,
    others: Mapping[str, Grid],
    folds: Mapping[str, tuple[Partial, Partial]],
    group: dict[str, Any],
    array_attributes: Mapping[str, dict[str, Any]],
) -> Iterator[FileEntry]:
    """The `zarr.json` of every array, `others` being those of episodes, and of every group above one. That of the store
    holds all others, too: by it zarr-python lists them, and neither looks into folders nor warns of the manifest."""
    grids = {**plan.grids, **others}
    groups = {str(parent) for name in grids for parent in PurePosixPath(name).parents} - {"."}
    nodes = {name: chunking.group_metadata({}) for name in groups}
    for name, known in grids.items():
        kept = statistics_attribute(known.shape[0] // known.shard, folds[name][0]) if name in folds else {}
        dimensions = chunking.dimension_names(name, len(known.shape), along_steps=name in plan.grids)
        nodes[name] = chunking.array_metadata(known, {**array_attributes.get(name, {}), **kept}, dimensions)
    yield _file(place, metadata.V3, chunking.encode(metadata.consolidate(chunking.group_metadata(group), nodes)))
    for name, node in nodes.items():
        yield _file(place, f"{name}/{metadata.V3}", chunking.encode(node))


def _file(place: Place, path: str, data: bytes | memoryview) -> FileEntry:
    return FileEntry(path=path, bytes=len(data), digest=place.put(path, lambda part: shard_writer.write(part, data)))
