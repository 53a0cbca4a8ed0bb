"""What recordings say of themselves, of episodes and of arrays, as JSON can hold it.

JSON has no NaN, no infinity and no bytes. What has to be said otherwise is kept as text, and a note says so: an
attribute is no reason to refuse a recording, and is not lost in silence.
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

# Attributes of an array that say how another format stores it, and the one that is written by an ingest.
_SKIPPED = {"CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "_ARRAY_DIMENSIONS", "statistics"}
_ESCAPED = re.compile("[\udc80-\udcff]")  # by which Python holds a byte that is not UTF-8

Attributes = dict[str, Any]


def array_attributes(attributes: Mapping[str, Any]) -> Attributes:
    """The attributes of an array that mean something in a version: units, names of its columns."""
    return {key: value for key, value in attributes.items() if key not in _SKIPPED}


def with_json_attributes(recording: Recording) -> Recording:
    """The recording with attributes that JSON can hold, and notes of those that had to be changed.

    An episode whose name is not text is refused. Raises DataError for a file whose name is not, and for attributes that
    are nested deeper than can be followed.
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
    kept: list[Episode] = []
    refused: list[RejectedEpisode] = []
    shared: dict[int, Any] = {}  # many episodes of a layout have one and the same
    for episode in recording.episodes:
        if id(about := episode.array_attributes) not in shared:
            shared[id(about)] = _as_json_value(about, "", changed)
        try:
            _check_text(episode.name, f"{episode.path}: {episode.name!r}")
        except DataError as error:
            refused.append(rejection(episode.name, episode.path, error))
            continue
        kept.append(
            msgspec.structs.replace(
                episode,
                language=_as_json_value(episode.language, "language", changed),
                attributes=_as_json_value(episode.attributes, "", changed),
                array_attributes=shared[id(about)],
            )
        )
    attributes = _as_json_value(recording.attributes, "", changed)
    notes = (f"attribute {key}: {reason}" for key, reason in changed.items())
    return msgspec.structs.replace(
        recording,
        episodes=tuple(kept),
        rejected=(*recording.rejected, *refused),
        attributes=attributes,
        notes=(*recording.notes, *notes),
    )


def _check_text(name: str, where: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise DataError("its name is not UTF-8", where=ascii(where), hint="rename it") from error


def _as_json_value(value: Any, key: str, changed: dict[str, str]) -> Any:
    """A value as JSON can hold it; `changed` says of each key what had to be made otherwise."""
    if isinstance(value, dict):
        return {
            _text(name, name, changed): _as_json_value(item, f"{key}/{name}".lstrip("/"), changed)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_as_json_value(item, key, changed) for item in value]
    if isinstance(value, str):
        return _text(value, key, changed)
    if isinstance(value, float) and not math.isfinite(value):
        changed[_shown(key)] = "NaN or infinity is kept as text"
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        changed[_shown(key)] = "a number of more than 64 bits is kept as text"
        return str(value)
    return value


def _text(text: str, key: str, changed: dict[str, str]) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        changed[_shown(key)] = r"bytes that are not UTF-8 are kept as \x.."
        return _shown(text)
    return text


def _shown(text: str) -> str:
    text = _ESCAPED.sub(lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)
    return text.encode(errors="backslashreplace").decode()


def common_attributes(
    recordings: Sequence[Recording], parent: Mapping[str, Attributes] | None
) -> tuple[dict[str, Attributes], list[tuple[Path, str]]]:
    """The attributes that an array has in all episodes, by array, and notes of those that are not the same in all.

    parent: those of the version that is appended to.
    """
    known = {name: dict(found) for name, found in (parent or {}).items()}
    noted: dict[tuple[str, str], Path] = {}
    last: dict[str, Attributes] = {}
    for recording in recordings:
        for episode in recording.episodes:
            for name in episode.columns:
                found = episode.array_attributes.get(name, {})
                mine = known.setdefault(name, dict(found))
                if found is last.get(name):
                    continue
                last[name] = found
                for key in [
                    key
                    for key in mine.keys() | found.keys()
                    if key not in mine or key not in found or mine[key] != found[key]
                ]:
                    mine.pop(key, None)
                    noted.setdefault((name, key), recording.path)
    notes = [
        (path, f"{name}: its attribute {key} is not the same in all episodes, and not kept")
        for (name, key), path in sorted(noted.items())
    ]
    return known, notes
