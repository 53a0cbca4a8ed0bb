"""`pit perf attribute` as a user types it."""

from __future__ import annotations

import json
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Pit = Callable[..., subprocess.CompletedProcess[str]]


def test_steps_verdict_and_pictures(pit: Pit, profiles: Path, tmp_path: Path) -> None:
    """JSON Lines end with the verdict; a table has it on stderr; each kind of picture is whole in itself."""
    page = tmp_path / "a.html"
    done = pit(
        "perf", "attribute", str(profiles / "torch-slow-rank"), "--plot", str(page), "--rank", "1", "--step", "4"
    )
    step, verdict = map(json.loads, done.stdout.splitlines())
    assert (step["schema"], step["rank"], step["step"]) == ("pit.perf-step/1", 1, 4)
    parts = ("compute", "communication", "copy", "input", "host", "compile", "checkpoint", "idle")
    assert sum(step[f"{name}_ms"] for name in parts) == pytest.approx(step["wall_ms"], abs=1e-6)
    assert (verdict["verdict"], verdict["rank"], verdict["steps"]) == ("straggler", 1, 5)
    text = page.read_text()
    assert text.count("<svg") == 1
    assert "wait for rank 1" in text
    assert not [part for part in text.split('href="')[1:] if not part.startswith(("#", "data:"))]
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        path = tmp_path / f"a{suffix}"
        shown = pit("perf", "attribute", str(profiles / "jax-recompile"), "--plot", str(path), "--format", "table")
        assert path.read_bytes().startswith(magic)
        assert "verdict: compile" in shown.stderr
        assert len(shown.stdout.splitlines()) == 11


def test_a_hang_is_shown(pit: Pit, tmp_path: Path) -> None:
    """Flight Recorder dumps alone give the ranks that a hang waits for."""
    for rank, states in enumerate((["completed", "started"], ["completed"])):
        entries = [
            {"process_group": ("0", ""), "collective_seq_id": number, "state": state}
            for number, state in enumerate(states, 1)
        ]
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps({"pg_config": {}, "entries": entries}))
    done = pit("perf", "attribute", str(tmp_path / "rank_0"), str(tmp_path / "rank_1"))
    (hang,) = map(json.loads, done.stdout.splitlines())
    assert (hang["schema"], hang["sequence"], hang["missing"], hang["waiting"]) == ("pit.perf-hang/1", 2, [1], [0])


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (("torch-healthy", "--step", "99"), 2, "expected ranks 0 to 1, steps 3 to 7"),
        (("torch-healthy", "--plot", "a.pdf"), 2, "expected .png, .svg or .html"),
        (("record_jax.py",), 5, "unknown content"),
        (("nothing-here",), 2, "nothing-here"),
    ],
)
def test_what_is_wrong_is_named(pit: Pit, profiles: Path, words: tuple[str, ...], code: int, problem: str) -> None:
    """Each with what was expected, and the exit code of its kind."""
    done = pit("perf", "attribute", str(profiles / words[0]), *words[1:])
    assert (done.returncode, problem in done.stderr) == (code, True), done.stderr
