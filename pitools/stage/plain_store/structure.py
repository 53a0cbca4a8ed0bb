"""Verify the files of a Zarr store by their indexes, ranges and checksums, without decoding."""

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

NoteKind = Literal["absent", "absent-inner", "unused", "no-checksum", "unchecked", "stray", "unowned"]
_NOTE_TEXTS: dict[NoteKind, str] = {
    "absent": "of {total} chunks are not stored: they read as the fill value, as lost ones would",
    "absent-inner": "inner chunks are not stored in their shards: they read as the fill value",
    "unused": "bytes of shards belong to no chunk",
    "no-checksum": "files have no checksum: their sizes, indexes and headers were checked, not their content",
    "unchecked": "files have codecs without sizes or checksums: they were not checked",
    "stray": "files in an array's folder hold none of its chunks",
    "unowned": "files are in no array's folder, and were copied unchecked: has an array lost its metadata?",
}
# A store may have thousands of arrays, a terminal has some dozen lines.
_MAX_NAMED = 3


class FileDefect(NamedTuple):
    """A defect of a file."""

    path: str
    defect: Defect


class StructureNote(msgspec.Struct, frozen=True, kw_only=True):
    """Something that cannot be verified, of one array: count and text. array: of `unowned` the first file."""

    array: str
    kind: NoteKind
    count: int
    text: str


class StructureReport(NamedTuple):
    """The defects of a store, by path, and what could not be decided, by array. checked_files: number of files
    read.
    """

    defects: list[FileDefect]
    notes: list[StructureNote]
    checked_files: int


class ChunkFile(NamedTuple):
    """A file, its array and the chunk it holds."""

    entry: FileEntry
    array: ArrayMetadata
    coordinate: Coordinate


class StructureChecker:
    """Check the files of a store against its metadata while they are copied.

    results: of the files checked so far, by manifest index; None where there is nothing to report.
    """

    def __init__(self, source: Source, manifest: Manifest) -> None:
        """Raises DataError when the metadata cannot be read, and what the source raises."""
        self.arrays = _read_arrays(source, manifest)
        self.counts: Counter[tuple[str, NoteKind]] = Counter()
        self.chunk_files = _chunk_files(manifest, self.arrays, self.counts)
        self.results: dict[int, VerifyResult | None] = {}

    def __call__(self, index: int, content: memoryview) -> VerifyResult | None:
        """Verify the content of a file by its manifest index. Raises ToolMissing."""
        if not (chunk_file := self.chunk_files.get(index)):
            return None
        result = verify.verify_file(
            shard_index.BufferedFile.over(content), len(content), chunk_file.array, chunk_file.coordinate
        )
        return None if result == VerifyResult([]) else result


def check_structure(
    source: Source,
    manifest: Manifest,
    *,
    readers: int,
    advance: Advance = lambda _: None,
    inspected: StructureChecker | None = None,
) -> StructureReport:
    """Verify every chunk file of a store, in worker processes. source: of the copy, or of the store. inspected: the
    checker of the files that were verified during the copy.

    Forks. Raises DataError when the metadata cannot be read or differ from those of `inspected`, ToolMissing, and as
    the source.
    """
    checker = inspected or StructureChecker(source, manifest)
    if inspected and inspected.arrays != _read_arrays(source, manifest):
        raise changed_error(source.label)
    chunk_files, counts = checker.chunk_files, checker.counts
    results = dict(checker.results)
    entries = manifest.files
    tasks = split_tasks(
        entries, [place for place in chunk_files if place not in results], {}, ranged=False, in_order=False
    )
    forked_pool.run_tasks(
        tasks, partial(_StructureWorker, source, chunk_files), results.update, readers=readers, advance=advance
    )
    defects: list[FileDefect] = []
    for index, result in results.items():
        if result:
            entry, array, _ = chunk_files[index]
            defects.extend(FileDefect(entry.path, defect) for defect in result.defects)
            counts[array.name, "absent-inner"] += result.missing_chunks
            counts[array.name, "unused"] += result.unused_bytes
    arrays = checker.arrays
    totals = {array.name: _file_count(manifest, array) for array in arrays.values()}
    notes = [
        StructureNote(
            array=name, kind=kind, count=count, text=f"{count} {_NOTE_TEXTS[kind]}".format(total=totals.get(name, 0))
        )
        for (name, kind), count in sorted(counts.items())
        if count > 0
    ]
    return StructureReport(sorted(defects, key=lambda found: found.path), notes, len(chunk_files))


