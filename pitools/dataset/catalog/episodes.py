"""List the episodes of a version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pitools.core.errors import UsageError
from pitools.core.record import Record
from pitools.dataset.reader import open_dataset
from pitools.store import version_state


class EpisodeInfo(Record, frozen=True, kw_only=True, tag="pit.dataset-episode/1"):
    """One episode: number, name in `recording`, a file name, and its steps [start, start + steps) of the arrays.

    quarantined: reasons why it must not be trained on; empty where it may be.
    """

    episode: int
    name: str
    start: int
    steps: int
    instruction: str
    recording: str
    quarantined: tuple[str, ...] = ()


def list_episodes(path: Path, number: int | None = None) -> Iterator[EpisodeInfo]:
    """Yield all episodes of the version in folder `path`, or episode `number`. Raises UsageError for a missing one,
    DataError."""
    opened = open_dataset(path)
    quarantine = version_state.read_quarantine(path)
    offsets = opened.episode_offsets.tolist()
    if number is not None and number >= len(offsets) - 1:
        raise UsageError(f"episode: expected 0 to {len(offsets) - 2}, got {number}", where=str(path))
    for i, record in enumerate(opened.episodes):
        if number is None or i == number:
            index = record.get("recording", -1)
            recordings = opened.manifest.recordings
            yield EpisodeInfo(
                episode=i,
                name=str(record.get("name", "")),
                start=offsets[i],
                steps=offsets[i + 1] - offsets[i],
                instruction=str(record.get("instruction") or ""),
                recording=str(recordings[index].get("file", "")) if 0 <= index < len(recordings) else "",
                quarantined=(
                    quarantine.episodes.get(i)
                    or (quarantine.reasons or ("all of it",) if quarantine.whole_version else ())
                )
                if quarantine
                else (),
            )
