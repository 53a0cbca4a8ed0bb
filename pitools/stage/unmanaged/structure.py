"""Judge the files of a Zarr store by what they say of themselves: indexes, ranges and checksums, nothing decoded."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import prod
from typing import Literal, NamedTuple

import msgspec

from pitools.core import forked_pool
from pitools.core.progress import Advance
from pitools.core.shared_progress import WorkerSlot
from pitools.stage.copy.tasks import CopyTask, split_tasks
from pitools.stage.sources.base import Source
from pitools.stage.sources.store_listing import changed_error, read_file
from pitools.store.manifest import FileEntry, Manifest
from pitools.store.zarr import chunk_keys, metadata, shard_index, verify
from pitools.store.zarr.metadata import METADATA_NAMES, ArrayMetadata, Coordinate
from pitools.store.zarr.shard_index import Defect
from pitools.store.zarr.verify import VerifyResult

NoteKind = Literal["absent", "absent-inner", "unused", "no-checksum", "unchecked", "stray", "apart"]
_NOTE_TEXTS: dict[NoteKind, str] = {
    "absent": "of {total} chunks are not stored: they read as the fill value, as lost ones would",
    "absent-inner": "inner chunks are not stored in their shards: they read as the fill value",
    "unused": "bytes of shards belong to no chunk",
    "no-checksum": "files have no checksum: their sizes, indexes and headers were checked, not their content",
    "unchecked": "files are of codecs that say nothing of themselves: they were not checked",
    "stray": "files in an array's folder hold none of its chunks",
    "apart": "files are in no array's folder, and were copied unchecked: has an array lost its metadata?",
}
# A store may have thousands of arrays, and a terminal has some dozen lines.
_MAX_NAMED = 3


class FlawedFile(NamedTuple):
    """One thing that is wrong with one file."""

    path: str
    flaw: Defect


class StructureNote(msgspec.Struct, frozen=True, kw_only=True):
    """What a judgement cannot decide, of one array: how many, and in words. array: of `apart` the first file."""

    array: str
    kind: NoteKind
    count: int
    text: str


class StructureReport(NamedTuple):
    """What is wrong with a store, by path, and what could not be decided, by array. checked_files: files that were
    read."""

    flawed: list[FlawedFile]
    notes: list[StructureNote]
    checked_files: int


class ChunkFile(NamedTuple):
    """A file, its array and the chunk it holds."""

    entry: FileEntry
    array: ArrayMetadata
    coordinate: Coordinate


class StructureChecker:
    """What the files of a store should hold, by its metadata, to judge them while they are copied.

    judged: what was found of files so far, by their place in the manifest; None where there is nothing to say.
    """

    def __init__(self, source: Source, manifest: Manifest) -> None:
        """Raises DataError when the metadata cannot be read, and what the source raises."""
        self.arrays = _read(source, manifest)
        self.counts: Counter[tuple[str, NoteKind]] = Counter()
        self.parts = _chunk_files(manifest, self.arrays, self.counts)
        self.checked_files: dict[int, VerifyResult | None] = {}

    def __call__(self, index: int, content: memoryview) -> VerifyResult | None:
        """Judge the content of the file at this place. Raises ToolMissing."""
        if not (part := self.parts.get(index)):
            return None
        found = verify.verify_file(shard_index.BufferedFile.over(content), len(content), part.array, part.coordinate)
        return None if found == VerifyResult([]) else found


def check_structure(
    source: Source,
    manifest: Manifest,
    *,
    readers: int,
    advance: Advance = lambda _: None,
    inspected: StructureChecker | None = None,
) -> StructureReport:
    """Judge every chunk file of a store, in worker processes. source: of the copy, or of any other place. inspected:
    what judged some of the files while they were copied.

    Forks. Raises DataError when its metadata cannot be read, or are not those of `inspected`, ToolMissing, and what the
    source raises.
    """
    inspector = inspected or StructureChecker(source, manifest)
    if inspected and inspected.arrays != _read(source, manifest):
        raise changed_error(source.label)
    parts, counts = inspector.parts, inspector.counts
    judged = dict(inspector.checked_files)
    entries = manifest.files
    todo = split_tasks(entries, [place for place in parts if place not in judged], {}, ranged=False, in_order=False)
    forked_pool.run_tasks(
        todo, partial(_StructureWorker, source, parts), judged.update, readers=readers, advance=advance
    )
    flawed: list[FlawedFile] = []
    for place, found in judged.items():
        if found:
            entry, array, _ = parts[place]
            flawed.extend(FlawedFile(entry.path, flaw) for flaw in found.defects)
            counts[array.name, "absent-inner"] += found.missing_chunks
            counts[array.name, "unused"] += found.unused_bytes
    arrays = inspector.arrays
    totals = {array.name: _total(manifest, array) for array in arrays.values()}
    notes = [
        StructureNote(
            array=name, kind=kind, count=count, text=f"{count} {_NOTE_TEXTS[kind]}".format(total=totals.get(name, 0))
        )
        for (name, kind), count in sorted(counts.items())
        if count > 0
    ]
    return StructureReport(sorted(flawed, key=lambda found: found.path), notes, len(parts))


def format_notes(notes: Iterable[StructureNote]) -> Iterator[str]:
    """Notes as lines: one for each array that lacks chunks, and one for each other kind, of however many arrays."""
    alike: dict[NoteKind, list[StructureNote]] = {}
    for note in notes:
        if note.kind == "absent":
            yield f"{note.array}: {note.text}"
        else:
            alike.setdefault(note.kind, []).append(note)
    for kind, some in alike.items():
        names = ", ".join(note.array for note in some[:_MAX_NAMED])
        more = f" and {len(some) - _MAX_NAMED} more" if len(some) > _MAX_NAMED else ""
        yield f"{names}{more}: {sum(note.count for note in some)} {_NOTE_TEXTS[kind]}"


def _read(source: Source, manifest: Manifest) -> dict[str, ArrayMetadata]:
    """The arrays as the source's own metadata have them, which must be those of the manifest."""
    reader = source.connect()
    try:
        arrays = metadata.read_arrays((entry.path for entry in manifest.files), lambda path: read_file(reader, path))
    finally:
        reader.close()
    if {array.name: array.shape for array in arrays.values()} != {n: s.shape for n, s in manifest.arrays.items()}:
        raise changed_error(source.label)
    return arrays


