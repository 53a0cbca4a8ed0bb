"""submitit's SlurmExecutor with pitools' script, Slurm client and rank logs.

Stock submitit renders one fixed script, calls `sbatch` by name, and drops the subclass when it submits an array
(1.5.4: `_internal_process_submissions` builds a literal SlurmExecutor). Each override below replaces one of these;
`tests/launch/test_executor.py` checks them against the installed version.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import submitit
from submitit.core import core, utils
from submitit.slurm import slurm

from pitools.core import timestamps
from pitools.core.errors import DataError, PitError, UsageError
from pitools.core.fs import from_os_error, write_atomic
from pitools.launch import plan as planning
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart
from pitools.site.connect import client
from pitools.site.load import load_site
from pitools.site.schema import Site
from pitools.site.template import rank_command
from pitools.slurm.states import is_final
from pitools.slurm.transport import run_command


class PitPaths(utils.JobPaths):  # type: ignore[misc]  # submitit's classes are untyped to mypy
    """submitit's files, with a rank's output in its attempt's folder instead of under the job's id."""

    @property
    def stdout(self) -> Path:
        """The rank's log in the newest attempt of its job; the job's own output before the first attempt."""
        run_dir, (_, _, index) = self.folder.parent, str(self.job_id).partition("_")
        for attempt in reversed(run_folder.attempt_dirs(run_dir)):
            log = attempt / "logs" / f"{self.task_id}.out"
            if log.exists() and self._is_attempt(attempt, index):
                return Path(log)
        return Path(run_dir / f"slurm-{self.job_id}.out")

    @property
    def stderr(self) -> Path:
        """The same file as `stdout`: a rank has one log for both."""
        return self.stdout

    def _is_attempt(self, attempt: Path, index: str) -> bool:
        if index:
            return attempt.name.partition(".")[0] == index
        with contextlib.suppress(DataError):
            start = run_folder.read_record(attempt / "start.json", AttemptStart)
            return start is not None and start.job_id == self.job_id
        return False


class SiteWatcher(slurm.SlurmInfoWatcher):  # type: ignore[misc]
    """submitit's cache of job states, queried by the site's Slurm client: submitit would call `sacct` by its name."""

    def __init__(self, site: Site) -> None:
        super().__init__(delay_s=60)
        self._site = site

    def update(self) -> None:
        """Query the states of all unfinished jobs at once. A failed query keeps the known states."""
        self._last_status_check = time.time()
        job_ids = sorted(self._registered - self._finished)
        with contextlib.suppress(PitError):
            states = client(self._site).state_of(job_ids)
            self._num_calls += 1
            self._info_dict.update({job_id: {"JobID": job_id, "State": state} for job_id, state in states.items()})
            self._finished.update(job_id for job_id, state in states.items() if is_final(state))


@lru_cache
def _watcher(site_name: str) -> SiteWatcher:
    return SiteWatcher(load_site(site_name))


class PitJob(submitit.SlurmJob):  # type: ignore[misc]
    """submitit's job. Its `stdout()` returns the rank's output; states and cancels go to the site of its run."""

    def __init__(self, folder: Path, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        self._run_dir = Path(folder).parent
        super().__init__(folder=folder, job_id=job_id, tasks=tasks)
        self._paths = PitPaths(folder, job_id=job_id, task_id=self.task_id)

    @property
    def watcher(self) -> SiteWatcher:
        """The states of all jobs of the site. Raises DataError for a folder that is no run."""
        return _watcher(planning.load_plan(self._run_dir).site)

    def cancel(self, check: bool = True) -> None:
        """End the job, or the task of an array. check: raise the errors of scancel."""
        with contextlib.nullcontext() if check else contextlib.suppress(PitError):
            client(load_site(planning.load_plan(self._run_dir).site)).cancel([self.job_id])

    def _interrupt(self, timeout: bool = False) -> None:
        """Send the signals of a preemption, or with `timeout` that before the time limit. Raises as scancel."""
        transport = client(load_site(planning.load_plan(self._run_dir).site)).transport
        for name in ("USR2",) if timeout else ("TERM", "USR2"):
            run_command(transport, ["scancel", f"--signal={name}", self.job_id], env={})


class PitExecutor(submitit.SlurmExecutor):  # type: ignore[misc]  # submitit's classes are untyped to mypy
    """Submits a plan's ranks (`submit_plan`), or callables as its jobs (submitit's `submit`, `map_array`, `batch`).

    Its folder is a run: `pit launch show` and `logs` take it. A failed callable is not repeated.

    Args:
        plan, site: the resources of every job, and the site that it runs on.
        run_dir: the run's folder; pickles and results of callables go to `<run_dir>/submitit`.
        submit_script: submits a script to the site and returns the job id. Raises ClusterError or Unreachable.

    Raises ConfigError for a run_dir that another user created or can write to.
    """

    job_class = PitJob

    def __init__(self, plan: planning.Plan, site: Site, run_dir: Path, submit_script: Callable[[Path], str]) -> None:
        super().__init__(run_dir / "submitit", python=plan.python)
        self.plan, self.run_dir, self.submit_script = plan, run_dir, submit_script
        self.site = planning.site_of_plan(plan, site)
        self.at_a_time = 0  # tasks of an array that may run at once; 0 for no limit
        if run_dir.exists():
            run_folder.require_own_run(run_dir, group_above=site.paths.runs_access == "group")
        else:
            run_folder.make_run_dir(run_dir, site.paths.runs_access)
        # submitit's limit for time-outs, in minutes.
        self.parameters["time"] = max(1, plan.job.time_s // 60)

    @classmethod
    def affinity(cls) -> int:
        """Return submitit's "available": a site over ssh needs no `srun` on this machine."""
        return 2

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        raise UsageError(
            f"{', '.join(kwargs)}: set by the plan", hint="change the request, then: pit launch plan REQUEST"
        )

    def submit_plan(self) -> str:
        """Submit one job in which the ranks run the plan itself, and return its id."""
        return str(self._submit_command(rank_command(self.site, "plan", f"{self.run_dir}/plan.json")).job_id)

    @property
    def _submitit_command_str(self) -> str:
        return rank_command(self.site, "submitit", str(self.folder))

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        count = self.parameters.get("map_count", 0)
        limit = f"%{self.at_a_time}" if self.at_a_time else ""
        array = f"0-{count - 1}{limit}" if count else ""
        return planning.render_script(self.plan, self.site, run_dir=str(self.run_dir), payload=command, array=array)

    def _num_tasks(self) -> int:
        return self.plan.job.nodes * self.plan.job.tasks_per_node

    def _submit_command(self, command: str) -> core.Job[Any]:
        self._make_run()
        script = self.run_dir / "script.sbatch"
        # Written atomically: `pit launch tick` may submit a script that has no job yet.
        write_atomic(script, self._make_submission_file_text(command, ""), durable=False)
        job_id = self.submit_script(script)
        recorded = run_folder.read_record(self.run_dir / "job.json", run_folder.JobRef)
        if recorded is None or recorded.job_id != job_id:
            ref = run_folder.JobRef(job_id=job_id, site=self.site.name, submitted=timestamps.now_rfc3339())
            run_folder.write_record(self.run_dir / "job.json", ref)
        return self.job_class(folder=self.folder, job_id=job_id, tasks=list(range(self._num_tasks())))

    def _make_run(self) -> None:
        """Write plan.json and the first event, unless the folder is a run already. Raises NoSpace, ClusterError."""
        path = self.run_dir / "plan.json"
        if path.exists():
            return
        try:
            (self.run_dir / "attempts").mkdir(0o755, exist_ok=True)
            write_atomic(path, msgspec.json.format(msgspec.json.encode(self.plan), indent=1))
            run_folder.record_created(self.run_dir, self.site.name)
        except OSError as error:
            raise from_os_error(error, self.run_dir) from error

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        # Pickles are code: a user who can write one here can run code as this user.
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if len(delayed_submissions) == 1:
            return list(super()._internal_process_submissions(delayed_submissions))
        pickles = []
        for delayed in delayed_submissions:
            path = self.folder / f"{uuid.uuid4().hex}.pkl"
            delayed.set_timeout(self.parameters["time"], self.max_num_timeout)
            delayed.dump(path)
            pickles.append(path)
        self.parameters["map_count"] = len(delayed_submissions)
        try:
            array = self._submit_command(self._submitit_command_str)
        finally:
            del self.parameters["map_count"]
        jobs = [
            self.job_class(folder=self.folder, job_id=f"{array.job_id}_{index}", tasks=list(range(array.num_tasks)))
            for index in range(len(pickles))
        ]
        for job, path in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(path, "submitted_pickle")
        return jobs
