"""How fast a request ran before: the step logs of its own runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pitools.launch.request import Request
from pitools.place.estimate import throughput
from pitools.place.estimate.throughput import Throughput
from pitools.run.steps import StepLog
from pitools.site.schema import Paths


def asks(**values: Any) -> Request:
    """A request for two nodes."""
    return Request(**{"name": "r", "command": "true", "nodes": 2, "gpus_per_node": 8, **values})


def write_run(
    root: Path, number: int, *, steps: int = 50, wall_s: float = 0.5, done: bool = True, suffix: str = "", **plan: Any
) -> Path:
    run = root / f"r-20260101-00000{number}-abc{number}{suffix}"
    folder = run / "attempts" / "0"
    folder.mkdir(parents=True)
    reference = {
        "name": "r",
        "site": "x",
        "job": {"nodes": 2, "partition": "gpu"},
        "request": {"args": {"steps": steps}},
    }
    (run / "plan.json").write_text(json.dumps({**reference, **plan}))
    for rank in range(4):
        log = StepLog(folder / "steps", rank)
        for step in range(steps):
            slow = 30.0 if step == 0 else wall_s
            log.write(step=step, loss=1.0, wall_s=slow, input_s=0, compute_s=0, comm_s=0, rank_samples=16)
        log.close()
    if done:
        (folder / "exit.json").write_text('{"schema":"pit.attempt-exit/1","job_id":"1","exit_code":0,"ended":""}')
    return run


def test_tickets_of_the_queue_count_as_runs(made: Any, tmp_path: Path) -> None:
    """Their folders are called <job-id>.<number>."""
    write_run(tmp_path, 1, suffix=".1")
    rates = throughput.measured_throughput(asks(entry="a:b", command=""), made.site(paths=Paths(runs=str(tmp_path))))
    assert rates["gpu"].samples_per_node_s == 64.0


def test_step_logs_tell_the_rate_and_the_work(made: Any, tmp_path: Path) -> None:
    """64 samples in 0.5 s on two nodes; the whole is known from a run that ended, scaled by its steps."""
    site = made.site(paths=Paths(runs=str(tmp_path)))
    write_run(tmp_path, 1)
    write_run(tmp_path, 2, wall_s=0.1, site="y")
    write_run(tmp_path, 3, wall_s=0.1, job={"nodes": 2, "partition": "other"}, done=False)
    (write_run(tmp_path, 4) / "plan.json").write_text("{")
    (tmp_path / "r-longer-20260101-000000-abcdef").mkdir()
    request = asks(entry="a:b", command="", args={"steps": 100})
    rates = throughput.measured_throughput(request, site)
    assert rates == {
        "gpu": Throughput(samples_per_node_s=64.0, step_s=0.5, samples=6400.0),
        "other": Throughput(samples_per_node_s=320.0, step_s=0.1),
    }
    write_run(tmp_path, 5, steps=2, job={"nodes": 2, "partition": "brief"})  # the first step of all compiles
    assert throughput.measured_throughput(request, site)["brief"].samples_per_node_s == 64.0
    other = asks(entry="a:b", command="", args={"steps": 50, "global_batch_size": 1})
    assert throughput.measured_throughput(other, site)["gpu"].samples is None
    assert throughput.measured_throughput(request, made.site(paths=Paths(runs=str(tmp_path / "gone")))) == {}
