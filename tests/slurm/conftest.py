"""Recorded answers, a Slurm that says what it is told, and the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pitools.core import subprocesses
from pitools.slurm.client import Client, Transport
from pitools.slurm.parse_jobs import JOB_FORMAT

VERSIONS = ("22.05", "23.11", "25.05")
Told = Callable[[Sequence[str]], tuple[int, str, str]]


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """Each Slurm version whose answers are recorded."""
    return request.param


@pytest.fixture
def recorded(repo: Path, version: str) -> Callable[[str], str]:
    """The text of a recorded answer of this version."""
    return lambda name: (repo / "tests" / "replay" / f"slurm-{version}" / name).read_text()


@pytest.fixture
def squeue_fields() -> tuple[str, ...]:
    """The columns of the recorded squeue_fixed.txt."""
    letters = "%i %A %F %K %T %r %j %u %a %q %P %D %N %S %e %l %M %Q %b %k %Z"
    field = {letter: name for name, letter in JOB_FORMAT.items()}
    return tuple(field[letter] for letter in letters.split())


@pytest.fixture
def told() -> Callable[..., tuple[Client, list[list[str]]]]:
    """Makes a client whose commands answer (code, stdout, stderr) as a function says, and the list of what it ran."""

    def make(answer: Told, reach: Transport | None = None) -> tuple[Client, list[list[str]]]:
        ran: list[list[str]] = []

        def run(argv: Sequence[str], **options: object) -> subprocesses.Completed:
            ran.append(list(argv))
            code, stdout, stderr = answer(argv)
            return subprocesses.Completed(tuple(argv), code, stdout, stderr)

        return Client(reach, run), ran

    return make


@pytest.fixture(scope="session")
def alpha(clusters: Path) -> Client:
    """A client of the real cluster alpha."""
    return Client(Transport(env={"SLURM_CONF": str(clusters / "alpha" / "slurm.conf")}, timeout_s=20))
