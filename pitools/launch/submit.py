"""A plan becomes a run: its folder, then the job. What fails before the job exists leaves nothing behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from pitools.core import clock, proc
from pitools.core.errors import ConfigError, DataError
from pitools.core.files import os_error
from pitools.launch import local
from pitools.launch.plan import Plan
from pitools.run import folder
from pitools.site.connect import client
from pitools.site.model import Site
from pitools.slurm.refusals import Unanswered
from pitools.store import manifest

_IMPORT_S = 120.0
_IMPORT = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
module, name = sys.argv[2].split(":")
found = getattr(importlib.import_module(module), name, None)
sys.exit(0 if callable(found) else f"module {module} has no function {name}")
"""


def check(plan: Plan, site: Site) -> None:
    """What only trying can tell: that the entry point imports, and that the data is still the planned version.

    Raises ConfigError or DataError. An import is tried only where it would be the ranks' own: not for a site over ssh,
    and not for ranks in a container.
    """
    for data in plan.data:
        _, raw = manifest.load(Path(data.source))
        if manifest.version(raw) != data.version:
            raise DataError(f'dataset "{data.name}" is no longer version {data.version}', where=data.source)
    if not plan.request.entry or site.container.runtime != "none" or site.reach.kind != "local":
        return
    argv = [plan.python, "-c", _IMPORT, plan.request.workdir, plan.request.entry]
    done = proc.run(argv, timeout_s=_IMPORT_S, env=plan.request.env)
    if done.code:
        last = (done.stderr.strip().splitlines() or ["it fails without a word"])[-1]
        what = f'entry = "{plan.request.entry}" does not import: {last}'
        raise ConfigError(what, where=plan.request.workdir, hint="try: python -c 'import …' in that folder")


def run(plan: Plan, site: Site) -> Path:
    """Make the run's folder and start its job; returns the folder. Raises what `check` and the site's Slurm raise."""
    check(plan, site)
    run_dir = Path(plan.runs) / folder.new_id(plan.name)
    try:
        _make(run_dir, plan)
    except OSError as error:
        raise os_error(error, run_dir) from error
    folder.note(run_dir, "created", site=site.name)
    try:
        job = local.start(run_dir, site) if site.scheduler == "none" else _submit(plan, site, run_dir)
    except Unanswered as error:
        # The request was sent and no answer came: the job may exist, and needs its folder then.
        folder.note(run_dir, "unanswered", error=str(error))
        hint = f"look for job name {run_dir.name} with squeue before you run it again; the run's folder is kept"
        raise Unanswered(error.what, where=str(run_dir), hint=hint) from error
    except BaseException:
        shutil.rmtree(run_dir)
        raise
    folder.write(run_dir / "job.json", job)
    folder.note(run_dir, "submitted", job_id=job.job_id)
    return run_dir


def _make(run_dir: Path, plan: Plan) -> None:
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    building = run_dir.with_name(f".{run_dir.name}")
    building.mkdir()
    try:
        (building / "request.toml").write_text(plan.request_text)
        (building / "plan.json").write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1))
        (building / "checkpoints").mkdir()
        (building / "attempts").mkdir()
        os.rename(building, run_dir)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _submit(plan: Plan, site: Site, run_dir: Path) -> folder.JobRef:
    # submitit is 90 ms of imports, and a local run has no use for it.
    from pitools.launch import worker
    from pitools.launch.executor import PitExecutor

    slurm = client(site)
    executor = PitExecutor(plan, site, run_dir, send=lambda script: slurm.submit(path=str(script)).job_id)
    job = executor.submit(worker.run, str(run_dir / "plan.json"))
    return folder.JobRef(job_id=job.job_id, site=site.name, submitted=clock.now())
