"""Scan recordings: accept or reject each episode, with a record of the reason."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pitools.core import worker_pool
from pitools.core.errors import ConfigError, DataError, UsageError, suggest
from pitools.core.fs import write_atomic
from pitools.core.progress import progress_bar
from pitools.core.record import Record
from pitools.dataset.formats import attributes, detect, transform_file
from pitools.dataset.formats.model import (
    Recording,
    RejectedEpisode,
    changed_during_read,
    natural_sort_key,
    partition_by_schema,
    reject_bad_names,
    rejection,
)
from pitools.dataset.formats.transform_file import TransformFile
from pitools.dataset.ingest.parent import ParentVersion
from pitools.dataset.ingest.plan import RecordingFile

_SERIAL_BELOW = 16  # so few recordings are scanned in this process: starting a worker takes as long
_MAX_REPORTED = 20


class EpisodeRecord(Record, frozen=True, kw_only=True, tag="pit.dataset-scanned-episode/1"):
    """One scanned episode. episode: "" where the whole recording is rejected, for `reason`."""

    file: str
    episode: str
    steps: int
    instruction: str
    accepted: bool
    reason: str = ""


class ScanResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a scan. recordings: in natural order, with accepted episodes only; empty ones left out. files: all
    that are to be read; `file_indices`: the indices of each recording's. notes: path and remark. array_attributes:
    those common to all episodes, by array."""

    recordings: tuple[Recording, ...]
    rejected: tuple[RejectedEpisode, ...]
    files: tuple[RecordingFile, ...]
    file_indices: tuple[tuple[int, ...], ...]
    notes: tuple[tuple[Path, str], ...] = ()
    array_attributes: dict[str, dict[str, Any]] = {}


def scan_recordings(
    paths: Sequence[Path],
    *,
    layout: str,
    skip: Sequence[str],
    transform: TransformFile | None,
    parent: ParentVersion | None,
    workers: int,
) -> ScanResult:
    """Scan recordings by their metadata alone.

    Raises UsageError; ConfigError of the transform; DataError for an unreadable recording.
    """
    ordered = _natural_order(paths)
    results = _scan(ordered, partial(_Scanner, layout, tuple(skip), transform), workers)
    refused = [item for item in results if isinstance(item, RejectedEpisode)]
    recordings = [item for item in results if isinstance(item, Recording)]
    refused += [item for recording in recordings for item in recording.rejected]
    if all(isinstance(item, Recording) for item in results):
        _require_matches(skip, transform, recordings)
    recordings, more = _partition_by_schema(recordings, parent)
    kept = [recording for recording in recordings if recording.episodes]
    files, places = _recording_files(kept)
    about, differing = attributes.common_attributes(kept, parent.array_attributes if parent else None)
    notes = [(recording.path, note) for recording in kept for note in recording.notes]
    if parent and parent.splits:
        note = f"its episodes are in none of the parent's splits: {', '.join(sorted(parent.splits))}"
        notes += [(recording.path, note) for recording in kept if parent.splits.keys().isdisjoint(recording.splits)]
    return ScanResult(
        recordings=tuple(kept),
        rejected=(*refused, *more),
        files=files,
        file_indices=places,
        notes=(*notes, *differing),
        array_attributes=about,
    )


def episode_records(scan: ScanResult, unreadable: Sequence[RejectedEpisode] = ()) -> Iterable[EpisodeRecord]:
    """Return one record per episode: accepted ones in order, then rejected ones. unreadable: found after the scan."""
    for recording in _without(scan.recordings, {(item.path, item.name) for item in unreadable}):
        for episode in recording.episodes:
            yield EpisodeRecord(
                file=str(recording.path),
                episode=episode.name,
                steps=episode.steps,
                instruction=episode.instruction,
                accepted=True,
            )
    for item in (*scan.rejected, *unreadable):
        yield EpisodeRecord(
            file=str(item.path), episode=item.name, steps=0, instruction="", accepted=False, reason=item.reason
        )


def require_separate_report(report: Path, paths: Sequence[Path]) -> None:
    """Raise UsageError for a report that would replace a recording, or a file in one."""
    for path in paths:
        if report.resolve().is_relative_to(path.resolve()):
            hint = "--report FILE: a file outside the recordings"
            raise UsageError(f"report: is in the recording {path}", where=str(report), hint=hint)


