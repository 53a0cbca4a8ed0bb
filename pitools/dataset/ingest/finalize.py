"""Complete a version whose shards are written: metadata, episode records, provenance and manifest."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pitools.core.fs import open_regular, write_atomic
from pitools.dataset.formats.model import Recording, RejectedEpisode
from pitools.dataset.ingest import chunking, shard_writer, statistics
from pitools.dataset.ingest.chunking import ArraySpec, shard_path
from pitools.dataset.ingest.journal import FinishedJob
from pitools.dataset.ingest.parent import ParentVersion, statistics_attribute
from pitools.dataset.ingest.plan import IngestPlan, RecordingFile, range_key
from pitools.dataset.ingest.statistics import PartialStats
from pitools.dataset.ingest.work_dir import IngestWorkDir
from pitools.dataset.versions import check_complete
from pitools.store import digest
from pitools.store import manifest as manifests
from pitools.store.manifest import EPISODE_JSON, EPISODE_OFFSETS, ArraySchema, FileEntry, Manifest
from pitools.store.version_list import SCHEMA
from pitools.store.zarr import metadata


def write_metadata(
    name: str,
    plan: IngestPlan,
    work_dir: IngestWorkDir,
    entries: Mapping[str, FinishedJob],
    recordings: Sequence[Recording],
    provenance: tuple[dict[str, Any], ...],
    parent: ParentVersion | None,
    codec: str,
    array_attributes: Mapping[str, dict[str, Any]],
) -> bytes:
    """Write all files except the shards of steps, the manifest last; return the manifest's bytes. Raises OSError.

    array_attributes: attributes that the recordings give each array, by name.
    """
    lines = (parent.episode_json if parent else b"") + episode_lines(recordings, _recordings_before(parent))
    offsets = [*(parent.offsets[:-1] if parent else ()), *plan.offsets]
    blocks: dict[str, NDArray[Any]] = {
        EPISODE_OFFSETS: np.array(offsets, np.int64),
        EPISODE_JSON: np.frombuffer(lines, np.uint8),
    }
    specs = {key: chunking.choose_array_spec(block.shape, block.dtype.name, codec) for key, block in blocks.items()}
    folds = {
        key: _fold_statistics(plan, key, entries)
        for key in plan.specs
        if statistics.has_statistics(plan.specs[key].dtype)
    }
    files = [
        *_shard_entries(plan, entries),
        *_episode_arrays(work_dir, blocks, specs),
        *_metadata(work_dir, plan, specs, folds, group_attributes(recordings, parent), array_attributes),
    ]
    specs = plan.specs | specs
    manifest = Manifest(
        name=name,
        episodes=len(offsets) - 1,
        steps=offsets[-1],
        arrays={key: ArraySchema(shape=spec.shape, dtype=spec.dtype) for key, spec in specs.items()},
        files=tuple(sorted(files, key=lambda file: file.path)),
        recordings=(*parent.manifest.recordings, *provenance) if parent else provenance,
        parent=parent.version if parent else "",
        statistics={key: statistics.to_statistics(merged) for key, (_, merged) in folds.items()},
        instructions=count_instructions(lines),
    )
    data = manifests.encode_manifest(manifest)
    work_dir.put_file(manifests.MANIFEST_FILE, lambda part: shard_writer.write_durable(part, data))
    return data


def provenance_records(
    recordings: Sequence[Recording],
    file_indices: Sequence[Sequence[int]],
    files: Sequence[RecordingFile],
    ranges: Mapping[str, FinishedJob],
    options: Mapping[str, Any],
    rejected: Sequence[RejectedEpisode],
) -> tuple[dict[str, Any], ...]:
    """Return one record per recording, without its folder and time: equal recordings give equal records.

    ranges: digests of all ranges of the files. options: of the ingest. rejected: episodes left out.
    """
    records = []
    for recording, numbers in zip(recordings, file_indices, strict=True):
        size = sum(files[number].bytes for number in numbers)
        text = _digest(
            recording, [(files[number], _digest_of_file(number, files[number], ranges)) for number in numbers]
        )
        record = {"file": recording.path.name, "bytes": size, "digest": text, "layout": recording.layout, **options}
        if left_out := sorted(item.name for item in rejected if item.path == recording.path):
            record["rejected"] = left_out
        records.append(record)
    return tuple(records)


def _digest_of_file(number: int, file: RecordingFile, ranges: Mapping[str, FinishedJob]) -> str:
    hashes = [ranges[range_key(number, i)].digest for i in range(file.ranges)]
    return f"{digest.ALGORITHM}:{hashes[0]}" if len(hashes) == 1 else digest.digest_ranges(map(bytes.fromhex, hashes))


def _digest(recording: Recording, files: Sequence[tuple[RecordingFile, str]]) -> str:
    """Return a recording's digest: the file's, or for a folder that of its file list in the format of `sha256sum`."""
    if [file.path for file, _ in files] == [recording.path]:
        return files[0][1]
    lines = (f"{text}  {file.path.relative_to(recording.path)}\n" for file, text in files)
    return digest.digest_bytes("".join(sorted(lines)).encode())


def group_attributes(recordings: Sequence[Recording], parent: ParentVersion | None) -> dict[str, Any]:
    """Return the group's attributes: counts, splits as episode numbers, and the attributes of each recording."""
    inherited = parent.attributes if parent else {}
    splits = {split: list(numbers) for split, numbers in parent.splits.items()} if parent else {}
    first = parent.manifest.episodes if parent else 0
    for recording in recordings:
        numbers = {episode.name: first + i for i, episode in enumerate(recording.episodes)}
        for split, names in recording.splits.items():
            splits.setdefault(split, []).extend(numbers[name] for name in names if name in numbers)
        first += len(numbers)
    described = [{"file": recording.path.name, "attributes": recording.attributes} for recording in recordings]
    described = [*inherited.get("recordings", []), *described]
    return {"schema": SCHEMA, "episodes": first, "splits": splits, "recordings": described}


