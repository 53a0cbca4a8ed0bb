"""Records of a check: findings, summary and counts."""

from __future__ import annotations

from typing import Literal

import msgspec

from pitools.core.record import Record

Level = Literal["damage", "fault", "warning"]


class Finding(Record, frozen=True, kw_only=True, tag="pit.dataset-finding/1"):
    """One thing that a check found.

    level: `damage` (files contradict the manifest, or cannot be read as a dataset), `fault` (readable, but not fit for
    training) or `warning` (for a human to judge). check: name of the check. array, episode, file, step: location, as
    far as known; step counts from the episode's first, or from the dataset's where no episode is given.
    """

    level: Level
    check: str
    array: str = ""
    episode: int | None = None
    file: str = ""
    step: int | None = None
    problem: str
    got: str = ""
    expected: str = ""

    @property
    def reason(self) -> str:
        """Return the finding in one line, without its episode."""
        step = "" if self.step is None else f"step {self.step}"
        where = ", ".join(filter(None, (self.array, step)))
        return f"{self.check}: {f'{where}: ' if where else ''}{self.problem}"


class CheckSummary(Record, frozen=True, kw_only=True, tag="pit.dataset-check/1"):
    """Counts of a check. read_bytes: of files, each counted once. frames: examined camera frames. part_of: the whole
    version, of a part of one."""

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
    part_of: str = ""


class ReadCounts(msgspec.Struct):
    """Running counts of what was read; written by one thread."""

    files: int = 0
    read_bytes: int = 0
    frames: int = 0
