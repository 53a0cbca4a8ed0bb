"""Writes the folder of a run: attempts with their step logs, and the rows of its jobs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from pitools.core.timestamps import to_rfc3339
from pitools.launch.plan import Plan
from pitools.launch.request import Request
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart, Verdict
from pitools.site.dialect import JobSpec
from pitools.slurm.records import AccountingRow

EPOCH = 1_700_000_000.0


def text(seconds: float) -> str:
    return to_rfc3339(datetime.fromtimestamp(EPOCH + seconds, UTC))


def make_run(
    folder: Path, *, nodes: int = 1, gpus: int = 0, submitted: float = 0.0, job_id: str = "7", site: str = "alpha"
) -> Path:
    run_dir = folder / "bc-20270115-080000-abcdef"
    run_dir.mkdir(parents=True)
    plan = Plan(
        name="bc", site=site, request=Request(name="bc", command="true"), data=(), runs_dir="", nvme="", python="",
        job=JobSpec(name="bc", nodes=nodes, gpus_per_node=gpus),
    )  # fmt: skip
    run_folder.write_record(run_dir / "plan.json", plan)
    ref = run_folder.JobRef(job_id=job_id, site="alpha", submitted=text(submitted))
    run_folder.write_record(run_dir / "job.json", ref)
    return run_dir


def add_attempt(
    run_dir: Path, started: float, ended: float | None, *, job_id: str = "7", restart: int = 0, **fields: Any
) -> Path:
    number = len(run_folder.attempt_dirs(run_dir))
    folder = run_dir / "attempts" / str(number)
    start = AttemptStart(
        attempt=str(number), job_number=0, job_id=job_id, cluster="", restart_count=restart, node_list="n1",
        started=text(started), **{"nodes": 1, **fields},
    )  # fmt: skip
    run_folder.write_record(folder / "start.json", start)
    if ended is not None:
        end_attempt(folder, ended)
    return folder


def end_attempt(folder: Path, ended: float, job_id: str = "7", code: int = 0) -> None:
    run_folder.write_record(
        folder / "exit.json", run_folder.AttemptExit(job_id=job_id, exit_code=code, ended=text(ended))
    )


def add_steps(folder: Path, rank: int, began: float, walls: Sequence[float], *, first: int = 0, **parts: Any) -> float:
    """Steps one after the other; parts: of each step, a number or a list. Returns the end of the last."""
    path = folder / "steps" / f"{rank}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        for index, wall in enumerate(walls):
            began += wall
            values = {name: part[index] if isinstance(part, list) else part for name, part in parts.items()}
            line = {"schema": "pit.step/1", "t": text(began), "rank": rank, "step": first + index, "wall_s": wall}
            file.write(msgspec.json.encode(line | {"input_s": 0, "comm_s": 0} | values) + b"\n")
    return began


def add_receipt(folder: Path, began: float, ended: float) -> None:
    path = folder / "nodes" / "n1" / "demo.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(msgspec.json.encode({"wall_s": ended - began}))
    os.utime(path, (EPOCH + ended, EPOCH + ended))


def add_rank(folder: Path, began: float) -> None:
    record = run_folder.RankRecord(
        rank=0, world_size=1, local_rank=0, node="n1", pid=1, coordinator="", data={}, t=text(began)
    )
    run_folder.write_record(folder / "ranks" / "0.json", record)


def finish(run_dir: Path, at: float) -> None:
    verdict = Verdict(state="succeeded", code="succeeded", kind="succeeded", reason="", t=text(at), attempts=1)
    run_folder.write_record(run_dir / "verdict.json", verdict)


def row(submit: float, start: float | None, end: float | None, *, job_id: str = "7", **fields: Any) -> AccountingRow:
    return AccountingRow(
        job_id=job_id, state="COMPLETED" if end is not None else "RUNNING", submit=text(submit),
        start="" if start is None else text(start), end="" if end is None else text(end),
        **{"nodes": 1, "raw_id": job_id, "elapsed_s": int(end - (start or 0)) if end is not None else 0, **fields},
    )  # fmt: skip
