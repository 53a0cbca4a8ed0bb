"""Run one function on many nodes as a Slurm job array, and wait for it. Its results are the files that it writes."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import submitit

from pitools.core.errors import ClusterError, PitError, TryLater
from pitools.core.fs import from_os_error
from pitools.core.progress import progress_bar
from pitools.launch import plan as planning
from pitools.launch.executor import PitExecutor
from pitools.launch.request import Request
from pitools.launch.submission import exactly_once
from pitools.run import run_folder
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.client import Client
from pitools.slurm.states import UNKNOWN, is_final
from pitools.store.version_state import revalidate_nfs

DoneCounter = Callable[[], int]

_PROGRESS_EVERY_S, _PROGRESS_LONGEST_S = 0.5, 5.0  # polling reads many files: less often as the array runs longer
_STATE_EVERY_S = 15.0
_UNREACHABLE_S = 60.0  # a shared file system may show a result this much later than its task's end
_HINT = "finished jobs are kept: run the same command again for the rest"


class _TaskBackend(Protocol):
    """The tasks of one array, in Slurm or on this machine."""

    def state(self) -> str:
        """Return one Slurm state for all tasks."""

    def cancel(self) -> None:
        """End the tasks that still run."""


def run_array(
    site: Site,
    name: str,
    function: Callable[..., object],
    argument_tuples: Sequence[tuple[Any, ...]],
    *,
    work_dir: Path,
    total: int,
    count_done: DoneCounter,
    cpus: int = 1,
) -> None:
    """Call `function` with each of `argument_tuples` in a separate array task, and wait until all have returned.

    work_dir: a folder on storage that all nodes share. total, count_done: the number of pieces of work, and a function
    that returns how many are done; for the progress bar. A site without Slurm runs all tasks on this machine at the
    same time, with their logs in `work_dir`. An interrupt or a failed task cancels the others. Raises the PitError of a
    task, ClusterError for another error of a task and for a task without a result, and the errors of Slurm.
    """
    request = Request(name=_slurm_name(name), command="true", cpus_per_task=cpus, workdir=str(Path.cwd()))
    plan = planning.make_plan(request, site, f"--site {site.name}")
    arguments = ([function] * len(argument_tuples), *zip(*argument_tuples, strict=True))
    if site.scheduler == "none":
        local = submitit.LocalExecutor(work_dir / "submitit")
        local.update_parameters(timeout_min=max(1, plan.job.time_s // 60))
        jobs = local.map_array(_call_on_node, *arguments)
        queue: _TaskBackend = _LocalTasks(jobs)
    else:
        slurm = client(site)
        jobs = _executor(plan, site, slurm).map_array(_call_on_node, *arguments)
        queue = _SlurmTasks(slurm, str(jobs[0].job_id).partition("_")[0])
    try:
        with progress_bar("array", total, unit="jobs") as advance:
            _wait_for_tasks(jobs, queue, advance, count_done)
    except BaseException:
        with contextlib.suppress(PitError):
            queue.cancel()
        raise


def _executor(plan: planning.Plan, site: Site, slurm: Client) -> PitExecutor:
    """Create the executor of the array. The array is a run: `pit launch show` and `logs` take it."""
    run_dir = Path(plan.runs_dir) / run_folder.new_run_id(plan.name)
    exactly_once.require_cluster(site, slurm)
    try:
        return PitExecutor(plan, site, run_dir, lambda script: slurm.submit(path=str(script)).job_id)
    except OSError as error:
        raise from_os_error(error, run_dir) from error


class _LocalTasks:
    """Processes of this machine."""

    def __init__(self, jobs: Sequence[submitit.Job[Any]]) -> None:
        self._jobs = jobs

    def state(self) -> str:
        return "COMPLETED" if all(job.done() for job in self._jobs) else "RUNNING"

    def cancel(self) -> None:
        for job in self._jobs:
            job.cancel()


class _SlurmTasks:
    """One array job."""

    def __init__(self, slurm: Client, job_id: str) -> None:
        self._slurm, self._id = slurm, job_id

    def state(self) -> str:
        with contextlib.suppress(TryLater):
            return self._slurm.state_of([self._id])[self._id]
        return "RUNNING"  # Slurm did not answer: assume that it runs

    def cancel(self) -> None:
        self._slurm.cancel([self._id])


def _wait_for_tasks(
    jobs: Sequence[submitit.Job[Any]], backend: _TaskBackend, advance: Callable[[int], None], done: DoneCounter
) -> None:
    started_at = queried_at = time.monotonic()
    shown, gone_since = 0, 0.0
    pending = list(jobs)
    while pending:
        time.sleep(min(_PROGRESS_LONGEST_S, max(_PROGRESS_EVERY_S, (time.monotonic() - started_at) / 60)))
        count = done()
        advance(count - shown)
        shown = count
        for job in [job for job in pending if job.paths.result_pickle.exists()]:
            _raise_task_error(job)
            pending.remove(job)
        if pending and time.monotonic() - queried_at > _STATE_EVERY_S:
            queried_at, state = time.monotonic(), backend.state()
            ended = is_final(state) or state == UNKNOWN
            gone_since = (gone_since or queried_at) if ended else 0.0
            if gone_since:
                revalidate_nfs(pending[0].paths.folder)
            if gone_since and queried_at - gone_since > _UNREACHABLE_S:
                where = str(pending[0].paths.folder.parent)
                raise ClusterError(
                    f"array task {pending[0].job_id} ended without a result: {state}", where=where, hint=_HINT
                )


def _raise_task_error(job: submitit.Job[Any]) -> None:
    """Raise the error that a task raised."""
    error = job.exception()
    if error is not None:
        last = (str(error).strip().splitlines() or ["no message"])[-1]
        where = str(job.paths.folder.parent)
        raise ClusterError(f"array task {job.job_id} failed: {last}", where=where, hint=_HINT) from error
    result = job.result()
    if isinstance(result, PitError):
        raise result


def _call_on_node(function: Callable[..., object], *arguments: Any) -> PitError | None:
    """Call `function` on the node. Return its PitError with all fields; submitit passes on other errors as text."""
    try:
        function(*arguments)
    except PitError as error:
        return error
    return None


def _slurm_name(text: str) -> str:
    return re.sub(r"[^a-z0-9_-]", "-", text.lower())[:48]
