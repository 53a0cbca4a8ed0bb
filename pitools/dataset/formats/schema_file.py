"""`--schema FILE`: what becomes of a recording's arrays before they are stored.

    keep_next_obs = false                      next_obs is obs, one step later
    drop = ["obs/*_depth"]                     globs

    [rename]
    "obs/agentview_image" = "obs/top_image"

    [resize]
    "obs/top_image" = [96, 96]                 height, width; or { size = [96, 96], method = "area" }

    [cast]
    "obs/qpos" = "float32"

    [derive."obs/gripper_open"]
    function = "lab.features:gripper_open"     or the name of an entry point of the group pitools.derive
    inputs = ["obs/qpos"]                      each (steps, *row), as recorded
    shape = []                                 of one step
    dtype = "bool"

In this order: arrays are renamed, and go by their new names from there; features are derived; arrays are dropped (also
those that others were derived from); images are resized, values cast.
"""

from __future__ import annotations

import fnmatch
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
    check_row,
    check_unique,
)
from pitools.store import digest

Method = Literal["area", "bilinear", "nearest"]


class ResizeRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another size for images. method: bilinear for colour and nearest for anything else, where none is given: a mean
    of two depths, or of two labels, is neither."""

    size: tuple[int, int]
    method: Method | None = None


class DeriveRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A feature that a function makes of whole arrays of an episode."""

    function: str
    inputs: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...] = ()