def episode_lines(recordings: Sequence[Recording], recordings_before: int = 0) -> bytes:
    """Return the episodes as JSON Lines, in order. recordings_before: number of the parent's recordings."""
    return b"".join(
        msgspec.json.encode(
            {
                "name": episode.name,
                "recording": i,
                "steps": episode.steps,
                "instruction": episode.instruction,
                "attributes": episode.attributes,
            }
        )
        + b"\n"
        for i, recording in enumerate(recordings, recordings_before)
        for episode in recording.episodes
    )


def count_instructions(lines: bytes) -> dict[str, int]:
    """Return the number of episodes of each instruction; episodes without an instruction are not counted."""
    instructions = (msgspec.json.decode(line).get("instruction", "") for line in lines.splitlines())
    return dict(sorted(Counter(text for text in instructions if text).items()))


def _recordings_before(parent: ParentVersion | None) -> int:
    return len(parent.attributes.get("recordings", ())) if parent else 0


def _fold_statistics(
    plan: IngestPlan, array: str, entries: Mapping[str, FinishedJob]
) -> tuple[PartialStats, PartialStats]:
    spec = plan.specs[array]
    base = plan.base_statistics.get(array)
    first = plan.reusable_shards[array] if base else 0
    keys = [shard_path(array, index, len(spec.shape)) for index in range(first, spec.shards)]
    partials = [partial for key in keys if (partial := entries[key].statistics)]
    return statistics.fold_shards(spec, partials, base)


def _shard_entries(plan: IngestPlan, entries: Mapping[str, FinishedJob]) -> Iterator[FileEntry]:
    for array, spec in plan.specs.items():
        for index in range(spec.shards):
            entry = entries[shard_path(array, index, len(spec.shape))]
            yield FileEntry(path=entry.key, bytes=entry.bytes, digest=entry.digest)


def _episode_arrays(
    work_dir: IngestWorkDir, blocks: Mapping[str, Any], specs: Mapping[str, ArraySpec]
) -> Iterator[FileEntry]:
    buffer = shard_writer.PageBuffer()
    for name, spec in specs.items():
        for index in range(spec.shards):
            block = blocks[name][index * spec.shard : (index + 1) * spec.shard]
            yield _write_file(work_dir, shard_path(name, index, 1), shard_writer.encode_shard([block], spec, buffer))


def _metadata(
    work_dir: IngestWorkDir,
    plan: IngestPlan,
    episode_specs: Mapping[str, ArraySpec],
    folds: Mapping[str, tuple[PartialStats, PartialStats]],
    group: dict[str, Any],
    array_attributes: Mapping[str, dict[str, Any]],
) -> Iterator[FileEntry]:
    """Write the `zarr.json` of each array and group. episode_specs: layouts of the arrays of episodes.

    The root's holds all others (consolidated): zarr-python then lists no folder and does not warn of the manifest."""
    specs = {**plan.specs, **episode_specs}
    groups = {str(parent) for name in specs for parent in PurePosixPath(name).parents} - {"."}
    nodes = {name: chunking.group_metadata({}) for name in groups}
    for name, spec in specs.items():
        folded = statistics_attribute(spec.shape[0] // spec.shard, folds[name][0]) if name in folds else {}
        dimensions = chunking.dimension_names(name, len(spec.shape), along_steps=name in plan.specs)
        nodes[name] = chunking.array_metadata(spec, {**array_attributes.get(name, {}), **folded}, dimensions)
    yield _write_file(
        work_dir, metadata.V3_FILE, chunking.encode(metadata.consolidate(chunking.group_metadata(group), nodes))
    )
    for name, node in nodes.items():
        yield _write_file(work_dir, f"{name}/{metadata.V3_FILE}", chunking.encode(node))


def _write_file(work_dir: IngestWorkDir, path: str, data: bytes | memoryview) -> FileEntry:
    return FileEntry(
        path=path, bytes=len(data), digest=work_dir.put_file(path, lambda part: shard_writer.write_durable(part, data))
    )


def restore_manifest(final: Path, manifest: Manifest, data: bytes) -> None:
    """Write the manifest of a published version that has lost it, or has it damaged. Raises DataError where a file is
    missing, NoSpace or ClusterError."""
    path = final / manifests.MANIFEST_FILE
    with contextlib.suppress(OSError), open_regular(path) as file:
        if file.read() == data:
            return
    write_atomic(path, data)
    print(f"pit: {final}: its {path.name} was lost or damaged, and is restored", file=sys.stderr)
    check_complete(final, manifest)
