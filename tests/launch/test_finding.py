"""Which run a name means, as people type it: at whichever site, nearly right, or of a folder that has lost a part."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pitools.launch import plan as planning

MakePlan = Callable[..., planning.Plan]
Pit = Callable[..., subprocess.CompletedProcess[str]]
NAME = "x-20260101-000000-abc123"


@pytest.fixture
def run(make_plan: MakePlan, tmp_path: Path) -> Path:
    """A run in the folder of runs of a site of its own, `other`, that has saved 20 steps by itself."""
    made = tmp_path / "theirs" / NAME
    made.mkdir(parents=True)
    (tmp_path / "other.toml").write_text(f'name = "other"\nscheduler = "none"\n[paths]\nruns = "{made.parent}"\n')
    (made / "plan.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(make_plan("local"), site="other")))
    (made / "request.toml").write_text('name = "x"\ncommand = "true"\n')
    (made / "progress").write_text("20\n")
    return made


def test_an_id_is_found_at_any_site(pit: Pit, run: Path, tmp_path: Path) -> None:
    """Without --site; the steps are those the program calls safe; a wrong character names the id that is meant."""
    sites = {"PIT_SITE_PATH": str(tmp_path)}
    done = pit("launch", "show", NAME, **sites)
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert (said["site"], said["run_dir"], said["steps"]) == ("other", str(run), 20)
    assert pit("launch", "diff", NAME, NAME, **sites).stderr == "pit: nothing differs\n"
    assert pit("checkpoint", "list", NAME, **sites).stderr == f"pit: no checkpoints in {run}/checkpoints\n"
    done = pit("launch", "cancel", NAME[:-1] + "4", **sites)
    assert (done.returncode, f'did you mean "{NAME}"?' in done.stderr) == (2, True)
    assert "pit launch list" in pit("launch", "show", "qqq", **sites).stderr


def test_a_run_without_its_plan_is_named_as_such(pit: Pit, run: Path) -> None:
    """Exit 5 and what can still be had, rather than "no run"."""
    (run / "plan.json").unlink()
    for words in (("show",), ("why",), ("resume",), ("cancel",), ("logs",), ("diff", str(run))):
        done = pit("launch", *words, str(run))
        assert (done.returncode, "a part of the run is gone: plan.json" in done.stderr) == (5, True), words
