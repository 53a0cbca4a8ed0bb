"""What a run waits for: each thing is said once, as it changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from pitools.launch import plan as planning
from pitools.launch.monitor.wait_reason import WaitReason
from pitools.launch.plan import StagedDataset
from pitools.run.run_folder import RunRecord

RUN = RunRecord(run_id="r", name="t", site="s", job_id="7", run_dir="", state="", exit_code=None, nodes=2, created="")


def run(state: str, **keys: str) -> RunRecord:
    return msgspec.structs.replace(RUN, state=state, **keys)


def test_the_queue_staging_and_the_ranks(make_plan: Callable[..., planning.Plan], tmp_path: Path) -> None:
    """Slurm's reason with its expected start; the datasets until each node has its receipts; then the ranks."""
    data = (StagedDataset(name="demo", source="/d", version="v", bytes=1),)
    plan = msgspec.structs.replace(make_plan("alpha", nodes=2, tasks_per_node=2), data=data)
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan))
    report = WaitReason(tmp_path)

    def line(*arguments: str, **keys: str) -> str:
        return report.changed_line(run(*arguments, **keys))

    assert line("PENDING") == ""  # Slurm was not queried
    first = line("PENDING", pending_reason="Priority", expected_start="2026-11-26T12:00:00Z")
    assert {"7", "Priority,", "2026-11-26T12:00:00Z"} <= set(first.split())
    assert line("PENDING", pending_reason="Priority", expected_start="2026-11-26T12:05:00Z") == ""
    assert "Resources" in line("PENDING", pending_reason="Resources")
    attempt = tmp_path / "attempts" / "0"
    (attempt / "ranks").mkdir(parents=True)
    for node in ("n1", "n2"):
        (attempt / "nodes" / node).mkdir(parents=True)
    assert "demo" in line("RUNNING")
    (attempt / "nodes" / "n1" / "demo.json").touch()
    assert line("RUNNING") == ""
    (attempt / "nodes" / "n2" / "demo.json").touch()
    assert line("RUNNING") == ""
    for rank in range(4):
        assert line("RUNNING") == ""
        (attempt / "ranks" / f"{rank}.json").touch()
    assert "(4)" in line("RUNNING")
    assert line("RUNNING") == ""
