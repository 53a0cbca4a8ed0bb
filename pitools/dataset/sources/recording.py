"""What a recording holds, whatever its layout: episodes, and where each of their arrays is found."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pitools.core.errors import DataError

MAX_ROW_BYTES = 256 << 20
RESERVED = "episode_"
# A name becomes a path in the store. Zarr keeps names with a leading `__` to itself, and `*.json` would meet its files.
_NAME_PART = re.compile(r"(?!__)[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}(?<!\.json)")


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One array of one episode: the HDF5 dataset that holds it, and what a step of it is.

    row: shape of one step, (H, W, 3) for an image. dtype: NumPy name. jpeg: each row is one JPEG, padded with zeros.
    """

    dataset: str
    steps: int
    row: tuple[int, ...]
    dtype: str
    jpeg: bool = False


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """One episode: its name in the recording, its length in steps, and its columns by array name."""

    name: str
    path: Path
    steps: int
    columns: dict[str, Column]
    language: str = ""
    attributes: dict[str, Any] = {}


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """One file: its episodes in order, its split masks as episode names, and its own attributes."""

    path: Path
    layout: str
    episodes: tuple[Episode, ...]
    splits: dict[str, tuple[str, ...]] = {}
    attributes: dict[str, Any] = {}


def natural(text: str) -> tuple[list[str | int], str]:
    """A sort key that counts: demo_2 before demo_10."""
    parts = re.split(r"([0-9]+)", text)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], text


def skipped(name: str, skip: Sequence[str]) -> bool:
    """Whether an array name matches one of the glob patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in skip)


def check_names(names: Sequence[str], where: str) -> None:
    """Raises DataError for an array name that cannot be a path in the store, or that stands in another's way."""
    for name in names:
        if not all(_NAME_PART.fullmatch(part) for part in name.split("/")) or name.startswith(RESERVED):
            raise DataError(
                f"an array cannot be named {name!r}",
                where=where,
                hint="rename it in the recording, or leave it out with --skip",
            )
        clash = next((other for other in names if other.startswith(name + "/")), "")
        if clash or names.count(name) > 1:
            raise DataError(
                f"two arrays of the recording would both be {name!r}" if not clash else f"{clash!r} lies in {name!r}",
                where=where,
                hint="rename one in the recording, or leave it out with --skip",
            )


def check_episode(episode: Episode, lead: str, where: str) -> None:
    """Raises DataError unless the episode has steps, and every column has one row for each. `lead` set the length."""
    if not episode.columns:
        raise DataError("no array is left", where=where, hint="give --skip fewer patterns")
    if episode.steps == 0:
        raise DataError(f"the episode has no steps: {lead} is empty", where=where, hint="remove the episode")
    for column in episode.columns.values():
        if column.steps != episode.steps:
            raise DataError(
                f"{column.dataset} has {column.steps} steps where {lead} has {episode.steps}",
                where=where,
                hint="repair or remove the episode, or leave the array out with --skip",
            )


def check_alike(first: Episode, other: Episode) -> None:
    """Raises DataError unless both episodes have the same arrays, each with the same step shape and dtype."""
    where = f"{other.path}: {other.name}"
    for name in sorted(first.columns.keys() ^ other.columns.keys()):
        has, lacks = (first, other) if name in first.columns else (other, first)
        raise DataError(
            f"{lacks.name} has no {name}, which {has.name} has",
            where=where,
            hint=f"ingest them apart, or leave it out with --skip '{name}'",
        )
    for name, column in first.columns.items():
        theirs = other.columns[name]
        if (theirs.row, theirs.dtype) != (column.row, column.dtype):
            raise DataError(
                f"a step of {name} is {theirs.dtype} {theirs.row}, but {column.dtype} {column.row} in {first.name} "
                f"of {first.path.name}",
                where=where,
                hint="ingest them apart",
            )
