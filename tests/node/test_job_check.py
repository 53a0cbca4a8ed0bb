"""This node's checks for a job: only those that its user can judge, and only what drains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.node import job_check
from pitools.node.check.rule import Check
from pitools.node.check.this_node import NodeCheck
from pitools.node.types import Finding, NodeFacts
from pitools.run.attempt_records import NodePreflight

CONFIG = """\
[[check]]
name = "{name}"
table = "files"
where.path = "/absent/é"
key = "exists"
equals = true
{more}
"""


def run(folder: Path, text: str) -> dict[str, Any]:
    (folder / "node.toml").write_text(text, encoding="utf-8")
    argv = [sys.executable, "-m", "pitools.node.job_check", str(folder / "node.toml")]
    env = {**os.environ, "SLURMD_NODENAME": "n07", "PYTHONIOENCODING": "ascii"}
    line = subprocess.run(argv, env=env, capture_output=True, check=True, timeout=60).stdout
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
    """A check whose action lets no further job start there; under the name that Slurm has for it, in any locale."""
    result = run(tmp_path, CONFIG.format(name="scratch", more=more))
    failed = [(row["node"], row["check"]) for row in result["failures"] if row["check"] == "scratch"]
    assert failed == ([("n07", "scratch")] if fails else [])


@pytest.mark.parametrize("letter", ["x", "é", "\N{SNOWMAN}", '"'])
@pytest.mark.parametrize("name", ["scratch", "nhc-file-contents-etc-slurm-gres-conf-text"])
def test_many_long_failures_are_one_short_line(name: str, letter: str) -> None:
    """However many checks fail, with however long messages, of whatever letters."""
    result = check_for_job([failure(f"{name}{number}", message=letter * 1000) for number in range(20)])
    assert len(msgspec.json.encode(result)) < 1023  # with its end srun's buffer
    assert result.failures[0].check == f"{name}0"
    assert len(result.failures[0].message) >= 40


def failure(check: str, message: str = "") -> Finding:
    return Finding(
        node="gpu-h100-r07-n012",
        check=check,
        state="failed",
        level="critical",
        action="drain",
        message=message,
        evidence_at="2026-11-01T00:00:00.000Z",
    )


def check_for_job(failed: list[Finding]) -> NodePreflight:
    checks = [Check(name=one.check, table="files", key="exists") for one in failed]
    facts = NodeFacts(node=failed[0].node, boot_id="", gathered_at=failed[0].evidence_at, tables={})
    return job_check.check_for_job(NodeCheck(facts, failed, checks))


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
