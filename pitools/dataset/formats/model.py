"""Records of a recording of any layout: its episodes, and the source of each of their arrays."""

from __future__ import annotations

import fnmatch
import math
import re
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError, PitError
from pitools.core.fs import iter_files
from pitools.store.manifest import EPISODE_PREFIX

MAX_ROW_BYTES = 256 << 20
SEPARATE_HINT = "ingest them separately, or leave the array out with --skip-array"
SKIPPED_NEXT_OBS = "next_obs is left out: it is obs, one step later (keep_next_obs = true in --transform keeps it)"
SINGULAR = {"actions": "action", "rewards": "reward", "dones": "done", "states": "state"}
# A name becomes a path in the store. Zarr reserves a leading `__`; `*.json` could collide with its metadata files.
_NAME_PART = re.compile(r"(?!__)[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}(?<!\.json)")
_NAMES = f"A-Z, a-z, 0-9, _, . and -, at most 100; no prefix . or - or __ or {EPISODE_PREFIX}, no suffix .json"


class ChangedDuringRead(DataError):
    """A recording changed while it was read."""


def changed_during_read(where: str) -> ChangedDuringRead:
    """Return the error of a file that changed while it was read."""
    hint = "ingest it when it is complete"
    return ChangedDuringRead("the file changed while it was read", where=where, hint=hint)


class EpisodeUnreadable(DataError):
    """An episode with valid metadata cannot be read. rejected: its record for the report."""

    rejected: RejectedEpisode


