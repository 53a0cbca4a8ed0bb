"""`pitools.Executor`: submitit's AutoExecutor for a site. In Slurm its jobs are runs, as `pit launch show` lists."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import submitit
from msgspec.structs import replace
from submitit.core import core, utils

from pitools.core.errors import UsageError, suggest
from pitools.launch import plan as planning
from pitools.launch.executor import PitExecutor
from pitools.launch.request import Request, check_request
from pitools.launch.run_lookup import runs_dir
from pitools.launch.submission import exactly_once
from pitools.run import run_folder
from pitools.site.connect import client
from pitools.site.load import load_site
from pitools.slurm.errors import SlurmBusy, SlurmRefused

# submitit's parameter → the request's key and how its value is written there.
_KEYS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "name": ("name", lambda value: re.sub(r"[^a-z0-9_-]+", "-", str(value).lower()).strip("-_")[:48] or "job"),
    "timeout_min": ("time", lambda value: str(max(1, int(value)))),
    "nodes": ("nodes", int),
    "tasks_per_node": ("tasks_per_node", int),
    "cpus_per_task": ("cpus_per_task", int),
    "gpus_per_node": ("gpus_per_node", int),
    "mem_gb": ("memory", lambda value: f"{round(value * 1024)}M"),
    "slurm_time": ("time", str),
    "slurm_mem": ("memory", str),
    "slurm_partition": ("partition", str),
    "slurm_account": ("account", str),
    "slurm_constraint": ("constraint", str),
    "slurm_exclude": ("exclude", str),
    "slurm_nodelist": ("nodelist", str),
    "slurm_cpus_per_task": ("cpus_per_task", int),
    "slurm_gpus_per_node": ("gpus_per_node", int),
    "slurm_ntasks_per_node": ("tasks_per_node", int),
}
_SBATCH_FLAGS = {
    f"slurm_{flag.replace('-', '_')}": flag
    for flag in ("comment", "dependency", "licenses", "mail-type", "mail-user", "qos", "reservation")
}
# Accepted without effect: a rank has one log for both streams.
_WITHOUT_EFFECT = {"stderr_to_stdout", "slurm_stderr_to_stdout"}
# Neither a key of a request nor a flag of its own.
_NOT_KEYS = {"slurm_array_parallelism", "slurm_additional_parameters", "slurm_signal_delay_s"}
_SIGNAL_DELAY_S = 90  # submitit's default: before the time limit, a callable with `checkpoint` saves and is requeued


class Executor(core.Executor):  # type: ignore[misc]  # submitit's classes are untyped to mypy
    """submitit's AutoExecutor for one site: `submit`, `map_array`, `submit_array`, `batch`, `update_parameters`.

    Its parameters are AutoExecutor's generic ones, and those `slurm_*` that are keys of a request or flags of sbatch;
    refused are those that change how ranks start (setup, teardown, srun_args, use_srun) or repeat gpus_per_node and mem
    (gres, num_gpus, mem_per_cpu and the like). Other flags of sbatch go into `slurm_additional_parameters`.
    stderr_to_stdout has no effect. On a site without Slurm, jobs are processes of
    this machine, by submitit's LocalExecutor, and no runs. pitools does not repeat a failed callable; submitit requeues
    one with a method `checkpoint` before the time limit (slurm_signal_delay_s) and at a preemption.
    """

    def __init__(self, folder: str | Path | None = None, *, site: str = "local") -> None:
        """folder: where the jobs' runs are created; None for the site's own folder of runs. Raises ConfigError."""
        self.site = load_site(site)
        super().__init__(folder or runs_dir(self.site))

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Check and keep parameters. Raises UsageError for an unknown one, ConfigError for an invalid value."""
        names = {*_KEYS, *_NOT_KEYS, *_WITHOUT_EFFECT, *_SBATCH_FLAGS}
        if unknown := next((name for name in kwargs if name not in names), ""):
            hint = suggest(unknown, names) or "flags of sbatch: slurm_additional_parameters={…}"
            raise UsageError(f'no parameter "{unknown}"', where="update_parameters", hint=hint)
        _request({**self.parameters, **kwargs})
        self.parameters.update(kwargs)

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        request = _request(self.parameters)
        plan = replace(planning.make_plan(request, self.site, "Executor"), runs_dir=str(self.folder))
        run_dir = self.folder / run_folder.new_run_id(plan.name)
        if self.site.scheduler == "none":
            run_folder.make_run_dir(run_dir, self.site.paths.runs_access)  # pickles are code: only the owner writes
            local = submitit.LocalExecutor(run_dir)
            local.update_parameters(
                timeout_min=max(1, plan.job.time_s // 60),
                tasks_per_node=plan.job.tasks_per_node,
                gpus_per_node=plan.job.gpus_per_node,
            )
            return list(local._internal_process_submissions(list(delayed_submissions)))
        slurm = client(self.site)
        exactly_once.require_cluster(self.site, slurm)
        executor = PitExecutor(plan, self.site, run_dir, lambda script: slurm.submit(path=str(script)).job_id)
        executor.at_a_time = int(self.parameters.get("slurm_array_parallelism", 0))
        try:
            return executor._internal_process_submissions(list(delayed_submissions))
        except (SlurmRefused, SlurmBusy):  # otherwise Slurm may have the job
            shutil.rmtree(run_dir, ignore_errors=True)
            raise


def _request(parameters: dict[str, Any]) -> Request:
    """Return the request of some parameters of submitit. Raises ConfigError, UsageError."""
    keys: dict[str, Any] = {"name": "job", "command": "true", "workdir": str(Path.cwd())}
    flags: dict[str, Any] = {}
    for name, value in parameters.items():
        if value is None:
            continue
        if name in _KEYS:
            key, written = _KEYS[name]
            try:
                keys[key] = written(value)
            except (TypeError, ValueError) as error:
                raise UsageError(f"{name} = {value!r}: {error}", where="update_parameters") from error
        elif name == "slurm_additional_parameters":
            flags |= {flag.replace("_", "-"): text for flag, text in value.items()}
        elif name in _SBATCH_FLAGS:
            flags[_SBATCH_FLAGS[name]] = value
    signal_s = int(parameters.get("slurm_signal_delay_s", _SIGNAL_DELAY_S))
    if minutes := parameters.get("timeout_min"):  # a short job would get it near its start
        signal_s = min(signal_s, int(minutes) * 60 // 4)
    request = Request(**keys, sbatch=flags, signal=f"USR2@{signal_s}")
    check_request(request, "update_parameters")
    return request
