"""Submit the first jobs of several runs as one Slurm job array, so that Slurm limits how many run at a time.

<array>/
    runs            line k: the folder of the run of task k
    script.sbatch   each task runs its run's own script.sbatch, as a job of its own
    jobs/0, job.json    the array's submission: see exactly_once.py

The job id of a run's first job is then `<array job>_<k>`, which all commands of Slurm take. Slurm's own number of the
last task is that of the whole array, so a run never uses it. Later jobs of a run are single jobs.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pitools.core.errors import DataError
from pitools.core.fs import write_atomic
from pitools.launch.plan import Plan, site_of_plan
from pitools.launch.submission import next_job, submissions
from pitools.run import run_folder
from pitools.run.run_folder import JobRef
from pitools.site import dialect
from pitools.site.connect import client
from pitools.site.schema import Site

RUNS_FILE = "runs"
_DEFAULT_MAX_TASKS = 1001  # Slurm's own default of MaxArraySize
_BODY = """\
run_dir=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {runs})
[ -n "$run_dir" ] || exit 1
job_id=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
export PIT_ARRAY_TASK="$SLURM_JOB_ID=$job_id" SLURM_JOB_NAME="${{run_dir##*/}}"
unset "${{!SLURM_ARRAY_@}}"
exec >> "$run_dir/slurm-$job_id.out" 2>&1
exec bash "$run_dir/script.sbatch"
"""


def is_array_plan(plan: Plan, site: Site) -> bool:
    """Return whether a plan's job can be a task of an array: in Slurm, with nodes that Slurm chooses."""
    return site.scheduler == "slurm" and plan.request.topology == "none"


def array_flags(plan: Plan, site: Site) -> tuple[str, ...]:
    """Return the sbatch flags that all tasks of an array share. Runs with equal flags can be one array."""
    job = msgspec.structs.replace(plan.job, name="", output="", extra=(*plan.job.extra, *plan.first_job_flags))
    return dialect.sbatch_flags(site, job)


def max_tasks(site: Site) -> int:
    """Return how many tasks an array can have at a site. Raises the errors of the query."""
    text = client(site).config().values.get("MaxArraySize", "")
    return max(1, (int(text) if text.isdecimal() else _DEFAULT_MAX_TASKS) - 1)


def create_array(array_dir: Path, plan: Plan, site: Site, run_dirs: Sequence[Path], at_a_time: int = 0) -> None:
    """Create the folder of an array of runs with equal flags. at_a_time: how many may run at once, 0 for no limit.

    Each run's folder must exist, with its script and the intent of `submissions.record_intent` for its task.
    """
    run_folder.make_run_dir(array_dir, site.paths.runs_access)
    write_atomic(array_dir / RUNS_FILE, "".join(f"{run_dir}\n" for run_dir in run_dirs))
    limit = f"%{at_a_time}" if at_a_time else ""
    job = msgspec.structs.replace(
        plan.job,
        name=array_dir.name,
        array=f"0-{len(run_dirs) - 1}{limit}",
        output=f"{array_dir}/slurm-%A_%a.out",
    )
    flags = [dialect.sbatch_directive(flag) for flag in dialect.sbatch_flags(site_of_plan(plan, site), job)]
    body = _BODY.format(runs=shlex.quote(f"{array_dir}/{RUNS_FILE}"))
    write_atomic(array_dir / "script.sbatch", "\n".join(["#!/bin/bash", *flags, body]))


def submit_array(array_dir: Path, plan: Plan, site: Site) -> JobRef:
    """Submit an array exactly once, and record the first job of each of its runs. Safe to repeat.

    Raises the errors of `next_job.submit_next_job`.
    """
    array = next_job.submit_next_job(array_dir, plan, site, job_number=0, retry_for_s=None, runs=Path(plan.runs_dir))
    for task, run_dir in enumerate(array_runs(array_dir)):
        if run_dir.is_dir() and submissions.is_unresolved(run_dir, 0):
            job = msgspec.structs.replace(array, job_id=f"{array.job_id}_{task}")
            run_folder.write_record(submissions.job_dir(run_dir, 0) / "job.json", job, durable=True)
            run_folder.write_record(run_dir / "job.json", job)
            run_folder.append_event(run_dir, "submitted", job_id=job.job_id, job_number=0)
    return array


def array_runs(array_dir: Path) -> list[Path]:
    """Return the run folders of an array, by task. Raises DataError."""
    try:
        return [Path(line) for line in (array_dir / RUNS_FILE).read_text().splitlines()]
    except (OSError, UnicodeError) as error:
        raise DataError(f"array: its list of runs cannot be read: {error}", where=str(array_dir)) from error