def write_report(scan: ScanResult, path: Path, unreadable: Sequence[RejectedEpisode] = ()) -> None:
    """Write the records as JSON Lines, as `episode_records`. Raises NoSpace or ClusterError."""
    records = episode_records(scan, unreadable)
    write_atomic(path, b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def require_accepted(scan: ScanResult, *, skip_rejected: bool) -> None:
    """Print notes and rejections. Raises DataError for rejections unless `skip_rejected`, and where no episode is
    left."""
    _print_notes(scan.notes)
    refused = scan.rejected
    accepted = sum(len(recording.episodes) for recording in scan.recordings)
    if refused and not skip_rejected and len(refused) == 1:
        hint = (
            f"{refused[0].hint or 'repair it'}; or leave it out with --skip-rejected" if accepted else refused[0].hint
        )
        raise DataError(refused[0].reason, where=refused[0].where, hint=hint)
    # Episodes of one lost file have one line.
    lines = dict.fromkeys(f"pit: refused: {item.where or item.path}: {item.reason}" for item in refused)
    for line in list(lines)[: len(lines) if not skip_rejected else _MAX_REPORTED]:
        print(line, file=sys.stderr)
    if refused and skip_rejected:
        print(f"pit: {len(refused)} refused and left out; the report of --report FILE has each", file=sys.stderr)
    if refused and not skip_rejected:
        whole = sum(not item.name for item in refused)
        episodes = len(refused) - whole
        counts = [f"{episodes} of {accepted + episodes} episodes"] * bool(episodes)
        counts += [f"{whole} whole recording{'s' * (whole > 1)}"] * bool(whole)
        problem = f"{' and '.join(counts)} are refused, the first: {refused[0].reason}"
        hint = f"{refused[0].hint or 'repair them'}; or leave those episodes out with --skip-rejected"
        raise DataError(problem, where=refused[0].where or str(refused[0].path), hint=hint)
    if not accepted:
        raise DataError("no episode is left", where=str(refused[0].path) if refused else "", hint="see --report FILE")


def _print_notes(notes: Iterable[tuple[Path, str]]) -> None:
    """Print each note once, with its first recording."""
    paths: dict[str, list[Path]] = {}
    for path, note in notes:
        paths.setdefault(note, []).append(path)
    for note, recordings in list(paths.items())[:_MAX_REPORTED]:
        more = f" (and {len(recordings) - 1} more recordings)" if len(recordings) > 1 else ""
        print(f"pit: note: {recordings[0]}{more}: {note}", file=sys.stderr)
    if len(paths) > _MAX_REPORTED:
        print(f"pit: note: and {len(paths) - _MAX_REPORTED} more", file=sys.stderr)


def without_episodes(scan: ScanResult, rejected: Sequence[RejectedEpisode]) -> ScanResult:
    """Return the scan without these episodes and without recordings left empty; prints each rejection."""
    odd = {(item.path, item.name) for item in rejected}
    recordings = [recording for recording in _without(scan.recordings, odd) if recording.episodes]
    for item in rejected[:_MAX_REPORTED]:
        print(f"pit: refused: {item.where or item.path}: {item.reason}", file=sys.stderr)
    files, places = _recording_files(recordings)
    return msgspec.structs.replace(
        scan, recordings=tuple(recordings), rejected=(*scan.rejected, *rejected), files=files, file_indices=places
    )


def fingerprint(path: Path) -> tuple[int, int, int]:
    """Return inode, bytes and mtime (ns), which change when a file does. Raises DataError."""
    try:
        # Open the file: on NFS, stat(2) of the path may return cached attributes.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
    return status.st_ino, status.st_size, status.st_mtime_ns


def _fingerprints(path: Path) -> dict[Path, tuple[int, int, int]]:
    """Return the fingerprints of a recording's files, or of those below its folder, without unreadable ones."""
    files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names] or [path]
    found = {}
    for file in files:
        with contextlib.suppress(DataError):  # a file that is needed is named by the scan
            found[file] = fingerprint(file)
    return found


def warn_duplicates(provenance: Iterable[Mapping[str, Any]]) -> None:
    """Warn about byte-identical recordings; they are ingested all the same."""
    first_files: dict[str, str] = {}
    for record in provenance:
        if first := first_files.get(record["digest"]):
            print(f"pit: note: {record['file']} has the same bytes as {first}", file=sys.stderr)
        else:
            first_files[record["digest"]] = record["file"]


def check_unchanged(files: Iterable[RecordingFile]) -> None:
    """Raise DataError for a file that changed since it was scanned."""
    for file in files:
        if fingerprint(file.path) != file.fingerprint:
            raise changed_during_read(str(file.path))


