"""Find the run, job and recovery mode of this process from its environment and the run's folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import msgspec

from pitools.core.errors import UsageError
from pitools.run.attempt_records import AttemptStart

RecoveryMode = Literal["none", "allocation", "run"]


class JobContext(msgspec.Struct, frozen=True, kw_only=True):
    """One start of one Slurm job. job_number: its position among the run's jobs. task: array task id, or "".

    job_id: `<array job>_<task>` for a run of a sweep that is a task of an array. slurm_number: Slurm's own, which the
    ids of its steps begin with; of an array's last task it is that of the array, so never cancel by it.
    """

    run_dir: Path
    job_number: int
    job_id: str
    slurm_number: str = ""
    cluster: str
    restart_count: int
    node_list: str
    nodes: int
    task: str
    mode: RecoveryMode


def load_context(environ: Mapping[str, str]) -> JobContext:
    """Return the job of this process. Raises UsageError outside of a job script."""
    if missing := [name for name in ("PIT_RUN_DIR", "SLURM_JOB_ID") if not environ.get(name)]:
        raise UsageError(f"{missing[0]} is not set: this is not a job script", hint="see `pit script render train`")
    run_dir = Path(environ["PIT_RUN_DIR"])
    return JobContext(
        run_dir=run_dir,
        job_number=job_number(run_dir.name, environ.get("SLURM_JOB_NAME", "")),
        job_id=slurm_job_id(environ),
        slurm_number=environ["SLURM_JOB_ID"],
        cluster=environ.get("SLURM_CLUSTER_NAME", ""),
        restart_count=_count(environ.get("SLURM_RESTART_COUNT", "")),
        node_list=environ.get("SLURM_JOB_NODELIST", ""),
        nodes=_count(environ.get("SLURM_JOB_NUM_NODES", "")) or 1,
        task=environ.get("SLURM_ARRAY_TASK_ID", ""),
        mode=recovery_mode(run_dir, environ),
    )


def slurm_job_id(environ: Mapping[str, str]) -> str:
    """Return the id of this process's job; `<array job>_<task>` in a task of an array of runs. "" outside of jobs."""
    number, _, task_id = environ.get("PIT_ARRAY_TASK", "").partition("=")
    job_id = environ.get("SLURM_JOB_ID", "")
    return task_id if number and number == job_id else job_id  # the variable may be inherited from another job


def job_number(run_id: str, job_name: str) -> int:
    """Return the run's job number in a Slurm job name: k for `<run id>.<k>`, 0 for any other name."""
    match = re.fullmatch(re.escape(run_id) + r"\.(\d+)", job_name)
    return int(match.group(1)) if match else 0


def recovery_mode(run_dir: Path, environ: Mapping[str, str]) -> RecoveryMode:
    """Return how far recovery may go: "none", "allocation" (retry in this job only), or "run" (submit further jobs).

    "none" for an array task, and without a plan, as in a script rendered for a user. Otherwise PIT_RECOVER, if set.
    Otherwise "run" for a run with `jobs/`; "allocation" for a ticket or a local run, which have only a request; "none"
    for callables, which have no request: their caller repeats them.
    """
    requested = environ.get("PIT_RECOVER", "")
    if environ.get("SLURM_ARRAY_TASK_ID") or not (run_dir / "plan.json").is_file():
        return "none"
    if requested in ("none", "allocation", "run"):
        return requested  # type: ignore[return-value]  # mypy does not narrow to literals by `in`
    if (run_dir / "jobs").is_dir():
        return "run"
    return "allocation" if (run_dir / "request.toml").is_file() else "none"


def seconds_to_time_limit(start: AttemptStart | None) -> float | None:
    """Return the seconds until the time limit of an attempt's job; None without a limit."""
    if start is None or not start.time_limit_at:
        return None
    return (datetime.fromisoformat(start.time_limit_at) - datetime.now(UTC)) / timedelta(seconds=1)


def _count(text: str) -> int:
    return int(text) if text.isdecimal() else 0
