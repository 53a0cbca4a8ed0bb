"""What a recording holds, whatever its layout: episodes, and where each of their arrays is found."""

from __future__ import annotations

import fnmatch
import math
import re
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError, PitError
from pitools.core.fs import plain_files

MAX_ROW_BYTES = 256 << 20
SEPARATE_HINT = "ingest them apart, or leave the array out with --skip"
RESERVED_PREFIX = "episode_"
SKIPPED_NEXT_OBS = "next_obs is left out: it is obs, one step later (keep_next_obs = true in a --schema file keeps it)"
SINGULAR = {"actions": "action", "rewards": "reward", "dones": "done", "states": "state"}
# A name becomes a path in the store. Zarr keeps names with a leading `__` to itself, and `*.json` would meet its files.
_NAME_PART = re.compile(r"(?!__)[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}(?<!\.json)")
_NAMES = f"A-Z, a-z, 0-9, _, . and -, at most 100; none begins with . or - or __ or {RESERVED_PREFIX}, or ends in .json"


class ChangedDuringRead(DataError):
    """A recording is written to while it is read."""


class EpisodeUnreadable(DataError):
    """An episode whose metadata are whole cannot be read."""


class Hdf5Source(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """A dataset of an HDF5 file, one row a step. bytes: size of the file when it was scanned.

    encoded_images: each row is one JPEG or PNG file, padded with zeros, or of a length of its own.
    """

    path: Path
    name: str
    bytes: int
    encoded_images: bool = False


class ParquetSource(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """A column of a Parquet file, from its row `first_row` on. encoded_images: each is the bytes of a JPEG or PNG
    file."""

    path: Path
    key: str
    first_row: int
    encoded_images: bool = False


class VideoSource(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """Frames of a video: step i is shown `start_s` + i / `fps` seconds into it."""

    path: Path
    start_s: float
    fps: float


class ZarrSource(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """An array of a Zarr store, from its row `first_row` on. is_own_version: the store is a version of ours."""

    path: Path
    name: str
    first_row: int
    is_own_version: bool = False


class ResizeOp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Another column's images in another size. method: area, bilinear or nearest."""

    input: Column
    method: str


class CastOp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Another column's values in another dtype."""

    input: Column


class DeriveOp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a function makes of whole columns of one episode. where: file and episode, for messages."""

    function: str
    inputs: tuple[Column, ...]
    where: str


ColumnSource = Hdf5Source | ParquetSource | VideoSource | ZarrSource | ResizeOp | CastOp | DeriveOp


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One array of one episode: what a step of it is, and all that a reader needs to find it, in any process.

    dataset: what the recording calls it. row: shape of one step, (H, W, 3) for an image. dtype: NumPy name.
    """

    dataset: str
    steps: int
    row: tuple[int, ...]
    dtype: str
    source: ColumnSource


class ColumnReader(Protocol):
    """What reads columns. Of one thread at a time; any number may be open, in any threads and processes."""

    def read_into(self, column: Column, out: NDArray[Any], start: int, stop: int) -> None:
        """Fill `out`, (stop - start, *column.row) of the column's dtype, with the episode's steps [start, stop).

        Raises DataError for what is damaged, missing, or no longer what it was.
        """

    def close(self) -> None:
        """Let go of the files."""


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """One episode: its name in the recording, its length in steps, and its columns by array name.

    attributes: what is said of the episode. array_attributes: of its arrays, by their names: units, names of columns.
    """

    name: str
    path: Path
    steps: int
    columns: dict[str, Column]
    language: str = ""
    attributes: dict[str, Any] = {}
    array_attributes: dict[str, dict[str, Any]] = {}


class RejectedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An incomplete or incompatible episode: name, reason and hint. where: file, and place in it."""

    name: str
    path: Path
    reason: str
    hint: str = ""
    where: str = ""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """One file, or folder: its episodes in order, its split masks as episode names, and its own attributes.

    rejected: episodes that it has and that cannot be taken. files: all that was read to tell, and will be. notes: what
    somebody should hear of, though nothing is wrong by the letter.
    """

    path: Path
    layout: str
    episodes: tuple[Episode, ...]
    splits: dict[str, tuple[str, ...]] = {}
    attributes: dict[str, Any] = {}
    rejected: tuple[RejectedEpisode, ...] = ()
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def natural_sort_key(text: str) -> tuple[list[str | int], str]:
    """Return a sort key with numbers as numbers: demo_2 before demo_10."""
    parts = re.split(r"([0-9]+)", text)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], text


def listed(path: Path) -> list[str]:
    """List every file of a recording that is a folder, by relative path, sorted. Raises DataError."""
    try:
        return sorted(plain_files(path))
    except OSError as error:
        hint = "give the folder of the recording itself, of files alone"
        problem = f"cannot be listed: {error.strerror}"
        raise DataError(problem, where=str(error.filename or path), hint=hint) from error


def is_skipped(name: str, skip: Sequence[str], key: str = "") -> bool:
    """Whether an array matches one of the glob patterns, by its name in a version or by `key`, what the recording
    calls it: of two that would have one name, the second alone tells them apart."""
    return any(fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(key, pattern) for pattern in skip)


def check_unique(names: Sequence[str], where: str) -> None:
    """Raise DataError for a name that two arrays of a recording would have."""
    if twice := next((name for name, count in Counter(names).items() if count > 1), ""):
        problem = f"two arrays of the recording would both be {twice!r}"
        raise DataError(problem, where=where, hint="rename one in the recording, or leave it out with --skip")


def _may_be_named(name: str) -> bool:
    return not name.startswith(RESERVED_PREFIX) and all(_NAME_PART.fullmatch(part) for part in name.split("/"))


def _check_names(names: Sequence[str], where: str) -> None:
    """Raise DataError for an array name that cannot be a path in the store, or is a prefix of another's."""
    wrong = [repr(name) for name in names if not _may_be_named(name)]
    if wrong:
        more = f", nor {len(wrong) - 5} others as they are" if len(wrong) > 5 else ""
        problem = f"an array cannot be named {' or '.join(wrong[:5])}{more} (expected {_NAMES})"
        hint = "rename it by [rename] in a --schema file, or leave it out with --skip"
        raise DataError(problem, where=where, hint=hint)
    for name in names:
        if clash := next((other for other in names if other.startswith(name + "/")), ""):
            hint = "rename one by [rename] in a --schema file, or leave it out with --skip"
            raise DataError(f"{clash!r} lies in {name!r}", where=where, hint=hint)


def make_episode(
    name: str,
    path: Path,
    steps: int,
    columns: Sequence[tuple[str, Column]],
    lead: str,
    where: str,
    *,
    language: str = "",
    attributes: dict[str, Any] | None = None,
    array_attributes: dict[str, dict[str, Any]] | None = None,
) -> Episode:
    """The episode of these columns. Raises DataError unless it has steps, and every column one row for each. `lead` is
    what set the length."""
    check_unique([array for array, _ in columns], where)
    if not columns:
        raise DataError("no array is left", where=where, hint="give --skip fewer patterns")
    if steps == 0:
        raise DataError(f"the episode has no steps: {lead} is empty", where=where, hint="remove the episode")
    for _, column in columns:
        if column.steps != steps:
            raise DataError(
                f"{column.dataset} has {column.steps} steps where {lead} has {steps}",
                where=where,
                hint="repair or remove the episode, or leave the array out with --skip",
            )
    return Episode(
        name=name,
        path=path,
        steps=steps,
        columns=dict(sorted(columns)),
        language=language,
        attributes=attributes or {},
        array_attributes=array_attributes or {},
    )


def reject_bad_names(recording: Recording) -> Recording:
    """The recording without the episodes that have an array of a name that cannot be stored. A schema may rename it,
    so that this is for when that has been applied."""
    kept: list[Episode] = []
    refused = list(recording.rejected)
    for episode in recording.episodes:
        try:
            _check_names(list(episode.columns), f"{episode.path}: {episode.name}")
            kept.append(episode)
        except DataError as error:
            refused.append(rejection(episode.name, episode.path, error))
    return msgspec.structs.replace(recording, episodes=tuple(kept), rejected=tuple(refused))


def take_language(attributes: dict[str, Any]) -> str:
    """The instruction, taken out of the attributes; of a list, which stays there where it has more, the first one."""
    for key in ("language", "language_instruction"):
        match attributes.get(key):
            case str(text) | [str(text)]:
                del attributes[key]
                return text
            case [str(text), *_]:
                return text
    return ""


def check_row(row: tuple[int, ...], dtype: str, where: str) -> None:
    """Raises DataError for a step of no bytes, or of more than can be stored."""
    row_bytes = math.prod(row) * np.dtype(dtype).itemsize
    if not 0 < row_bytes <= MAX_ROW_BYTES:
        problem = f"a step of it has {row_bytes} bytes; 1 to {MAX_ROW_BYTES} can be stored"
        raise DataError(problem, where=where, hint="leave it out with --skip")


def is_own_fault(error: Exception) -> bool:
    """Whether our own code raised this TypeError or KeyError, and not the library that reads a recording: then it is a
    mistake of ours, and says nothing of the data."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = str(frames[-1].f_globals.get("__name__")).startswith("pitools.")
    return ours and isinstance(error, TypeError | KeyError)


def rejection(name: str, path: Path, error: PitError) -> RejectedEpisode:
    """An episode that could not be described, for this reason."""
    return RejectedEpisode(name=name, path=path, reason=error.message, hint=error.hint, where=error.where)


def schema_difference(left: Episode, right: Episode) -> str:
    """Why both cannot be in one dataset, "" when they have the same arrays with the same step shape and dtype."""
    for name in sorted(left.columns.keys() ^ right.columns.keys()):
        has, lacks = (left, right) if name in left.columns else (right, left)
        return f"{lacks.name} has no {name}, which {has.name} has"
    for name, column in left.columns.items():
        theirs = right.columns[name]
        if (theirs.row, theirs.dtype) != (column.row, column.dtype):
            mine = f"{column.dtype} {column.row} in {left.name} of {left.path.name}"
            return f"a step of {name} is {theirs.dtype} {theirs.row}, but {mine}"
    return ""


def most_common(episodes: Sequence[Episode]) -> Episode:
    """The first of those that most are like: one odd episode at the start must not refuse all the others."""
    forms = [
        tuple((name, column.row, column.dtype) for name, column in sorted(episode.columns.items()))
        for episode in episodes
    ]
    return episodes[forms.index(Counter(forms).most_common(1)[0][0])]


def partition_by_schema(episodes: Sequence[Episode]) -> tuple[tuple[Episode, ...], tuple[RejectedEpisode, ...]]:
    """Those that are alike, and those that are not like most."""
    if not episodes:
        return (), ()
    first = most_common(episodes)
    kept: list[Episode] = []
    refused: list[RejectedEpisode] = []
    for episode in episodes:
        if reason := schema_difference(first, episode):
            where = f"{episode.path}: {episode.name}"
            refused.append(
                RejectedEpisode(name=episode.name, path=episode.path, reason=reason, hint=SEPARATE_HINT, where=where)
            )
        else:
            kept.append(episode)
    return tuple(kept), tuple(refused)
