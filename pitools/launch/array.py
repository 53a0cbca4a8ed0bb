"""One function on many nodes, as a Slurm array of a site, waited for: for work that files keep account of."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import submitit

from pitools.core.errors import ClusterError, PitError, TryLater
from pitools.core.fs import os_error
from pitools.core.progress import bar
from pitools.launch import plan as planning
from pitools.launch.executor import PitExecutor
from pitools.launch.request import Request
from pitools.launch.submission import exactly_once
from pitools.run import run_folder
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.client import Client
from pitools.slurm.states import UNKNOWN, is_finished
from pitools.store.version_state import refresh

Count = Callable[[], int]

_LOOK_EVERY_S, _LOOK_LATER_S = 0.5, 5.0  # at first, and when it takes long: many files are looked at
_ASK_EVERY_S = 15.0
_UNHEARD_S = 60.0  # so long a result may need to show on a shared file system after its task is gone
_HINT = "what is done is kept: run the same command again, and it goes on with the rest"


class _Queue(Protocol):
    """What runs the tasks."""

    def state(self) -> str:
        """The state of all of them together, as Slurm says it."""

    def cancel(self) -> None:
        """End what is left."""


def run(
    site: Site,
    name: str,
    function: Callable[..., object],
    calls: Sequence[tuple[Any, ...]],
    *,
    work: Path,
    total: int,
    done: Count,
    cpus: int = 1,
) -> None:
    """Call `function` with each of `calls` in an array task of its own, and wait until all have returned.

    work: a folder that all nodes see. total, done: pieces of work in all, and how many are done now; shown on the way.
    A site without Slurm runs the tasks here, all at once, with their logs in `work`. Interrupted, or when a task fails,
    it cancels the others. Raises what a task raises, ClusterError for one that ends without a word, and what the site's
    Slurm raises.
    """
    request = Request(name=_name(name), command="true", cpus_per_task=cpus, workdir=str(Path.cwd()))
    plan = planning.make(request, site, f"--site {site.name}")
    arguments = ([function] * len(calls), *zip(*calls, strict=True))
    if site.scheduler == "none":
        local = submitit.LocalExecutor(work / "submitit")
        local.update_parameters(timeout_min=max(1, plan.job.time_s // 60))
        jobs = local.map_array(_told, *arguments)
        queue: _Queue = _Here(jobs)
    else:
        slurm = client(site)
        jobs = _executor(plan, site, slurm).map_array(_told, *arguments)
        queue = _Slurm(slurm, str(jobs[0].job_id).partition("_")[0])
    try:
        with bar("array", total, unit="jobs") as advance:
            _attend(jobs, queue, advance, done)
    except BaseException:
        with contextlib.suppress(PitError):
            queue.cancel()
        raise


def _executor(plan: planning.Plan, site: Site, slurm: Client) -> PitExecutor:
    """An executor whose array is a run like any other, to be looked at with `pit launch`."""
    run_dir = Path(plan.runs) / run_folder.new_id(plan.name)
    exactly_once.require_cluster(site, slurm)
    try:
        return PitExecutor(plan, site, run_dir, lambda script: slurm.submit(path=str(script)).job_id)
    except OSError as error:
        raise os_error(error, run_dir) from error


class _Here:
    """Processes of this machine."""

    def __init__(self, jobs: Sequence[submitit.Job[Any]]) -> None:
        self._jobs = jobs

    def state(self) -> str:
        return "COMPLETED" if all(job.done() for job in self._jobs) else "RUNNING"

    def cancel(self) -> None:
        for job in self._jobs:
            job.cancel()


class _Slurm:
    """One array job."""

    def __init__(self, slurm: Client, job_id: str) -> None:
        self._slurm, self._id = slurm, job_id

    def state(self) -> str:
        with contextlib.suppress(TryLater):
            return self._slurm.state_of([self._id])[self._id]
        return "RUNNING"  # as far as we know: Slurm did not answer

    def cancel(self) -> None:
        self._slurm.cancel([self._id])


def _attend(jobs: Sequence[submitit.Job[Any]], queue: _Queue, advance: Callable[[int], None], done: Count) -> None:
    began = asked = time.monotonic()
    shown, gone = 0, 0.0
    left = list(jobs)
    while left:
        time.sleep(min(_LOOK_LATER_S, max(_LOOK_EVERY_S, (time.monotonic() - began) / 60)))
        count = done()
        advance(count - shown)
        shown = count
        for job in [job for job in left if job.paths.result_pickle.exists()]:
            _check(job)
            left.remove(job)
        if left and time.monotonic() - asked > _ASK_EVERY_S:
            asked, state = time.monotonic(), queue.state()
            ended = is_finished(state) or state == UNKNOWN
            gone = (gone or asked) if ended else 0.0
            if gone:
                refresh(left[0].paths.folder)
            if gone and asked - gone > _UNHEARD_S:
                where = str(left[0].paths.folder.parent)
                raise ClusterError(
                    f"array task {left[0].job_id} ended without a word: {state}", where=where, hint=_HINT
                )


def _check(job: submitit.Job[Any]) -> None:
    """Raises what a task raised."""
    failed = job.exception()
    if failed is not None:
        last = (str(failed).strip().splitlines() or ["it says no more"])[-1]
        where = str(job.paths.folder.parent)
        raise ClusterError(f"array task {job.job_id} failed: {last}", where=where, hint=_HINT) from failed
    told = job.result()
    if isinstance(told, PitError):
        raise told


def _told(function: Callable[..., object], *arguments: Any) -> PitError | None:
    """Call it on the node. An error of ours is handed back whole, others as submitit does it."""
    try:
        function(*arguments)
    except PitError as error:
        return error
    return None


def _name(text: str) -> str:
    return re.sub(r"[^a-z0-9_-]", "-", text.lower())[:48]
