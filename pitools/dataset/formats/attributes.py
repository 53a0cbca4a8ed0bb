"""Convert attributes of recordings, episodes and arrays to JSON values.

JSON has no NaN, no infinity and no bytes. Such values become text, with a note: an attribute is neither a reason to
reject a recording, nor dropped silently. Left out are HDF5's own names, and `statistics`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pitools.core.errors import DataError
from pitools.dataset.formats.model import Episode, Recording, RejectedEpisode, rejection

# Attributes that describe an array's storage in another format, and `statistics`, which the ingest writes.
_SKIPPED = {"CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "_ARRAY_DIMENSIONS", "statistics"}
_ESCAPED = re.compile("[\udc80-\udcff]")  # Python's surrogates for bytes that are not UTF-8

Attributes = dict[str, Any]


def drop_storage_attributes(attributes: Mapping[str, Any]) -> Attributes:
    """Return an array's attributes without those of its storage format: units, names of columns stay."""
    return {key: value for key, value in attributes.items() if key not in _SKIPPED}


def with_json_attributes(recording: Recording) -> Recording:
    """Convert a recording's attributes to JSON values, with a note for each changed attribute.

    An episode whose name is not UTF-8 is rejected. Raises DataError for a file name that is not UTF-8, and for
    attributes that are nested too deep.
    """
    try:
        return _as_json(recording)
    except RecursionError as error:
        problem = "its attributes are nested too deep"
        raise DataError(problem, where=str(recording.path), hint="take them out of its metadata") from error


def _as_json(recording: Recording) -> Recording:
    for path in (recording.path, *recording.files):
        _check_text(path.name, str(path))
    changed: dict[str, str] = {}
    episodes: list[Episode] = []
    rejected: list[RejectedEpisode] = []
    converted_by_id: dict[int, Any] = {}  # many episodes share one dict of attributes
    for episode in recording.episodes:
        if id(array_attrs := episode.array_attributes) not in converted_by_id:
            converted_by_id[id(array_attrs)] = _as_json_value(array_attrs, "", changed)
        try:
            _check_text(episode.name, f"{episode.path}: {episode.name!r}")
        except DataError as error:
            rejected.append(rejection(episode.name, episode.path, error))
            continue
        episodes.append(
            msgspec.structs.replace(
                episode,
                instruction=_as_json_value(episode.instruction, "instruction", changed),
                attributes=_as_json_value(episode.attributes, "", changed),
                array_attributes=converted_by_id[id(array_attrs)],
            )
        )
    attributes = _as_json_value(recording.attributes, "", changed)
    notes = (f"attribute {key}: {reason}" for key, reason in changed.items())
    return msgspec.structs.replace(
        recording,
        episodes=tuple(episodes),
        rejected=(*recording.rejected, *rejected),
        attributes=attributes,
        notes=(*recording.notes, *notes),
    )


def _check_text(name: str, where: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise DataError("the name is not UTF-8", where=ascii(where), hint="rename it") from error


def _as_json_value(value: Any, key: str, changed: dict[str, str]) -> Any:
    """Convert a value to JSON. changed: receives the reason for each changed key."""
    if isinstance(value, dict):
        return {
            _as_json_text(name, name, changed): _as_json_value(item, f"{key}/{name}".lstrip("/"), changed)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_as_json_value(item, key, changed) for item in value]
    if isinstance(value, str):
        return _as_json_text(value, key, changed)
    if isinstance(value, float) and not math.isfinite(value):
        changed[_escape(key)] = "NaN or infinity is kept as text"
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        changed[_escape(key)] = "a number of more than 64 bits is kept as text"
        return str(value)
    return value


def _as_json_text(text: str, key: str, changed: dict[str, str]) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        changed[_escape(key)] = r"bytes that are not UTF-8 are kept as \x.."
        return _escape(text)
    return text


def _escape(text: str) -> str:
    text = _ESCAPED.sub(lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)
    return text.encode(errors="backslashreplace").decode()


def common_attributes(
    recordings: Sequence[Recording], parent: Mapping[str, Attributes] | None
) -> tuple[dict[str, Attributes], list[tuple[Path, str]]]:
    """Return the attributes that are equal in all episodes, by array, and notes on those that differ.

    parent: attributes by array of the version that is appended to.
    """
    common = {name: dict(attrs) for name, attrs in (parent or {}).items()}
    first_recordings: dict[tuple[str, str], Path] = {}
    last_attrs: dict[str, Attributes] = {}
    for recording in recordings:
        for episode in recording.episodes:
            for name in episode.columns:
                found = episode.array_attributes.get(name, {})
                common_attrs = common.setdefault(name, dict(found))
                if found is last_attrs.get(name):
                    continue
                last_attrs[name] = found
                for key in [
                    key
                    for key in common_attrs.keys() | found.keys()
                    if key not in common_attrs or key not in found or common_attrs[key] != found[key]
                ]:
                    common_attrs.pop(key, None)
                    first_recordings.setdefault((name, key), recording.path)
    notes = [
        (path, f"{name}: attribute {key} is dropped: it differs between episodes")
        for (name, key), path in sorted(first_recordings.items())
    ]
    return common, notes
