"""A world of jobs, and a `sacct` that answers about it as the real one does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pitools.core.subprocesses import Completed
from pitools.monitor.usage.sacct_text import COLUMNS

DAY = 86_400
T0 = 1_780_000_000  # the world's first second


def text(unix_s: int | None) -> str:
    """A time as Slurm prints it."""
    return "Unknown" if unix_s is None else f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%M:%S}"


@dataclass
class FakeJob:
    """A row of slurmdbd's job table. visible: from when it is there."""

    raw_id: int
    submit: int
    start: int | None = None
    end: int | None = None
    state: str = "COMPLETED"
    user: str = "ada"
    gpus: int = 0
    nodes: int = 1
    visible: int = 0
    values: dict[str, str] = field(default_factory=dict)

    def cells(self, now: int, columns: Sequence[str] = COLUMNS) -> list[str]:
        """What sacct prints of it at a time."""
        is_running = self.start is not None and self.start <= now and (self.end is None or self.end > now)
        start = self.start if self.start is not None and self.start <= now else None
        end = self.end if self.end is not None and self.end <= now else None
        state = "RUNNING" if is_running else self.state if end is not None else "PENDING"
        tres = f"cpu={4 * self.nodes},node={self.nodes}" + (f",gres/gpu={self.gpus}" if self.gpus else "")
        known = {
            "JobID": str(self.raw_id),
            "JobIDRaw": str(self.raw_id),
            "User": self.user,
            "State": state,
            "Submit": text(self.submit),
            "Eligible": text(self.submit),
            "Start": text(start),
            "End": text(end),
            "ElapsedRaw": str((end or now) - start if start is not None else 0),
            "Partition": "gpu",
            "AllocTRES": tres if start is not None else "",
        } | self.values
        return [known.get(name, "") for name in columns]


@dataclass
class FakeSacct:
    """Replaces `subprocesses.run`. now: the cluster's clock. asked: the arguments of each call; printed: rows of all.

    failing: calls left until one fails.
    """

    jobs: list[FakeJob]
    now: int = T0
    asked: list[list[str]] = field(default_factory=list)
    printed: int = 0
    failing: int = -1

    def __call__(self, argv: Sequence[str], **options: Any) -> Completed:
        """Answer one call."""
        self.asked.append(list(argv))
        self.failing -= 1
        if self.failing == 0:
            return Completed(tuple(argv), 1, "", "sacct: error: slurmdbd: Connection refused")
        flags = dict(word.split("=", 1) for word in argv if word.startswith("--") and "=" in word)
        sep, columns = flags["--delimiter"], argv[argv.index("-o") + 1].split(",")
        lines = [sep.join(columns)]
        for job in self.jobs:
            if job.visible > self.now or job.submit > self.now:
                continue
            if "--jobs" in flags:
                is_listed = str(job.raw_id) in flags["--jobs"].split(",")
            else:
                until = self.now + 1 if flags["--endtime"] == "now" else _unix(flags["--endtime"])
                end = job.end if job.end is not None and job.end <= self.now else until
                is_listed = job.submit < until and end >= _unix(flags["--starttime"])
            if is_listed:
                lines.append(sep.join(job.cells(self.now, columns)))
        self.printed += len(lines) - 1
        lines.insert(0, str(self.now))  # of `date +%s`
        options["stdout"].write("".join(line + "\n" for line in lines).encode(errors="surrogateescape"))
        return Completed(tuple(argv), 0, "", "")


def _unix(slurm_time: str) -> int:
    return int(datetime.fromisoformat(slurm_time).replace(tzinfo=UTC).timestamp())
