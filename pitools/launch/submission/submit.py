"""Make a run from a plan: create its folder, then submit its job. A failure before the job exists leaves no folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pitools.core import subprocesses
from pitools.core.errors import ClusterError, ConfigError, DataError, PitError
from pitools.core.fs import from_os_error, write_atomic
from pitools.launch import hooks
from pitools.launch.plan import Plan, require_workdir
from pitools.launch.provenance import provenance
from pitools.launch.rank.environment import IMPORTING
from pitools.launch.submission import local_process, next_job, node_choice, submissions
from pitools.run import run_folder
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.errors import OutcomeUnknown
from pitools.store import manifest
from pitools.topology.fabric_model import Fabric

_IMPORT_TIMEOUT_S = 120.0
_IMPORT_SCRIPT = """
import importlib, sys
_, folder, entry = sys.argv
sys.path.insert(0, folder)
module, name = entry.split(":")
sys.argv = [module]
function = getattr(importlib.import_module(module), name, None)
sys.exit(0 if callable(function) else f"module {module} has no function {name}")
"""


def check_submittable(plan: Plan, site: Site) -> None:
    """Raise DataError unless the datasets are still the planned versions, and ConfigError unless the entry imports.

    The import is skipped if the ranks would use other packages than this machine: for a site over ssh, and for ranks in
    a container. Also raises ConfigError for a missing workdir.
    """
    for data in plan.data:
        _, raw = manifest.load_manifest(Path(data.source))
        if manifest.version_of(raw) != data.version:
            raise DataError(f'dataset "{data.name}" is no longer version {data.version}', where=data.source)
    require_workdir(plan, site)
    if not plan.request.entry or plan.container.runtime != "none" or site.connection.kind != "local":
        return
    argv = [plan.python, "-c", _IMPORT_SCRIPT, plan.request.workdir, plan.request.entry]
    env = {**plan.request.env, IMPORTING: plan.request.entry}
    done = subprocesses.run(argv, timeout_s=_IMPORT_TIMEOUT_S, env=env)
    if done.code:
        no_message = f"python exited with code {done.code} and printed nothing"
        last_line = (done.stderr.strip().splitlines() or [no_message])[-1]
        problem = f'entry = "{plan.request.entry}" does not import: {last_line}'
        module = plan.request.entry.partition(":")[0]
        raise ConfigError(problem, where=plan.request.workdir, hint=f"try there: {plan.python} -c 'import {module}'")


def submit_run(plan: Plan, site: Site, *, run_id: str = "", populate: Callable[[Path], None] = lambda _: None) -> Path:
    """Create the run's folder, start its job, and return the folder.

    run_id: "" for a new id. populate: adds files to the folder before it is renamed into place. Raises as
    `check_submittable`, `create_run_dir` and `start_job` do.
    """
    check_submittable(plan, site)
    run_dir = Path(plan.runs_dir) / (run_id or run_folder.new_run_id(plan.name))
    if site.connection.kind == "ssh" and not run_dir.parent.parent.is_dir():
        problem = f'no folder "{run_dir.parent.parent}" here (expected storage shared with site "{site.name}")'
        raise ClusterError(problem, where="paths.runs", hint="launch from a machine that mounts the folder")
    try:
        plan = create_run_dir(run_dir, plan, site, populate)
    except OSError as error:
        raise from_os_error(error, run_dir) from error
    try:
        fabric = node_choice.load_fabric(plan, site, client(site)) if site.scheduler == "slurm" else None
        if not fabric and plan.request.topology != "none" and site.scheduler == "slurm":
            print(f'pit: site "{site.name}" has no topology: Slurm chooses the nodes', file=sys.stderr)
        job = start_job(plan, site, run_dir, node_choice.DELAYED_START_ARGS if fabric else ())
    except BaseException as error:
        if submissions.is_unresolved(run_dir, 0):
            # sbatch was called with an unknown outcome: the job may exist, and then needs the folder.
            run_folder.append_event(run_dir, "submission-unanswered", error=str(error))
            hint = f"the run's folder is kept; find the job, or submit it: pit launch resume {run_dir.name}"
            if isinstance(error, KeyboardInterrupt):
                print(f"pit: {hint}", file=sys.stderr)
                raise
            problem = error.message if isinstance(error, PitError) else str(error)
            raise OutcomeUnknown(problem, where=str(run_dir), hint=hint) from error
        rollback(run_dir, site)
        if isinstance(error, OSError):
            raise from_os_error(error, run_dir) from error
        raise
    if fabric:
        place_on_nodes(plan, site, run_dir, fabric, job.job_id)
    return run_dir


def place_on_nodes(plan: Plan, site: Site, run_dir: Path, fabric: Fabric, job_id: str) -> None:
    """Choose the nodes of a delayed job and record the choice. On PitError, roll back the run and raise."""
    try:
        node_choice.record_choice(run_dir, node_choice.acquire_nodes(plan, site, fabric, client(site), job_id))
    except PitError:
        rollback(run_dir, site)  # the job has been cancelled before its start
        raise


def rollback(run_dir: Path, site: Site) -> None:
    """Cancel the run's job if there is one, and remove the run's folder."""
    with contextlib.suppress(PitError):
        if job := run_folder.read_record(run_dir / "job.json", run_folder.JobRef):
            local_process.terminate_supervisor(job) if site.scheduler == "none" else client(site).cancel([job.job_id])
    shutil.rmtree(run_dir, ignore_errors=True)


def create_run_dir(run_dir: Path, plan: Plan, site: Site, populate: Callable[[Path], None]) -> Plan:
    """Create the run's folder atomically; return the plan with the copied code as its workdir: see provenance.py."""
    building = run_dir.with_name(f".{run_dir.name}")
    shutil.rmtree(building, ignore_errors=True)  # left by a killed move: no other run has this id
    run_folder.make_run_dir(building, site.paths.runs_access)
    try:
        write_atomic(building / "request.toml", plan.request_text, durable=False)
        plan = provenance.capture(plan, site, building, run_dir)
        write_atomic(building / "plan.json", msgspec.json.format(msgspec.json.encode(plan), indent=1), durable=False)
        (building / "checkpoints").mkdir(0o755)
        (building / "attempts").mkdir(0o755)
        if site.scheduler == "slurm":
            (building / "jobs").mkdir(0o755)
        run_folder.record_created(building, site.name)
        if plan.hooks:
            hooks.mark_pending(building)
        populate(building)
        os.rename(building, run_dir)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return plan


def start_job(plan: Plan, site: Site, run_dir: Path, args: Sequence[str]) -> run_folder.JobRef:
    """Start the run's job with further sbatch arguments; record it in job.json and return it."""
    if site.scheduler == "none":
        return local_process.start_job(run_dir, site)
    # submitit takes 90 ms to import, and a local run does not need it.
    from pitools.launch.executor import PitExecutor

    jobs: list[run_folder.JobRef] = []

    def submit_script(_script: Path) -> str:
        jobs.append(next_job.submit_next_job(run_dir, plan, site, job_number=0, retry_for_s=None, args=args))
        return jobs[0].job_id

    PitExecutor(plan, site, run_dir, submit_script).submit_plan()
    return jobs[0]