class Hdf5Source(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """A dataset of an HDF5 file, one row per step. bytes: size of the file when it was scanned.

    encoded_images: each row is one JPEG or PNG file, padded with zeros or of variable length.
    """

    path: Path
    name: str
    bytes: int
    encoded_images: bool = False


class ParquetSource(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """A column of a Parquet file, from row `first_row` on. encoded_images: each cell is one JPEG or PNG file."""

    path: Path
    key: str
    first_row: int
    encoded_images: bool = False


class VideoSource(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """Frames of a video: step i is the frame at `start_s` + i / `fps` seconds."""

    path: Path
    start_s: float
    fps: float


class ZarrSource(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """An array of a Zarr store, from row `first_row` on. is_own_version: the store is a dataset version of pitools."""

    path: Path
    name: str
    first_row: int
    is_own_version: bool = False


class ResizeOp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Resize the images of another column. method: area, bilinear or nearest."""

    input: Column
    method: str


class CastOp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Cast the values of another column."""

    input: Column


class DeriveOp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Apply a function to entire columns of one episode. where: file and episode, for messages."""

    function: str
    inputs: tuple[Column, ...]
    where: str


ColumnSource = Hdf5Source | ParquetSource | VideoSource | ZarrSource | ResizeOp | CastOp | DeriveOp


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One array of one episode: its shape, dtype and source. A reader in any process needs nothing else.

    dataset: its name in the recording. row: shape of one step, (H, W, 3) for an image. dtype: NumPy name.
    """

    dataset: str
    steps: int
    row: tuple[int, ...]
    dtype: str
    source: ColumnSource


class ColumnReader(Protocol):
    """A reader of columns. Each belongs to one thread at a time; any number may be open."""

    def read_into(self, column: Column, out: NDArray[Any], start: int, stop: int) -> None:
        """Fill `out`, (stop - start, *column.row) of the column's dtype, with the episode's steps [start, stop).

        Raises DataError for data that are damaged, missing, or changed since the scan.
        """

    def close(self) -> None:
        """Close the files."""


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """One episode: its name in the recording, its length in steps, and its columns by array name.

    attributes: those of the episode. array_attributes: those of its arrays, by array name: units, names of columns.
    """

    name: str
    path: Path
    steps: int
    columns: dict[str, Column]
    instruction: str = ""
    attributes: dict[str, Any] = {}
    array_attributes: dict[str, dict[str, Any]] = {}


class RejectedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An incomplete or incompatible episode: name, reason and hint. where: file, and location in the file."""

    name: str
    path: Path
    reason: str
    hint: str = ""
    where: str = ""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """One file or folder: its episodes in order, its splits as episode names, and its attributes.

    rejected: episodes that cannot be ingested. files: all files that the scan and the ingest read; `fingerprints`:
    theirs, taken before the scan. notes: remarks for the user, none of them an error. matched_skips, matched_drops: the
    globs of `skip`, and of the transform's `drop`, that matched an array.
    """

    path: Path
    layout: str
    episodes: tuple[Episode, ...]
    splits: dict[str, tuple[str, ...]] = {}
    attributes: dict[str, Any] = {}
    rejected: tuple[RejectedEpisode, ...] = ()
    files: tuple[Path, ...] = ()
    fingerprints: tuple[tuple[int, int, int], ...] = ()
    notes: tuple[str, ...] = ()
    matched_skips: frozenset[str] = frozenset()
    matched_drops: frozenset[str] = frozenset()


def natural_sort_key(text: str) -> tuple[list[str | int], str]:
    """Return a sort key with numbers as numbers: demo_2 before demo_10."""
    parts = re.split(r"([0-9]+)", text)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], text


def list_files(path: Path) -> list[str]:
    """List every file of a recording that is a folder, by relative path, sorted. Raises DataError."""
    try:
        return sorted(iter_files(path))
    except OSError as error:
        hint = "give the folder of the recording itself, with regular files only"
        problem = f"cannot be listed: {error.strerror}"
        raise DataError(problem, where=str(error.filename or path), hint=hint) from error


class SkipPatterns(tuple[str, ...]):
    """Globs of arrays to be left out. matched: those that matched an array so far."""

    matched: set[str]

    def __init__(self, patterns: Iterable[str]) -> None:
        self.matched = set()


def is_skipped(name: str, skip: Sequence[str], key: str = "") -> bool:
    """Return whether an array matches one of the glob patterns, by its name in a version or its key in the recording.

    Two arrays that would get the same name differ only in their keys. The matching ones of SkipPatterns are recorded.
    """
    matching = {p for p in skip if fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(key, p)}
    if isinstance(skip, SkipPatterns):
        skip.matched |= matching
    return bool(matching)


def check_unique(names: Sequence[str], where: str) -> None:
    """Raise DataError if two arrays of a recording would have the same name."""
    if twice := next((name for name, count in Counter(names).items() if count > 1), ""):
        problem = f"two arrays of the recording would both be {twice!r}"
        raise DataError(problem, where=where, hint="rename one in the recording, or leave it out with --skip-array")


def _is_valid_name(name: str) -> bool:
    # In any group: as `store.manifest.along_steps` reads such names.
    return all(_NAME_PART.fullmatch(part) and not part.startswith(EPISODE_PREFIX) for part in name.split("/"))


def _check_names(names: Sequence[str], where: str) -> None:
    """Raise DataError for an array name that cannot be a path in the store, or is a prefix of another's."""
    invalid = [repr(name) for name in names if not _is_valid_name(name)]
    if invalid:
        more = f", and {len(invalid) - 5} more" if len(invalid) > 5 else ""
        problem = f"an array cannot be named {' or '.join(invalid[:5])}{more} (expected {_NAMES})"
        hint = "rename it by [rename] in a --transform file, or leave it out with --skip-array"
        raise DataError(problem, where=where, hint=hint)
    for name in names:
        if clash := next((other for other in names if other.startswith(name + "/")), ""):
            hint = "rename one by [rename] in a --transform file, or leave it out with --skip-array"
            raise DataError(f"array {clash!r} would be inside array {name!r}", where=where, hint=hint)


def make_episode(
    name: str,
    path: Path,
    steps: int,
    columns: Sequence[tuple[str, Column]],
    length_array: str,
    where: str,
    *,
    instruction: str = "",
    attributes: dict[str, Any] | None = None,
    array_attributes: dict[str, dict[str, Any]] | None = None,
) -> Episode:
    """Return the episode of these columns. length_array: name of the array that gives `steps`, for messages.

    Raises DataError unless the episode has steps, and every column has one row per step.
    """
    check_unique([array for array, _ in columns], where)
    if not columns:
        raise DataError("no array is left", where=where, hint="give --skip-array fewer patterns")
    if steps == 0:
        raise DataError(f"the episode has no steps: {length_array} is empty", where=where, hint="remove the episode")
    for _, column in columns:
        if column.steps != steps:
            raise DataError(
                f"{column.dataset} has {column.steps} steps where {length_array} has {steps}",
                where=where,
                hint="repair or remove the episode, or leave the array out with --skip-array",
            )
    return Episode(
        name=name,
        path=path,
        steps=steps,
        columns=dict(sorted(columns)),
        instruction=instruction,
        attributes=attributes or {},
        array_attributes=array_attributes or {},
    )


def reject_bad_names(recording: Recording) -> Recording:
    """Reject the episodes that have an array whose name cannot be stored. Call after a transform has renamed arrays."""
    accepted: list[Episode] = []
    rejected = list(recording.rejected)
    for episode in recording.episodes:
        try:
            _check_names(list(episode.columns), f"{episode.path}: {episode.name}")
            accepted.append(episode)
        except DataError as error:
            rejected.append(rejection(episode.name, episode.path, error))
    return msgspec.structs.replace(recording, episodes=tuple(accepted), rejected=tuple(rejected))


def take_instruction(attributes: dict[str, Any]) -> str:
    """Remove the instruction from the attributes and return it, "" if there is none.

    A list of several instructions stays in the attributes; its first is returned.
    """
    for key in ("language", "language_instruction"):
        match attributes.get(key):
            case str(text) | [str(text)]:
                del attributes[key]
                return text
            case [str(text), *_]:
                return text
    return ""


def check_row(row: tuple[int, ...], dtype: str, where: str) -> None:
    """Raise DataError for a step of 0 bytes, or of more than MAX_ROW_BYTES."""
    row_bytes = math.prod(row) * np.dtype(dtype).itemsize
    if not 0 < row_bytes <= MAX_ROW_BYTES:
        problem = f"a step has {row_bytes} bytes (expected 1 to {MAX_ROW_BYTES})"
        raise DataError(problem, where=where, hint="leave it out with --skip-array")


@contextmanager
def translate_library_errors(library: str, where: str, hint: str, kinds: tuple[type[Exception], ...]) -> Iterator[None]:
    """Raise errors of these classes in the block as DataError. The block must only read by the library."""
    try:
        yield
    except kinds as error:
        # A TypeError or KeyError that pitools itself raised is a bug, and no evidence of bad data.
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        is_pitools = str(frames[-1].f_globals.get("__name__")).startswith("pitools.")
        if is_pitools and isinstance(error, TypeError | KeyError):
            raise
        text = getattr(error, "strerror", None) or (error.args[-1] if error.args else error)
        problem = f"cannot be read as {library}: {' '.join(str(text).split())}"
        raise DataError(problem, where=where, hint=hint) from error


def rejection(name: str, path: Path, error: PitError) -> RejectedEpisode:
    """Return the record of an episode that could not be described because of `error`."""
    return RejectedEpisode(name=name, path=path, reason=error.message, hint=error.hint, where=error.where)


def schema_difference(first: Episode, second: Episode) -> str:
    """Return why two episodes cannot be in one dataset, "" if names, row shapes and dtypes of arrays are equal."""
    for name in sorted(first.columns.keys() ^ second.columns.keys()):
        present_in, missing_in = (first, second) if name in first.columns else (second, first)
        missing, present = (
            (f"{each.name} of {each.path.name}" for each in (missing_in, present_in))
            if missing_in.name == present_in.name
            else (missing_in.name, present_in.name)
        )
        return f"{missing} has no {name}, which {present} has"
    for name, column in first.columns.items():
        other_column = second.columns[name]
        if (other_column.row, other_column.dtype) != (column.row, column.dtype):
            expected = f"{column.dtype} {column.row} in {first.name} of {first.path.name}"
            return f"a step of {name} is {other_column.dtype} {other_column.row}, but {expected}"
    return ""


def most_common_schema(episodes: Sequence[Episode]) -> Episode:
    """Return the first episode of the most common schema, so that one odd episode does not reject all others."""
    forms = [
        tuple((name, column.row, column.dtype) for name, column in sorted(episode.columns.items()))
        for episode in episodes
    ]
    return episodes[forms.index(Counter(forms).most_common(1)[0][0])]


def partition_by_schema(episodes: Sequence[Episode]) -> tuple[tuple[Episode, ...], tuple[RejectedEpisode, ...]]:
    """Return the episodes of the most common schema, and the rejected others."""
    if not episodes:
        return (), ()
    reference = most_common_schema(episodes)
    alike: list[Episode] = []
    rejected: list[RejectedEpisode] = []
    for episode in episodes:
        if reason := schema_difference(reference, episode):
            where = f"{episode.path}: {episode.name}"
            rejected.append(
                RejectedEpisode(name=episode.name, path=episode.path, reason=reason, hint=SEPARATE_HINT, where=where)
            )
        else:
            alike.append(episode)
    return tuple(alike), tuple(rejected)
