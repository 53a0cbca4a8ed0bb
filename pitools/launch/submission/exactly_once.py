"""Submit a run's next job exactly once, even if sbatch is cut off or any process involved is killed.

    intent on disk ──▶ sbatch ──┬─ an id ────────────────────────────────▶ job.json
                          ▲     ├─ refused ─▶ intent gone, error
                          │     ├─ busy, or never reached ─▶ wait ──┐
                          │     └─ no answer, or half of one ─▶ look ─── the job is there ─▶ job.json
                          └──────────────────────── certain to be none ─┘

The job's name is its own, so it can be looked for; who finds an intent without a job looks first. One process at a time
has the run's lock, and its sbatch has it too: while that lives nobody looks, and what it answers is in the locked file.
slurmctld may still be digesting a request when its sender has given up, so that there is none is only believed some
time after. Should it be wrong all the same, the jobs themselves settle which of them runs: see grant.py.
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
from pitools.core.locks import open_lock_file, try_lock
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
RETRY_FOR_S = 300.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0
# What slurmctld told this process, by the way it was reached: to ask is two calls more, which a queue of jobs would
# make at each. Not kept on disk, where it would outlive a cluster that is set up anew under the same name.
_cluster_names: dict[str, str] = {}


def submit_once(
    run_dir: Path, site: Site, *, args: Sequence[str] = (), number: int | None = None, retry_for_s: float | None = None
) -> JobRef:
    """Submit `<run>/script.sbatch` as the run's next job and return it; one that was begun before is finished first.

    Args:
        args: more of sbatch's, such as `--exclude=n[1-2]`; they come before the script's own.
        number: the job that there is to be; called again it returns the same one. None: the one after the newest.
        retry_for_s: how long to go on where Slurm is busy or silent; None: PIT_RETRY_FOR, or five minutes. With 0 it is
            asked once, and looked once.

    Raises ConfigError for a run that others could have changed, ClusterError when Slurm refuses, TryLater or
    Unreachable when it has not got it: nothing is left of the attempt then. Raises Unanswered when it may have it: the
    same call later finds out.
    """
    run_folder.require_own_run(run_dir, group_above=site.paths.runs_access == "group")
    deadline = time.monotonic() + (_default_retry_s() if retry_for_s is None else retry_for_s)
    number = submissions.next_number(run_dir) if number is None else number
    with submission_lock(run_dir, deadline) as answer:
        if job := submissions.read_job(run_dir, number):
            submissions.require_same_cluster(site, job)
            _write_latest_job(run_dir, job)  # in case that its sender was killed in between
            return job
        return Submission(run_dir, site, number, tuple(args), answer, deadline).submit_until_known()


def _default_retry_s() -> float:
    text = os.environ.get("PIT_RETRY_FOR", "")
    return units.parse_duration(text) if text else RETRY_FOR_S


def find_submitted(run_dir: Path, site: Site, number: int) -> JobRef | None:
    """The run's job of this number, if it was submitted: looked for once where nobody has heard. Submits nothing.

    None where it was never begun, or is certain to have come to nothing. Raises Unanswered while that is not certain.
    """
    deadline = time.monotonic()
    with submission_lock(run_dir, deadline) as answer:
        if job := submissions.read_job(run_dir, number):
            return job
        return Submission(run_dir, site, number, (), answer, deadline).recover_previous()


@contextlib.contextmanager
def submission_lock(run_dir: Path, deadline: float) -> Iterator[BinaryIO]:
    """The run's lock, as a file to give to sbatch: it is held for as long as that lives. Raises TryLater."""
    path = run_dir / "jobs" / ".sending"
    try:
        path.parent.mkdir(mode=0o755, exist_ok=True)
        file = os.fdopen(open_lock_file(path, os.O_APPEND), "a+b", buffering=0)
    except OSError as error:
        raise from_os_error(error, path) from error
    with file:
        # Where there are no locks two may submit, under one name: their jobs settle which of them runs.
        if not try_lock(file.fileno(), path, wait_s=deadline - time.monotonic()):
            what = "another process is submitting the run's next job"
            raise TryLater(what, where=str(run_dir), hint="run the same command again later")
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # whatever ssh has left in the background does not keep it


