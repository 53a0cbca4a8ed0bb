"""submitit's SlurmExecutor with our script, our Slurm client, and the exit code of the ranks.

Stock submitit renders one fixed script, calls `sbatch` by name, and forgets a subclass when it submits an array
(1.5.4: `_internal_process_submissions` builds a literal SlurmExecutor). It also stores the callable under the job's id,
and only then: a job whose id nobody lived to hear would find none. Each of the overrides below is one of these;
`tests/launch/test_executor.py` holds them against the installed version.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import submitit
from submitit.core import core, utils

from pitools.core.errors import UsageError
from pitools.core.files import write_atomic
from pitools.launch import plan as planning
from pitools.site.model import Site
from pitools.site.template import container_prefix


def payload(site: Site, folder: str) -> str:
    """What each rank runs, as shell text: our entry to submitit's, behind the site's container where there is one."""
    python = '"$PIT_PYTHON"' if site.container.runtime == "none" else "python3"
    words = [*container_prefix(site), python, "-u -m pitools.launch.worker submitit", shlex.quote(folder)]
    return " ".join(words)


class PitExecutor(submitit.SlurmExecutor):  # type: ignore[misc]  # submitit's classes are untyped to mypy
    """Submits callables as jobs of one plan; `submit`, `map_array` and `batch` are submitit's.

    Args:
        plan, site: what every job asks for, and how it is spelled.
        run_dir: the run's folder; pickles and results go to `<run_dir>/submitit`.
        send: gives a script to the site and returns the job id. Raises ClusterError or Unreachable.
    """

    def __init__(self, plan: planning.Plan, site: Site, run_dir: Path, send: Callable[[Path], str]) -> None:
        super().__init__(run_dir / "submitit", python=plan.python)
        self.plan, self.site, self.run_dir, self.send = plan, site, run_dir, send
        # Pickles are code: whoever could put one here would run as this user.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # submitit counts time-outs against this, in minutes.
        self.parameters["time"] = max(1, plan.job.time_s // 60)

    @classmethod
    def affinity(cls) -> int:
        """Always available: the site may be reached over ssh, with no `srun` here."""
        return 2

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        raise UsageError(
            f"{', '.join(kwargs)}: resources come from the plan", hint="change the request, and plan again"
        )

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        count = self.parameters.get("map_count", 0)
        array = f"0-{count - 1}" if count else ""
        return planning.script(
            self.plan, self.site, run_dir=str(self.run_dir), payload=payload(self.site, str(self.folder)), array=array
        )

    def _num_tasks(self) -> int:
        return self.plan.job.nodes * self.plan.job.tasks_per_node

    def _submit_command(self, command: str) -> core.Job[Any]:
        script = self.run_dir / "script.sbatch"
        # Whole or absent: where a script is there, `pit launch tick` may find that nobody has submitted it.
        write_atomic(script, self._make_submission_file_text(command, ""), durable=False)
        job_id = self.send(script)
        return self.job_class(folder=self.folder, job_id=job_id, tasks=list(range(self._num_tasks())))

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        if len(delayed_submissions) == 1:
            return [self._submit_one(delayed_submissions[0])]
        pickles = []
        for delayed in delayed_submissions:
            path = self.folder / f"{uuid.uuid4().hex}.pkl"
            delayed.set_timeout(self.parameters["time"], self.max_num_timeout)
            delayed.dump(path)
            pickles.append(path)
        self.parameters["map_count"] = len(delayed_submissions)
        try:
            array = self._submit_command("")
        finally:
            del self.parameters["map_count"]
        jobs = [
            self.job_class(folder=self.folder, job_id=f"{array.job_id}_{index}", tasks=list(range(array.num_tasks)))
            for index in range(len(pickles))
        ]
        for job, path in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(path, "submitted_pickle")
        return jobs

    def _submit_one(self, delayed: utils.DelayedSubmission) -> core.Job[Any]:
        """Unlike submitit, keep the callable under a name that needs no job id: whoever finds the job can link it."""
        path = self.folder / f"{uuid.uuid4().hex}_submitted.pkl"
        delayed.set_timeout(self.parameters["time"], self.max_num_timeout)
        delayed.dump(path)
        job = self._submit_command("")
        with contextlib.suppress(FileExistsError):
            os.link(path, job.paths.submitted_pickle)
        return job