def format_notes(notes: Iterable[StructureNote]) -> Iterator[str]:
    """Format notes: a line for each array with missing chunks, and a line for each other kind, of all its arrays."""
    notes_by_kind: dict[NoteKind, list[StructureNote]] = {}
    for note in notes:
        if note.kind == "absent":
            yield f"{note.array}: {note.text}"
        else:
            notes_by_kind.setdefault(note.kind, []).append(note)
    for kind, same_kind in notes_by_kind.items():
        names = ", ".join(note.array for note in same_kind[:_MAX_NAMED])
        more = f" and {len(same_kind) - _MAX_NAMED} more" if len(same_kind) > _MAX_NAMED else ""
        yield f"{names}{more}: {sum(note.count for note in same_kind)} {_NOTE_TEXTS[kind]}"


def _read_arrays(source: Source, manifest: Manifest) -> dict[str, ArrayMetadata]:
    """Read the arrays of the source's metadata. Raises DataError if they are not those of the manifest."""
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
    """Return the files to verify, by manifest index; count the missing and the unverifiable ones."""
    parse_key: dict[str, Callable[[str], Coordinate | None]] = {
        path: chunk_keys.make_key_parser(arrays[path]) for path in arrays
    }
    integrity = {path: verify.integrity_level(array.codecs) for path, array in arrays.items()}
    for array in arrays.values():
        counts[array.name, "absent"] = _file_count(manifest, array)
    chunk_files = {}
    first_unowned = ""
    owners = chunk_keys.arrays_of_paths(arrays, (entry.path for entry in manifest.files))
    for index, (entry, (path, owner)) in enumerate(zip(manifest.files, owners, strict=True)):
        if path.rpartition("/")[2] in METADATA_NAMES:
            continue
        if owner is None:
            first_unowned = first_unowned or path
            counts[first_unowned, "unowned"] += 1
            continue
        coordinate = parse_key[owner.path](path)
        if coordinate is None:
            counts[owner.name, "stray"] += 1
            continue
        counts[owner.name, "absent"] -= 1
        if integrity[owner.path] != "checksum":
            counts[owner.name, "no-checksum" if integrity[owner.path] == "structure" else "unchecked"] += 1
        if integrity[owner.path] != "nothing":
            chunk_files[index] = ChunkFile(entry, owner, coordinate)
    return chunk_files


def _file_count(manifest: Manifest, array: ArrayMetadata) -> int:
    """Return the number of files of an array if all are stored; of a subset, for its steps."""
    rows = chunk_keys.chunk_ranges(array, manifest.present_ranges(array.name)) if array.shape else [range(1)]
    return sum(map(len, rows)) * prod(array.grid[1:])


class _StructureWorker:
    """One thread of a check: its reader and its buffer."""

    def __init__(self, source: Source, chunk_files: dict[int, ChunkFile], slot: WorkerSlot) -> None:
        self._chunk_files, self._slot, self._reader = chunk_files, slot, source.connect()
        self._buffer = memoryview(mmap.mmap(-1, max(shard_index.BUFFER_BYTES, source.block)))

    def __call__(self, task: CopyTask) -> dict[int, VerifyResult]:
        """Return the results of the task's files that have any."""
        results = ((index, self._verify_file(self._chunk_files[index])) for index in task.files)
        return {place: result for place, result in results if result != VerifyResult([])}

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def _verify_file(self, chunk_file: ChunkFile) -> VerifyResult:
        file = self._reader.open(chunk_file.entry.path)
        self._slot.add_bytes(0)

        def read_into(view: memoryview, offset: int) -> int:
            count = file.read_into(view, offset)
            self._slot.add_bytes(count)
            return count

        try:
            if file.size != chunk_file.entry.bytes:
                return VerifyResult(
                    [Defect(kind="size", expected=f"{chunk_file.entry.bytes} bytes", got=f"{file.size} bytes")]
                )
            return verify.verify_file(
                shard_index.BufferedFile(read_into, self._buffer), file.size, chunk_file.array, chunk_file.coordinate
            )
        finally:
            file.close()