def _chunk_files(
    manifest: Manifest, arrays: Mapping[str, ArrayMetadata], counts: Counter[tuple[str, NoteKind]]
) -> dict[int, ChunkFile]:
    """The files to judge, by their place in the manifest; what is not to be judged, and what is missing, is counted."""
    find: dict[str, Callable[[str], Coordinate | None]] = {
        path: chunk_keys.make_key_parser(arrays[path]) for path in arrays
    }
    worth = {path: verify.integrity_level(array.codecs) for path, array in arrays.items()}
    for array in arrays.values():
        counts[array.name, "absent"] = _total(manifest, array)
    parts = {}
    apart = ""
    owners = chunk_keys.arrays_of_paths(arrays, (entry.path for entry in manifest.files))
    for place, (entry, (path, owner)) in enumerate(zip(manifest.files, owners, strict=True)):
        if path.rpartition("/")[2] in METADATA_NAMES:
            continue
        if owner is None:
            apart = apart or path
            counts[apart, "apart"] += 1
            continue
        coordinate = find[owner.path](path)
        if coordinate is None:
            counts[owner.name, "stray"] += 1
            continue
        counts[owner.name, "absent"] -= 1
        if worth[owner.path] != "checksum":
            counts[owner.name, "no-checksum" if worth[owner.path] == "structure" else "unchecked"] += 1
        if worth[owner.path] != "nothing":
            parts[place] = ChunkFile(entry, owner, coordinate)
    return parts


def _total(manifest: Manifest, array: ArrayMetadata) -> int:
    """How many files an array has when all are stored; of a subset, those of its steps."""
    rows = chunk_keys.chunk_ranges(array, manifest.runs(array.name)) if array.shape else [range(1)]
    return sum(map(len, rows)) * prod(array.grid[1:])


class _StructureWorker:
    """One thread's share: its reader and its buffer."""

    def __init__(self, source: Source, parts: dict[int, ChunkFile], slot: WorkerSlot) -> None:
        self._parts, self._slot, self._reader = parts, slot, source.connect()
        self._buffer = memoryview(mmap.mmap(-1, max(shard_index.BUFFER_BYTES, source.block)))

    def __call__(self, task: CopyTask) -> dict[int, VerifyResult]:
        """The task's files of which there is something to say."""
        judged = ((place, self._judge(self._parts[place])) for place in task.files)
        return {place: found for place, found in judged if found != VerifyResult([])}

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def _judge(self, part: ChunkFile) -> VerifyResult:
        file = self._reader.open(part.entry.path)
        self._slot.add_bytes(0)

        def read_into(view: memoryview, offset: int) -> int:
            count = file.read_into(view, offset)
            self._slot.add_bytes(count)
            return count

        try:
            if file.size != part.entry.bytes:
                return VerifyResult(
                    [Defect(kind="size", expected=f"{part.entry.bytes} bytes", got=f"{file.size} bytes")]
                )
            return verify.verify_file(
                shard_index.BufferedFile(read_into, self._buffer), file.size, part.array, part.coordinate
            )
        finally:
            file.close()
