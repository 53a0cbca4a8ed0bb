"""Submit a run's next job exactly once, even if sbatch is interrupted or any process involved is killed.

    intent on disk ──▶ sbatch ──┬─ job id ───────────────────────────────▶ job.json
                          ▲     ├─ refused ─▶ remove the intent, raise
                          │     ├─ busy or unreachable ─▶ back off ─┐
                          │     └─ no or incomplete answer ─▶ query ─── job found ─▶ job.json
                          └────────────────────────── no such job ──┘

The job has a unique name, so Slurm can be queried for it; a process that finds an intent without a job queries first.
One process at a time holds the run's lock. Its sbatch inherits the lock and writes its output to the locked file, so no
process queries while sbatch lives. slurmctld may process a request after its sender has timed out: an empty answer
counts only after a delay. If two jobs result all the same, the grant lets only one of them run: see grant.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from pitools.core import timestamps, units
from pitools.core.errors import ClusterError, DataError, PitError, TryLater
from pitools.core.fs import from_os_error
from pitools.core.locks import lock_if_supported, open_lock_file
from pitools.launch import slurm_cache
from pitools.launch.slurm_cache import store
from pitools.launch.submission import find_job, submissions
from pitools.run import run_folder
from pitools.run.run_folder import JobRef
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.client import Client
from pitools.slurm.errors import OutcomeUnknown, is_busy
from pitools.slurm.records import Submitted

# For an interactive caller, unless PIT_RETRY_FOR is set; periodic callers such as cron pass less.
INTERACTIVE_RETRY_S = 300.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0
# ClusterName by connection, queried once per process: a query is two calls, for each job of a queue. Not cached on
# disk, where the name would outlive a cluster that is set up again.
_cluster_names: dict[str, str] = {}


def submit_once(
    run_dir: Path,
    site: Site,
    *,
    args: Sequence[str] = (),
    job_number: int | None = None,
    retry_for_s: float | None = None,
) -> JobRef:
    """Submit `<run>/script.sbatch` as the run's next job and return the job; first complete an interrupted submission.

    Args:
        args: further sbatch arguments, such as `--exclude=n[1-2]`; they take precedence over the script's directives.
        job_number: of the submission; a repeated call with a number returns the same job. None: the next number.
        retry_for_s: how long to retry while Slurm is busy or silent, in seconds; None: PIT_RETRY_FOR, or five minutes.
            0: call sbatch once, and query once.

    Raises ConfigError for a run folder that others could have changed, ClusterError if Slurm refuses the job, TryLater
    or Unreachable if Slurm did not get the request; nothing is submitted then. Raises OutcomeUnknown if Slurm may have
    the job: a later call finds out.
    """
    run_folder.require_own_run(run_dir, group_above=site.paths.runs_access == "group")
    deadline = time.monotonic() + (_default_retry_s() if retry_for_s is None else retry_for_s)
    job_number = submissions.next_job_number(run_dir) if job_number is None else job_number
    with submission_lock(run_dir, deadline) as answer:
        if job := submissions.read_job(run_dir, job_number):
            submissions.require_same_cluster(site, job)
            _write_latest_job(run_dir, job)  # the submitting process may have been killed before this write
            return job
        return Submission(run_dir, site, job_number, tuple(args), answer, deadline).submit_until_known()


def _default_retry_s() -> float:
    text = os.environ.get("PIT_RETRY_FOR", "")
    return units.parse_duration(text) if text else INTERACTIVE_RETRY_S


def find_submitted(run_dir: Path, site: Site, job_number: int) -> JobRef | None:
    """Return the run's job with this number, querying Slurm once if its id is unknown. Submits nothing.

    None if there was no submission, or it certainly made no job. Raises OutcomeUnknown while that is uncertain.
    """
    deadline = time.monotonic()
    with submission_lock(run_dir, deadline) as answer:
        if job := submissions.read_job(run_dir, job_number):
            return job
        return Submission(run_dir, site, job_number, (), answer, deadline).recover_previous()


@contextlib.contextmanager
def submission_lock(run_dir: Path, deadline: float) -> Iterator[BinaryIO]:
    """Hold the run's submission lock, and yield its file for sbatch to inherit. Raises TryLater on time-out.

    The lock is held until sbatch ends, even if this process is killed.
    """
    path = run_dir / "jobs" / ".sbatch-output"
    try:
        path.parent.mkdir(mode=0o755, exist_ok=True)
        file = os.fdopen(open_lock_file(path, os.O_APPEND), "a+b", buffering=0)
    except OSError as error:
        raise from_os_error(error, path) from error
    with file:
        # Without file locks two processes may submit two jobs of one name: the grant lets only one run.
        if not lock_if_supported(file.fileno(), path, timeout_s=deadline - time.monotonic()):
            problem = "another process is submitting the run's next job"
            raise TryLater(problem, where=str(run_dir), hint="run the same command again later")
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # background processes of ssh may still have the file open


class Submission:
    """One submission, made by the process that holds the run's lock."""

    def __init__(
        self, run_dir: Path, site: Site, job_number: int, args: tuple[str, ...], answer: BinaryIO, deadline: float
    ) -> None:
        self.run_dir, self.site, self.job_number, self.args = run_dir, site, job_number, args
        self.answer, self.deadline = answer, deadline
        self.name, self.path = submissions.slurm_job_name(run_dir, job_number), submissions.job_dir(run_dir, job_number)
        self.task = ""  # of the array of this name
        self.slurm = client(site)

    def submit_until_known(self) -> JobRef:
        """Retry sbatch until Slurm has the job, and return the job. Raises the errors of `submit_once`."""
        if previous := self.recover_previous():
            return previous
        require_cluster(self.site, self.slurm)
        submitted, tries = None, 0
        while submitted is None:
            # Before the intent is written: an earlier sbatch's output must not count as this one's.
            self.answer.truncate(0)
            intent = submissions.record_intent(self.run_dir, self.job_number, self.site, self.args)
            try:
                submitted = self._call_sbatch()
            except OutcomeUnknown as error:
                self._report(f"{error}; querying Slurm for job {self.name}")
                submitted = self._find_by_name(intent, 0.0, error)
                if submitted is None:
                    self._report(f"Slurm has no job {self.name}; submitting again")
            except PitError as error:
                if not is_busy(error) or time.monotonic() >= self.deadline:
                    self._remove_intent()
                    raise
                self._report(f"{error}; retrying")
            if submitted is None:
                # Full jitter: many clients that were refused together must not retry together.
                pause = random.uniform(0, min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(tries, 10)))  # noqa: S311
                time.sleep(max(0.0, min(pause, self.deadline - time.monotonic())))
                tries += 1
        return self._record_job(submitted)

    def recover_previous(self) -> JobRef | None:
        """Return the job of an interrupted submission; None if there certainly is none."""
        intent = run_folder.read_record(self.path / "intent.json", submissions.SubmissionIntent)
        if intent is None:
            return None
        submissions.require_same_cluster(self.site, intent)
        if intent.site != self.site.name:
            problem = f'job {self.name} was submitted at site "{intent.site}" (expected "{self.site.name}")'
            raise ClusterError(problem, where=str(self.path), hint=f"name that site: --site {intent.site}")
        self.name, self.task = intent.name, intent.task
        if submitted := self.slurm.read_answer(self.answer):
            return self._record_job(submitted)
        outcome_error = OutcomeUnknown(
            f"job {self.name}: an earlier sbatch was interrupted, and Slurm shows no such job", where=str(self.run_dir)
        )
        # sbatch has ended, since this process has the lock. Its end time is unknown if its parent was killed.
        last_tried_s = (datetime.now(UTC) - datetime.fromisoformat(intent.last_tried_at)).total_seconds()
        submitted = self._find_by_name(intent, max(0.0, last_tried_s - self.site.connection.timeout_s), outcome_error)
        if submitted:
            return self._record_job(submitted)
        self.name, self.task = submissions.slurm_job_name(self.run_dir, self.job_number), ""
        return None

    def _call_sbatch(self) -> Submitted:
        # sbatch uses the last of two equal flags on its command line.
        sbatch_args = [*self.args, f"--job-name={self.name}"]
        try:
            return self.slurm.submit(path=str(self.run_dir / "script.sbatch"), args=sbatch_args, answer=self.answer)
        except OutcomeUnknown:
            if submitted := self.slurm.read_answer(self.answer):  # sbatch printed the id before it was interrupted
                return submitted
            raise

    def _find_by_name(
        self, intent: submissions.SubmissionIntent, sbatch_ended_s: float, outcome_error: OutcomeUnknown
    ) -> Submitted | None:
        job_id = find_job.find_by_name(
            self.slurm,
            self.name,
            self.path,
            intended=datetime.fromisoformat(intent.intended_at),
            sbatch_ended_s=sbatch_ended_s,
            deadline=self.deadline,
            outcome_error=outcome_error,
            task=self.task,
        )
        if job_id is None:
            return None
        self._report(f"job {self.name} is job {job_id}")
        return Submitted(job_id=job_id)

    def _record_job(self, submitted: Submitted) -> JobRef:
        cluster = submitted.cluster or self.site.slurm.cluster or _cluster_name(self.site, self.slurm)
        job = JobRef(
            job_id=submitted.job_id,
            site=self.site.name,
            submitted=timestamps.now_rfc3339(),
            cluster=cluster,
            job_number=self.job_number,
        )
        try:
            run_folder.write_record(self.path / "job.json", job, durable=True)
            _write_latest_job(self.run_dir, job)
        except PitError as error:
            self.cancel_unrecorded(submitted.job_id, error)
            raise
        run_folder.append_event(self.run_dir, "submitted", job_id=job.job_id, job_number=job.job_number)
        with contextlib.suppress(Exception):  # cached states expire anyway; the job is submitted and recorded
            slurm_cache.invalidate(self.site)
        return job

    def cancel_unrecorded(self, job_id: str, error: PitError) -> None:
        """Cancel a job that could not be recorded in its run's folder. Raises OutcomeUnknown if that fails too."""
        try:
            self.slurm.cancel([job_id])
        except PitError:
            problem = f"job {job_id} is queued, but could not be recorded: {error}"
            raise OutcomeUnknown(problem, where=str(self.run_dir), hint="run the same command again later") from error
        self._remove_intent()

    def _remove_intent(self) -> None:
        """Remove the folder of a failed submission."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _report(self, message: str) -> None:
        print(f"pit: {message}", file=sys.stderr, flush=True)


def require_cluster(site: Site, slurm: Client) -> None:
    """Raise ClusterError if another cluster answers than the site's. Call before a submission; cached per process."""
    expected = site.slurm.cluster
    actual = _cluster_name(site, slurm) if expected else ""
    if actual and actual.lower() != expected.lower():
        problem = f'site "{site.name}": cluster "{actual}" answers (expected "{expected}")'
        hint = f"pit site check --live {site.name}; see slurm.conf, slurm.bin and slurm.cluster of its file"
        raise ClusterError(problem, where=f"site {site.name}", hint=hint)


def _cluster_name(site: Site, slurm: Client) -> str:
    """Return the ClusterName of the slurmctld that answers for a site; "" while Slurm does not answer."""
    key = store.cache_key(site)
    if key not in _cluster_names:
        with contextlib.suppress(PitError):
            _cluster_names[key] = slurm.config().cluster
    return _cluster_names.get(key, "")


def _write_latest_job(run_dir: Path, job: JobRef) -> None:
    latest = None
    with contextlib.suppress(DataError):
        latest = run_folder.read_record(run_dir / "job.json", JobRef)
    if latest is None or latest.job_number < job.job_number:
        run_folder.write_record(run_dir / "job.json", job)
