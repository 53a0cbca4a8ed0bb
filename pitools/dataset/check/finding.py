"""What a check finds, and what it went through."""

from __future__ import annotations

from typing import Literal

import msgspec

from pitools.core.record import Record

Level = Literal["damage", "fault", "warning"]


class Finding(Record, frozen=True, kw_only=True, tag="pit.dataset-finding/1"):
    """One thing that is not as it should be.

    level: `damage` (the files are not what the manifest says, or cannot be read as a dataset), `fault` (they are, and
    should not be trained on) or `warning` (look at it). check: which check says so. array, episode, file, step: where,
    as far as that is known; step counts from the episode's first, or from the dataset's where no episode is named.
    """

    level: Level
    check: str
    array: str = ""
    episode: int | None = None
    file: str = ""
    step: int | None = None
    what: str
    got: str = ""
    expected: str = ""

    @property
    def reason(self) -> str:
        """The finding in one line, without its episode."""
        step = "" if self.step is None else f"step {self.step}"
        where = ", ".join(filter(None, (self.array, step)))
        return f"{self.check}: {f'{where}: ' if where else ''}{self.what}"


class Summary(Record, frozen=True, kw_only=True, tag="pit.dataset-check/1"):
    """What a check went through. read_bytes: of files, each counted once. frames: of cameras, that were looked at."""

    name: str
    version: str
    path: str
    episodes: int
    steps: int
    files: int
    read_bytes: int
    frames: int
    damage: int
    faults: int
    warnings: int
    deep: bool
    wall_s: float


class Tally(msgspec.Struct):
    """What has been read so far; the check that fills it runs in one thread."""

    files: int = 0
    read_bytes: int = 0
    frames: int = 0
