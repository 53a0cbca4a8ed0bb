"""The episodes of a version, as a list that people read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pitools.core.errors import UsageError
from pitools.core.record import Record
from pitools.dataset.reader import open_dataset
from pitools.store import version_state


class Episode(Record, frozen=True, kw_only=True, tag="pit.dataset-episode-row/1"):
    """One episode: its number, its name in the recording `source`, its steps [start, start + steps) of the arrays.

    quarantined: why it is not to be trained on; nothing where it is.
    """

    episode: int
    name: str
    start: int
    steps: int
    language: str
    source: str
    quarantined: tuple[str, ...] = ()


def episodes(path: Path, number: int | None = None) -> Iterator[Episode]:
    """All episodes of the version in folder `path`, or one. Raises UsageError for one that it has not, DataError."""
    opened = open_dataset(path)
    held = version_state.quarantine(path)
    offsets = opened.episode_offsets.tolist()
    if number is not None and number >= len(offsets) - 1:
        raise UsageError(f"there is no episode {number}", where=str(path), hint=f"it has 0 to {len(offsets) - 2}")
    for i, known in enumerate(opened.episodes):
        if number is None or i == number:
            from_ = known.get("source", -1)
            sources = opened.manifest.source
            yield Episode(
                episode=i,
                name=str(known.get("name", "")),
                start=offsets[i],
                steps=offsets[i + 1] - offsets[i],
                language=str(known.get("language") or ""),
                source=str(sources[from_].get("file", "")) if 0 <= from_ < len(sources) else "",
                quarantined=(held.episodes.get(i) or (held.reasons or ("all of it",) if held.whole else ()))
                if held
                else (),
            )
