"""Runs as folders on disk, of sites whose files are written here: made in milliseconds."""

from __future__ import annotations

import os
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import psutil

from pitools.core import timestamps
from pitools.launch import plan as planning
from pitools.launch.request import Request
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart, Cause, Verdict
from pitools.run.steps import Step
from pitools.site.load import load_site


def write_site(folder: Path, name: str, runs: Path, scheduler: str = "none", more: str = "") -> None:
    """Write the file of a site."""
    runs.mkdir(parents=True, exist_ok=True)
    text = f'name = "{name}"\nscheduler = "{scheduler}"\n[paths]\nruns = "{runs}"\n{more}\n'
    (folder / f"{name}.toml").write_text(text)


class Runs:
    """Runs of a site, below its folder of runs. now: of their records."""

    def __init__(self, site: str, now: datetime | None = None) -> None:
        self.site, self.now, self.count = load_site(site), now or datetime.now(UTC), 0
        plan = planning.make_plan(Request(name="t", command="true", workdir="/"), self.site, "test")
        self.plan = msgspec.json.encode(plan)
        self.root = Path(self.site.paths.runs)
        process = psutil.Process()
        ticks = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
        self.this_process: dict[str, Any] = {
            "host": os.uname().nodename, "pid": process.pid, "start_ticks": ticks, "job_id": str(process.pid)
        }  # fmt: skip

    def at(self, seconds: float) -> str:
        """A time before now."""
        return timestamps.to_rfc3339(self.now - timedelta(seconds=seconds))

    def add(self, name: str = "bc-jax", *, state: str = "RUNNING", age_s: float = 600.0, job_id: str = "") -> Path:
        """A run that began `age_s` ago: RUNNING by this process, or by a job; PENDING; or ended half of that ago."""
        self.count += 1
        stamp = (self.now - timedelta(seconds=age_s)).strftime("%Y%m%d-%H%M%S")
        run_dir = self.root / f"{name}-{stamp}-{self.count:06x}"
        (run_dir / "attempts").mkdir(parents=True)
        (run_dir / "plan.json").write_bytes(self.plan)
        run_folder.record_created(run_dir, self.site.name)
        runner: dict[str, Any] = {"job_id": job_id} if job_id else self.this_process
        job = run_folder.JobRef(site=self.site.name, submitted=self.at(age_s), **runner)
        run_folder.write_record(run_dir / "job.json", job)
        if state != "PENDING":
            self.start(run_dir, 0, age_s)
        if state not in ("PENDING", "RUNNING"):
            self.end(run_dir, 0, state, age_s / 2)
        return run_dir

    def start(self, run_dir: Path, attempt: int | str, age_s: float) -> None:
        """An attempt begins."""
        record = AttemptStart(
            attempt=str(attempt), job_number=0, job_id="7", cluster="", restart_count=0, node_list="n01", nodes=1,
            started=self.at(age_s),
        )  # fmt: skip
        run_folder.write_record(run_dir / "attempts" / str(attempt) / "start.json", record)

    def end(
        self, run_dir: Path, attempt: int | str, state: str, age_s: float, reason: str = "it raised KeyError"
    ) -> None:
        """An attempt ends, and with it the run unless it is PREEMPTED."""
        folder, code = run_dir / "attempts" / str(attempt), int(state != "COMPLETED")
        ended = run_folder.AttemptExit(job_id="7", exit_code=code, ended=self.at(age_s))
        run_folder.write_record(folder / "exit.json", ended)
        kind: Any = {"COMPLETED": "succeeded", "PREEMPTED": "preempted"}.get(state, "program")
        cause = Cause(attempt=str(attempt), kind=kind, confidence="certain", reason=reason, exit_code=code)
        run_folder.write_record(folder / "cause.json", cause)
        if state != "PREEMPTED":
            how: Any = ("succeeded", "succeeded") if state == "COMPLETED" else ("stopped", "failed")
            verdict = Verdict(
                state=how[0], code=how[1], kind=kind, reason=reason, t=self.at(age_s), attempts=1,
                exit_code=code,
            )  # fmt: skip
            run_folder.write_record(run_dir / "verdict.json", verdict)

    def log(
        self, run_dir: Path, first: int, last: int, *, attempt: int = 0, rank: int = 0, age_s: float = 0.0,
        wall_s: float = 1.0, input_s: float = 0.1,
    ) -> None:  # fmt: skip
        """The rank logs steps, the last of them `age_s` ago."""
        path = run_dir / "attempts" / str(attempt) / "steps" / f"{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines, chance = [], random.Random(f"{first} {rank}")
        for step in range(first, last):
            record = Step(
                t=self.at(age_s + (last - 1 - step) * wall_s), rank=rank, step=step, loss=2.0 / (1 + step / 50),
                wall_s=wall_s * chance.uniform(0.98, 1.0),
                input_s=input_s, compute_s=wall_s * 0.8 - input_s, comm_s=wall_s * 0.1, rank_samples=8,
            )  # fmt: skip
            lines.append(msgspec.json.encode(record) + b"\n")
        with path.open("ab") as file:
            file.write(b"".join(lines))