class Submission:
    """Make one submission, in the process that holds the run's lock."""

    def __init__(
        self, run_dir: Path, site: Site, number: int, args: tuple[str, ...], answer: BinaryIO, until: float
    ) -> None:
        self.run_dir, self.site, self.number, self.args = run_dir, site, number, args
        self.answer, self.deadline = answer, until
        self.name, self.path = submissions.slurm_job_name(run_dir, number), submissions.job_dir(run_dir, number)
        self.slurm = client(site)

    def submit_until_known(self) -> JobRef:
        """Submit until there is a job. Raises as `submit_once` does."""
        if previous := self.recover_previous():
            return previous
        require_cluster(self.site, self.slurm)
        submitted, tries = None, 0
        while submitted is None:
            # Before there is an intent: what the one before was answered is no answer to it.
            self.answer.truncate(0)
            intent = submissions.record_intent(self.run_dir, self.number, self.site, self.args)
            try:
                submitted = self._call_sbatch()
            except OutcomeUnknown as error:
                self._report(f"{error}; looking for job {self.name}")
                submitted = self._find_by_name(intent, 0.0, error)
                if submitted is None:
                    self._report(f"Slurm has no job {self.name}: submitting it again")
            except PitError as error:
                if not is_busy(error) or time.monotonic() >= self.deadline:
                    self._remove_intent()
                    raise
                self._report(f"{error}; trying again")
            if submitted is None:
                # Full jitter: of many that were turned away together no two come back together.
                pause = random.uniform(0, min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(tries, 10)))  # noqa: S311
                time.sleep(max(0.0, min(pause, self.deadline - time.monotonic())))
                tries += 1
        return self._record_job(submitted)

    def recover_previous(self) -> JobRef | None:
        """Return the job of an interrupted submission; None where there is certainly none."""
        intent = run_folder.read_record(self.path / "intent.json", submissions.SubmissionIntent)
        if intent is None:
            return None
        submissions.require_same_cluster(self.site, intent)
        if intent.site != self.site.name:
            what = f'job {self.name} was begun at site "{intent.site}", and not at "{self.site.name}"'
            raise ClusterError(what, where=str(self.path), hint=f"name that site: --site {intent.site}")
        if submitted := self.slurm.read_answer(self.answer):
            return self._record_job(submitted)
        outcome_error = OutcomeUnknown(
            f"job {self.name} was begun before, and Slurm shows none", where=str(self.run_dir)
        )
        # sbatch is over, for we have the lock. When it ended is not known of one whose parent was killed.
        last_tried_s = (datetime.now(UTC) - datetime.fromisoformat(intent.last_tried_at)).total_seconds()
        submitted = self._find_by_name(intent, max(0.0, last_tried_s - self.site.connection.timeout_s), outcome_error)
        return self._record_job(submitted) if submitted else None

    def _call_sbatch(self) -> Submitted:
        # Of what is said twice on sbatch's command line the last counts.
        sbatch_args = [*self.args, f"--job-name={self.name}"]
        try:
            return self.slurm.submit(path=str(self.run_dir / "script.sbatch"), args=sbatch_args, answer=self.answer)
        except OutcomeUnknown:
            if submitted := self.slurm.read_answer(self.answer):  # it had been said before sbatch was cut off
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
        )
        if job_id is None:
            return None
        self._report(f"found job {self.name}: {job_id}")
        return Submitted(job_id=job_id)

    def _record_job(self, submitted: Submitted) -> JobRef:
        cluster = submitted.cluster or self.site.slurm.cluster or _cluster_name(self.site, self.slurm)
        job = JobRef(
            job_id=submitted.job_id,
            site=self.site.name,
            submitted=timestamps.now_rfc3339(),
            cluster=cluster,
            number=self.number,
        )
        try:
            run_folder.write_record(self.path / "job.json", job, durable=True)
            _write_latest_job(self.run_dir, job)
        except PitError as error:
            self.cancel_unrecorded(submitted.job_id, error)
            raise
        with contextlib.suppress(OSError):
            run_folder.append_event(self.run_dir, "submitted", job_id=job.job_id, number=job.number)
        with contextlib.suppress(Exception):  # what is kept grows old by itself; the job is there, whatever fails
            slurm_cache.invalidate(self.site)
        return job

    def cancel_unrecorded(self, job_id: str, error: PitError) -> None:
        """Cancel a job that its run's folder could not take note of: it would be nobody's. Raises Unanswered."""
        try:
            self.slurm.cancel([job_id])
        except PitError:
            what = f"job {job_id} is queued, and its run cannot take note of it: {error}"
            raise OutcomeUnknown(what, where=str(self.run_dir), hint="run the same command again later") from error
        self._remove_intent()

    def _remove_intent(self) -> None:
        """Remove the folder of a failed submission."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _report(self, what: str) -> None:
        print(f"pit: {what}", file=sys.stderr, flush=True)


def require_cluster(site: Site, slurm: Client) -> None:
    """Raise ClusterError where another cluster answers in place of the site's: its nodes are not meant.

    To be called before a job is submitted; asked once in a process.
    """
    expected = site.slurm.cluster
    actual = _cluster_name(site, slurm) if expected else ""
    if actual and actual.lower() != expected.lower():
        what = f'site "{site.name}": cluster "{actual}" answers (expected "{expected}")'
        hint = f"pit site check --live {site.name}; see slurm.conf, slurm.bin and slurm.cluster of its file"
        raise ClusterError(what, where=f"site {site.name}", hint=hint)


def _cluster_name(site: Site, slurm: Client) -> str:
    """Return the ClusterName that answers for a site; "" while Slurm does not answer."""
    key = store.cache_key(site)
    if key not in _cluster_names:
        with contextlib.suppress(PitError):
            _cluster_names[key] = slurm.config().cluster
    return _cluster_names.get(key, "")


def _write_latest_job(run_dir: Path, job: JobRef) -> None:
    latest = None
    with contextlib.suppress(DataError):
        latest = run_folder.read_record(run_dir / "job.json", JobRef)
    if latest is None or latest.number < job.number:
        run_folder.write_record(run_dir / "job.json", job)