def _natural_order(paths: Sequence[Path]) -> list[Path]:
    if not paths or len({path.resolve() for path in paths}) != len(paths):
        raise UsageError("recordings: one is given twice" if paths else "recordings: none given")
    # Sort by the name as given: the target of a symbolic link may be named by a hash.
    named = [path if path.name else path.absolute() for path in paths]  # "." has no name
    return sorted(named, key=lambda path: (natural_sort_key(path.name), natural_sort_key(str(path))))


class _Scanner:
    """Scan recordings by number and path."""

    def __init__(self, layout: str, skip: tuple[str, ...], transform: TransformFile | None) -> None:
        self._layout, self._skip, self._transform = layout, skip, transform

    def close(self) -> None:
        """Nothing is open."""

    def __call__(self, job: tuple[int, Path]) -> tuple[int, Recording | RejectedEpisode]:
        number, path = job
        try:
            before = _fingerprints(path)
            keep = bool(self._transform and self._transform.keep_next_obs)
            recording = detect.scan_recording(path, self._layout, self._skip, keep_next_obs=keep)
            recording = transform_file.apply_transform(self._transform, recording) if self._transform else recording
            files = recording.files or (path,)
            seen = tuple(before.get(file) or fingerprint(file) for file in files)
            recording = msgspec.structs.replace(recording, files=files, fingerprints=seen)
            return number, attributes.with_json_attributes(reject_bad_names(recording))
        except DataError as error:
            item = rejection("", path, error)
            return number, msgspec.structs.replace(item, where=item.where or str(path))


def _scan(paths: Sequence[Path], start: Callable[[], _Scanner], workers: int) -> list[Recording | RejectedEpisode]:
    results: dict[int, Recording | RejectedEpisode] = {}
    with progress_bar("scan", len(paths), unit="recordings", quiet=len(paths) <= _SERIAL_BELOW) as advance:
        for number, item in worker_pool.run_tasks(
            enumerate(paths), start, workers=workers if len(paths) > _SERIAL_BELOW else 1
        ):
            results[number] = item
            advance(1)
    return [results[number] for number in range(len(paths))]


def _require_matches(skip: Sequence[str], transform: TransformFile | None, recordings: Sequence[Recording]) -> None:
    """Raise UsageError for a glob of `skip`, ConfigError for one of `drop`, that matches no array of any recording."""
    names = {name for recording in recordings for episode in recording.episodes for name in episode.columns}
    matched = {pattern for recording in recordings for pattern in recording.matched_skips}
    for pattern in skip:
        if pattern not in matched:
            where = f"--skip-array {pattern}"
            raise UsageError("no array of this name", where=where, hint=suggest(pattern, names))
    matched = {pattern for recording in recordings for pattern in recording.matched_drops}
    for pattern in transform.tables.drop if transform else ():
        if transform and names and pattern not in matched:
            problem = f"{pattern!r}: no array of this name"
            raise ConfigError(problem, where=f"{transform.path}: drop", hint=suggest(pattern, names))


def _partition_by_schema(
    recordings: Sequence[Recording], parent: ParentVersion | None
) -> tuple[list[Recording], list[RejectedEpisode]]:
    """Split recordings into those with a common schema, the parent's where given, and rejected episodes."""
    episodes = [episode for recording in recordings for episode in recording.episodes]
    refused: list[RejectedEpisode] = []
    if parent:
        refused = [item for episode in episodes if (item := parent.incompatibility(episode))]
    else:
        refused = list(partition_by_schema(episodes)[1])
    if not refused:
        return list(recordings), []
    return _without(recordings, {(item.path, item.name) for item in refused}), refused


def _without(recordings: Sequence[Recording], odd: set[tuple[Path, str]]) -> list[Recording]:
    return [
        msgspec.structs.replace(
            recording,
            episodes=tuple(episode for episode in recording.episodes if (episode.path, episode.name) not in odd),
        )
        for recording in recordings
    ]


def _recording_files(recordings: Sequence[Recording]) -> tuple[tuple[RecordingFile, ...], tuple[tuple[int, ...], ...]]:
    files: list[RecordingFile] = []
    places = []
    for recording in recordings:
        fingerprints = zip(recording.files, recording.fingerprints, strict=True)
        places.append(tuple(range(len(files), len(files) + len(recording.files))))
        files += (RecordingFile(path=path, fingerprint=seen) for path, seen in fingerprints)
    return tuple(files), tuple(places)
