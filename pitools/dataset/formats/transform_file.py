"""Apply a `--transform FILE`, which transforms a recording's arrays before they are stored.

    keep_next_obs = false                      next_obs is obs, one step later
    drop = ["obs/*_depth"]                     globs

    [rename]
    "obs/agentview_image" = "obs/top_image"

    [resize]
    "obs/top_image" = [96, 96]                 height and width, or { size = [96, 96], method = "area" }

    [cast]
    "obs/qpos" = "float32"

    [derive."obs/gripper_open"]
    function = "lab.features:gripper_open"     or the name of an entry point of the group pitools.derive
    inputs = ["obs/qpos"]                      each (steps, *row), as recorded
    shape = []                                 of one step
    dtype = "bool"

Order: rename arrays, derive features (by the new names), drop arrays (inputs of derived features too), resize, cast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from pitools.core import strict_toml
from pitools.core.errors import ConfigError, suggest
from pitools.dataset.formats import derive_functions
from pitools.dataset.formats.model import (
    CastOp,
    Column,
    DeriveOp,
    Episode,
    Recording,
    RejectedEpisode,
    ResizeOp,
    SkipPatterns,
    check_row,
    check_unique,
    is_skipped,
)
from pitools.store import digest

Method = Literal["area", "bilinear", "nearest"]


class ResizeRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new size for images. method: by default bilinear for colour, else nearest: depths and labels have no mean."""

    size: tuple[int, int]
    method: Method | None = None


class DeriveRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A feature that a function computes from entire arrays of an episode."""

    function: str
    inputs: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...] = ()


class TransformTables(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a transform file."""

    keep_next_obs: bool = False
    drop: tuple[str, ...] = ()
    rename: dict[str, str] = {}
    resize: dict[str, tuple[int, int] | ResizeRule] = {}
    cast: dict[str, str] = {}
    derive: dict[str, DeriveRule] = {}


class MissingName(ConfigError):
    """A transform file names an array that the recording does not have."""


class TransformFile(msgspec.Struct, frozen=True, kw_only=True):
    """A transform file. text: its content verbatim, for `rebuild`."""

    path: Path
    text: str
    tables: TransformTables

    @property
    def keep_next_obs(self) -> bool:
        """Return whether `next_obs` is stored; `scan_recording` needs this before the transform is applied."""
        return self.tables.keep_next_obs


def transform_provenance(transform: TransformFile) -> dict[str, Any]:
    """Return the transform's text and digest, and the provenance of its functions. Raises ConfigError."""
    names = sorted({derive.function for derive in transform.tables.derive.values()})
    return {
        "text": transform.text,
        "digest": digest.digest_bytes(transform.text.encode()),
        "functions": [derive_functions.function_provenance(name) for name in names],
    }


def load_transform(path: Path) -> TransformFile:
    """Read a transform file and load its functions. Raises ConfigError with file and key."""
    content, text = strict_toml.read_toml_and_text(path)
    tables = strict_toml.convert_tables(content, TransformTables, str(path))
    transform = TransformFile(path=path, text=text, tables=tables)
    for name, derive in tables.derive.items():
        try:
            derive_functions.find_function(derive.function)
        except ConfigError as error:
            raise ConfigError(error.message, where=f"{path}: derive.{name}.function", hint=error.hint) from error
        _check_dtype(transform, derive.dtype, f"derive.{name}.dtype")
    for name, dtype in tables.cast.items():
        _check_dtype(transform, dtype, f"cast.{name}")
    for name, rule in tables.resize.items():
        size, _ = _size_and_method(rule)
        if not all(0 < side <= 1 << 14 for side in size):
            raise ConfigError(
                f"size {list(size)} (expected [height, width], each 1 to {1 << 14})", where=f"{path}: resize.{name}"
            )
    return transform


def apply_transform(transform: TransformFile, recording: Recording) -> Recording:
    """Apply a transform to the columns of all episodes, without reading data.

    Raises ConfigError for an unknown array, or an impossible transform. A recording of a single episode may be one of
    many, so an unknown array only rejects that episode.
    """
    try:
        drop = SkipPatterns(transform.tables.drop)
        episodes = tuple(_apply_to_episode(transform, drop, episode) for episode in recording.episodes)
    except MissingName as error:
        if len(recording.episodes) > 1:
            raise
        (episode,) = recording.episodes
        problem = f"{error.message}, which the transform uses in {error.where.rpartition(': ')[2]}"
        item = RejectedEpisode(
            name=episode.name,
            path=episode.path,
            reason=problem,
            hint=error.hint,
            where=f"{episode.path}: {episode.name}",
        )
        return msgspec.structs.replace(recording, episodes=(), rejected=(*recording.rejected, item))
    return msgspec.structs.replace(recording, episodes=episodes, matched_drops=frozenset(drop.matched))


