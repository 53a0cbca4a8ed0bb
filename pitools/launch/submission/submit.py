"""A plan becomes a run: its folder, then the job. What fails before the job exists leaves nothing behind."""

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
from pitools.launch.plan import Plan, require_workdir
from pitools.launch.provenance import provenance
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
sys.path.insert(0, sys.argv[1])
module, name = sys.argv[2].split(":")
found = getattr(importlib.import_module(module), name, None)
sys.exit(0 if callable(found) else f"module {module} has no function {name}")
"""


def check_submittable(plan: Plan, site: Site) -> None:
    """What only trying can tell: that the entry point imports, and that the data is still the planned version.

    Raises ConfigError or DataError. An import is tried only where it would be the ranks' own: not for a site over ssh,
    and not for ranks in a container.
    """
    for data in plan.data:
        _, raw = manifest.load_manifest(Path(data.source))
        if manifest.version_of(raw) != data.version:
            raise DataError(f'dataset "{data.name}" is no longer version {data.version}', where=data.source)
    require_workdir(plan, site)
    if not plan.request.entry or site.container.runtime != "none" or site.connection.kind != "local":
        return
    argv = [plan.python, "-c", _IMPORT_SCRIPT, plan.request.workdir, plan.request.entry]
    done = subprocesses.run(argv, timeout_s=_IMPORT_TIMEOUT_S, env=plan.request.env)
    if done.code:
        last = (done.stderr.strip().splitlines() or ["it fails without a word"])[-1]
        what = f'entry = "{plan.request.entry}" does not import: {last}'
        module = plan.request.entry.partition(":")[0]
        raise ConfigError(what, where=plan.request.workdir, hint=f"try there: {plan.python} -c 'import {module}'")


def submit_run(plan: Plan, site: Site, *, run_id: str = "", populate: Callable[[Path], None] = lambda _: None) -> Path:
    """Make the run's folder and start its job; returns the folder. Raises what `check` and the site's Slurm raise.

    run_id: "" for a new one. populate: puts into the folder, before it appears, what the run is to begin with.
    """
    check_submittable(plan, site)
    run_dir = Path(plan.runs) / (run_id or run_folder.new_run_id(plan.name))
    if site.connection.kind == "ssh" and not run_dir.parent.parent.is_dir():
        what = f'no folder "{run_dir.parent.parent}" here: runs of "{site.name}" need storage that both sides see'
        raise ClusterError(what, where="paths.runs", hint="launch from a machine that mounts it")
    try:
        plan = create_run_dir(run_dir, plan, site, populate)
    except OSError as error:
        raise from_os_error(error, run_dir) from error
    try:
        fabric = node_choice.load_fabric(plan, site, client(site)) if site.scheduler == "slurm" else None
        if not fabric and plan.request.topology != "none" and site.scheduler == "slurm":
            print(f'pit: site "{site.name}" tells no topology: Slurm takes whichever nodes are free', file=sys.stderr)
        job = start_job(plan, site, run_dir, node_choice.DELAYED_START_ARGS if fabric else ())
    except BaseException as error:
        if submissions.is_unresolved(run_dir, 0):
            # sbatch was called, and what it did is not known: the job may exist, and needs its folder then.
            run_folder.append_event(run_dir, "unanswered", error=str(error))
            hint = f"the run's folder is kept; this finds its job, or submits it: pit launch resume {run_dir.name}"
            if isinstance(error, KeyboardInterrupt):
                print(f"pit: {hint}", file=sys.stderr)
                raise
            what = error.message if isinstance(error, PitError) else str(error)
            raise OutcomeUnknown(what, where=str(run_dir), hint=hint) from error
        rollback(run_dir, site)
        if isinstance(error, OSError):
            raise from_os_error(error, run_dir) from error
        raise
    if fabric:
        place_on_nodes(plan, site, run_dir, fabric, job.job_id)
    return run_dir


def place_on_nodes(plan: Plan, site: Site, run_dir: Path, fabric: Fabric, job_id: str) -> None:
    """Choose the nodes of a held job and release it onto them. Raises PitError, with the run rolled back."""
    try:
        node_choice.record_choice(run_dir, node_choice.acquire_nodes(plan, fabric, client(site), job_id))
    except PitError:
        rollback(run_dir, site)  # its job was not to begin, and has been cancelled
        raise


def rollback(run_dir: Path, site: Site) -> None:
    """Take back what was begun: the job, if there is one already, and the folder."""
    with contextlib.suppress(PitError):
        if job := run_folder.read_record(run_dir / "job.json", run_folder.JobRef):
            local_process.terminate_supervisor(job) if site.scheduler == "none" else client(site).cancel([job.job_id])
    shutil.rmtree(run_dir, ignore_errors=True)


def create_run_dir(run_dir: Path, plan: Plan, site: Site, populate: Callable[[Path], None]) -> Plan:
    """Make the run's folder, whole or not at all; returns the plan of what runs: see provenance/provenance.py."""
    building = run_dir.with_name(f".{run_dir.name}")
    shutil.rmtree(building, ignore_errors=True)  # of a move that was killed: no other run has this id
    run_folder.make_run_dir(building, site.paths.runs_access)
    try:
        write_atomic(building / "request.toml", plan.request_text, durable=False)
        plan = provenance.capture(plan, site, building, run_dir)
        write_atomic(building / "plan.json", msgspec.json.format(msgspec.json.encode(plan), indent=1), durable=False)
        (building / "checkpoints").mkdir(0o755)
        (building / "attempts").mkdir(0o755)
        if site.scheduler == "slurm":
            (building / "jobs").mkdir(0o755)
        run_folder.append_event(building, "created", site=site.name)
        populate(building)
        os.rename(building, run_dir)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return plan


def start_job(plan: Plan, site: Site, run_dir: Path, args: Sequence[str]) -> run_folder.JobRef:
    """Start the run's job, with these flags too; job.json is there from the moment that there is a job."""
    if site.scheduler == "none":
        job = local_process.start_supervisor(run_dir, site)
        run_folder.write_record(run_dir / "job.json", job)
        run_folder.append_event(run_dir, "submitted", job_id=job.job_id)
        return job
    # submitit is 90 ms of imports, and a local run has no use for it.
    from pitools.launch.executor import PitExecutor

    jobs: list[run_folder.JobRef] = []

    def send(_script: Path) -> str:
        jobs.append(next_job.submit_next_job(run_dir, plan, site, number=0, retry_for_s=None, args=args))
        return jobs[0].job_id

    PitExecutor(plan, site, run_dir, send).submit_plan()
    return jobs[0]
