"""The recipes of pitools/slurm/README.md run as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pitools.slurm.client import Client


def recipe(repo: Path, number: int) -> str:
    return re.findall(r"```python\n(.*?)```", (repo / "pitools/slurm/README.md").read_text(), re.DOTALL)[number]


def test_reading_a_saved_answer(
    repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first recipe counts the free GPUs of a recorded cluster."""
    monkeypatch.chdir(repo)
    exec(recipe(repo, 0), {})
    assert capsys.readouterr().out == "24 GPUs on 4 nodes\n"


@pytest.mark.slurm
def test_asking_and_submitting(
    repo: Path, alpha: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other recipes run on a real cluster."""
    monkeypatch.setenv("SLURM_CONF", alpha.transport.env["SLURM_CONF"])
    exec(recipe(repo, 1), {})
    assert capsys.readouterr().out.startswith("alpha (2")
    left: dict[str, object] = {}
    exec(recipe(repo, 2), left)
    assert alpha.state_of([left["job"].job_id])  # type: ignore[attr-defined]


def test_the_readme_is_short(repo: Path) -> None:
    """At most 80 lines."""
    assert len((repo / "pitools/slurm/README.md").read_text().splitlines()) <= 80