class SchemaTables(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file, as it is written."""

    keep_next_obs: bool = False
    drop: tuple[str, ...] = ()
    rename: dict[str, str] = {}
    resize: dict[str, tuple[int, int] | ResizeRule] = {}
    cast: dict[str, str] = {}
    derive: dict[str, DeriveRule] = {}


class MissingName(ConfigError):
    """A name that a recording does not have."""


class SchemaFile(msgspec.Struct, frozen=True, kw_only=True):
    """A schema file. text: as it is written, so that the same can be done again."""

    path: Path
    text: str
    tables: SchemaTables

    @property
    def keep_next_obs(self) -> bool:
        """Whether `next_obs` is stored: `layouts.scan` has to be told, before this schema is applied."""
        return self.tables.keep_next_obs


def schema_provenance(schema: SchemaFile) -> dict[str, Any]:
    """What was asked for: the text and its digest, and what each function was. Raises ConfigError."""
    names = sorted({derive.function for derive in schema.tables.derive.values()})
    return {
        "text": schema.text,
        "digest": digest.digest_bytes(schema.text.encode()),
        "functions": [derive_functions.function_provenance(name) for name in names],
    }


def load_schema(path: Path) -> SchemaFile:
    """Read a schema file, and find the functions it names. Raises ConfigError naming file and key."""
    tables = strict_toml.convert_tables(strict_toml.read_toml(path), SchemaTables, str(path))
    schema = SchemaFile(path=path, text=path.read_text(), tables=tables)
    for name, derive in tables.derive.items():
        try:
            derive_functions.find_function(derive.function)
        except ConfigError as error:
            raise ConfigError(error.message, where=f"{path}: derive.{name}.function", hint=error.hint) from error
        _check_dtype(schema, derive.dtype, f"derive.{name}.dtype")
    for name, dtype in tables.cast.items():
        _check_dtype(schema, dtype, f"cast.{name}")
    for name, wanted in tables.resize.items():
        size, _ = _resize(wanted)
        if not all(0 < side <= 1 << 14 for side in size):
            raise ConfigError(
                f"a size of {size[0]} x {size[1]}", where=f"{path}: resize.{name}", hint="[height, width]"
            )
    return schema


def apply_schema(schema: SchemaFile, recording: Recording) -> Recording:
    """The recording with its arrays as the schema says, of every episode alike. Nothing is read or computed yet.

    Raises ConfigError for a name that the recording does not have, or what cannot be done to an array. One that is a
    single episode may be the odd one of many: that is refused for a name it does not have.
    """
    try:
        episodes = tuple(_apply(schema, episode) for episode in recording.episodes)
    except MissingName as error:
        if len(recording.episodes) > 1:
            raise
        (episode,) = recording.episodes
        problem = f"{error.message}, which the schema names under {error.where.rpartition(': ')[2]}"
        item = RejectedEpisode(
            name=episode.name,
            path=episode.path,
            reason=problem,
            hint=error.hint,
            where=f"{episode.path}: {episode.name}",
        )
        return msgspec.structs.replace(recording, episodes=(), rejected=(*recording.rejected, item))
    return msgspec.structs.replace(recording, episodes=episodes)


def _apply(schema: SchemaFile, episode: Episode) -> Episode:
    tables, where = schema.tables, f"{episode.path}: {episode.name}"
    for old in tables.rename:
        _find_column(schema, episode.columns, old, f"rename.{old}")
    pairs = [(tables.rename.get(name, name), column) for name, column in episode.columns.items()]
    check_unique([*(name for name, _ in pairs), *tables.derive], where)
    columns = recorded = dict(pairs)
    derived = {name: _derived(schema, recorded, name, derive, where) for name, derive in tables.derive.items()}
    columns = {
        name: column
        for name, column in (recorded | derived).items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in tables.drop)
    }
    for name, wanted in tables.resize.items():
        columns[name] = _resized(schema, _find_column(schema, columns, name, f"resize.{name}"), name, *_resize(wanted))
    for name, dtype in tables.cast.items():
        columns[name] = _cast(schema, _find_column(schema, columns, name, f"cast.{name}"), name, dtype)
    if not columns:
        raise ConfigError("no array is left", where=f"{schema.path}: drop", hint="give fewer patterns")
    about = {tables.rename.get(name, name): found for name, found in episode.array_attributes.items()}
    about = {name: found for name, found in about.items() if name in columns}
    return msgspec.structs.replace(episode, columns=dict(sorted(columns.items())), array_attributes=about)


def _find_column(schema: SchemaFile, columns: dict[str, Column], name: str, key: str) -> Column:
    if name not in columns:
        raise MissingName(f"there is no array {name!r}", where=f"{schema.path}: {key}", hint=suggest(name, columns))
    return columns[name]


def _derived(schema: SchemaFile, columns: dict[str, Column], name: str, derive: DeriveRule, where: str) -> Column:
    key = f"derive.{name}"
    inputs = tuple(_find_column(schema, columns, source, f"{key}.inputs") for source in derive.inputs)
    if not inputs:
        raise ConfigError("a function needs an input", where=f"{schema.path}: {key}.inputs", hint="name an array")
    check_row(derive.shape, derive.dtype, f"{schema.path}: {key}.shape")
    place = DeriveOp(function=derive.function, inputs=inputs, where=where)
    return Column(
        dataset=name, steps=inputs[0].steps, row=derive.shape, dtype=_canonical_dtype(derive.dtype), source=place
    )


def _resized(schema: SchemaFile, column: Column, name: str, size: tuple[int, int], method: Method | None) -> Column:
    colour = column.dtype == "uint8" and len(column.row) == 3 and column.row[2] in (1, 3, 4)
    key = f"{schema.path}: resize.{name}"
    if len(column.row) not in (2, 3):
        raise ConfigError(f"a step of {name} is {column.row}, not an image", where=key, hint="only images are resized")
    if len(column.row) == 3 and column.row[0] in (1, 3, 4) and column.row[2] not in (1, 3, 4):
        problem = (
            f"a step of {name} is {column.row}, with its channels first; only (height, width, channels) is resized"
        )
        raise ConfigError(problem, where=key, hint="derive it by a function")
    if method not in (None, "nearest") and column.dtype != "uint8":
        problem = f"{name} is {column.dtype}; {method} is for images of uint8"
        raise ConfigError(problem, where=key, hint='leave the method out, or give "nearest"')
    if method not in (None, "nearest") and not (colour or len(column.row) == 2):
        raise ConfigError(
            f"a step of {name} is {column.row}; {method} is for 1, 3 or 4 channels",
            where=key,
            hint='leave the method out, or give "nearest"',
        )
    if column.row[:2] == size:
        return column
    place = ResizeOp(input=column, method=method or ("bilinear" if colour else "nearest"))
    return msgspec.structs.replace(column, row=(*size, *column.row[2:]), source=place)


def _cast(schema: SchemaFile, column: Column, name: str, dtype: str) -> Column:
    old, new = np.dtype(column.dtype), np.dtype(dtype)
    if old == new:
        return column
    # Whole numbers are what fractions and complex numbers are not: which of them is meant, a function can say.
    if (old.kind in "fc" and new.kind in "biu") or (old.kind == "c" and new.kind == "f"):
        problem = f"{name} is {old}, and {new} would lose more than digits"
        raise ConfigError(problem, where=f"{schema.path}: cast.{name}", hint="derive it by a function")
    return msgspec.structs.replace(column, dtype=new.name, source=CastOp(input=column))


def _resize(size: tuple[int, int] | ResizeRule) -> tuple[tuple[int, int], Method | None]:
    return (size.size, size.method) if isinstance(size, ResizeRule) else (size, None)


def _canonical_dtype(dtype: str) -> str:
    return np.dtype(dtype).name


def _check_dtype(schema: SchemaFile, dtype: str, key: str) -> None:
    try:
        kind, size = np.dtype(dtype).kind, np.dtype(dtype).itemsize
    except TypeError:
        kind, size = "O", 0
    if kind not in "biufc" or size > 16 or np.dtype(dtype) == np.longdouble:
        known = ["bool", "uint8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64"]
        raise ConfigError(
            f"no dtype {dtype!r} can be stored", where=f"{schema.path}: {key}", hint=suggest(dtype, known)
        )
