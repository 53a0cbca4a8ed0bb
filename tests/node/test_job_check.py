"""This node's checks for a job: only those that its user can judge, and only what drains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pitools.node import job_check
from pitools.node.check.rule import Check
from pitools.node.check.this_node import NodeCheck
from pitools.node.types import Finding, NodeFacts

CONFIG = """\
[[check]]
name = "{name}"
table = "files"
where.path = "/nosuch"
key = "exists"
equals = true
{more}
"""


def run(folder: Path, text: str) -> dict[str, Any]:
    (folder / "node.toml").write_text(text)
    argv = [sys.executable, "-m", "pitools.node.job_check", str(folder / "node.toml")]
    env = {**os.environ, "SLURMD_NODENAME": "n07"}
    line = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=60).stdout
    assert len(line) < 1024  # srun's buffer
    result: dict[str, Any] = json.loads(line)
    return result


@pytest.mark.parametrize(
    ("more", "fails"),
    [
        ("", True),
        ('action = "reboot"', True),
        ('action = "drain-after-job"', False),
        ('level = "warning"\naction = "report"', False),
        ("is_shadow = true", False),
    ],
)
def test_what_drains_a_node_fails_it(tmp_path: Path, more: str, fails: bool) -> None:
    """A check whose action lets no further job start there; under the name that Slurm has for the node."""
    result = run(tmp_path, CONFIG.format(name="scratch", more=more))
    failed = [(row["node"], row["check"]) for row in result["failures"] if row["check"] == "scratch"]
    assert failed == ([("n07", "scratch")] if fails else [])


def test_many_long_failures_are_one_short_line(tmp_path: Path) -> None:
    """However many checks fail, with however long paths."""
    text = "".join(CONFIG.format(name=f"c{at}", more="").replace("/nosuch", "/nosuch" * 100) for at in range(20))
    assert run(tmp_path, text)["failures"]


@pytest.mark.parametrize(
    ("check", "gpus", "is_valid"),
    [
        (Check(name="n", table="files", key="exists"), 0, True),
        (Check(name="n", table="files", key="is_writable"), 0, False),
        (Check(name="n", table="files", where={"path": "/scratch", "is_writable": True}, min_count=1), 0, False),
        (Check(name="n", table="gpus", key="responds", equals=True), 0, True),
        (Check(name="n", table="gpus", count=8), 8, True),
        (Check(name="n", table="gpus", count=8), 4, False),
        (Check(name="n", table="gpus", min_count=8), 0, False),
    ],
)
def test_a_job_may_see_less_than_root(check: Check, gpus: int, is_valid: bool) -> None:
    """A job with a part of the GPUs does not count them; a folder that is another user's is not at fault."""
    assert job_check.is_valid_in_job(check, gpus) is is_valid
    now = "2026-11-01T00:00:00.000Z"
    row = Finding(node="n", check="n", state="failed", level="critical", action="drain", evidence_at=now)
    checked = NodeCheck(NodeFacts(node="n", boot_id="", gathered_at=now, tables={}), [row], [check])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_GPUS_ON_NODE", str(gpus))
        assert bool(job_check.check_for_job(checked).failures) is is_valid


HANGS = """\
import sys, time
from pitools.node import job_check
from pitools.node.gather import collectors, files
from pitools.node.gather.child import Collector
hangs = Collector("mounts", "", lambda query: time.sleep(60), 40.0)
collectors.COLLECTORS = (Collector("files", "", files.read_files), hangs)
job_check._GATHER_TIMEOUT_S = 0.5
job_check.main(sys.argv[1:])
"""


def test_what_failed_is_told_whatever_hangs_behind_it(tmp_path: Path) -> None:
    """A node that is broken enough to hang does not get away as one that says nothing."""
    (tmp_path / "node.toml").write_text(CONFIG.format(name="scratch", more=""))
    argv = [sys.executable, "-c", HANGS, str(tmp_path / "node.toml")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    result = json.loads(done.stdout)
    assert [row["check"] for row in result["failures"]] == ["scratch"]
    assert result["unknown"]


def test_a_file_of_checks_that_is_not_here_is_said(tmp_path: Path) -> None:
    """In the one line that the job's log has; no other checks take its place."""
    argv = [sys.executable, "-m", "pitools.node.job_check", str(tmp_path / "node.toml")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert (bool(done.returncode), done.stdout) == (True, "")
    assert str(tmp_path / "node.toml") in done.stderr
    assert len(done.stderr.splitlines()) == 1
