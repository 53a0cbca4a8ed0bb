"""A Slurm that says what it is told, at a time that is told, and a cache of the test's own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pitools.core import subprocesses
from pitools.core.errors import PitError
from pitools.launch import slurm_cache
from pitools.site.schema import Site
from pitools.slurm.client import Client, Transport
from pitools.slurm.parse_accounting import ACCOUNTING_FORMAT


class Slurm:
    """squeue and sacct, and every call of them. An error instead of rows is raised."""

    def __init__(self) -> None:
        self.queue: list[tuple[str, ...]] | PitError = []
        self.accounts: list[tuple[str, ...]] | PitError = []
        self.ran: list[list[str]] = []
        self.now = 1_800_000_000.0

    def run(self, argv: Sequence[str], **options: object) -> subprocesses.Completed:
        self.ran.append(list(argv))
        rows = self.queue if argv[0] == "squeue" else self.accounts
        if isinstance(rows, PitError):
            raise rows
        if argv[0] == "squeue":
            sep = argv[-1].removeprefix("%i").split("%")[0]
            # (id, number, state), and of one that waits its reason and expected start.
            output = [(row[0], *(row[3:] or ("None", "N/A")), row[1], row[2]) for row in rows]
            text = "".join(sep.join(row) + "\n" for row in output)
        else:
            sep = next(argument for argument in argv if argument.startswith("--delimiter=")).removeprefix(
                "--delimiter="
            )
            empty = dict.fromkeys(ACCOUNTING_FORMAT, "") | {"ExitCode": "0:0"}
            cells = [empty | {"JobID": a, "JobIDRaw": b, "State": c} for a, b, c in rows]
            text = "".join(sep.join(row) + "\n" for row in [list(ACCOUNTING_FORMAT), *(row.values() for row in cells)])
        return subprocesses.Completed(tuple(argv), 0, text, "")

    def calls(self) -> list[str]:
        """The commands since the last time."""
        ran, self.ran = [argv[0] for argv in self.ran], []
        return ran


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return tmp_path


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """The one that `slurm_cache` queries, and whose clock it reads."""
    reported = Slurm()
    monkeypatch.setattr(slurm_cache, "client", lambda site: Client(Transport(), reported.run))
    monkeypatch.setattr(time, "time", lambda: reported.now)
    return reported


@pytest.fixture
def site() -> Site:
    """A site with a Slurm."""
    return Site(name="x")
