"""What comes in: recordings looked at, episodes accepted or refused, each with a record that says why."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pitools.core import worker_pool
from pitools.core.errors import DataError, UsageError
from pitools.core.fs import write_atomic
from pitools.core.progress import bar
from pitools.core.record import Record
from pitools.dataset.formats import attributes, detect, schema_file
from pitools.dataset.formats.model import Recording, Refused, natural, refusal, refuse_names, sort_out
from pitools.dataset.formats.schema_file import Schema
from pitools.dataset.ingest.parent import Parent
from pitools.dataset.ingest.plan import Source
from pitools.dataset.ingest.shard_worker import CHANGED

_FEW = 16  # recordings that are looked at in this process: a worker costs as much as looking at them
_SHOWN = 20


class EpisodeRecord(Record, frozen=True, kw_only=True, tag="pit.dataset-episode/1"):
    """What became of one episode of a recording. episode: "" where the whole recording is refused, for `why`."""

    file: str
    episode: str
    steps: int
    language: str
    accepted: bool
    why: str = ""


class Intake(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked, and found. recordings: in natural order, with accepted episodes alone; those without any left
    out. sources: every file that will be read, and `places` which of them are each recording's. notes: what is odd,
    and of which recording. array_attributes: those that all episodes have, by array."""

    recordings: tuple[Recording, ...]
    refused: tuple[Refused, ...]
    sources: tuple[Source, ...]
    places: tuple[tuple[int, ...], ...]
    notes: tuple[tuple[Path, str], ...] = ()
    array_attributes: dict[str, dict[str, Any]] = {}


def take(
    paths: Sequence[Path], *, layout: str, skip: Sequence[str], made: Schema | None, parent: Parent | None, workers: int
) -> Intake:
    """Look at all recordings, by their metadata alone. Raises UsageError, DataError where one cannot be read at all."""
    ordered = _in_order(paths)
    found = _scan(ordered, partial(_Scanner, layout, tuple(skip), made), workers)
    refused = [item for item in found if isinstance(item, Refused)]
    recordings = [item for item in found if isinstance(item, Recording)]
    refused += [item for recording in recordings for item in recording.refused]
    recordings, more = _alike(recordings, parent)
    kept = [recording for recording in recordings if recording.episodes]
    sources, places = _sources(kept)
    about, differing = attributes.common(kept, parent.array_attributes if parent else None)
    notes = [(recording.path, note) for recording in kept for note in recording.notes]
    return Intake(
        recordings=tuple(kept),
        refused=(*refused, *more),
        sources=sources,
        places=places,
        notes=(*notes, *differing),
        array_attributes=about,
    )


def records(intake: Intake) -> Iterable[EpisodeRecord]:
    """One an episode: the accepted ones in their order, then the refused ones."""
    for recording in intake.recordings:
        for episode in recording.episodes:
            yield EpisodeRecord(
                file=str(recording.path),
                episode=episode.name,
                steps=episode.steps,
                language=episode.language,
                accepted=True,
            )
    for item in intake.refused:
        yield EpisodeRecord(file=str(item.path), episode=item.name, steps=0, language="", accepted=False, why=item.why)


def report(intake: Intake, path: Path) -> None:
    """Write the records as JSON Lines. Raises NoSpace or ClusterError."""
    write_atomic(path, b"".join(msgspec.json.encode(record) + b"\n" for record in records(intake)))


def judge(intake: Intake, *, skip_refused: bool) -> None:
    """Say what is odd, and what was refused. Raises DataError where something was and may not be left out, and where
    nothing is left."""
    _tell(intake.notes)
    refused = intake.refused
    if refused and not skip_refused and len(refused) == 1:
        raise DataError(refused[0].why, where=refused[0].where, hint=refused[0].hint)
    for item in refused[: len(refused) if not skip_refused else _SHOWN]:
        print(f"pit: refused: {item.where or item.path}: {item.why}", file=sys.stderr)
    if refused and skip_refused:
        print(f"pit: {len(refused)} refused and left out; --report FILE lists them", file=sys.stderr)
    accepted = sum(len(recording.episodes) for recording in intake.recordings)
    if refused and not skip_refused:
        what = f"{len(refused)} of {accepted + len(refused)} episodes are refused, the first: {refused[0].why}"
        hint = f"{refused[0].hint or 'repair them'}; or leave those episodes out with --skip-refused"
        raise DataError(what, where=refused[0].where or str(refused[0].path), hint=hint)
    if not accepted:
        raise DataError("no episode is left", where=str(refused[0].path) if refused else "", hint="see --report FILE")


