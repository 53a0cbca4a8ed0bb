"""Why attempts ended: recorded ones from a real cluster, and what Slurm, kernels and libraries are known to say."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pitools.launch.diagnosis import diagnose
from pitools.run.attempt_records import Cause
from pitools.slurm.records import AccountingRow

HERE = Path(__file__).parent
RECORDED = {path.stem: tomllib.loads(path.read_text()) for path in sorted((HERE / "logs").glob("*.toml"))}
SAID = {case["name"]: case for case in tomllib.loads((HERE / "expected_causes.toml").read_text())["case"]}
START = (
    '{"schema":"pit.attempt-start/1","attempt":"0","job_number":0,"job_id":"12","cluster":"c","restart_count":0,"node_list":"n[1-2]",'
    '"nodes":2,"started":"2026-11-22T01:00:00.000Z","saved_steps":0}'
)
EXIT = '{"schema":"pit.attempt-exit/1","job_id":"12","exit_code":1,"ended":"2026-11-22T01:20:00.000Z"}'
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes attempt 0 of a run from texts by path; `attempt/` is its folder, and times of change are as given."""
    monkeypatch.setenv("TZ", "UTC")

    def attempt(files: Mapping[str, str], mtimes: Mapping[str, str] = {}) -> Path:
        for name, text in files.items():
            path = tmp_path / name.replace("attempt/", "attempts/0/", 1)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            if moment := mtimes.get(name):
                seconds = datetime.fromisoformat(moment).timestamp()
                os.utime(path, (seconds, seconds))
        (tmp_path / "attempts" / "0").mkdir(parents=True, exist_ok=True)
        return tmp_path

    return attempt


def said(make: Make, case: Mapping[str, Any]) -> Path:
    """An attempt of two ranks from 01:00 to 01:20 in which only this was said."""
    files = {"start.json": START, "exit.json": EXIT, "hostfile": "n1\nn2\n", **case.get("files", {})}
    return make({f"attempt/{name}": text for name, text in files.items()})


def judge(run_dir: Path, **more: Any) -> Cause:
    return diagnose.diagnose_attempt(run_dir, run_dir / "attempts" / "0", **more)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_attempts(make: Make, name: str) -> None:
    """Faults injected into real jobs are called what they were."""
    case = RECORDED[name]
    cause = judge(make(case["files"], case["mtimes"]))
    assert (cause.kind, cause.confidence, list(cause.nodes)) == (case["kind"], case["confidence"], case["nodes"]), (
        cause.reason
    )


@pytest.mark.parametrize("name", SAID)
def test_what_others_are_known_to_say(make: Make, name: str) -> None:
    """The documented words of Slurm, kernels and libraries are understood, and imitations are not believed."""
    case = SAID[name]
    cause = judge(said(make, case))
    assert [cause.kind, cause.confidence, list(cause.nodes)] == [*case["expect"], case.get("nodes", [])], cause.reason
    assert case.get("says", "") in cause.reason


def test_staging_has_no_ranks(make: Make) -> None:
    """What a node could not stage is said of the node."""
    cause = judge(said(make, SAID["stage-no-room"]))
    assert (cause.rank, cause.reason) == (None, "n2: pit: error: 8.1 MiB needed, 56.0 KiB free; where: /nvme/n2")


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("PREEMPTED", "preempted"),
        ("TIMEOUT", "time-limit"),
        ("NODE_FAIL", "node"),
        ("BOOT_FAIL", "node"),
        ("OUT_OF_MEMORY", "memory"),
        ("CANCELLED", "cancelled"),
        ("DEADLINE", "time-limit"),
    ],
)
def test_slurms_word_is_certain(make: Make, state: str, kind: str) -> None:
    """Slurm's state of the job decides, whatever lines stand in logs; FAILED decides nothing."""
    run_dir = said(make, SAID["ib-port"])
    cause = judge(run_dir, accounting=AccountingRow(job_id="12", raw_id="12", state=state))
    assert (cause.kind, cause.confidence, cause.state) == (kind, "certain", state)
    (run_dir / "attempts" / "0" / "cause.json").unlink()
    assert judge(run_dir, accounting=AccountingRow(job_id="12", raw_id="12", state="FAILED")).kind == "network"