def _apply_to_episode(transform: TransformFile, drop: SkipPatterns, episode: Episode) -> Episode:
    tables, where = transform.tables, f"{episode.path}: {episode.name}"
    for old in tables.rename:
        _find_column(transform, episode.columns, old, f"rename.{old}")
    pairs = [(tables.rename.get(name, name), column) for name, column in episode.columns.items()]
    check_unique([*(name for name, _ in pairs), *tables.derive], where)
    columns = recorded = dict(pairs)
    derived = {
        name: _derived_column(transform, recorded, name, derive, where) for name, derive in tables.derive.items()
    }
    columns = {name: column for name, column in (recorded | derived).items() if not is_skipped(name, drop)}
    for name, wanted in tables.resize.items():
        columns[name] = _resized_column(
            transform, _find_column(transform, columns, name, f"resize.{name}"), name, *_size_and_method(wanted)
        )
    for name, dtype in tables.cast.items():
        columns[name] = _cast_column(transform, _find_column(transform, columns, name, f"cast.{name}"), name, dtype)
    if not columns:
        raise ConfigError("no array is left", where=f"{transform.path}: drop", hint="give fewer patterns")
    attributes_by_array = {tables.rename.get(name, name): attrs for name, attrs in episode.array_attributes.items()}
    attributes_by_array = {name: found for name, found in attributes_by_array.items() if name in columns}
    return msgspec.structs.replace(episode, columns=dict(sorted(columns.items())), array_attributes=attributes_by_array)


def _find_column(transform: TransformFile, columns: dict[str, Column], name: str, key: str) -> Column:
    if name not in columns:
        raise MissingName(f"no array {name!r}", where=f"{transform.path}: {key}", hint=suggest(name, columns))
    return columns[name]


def _derived_column(
    transform: TransformFile, columns: dict[str, Column], name: str, derive: DeriveRule, where: str
) -> Column:
    key = f"derive.{name}"
    inputs = tuple(_find_column(transform, columns, source, f"{key}.inputs") for source in derive.inputs)
    if not inputs:
        raise ConfigError("no inputs (expected an array)", where=f"{transform.path}: {key}.inputs")
    check_row(derive.shape, derive.dtype, f"{transform.path}: {key}.shape")
    op = DeriveOp(function=derive.function, inputs=inputs, where=where)
    return Column(
        dataset=name, steps=inputs[0].steps, row=derive.shape, dtype=_canonical_dtype(derive.dtype), source=op
    )


def _resized_column(
    transform: TransformFile, column: Column, name: str, size: tuple[int, int], method: Method | None
) -> Column:
    colour = column.dtype == "uint8" and len(column.row) == 3 and column.row[2] in (1, 3, 4)
    key = f"{transform.path}: resize.{name}"
    if len(column.row) not in (2, 3):
        problem = f"a step of {name} has the shape {column.row} (expected an image: 2 or 3 axes)"
        raise ConfigError(problem, where=key)
    if len(column.row) == 3 and column.row[0] in (1, 3, 4) and column.row[2] not in (1, 3, 4):
        problem = f"a step of {name} has the shape {column.row} (expected (height, width, channels))"
        raise ConfigError(problem, where=key, hint="derive it by a function")
    if method not in (None, "nearest") and column.dtype != "uint8":
        problem = f"{name} has the dtype {column.dtype} (expected uint8 for method {method})"
        raise ConfigError(problem, where=key, hint='omit the method, or give "nearest"')
    if method not in (None, "nearest") and not (colour or len(column.row) == 2):
        raise ConfigError(
            f"a step of {name} has the shape {column.row} (expected 1, 3 or 4 channels for method {method})",
            where=key,
            hint='omit the method, or give "nearest"',
        )
    if column.row[:2] == size:
        return column
    op = ResizeOp(input=column, method=method or ("bilinear" if colour else "nearest"))
    return msgspec.structs.replace(column, row=(*size, *column.row[2:]), source=op)


def _cast_column(transform: TransformFile, column: Column, name: str, dtype: str) -> Column:
    old, new = np.dtype(column.dtype), np.dtype(dtype)
    if old == new:
        return column
    # Rounding to integers, or to the real part, is ambiguous: a derive function can state which is wanted.
    if (old.kind in "fc" and new.kind in "biu") or (old.kind == "c" and new.kind == "f"):
        problem = f"{name} has the dtype {old}, which cannot be cast to {new} without loss"
        raise ConfigError(problem, where=f"{transform.path}: cast.{name}", hint="derive it by a function")
    return msgspec.structs.replace(column, dtype=new.name, source=CastOp(input=column))


def _size_and_method(size: tuple[int, int] | ResizeRule) -> tuple[tuple[int, int], Method | None]:
    return (size.size, size.method) if isinstance(size, ResizeRule) else (size, None)


def _canonical_dtype(dtype: str) -> str:
    return np.dtype(dtype).name


def _check_dtype(transform: TransformFile, dtype: str, key: str) -> None:
    try:
        kind, size = np.dtype(dtype).kind, np.dtype(dtype).itemsize
    except TypeError:
        kind, size = "O", 0
    if kind not in "biufc" or size > 16 or np.dtype(dtype) == np.longdouble:
        dtypes = ["bool", "uint8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64"]
        raise ConfigError(f"unsupported dtype {dtype!r}", where=f"{transform.path}: {key}", hint=suggest(dtype, dtypes))