def _tell(notes: Iterable[tuple[Path, str]]) -> None:
    """Print each note once, with the first recording that it is of."""
    paths: dict[str, list[Path]] = {}
    for path, note in notes:
        paths.setdefault(note, []).append(path)
    for note, found in list(paths.items())[:_SHOWN]:
        more = f" (and {len(found) - 1} more recordings)" if len(found) > 1 else ""
        print(f"pit: note: {found[0]}{more}: {note}", file=sys.stderr)
    if len(paths) > _SHOWN:
        print(f"pit: note: and {len(paths) - _SHOWN} more", file=sys.stderr)


def without(intake: Intake, refused: Sequence[Refused]) -> Intake:
    """The same, those episodes refused; a recording of which none is left is left out. Says what is refused."""
    odd = {(item.path, item.name) for item in refused}
    recordings = [recording for recording in _without(intake.recordings, odd) if recording.episodes]
    for item in refused[:_SHOWN]:
        print(f"pit: refused: {item.where or item.path}: {item.why}", file=sys.stderr)
    sources, places = _sources(recordings)
    return msgspec.structs.replace(
        intake, recordings=tuple(recordings), refused=(*intake.refused, *refused), sources=sources, places=places
    )


def stamp(path: Path) -> tuple[int, int, int]:
    """By which it shows that a file was changed: inode, bytes, time of last change in ns. Raises DataError."""
    try:
        # Opened, since on NFS a look at the name alone may be answered from memory.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
    return status.st_ino, status.st_size, status.st_mtime_ns


def tell_twins(source: Iterable[Mapping[str, Any]]) -> None:
    """Say which recordings are the same to the byte: they are taken, for who knows why."""
    seen: dict[str, str] = {}
    for record in source:
        if (first := seen.setdefault(record["digest"], record["file"])) is not record["file"]:
            print(f"pit: note: {record['file']} has the same bytes as {first}", file=sys.stderr)


def check_unchanged(sources: Iterable[Source]) -> None:
    """Raises DataError for a file that is no longer what it was when it was scanned."""
    for source in sources:
        if stamp(source.path) != source.stamp:
            raise DataError(CHANGED, where=str(source.path), hint="ingest it when it is complete")


def _in_order(paths: Sequence[Path]) -> list[Path]:
    if not paths or len({path.resolve() for path in paths}) != len(paths):
        raise UsageError("a recording is given twice" if paths else "no recording is given")
    # By name as given: a link's own name is the recording's, what it points to may be a hash.
    return sorted(paths, key=lambda path: (natural(path.name), natural(str(path))))


class _Scanner:
    """Looks at recordings by number and path."""

    def __init__(self, layout: str, skip: tuple[str, ...], made: Schema | None) -> None:
        self._layout, self._skip, self._schema = layout, skip, made

    def close(self) -> None:
        """Nothing is open."""

    def __call__(self, job: tuple[int, Path]) -> tuple[int, Recording | Refused]:
        number, path = job
        try:
            keep = bool(self._schema and self._schema.keep_next_obs)
            found = detect.scan(path, self._layout, self._skip, keep_next_obs=keep)
            found = schema_file.apply(self._schema, found) if self._schema else found
            return number, attributes.as_json(refuse_names(found))
        except DataError as error:
            item = refusal("", path, error)
            return number, msgspec.structs.replace(item, where=item.where or str(path))


def _scan(paths: Sequence[Path], start: Callable[[], _Scanner], workers: int) -> list[Recording | Refused]:
    found: dict[int, Recording | Refused] = {}
    with bar("scan", len(paths), unit="recordings", quiet=len(paths) <= _FEW) as advance:
        for number, item in worker_pool.run(start, enumerate(paths), workers=workers if len(paths) > _FEW else 1):
            found[number] = item
            advance(1)
    return [found[number] for number in range(len(paths))]


def _alike(recordings: Sequence[Recording], parent: Parent | None) -> tuple[list[Recording], list[Refused]]:
    """The recordings with those episodes alone that go together, with the parent's too, and the others."""
    episodes = [episode for recording in recordings for episode in recording.episodes]
    refused: list[Refused] = []
    if parent:
        refused = [item for episode in episodes if (item := parent.unlike(episode))]
    else:
        refused = list(sort_out(episodes)[1])
    if not refused:
        return list(recordings), []
    return _without(recordings, {(item.path, item.name) for item in refused}), refused


def _without(recordings: Sequence[Recording], odd: set[tuple[Path, str]]) -> list[Recording]:
    return [
        msgspec.structs.replace(
            recording, episodes=tuple(each for each in recording.episodes if (each.path, each.name) not in odd)
        )
        for recording in recordings
    ]


def _sources(recordings: Sequence[Recording]) -> tuple[tuple[Source, ...], tuple[tuple[int, ...], ...]]:
    sources: list[Source] = []
    places = []
    for recording in recordings:
        files = recording.files or (recording.path,)
        places.append(tuple(range(len(sources), len(sources) + len(files))))
        sources += (Source(path=path, stamp=stamp(path)) for path in files)
    return tuple(sources), tuple(places)
