"""A run's next job is submitted exactly once, however often sbatch is cut off, and whoever is killed on the way.

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
from pitools.core.fs import os_error
from pitools.core.locks import open_shared, taken
from pitools.launch import slurm_cache
from pitools.launch.slurm_cache import store
from pitools.launch.submission import find_job, submissions
from pitools.run import run_folder
from pitools.run.run_folder import JobRef
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.client import Client
from pitools.slurm.errors import Unanswered, is_busy
from pitools.slurm.records import Submitted

# Of a person who waits, unless PIT_PATIENCE says otherwise; whoever comes again by itself, as cron does, needs little.
PATIENCE_S = 300.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
# What slurmctld told this process, by the way it was reached: to ask is two calls more, which a queue of jobs would
# make at each. Not kept on disk, where it would outlive a cluster that is set up anew under the same name.
_CLUSTERS: dict[str, str] = {}


def send(
    run_dir: Path, site: Site, *, args: Sequence[str] = (), number: int | None = None, patience_s: float | None = None
) -> JobRef:
    """Submit `<run>/script.sbatch` as the run's next job and return it; one that was begun before is finished first.

    Args:
        args: more of sbatch's, such as `--exclude=n[1-2]`; they come before the script's own.
        number: the job that there is to be; called again it returns the same one. None: the one after the newest.
        patience_s: how long to go on where Slurm is busy or silent; None: PIT_PATIENCE, or five minutes. With 0 it is
            asked once, and looked once.

    Raises ConfigError for a run that others could have changed, ClusterError when Slurm refuses, TryLater or
    Unreachable when it has not got it: nothing is left of the attempt then. Raises Unanswered when it may have it: the
    same call later finds out.
    """
    run_folder.require_own(run_dir, group_above=site.paths.runs_access == "group")
    until = time.monotonic() + (_patience_s() if patience_s is None else patience_s)
    number = submissions.due(run_dir) if number is None else number
    with _alone(run_dir, until) as answer:
        if known := submissions.known(run_dir, number):
            submissions.check_cluster(site, known)
            _as_newest(run_dir, known)  # in case that its sender was killed in between
            return known
        return _Sending(run_dir, site, number, tuple(args), answer, until).end()


def _patience_s() -> float:
    text = os.environ.get("PIT_PATIENCE", "")
    return units.seconds(text) if text else PATIENCE_S


def find(run_dir: Path, site: Site, number: int) -> JobRef | None:
    """The run's job of this number, if it was submitted: looked for once where nobody has heard. Submits nothing.

    None where it was never begun, or is certain to have come to nothing. Raises Unanswered while that is not certain.
    """
    until = time.monotonic()
    with _alone(run_dir, until) as answer:
        if known := submissions.known(run_dir, number):
            return known
        return _Sending(run_dir, site, number, (), answer, until).begun_before()


@contextlib.contextmanager
def _alone(run_dir: Path, until: float) -> Iterator[BinaryIO]:
    """The run's lock, as a file to give to sbatch: it is held for as long as that lives. Raises TryLater."""
    path = run_dir / "jobs" / ".sending"
    try:
        path.parent.mkdir(mode=0o755, exist_ok=True)
        file = os.fdopen(open_shared(path, os.O_APPEND), "a+b", buffering=0)
    except OSError as error:
        raise os_error(error, path) from error
    with file:
        # Where there are no locks two may submit, under one name: their jobs settle which of them runs.
        if not taken(file.fileno(), path, wait_s=until - time.monotonic()):
            what = "another process is submitting the run's next job"
            raise TryLater(what, where=str(run_dir), hint="run the same command again later")
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # whatever ssh has left in the background does not keep it


class _Sending:
    """One submission, by the process that has the run's lock."""

    def __init__(
        self, run_dir: Path, site: Site, number: int, args: tuple[str, ...], answer: BinaryIO, until: float
    ) -> None:
        self.run_dir, self.site, self.number, self.args = run_dir, site, number, args
        self.answer, self.until = answer, until
        self.name, self.path = submissions.name(run_dir, number), submissions.at(run_dir, number)
        self.slurm = client(site)

    def end(self) -> JobRef:
        """Submit until there is a job. Raises as `send` does."""
        if begun := self.begun_before():
            return begun
        require_cluster(self.site, self.slurm)
        found, tried = None, 0
        while found is None:
            # Before there is an intent: what the one before was answered is no answer to it.
            self.answer.truncate(0)
            intent = submissions.intend(self.run_dir, self.number, self.site, self.args)
            try:
                found = self._sbatch()
            except Unanswered as error:
                self._say(f"{error}; looking for job {self.name}")
                found = self._look(intent, 0.0, error)
                if found is None:
                    self._say(f"Slurm has no job {self.name}: submitting it again")
            except PitError as error:
                if not is_busy(error) or time.monotonic() >= self.until:
                    self._forget()
                    raise
                self._say(f"{error}; trying again")
            if found is None:
                # Full jitter: of many that were turned away together no two come back together.
                pause = random.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(tried, 10)))  # noqa: S311
                time.sleep(max(0.0, min(pause, self.until - time.monotonic())))
                tried += 1
        return self._note(found)

    def begun_before(self) -> JobRef | None:
        """The job of somebody who got no further than sbatch; None where there is certain to be none."""
        intent = run_folder.read(self.path / "intent.json", submissions.Intent)
        if intent is None:
            return None
        submissions.check_cluster(self.site, intent)
        if intent.site != self.site.name:
            what = f'job {self.name} was begun at site "{intent.site}", and not at "{self.site.name}"'
            raise ClusterError(what, where=str(self.path), hint=f"name that site: --site {intent.site}")
        if told := self.slurm.answered(self.answer):
            return self._note(told)
        doubt = Unanswered(f"job {self.name} was begun before, and Slurm shows none", where=str(self.run_dir))
        # sbatch is over, for we have the lock. When it ended is not known of one whose parent was killed.
        ago = (datetime.now(UTC) - datetime.fromisoformat(intent.tried)).total_seconds()
        found = self._look(intent, max(0.0, ago - self.site.reach.timeout_s), doubt)
        return self._note(found) if found else None

    def _sbatch(self) -> Submitted:
        # Of what is said twice on sbatch's command line the last counts.
        words = [*self.args, f"--job-name={self.name}"]
        try:
            return self.slurm.submit(path=str(self.run_dir / "script.sbatch"), args=words, answer=self.answer)
        except Unanswered:
            if told := self.slurm.answered(self.answer):  # it had been said before sbatch was cut off
                return told
            raise

    def _look(self, intent: submissions.Intent, over_s: float, doubt: Unanswered) -> Submitted | None:
        job_id = find_job.look(
            self.slurm,
            self.name,
            self.path,
            intended=datetime.fromisoformat(intent.t),
            over_s=over_s,
            until=self.until,
            doubt=doubt,
        )
        if job_id is None:
            return None
        self._say(f"found job {self.name}: {job_id}")
        return Submitted(job_id=job_id)

    def _note(self, found: Submitted) -> JobRef:
        cluster = found.cluster or self.site.slurm.cluster or _cluster(self.site, self.slurm)
        job = JobRef(
            job_id=found.job_id, site=self.site.name, submitted=timestamps.now(), cluster=cluster, number=self.number
        )
        try:
            run_folder.write(self.path / "job.json", job, durable=True)
            _as_newest(self.run_dir, job)
        except PitError as error:
            self._take_back(found.job_id, error)
            raise
        with contextlib.suppress(OSError):
            run_folder.note(self.run_dir, "submitted", job_id=job.job_id, number=job.number)
        with contextlib.suppress(Exception):  # what is kept grows old by itself; the job is there, whatever fails
            slurm_cache.changed(self.site)
        return job

    def _take_back(self, job_id: str, error: PitError) -> None:
        """Cancel a job that its run's folder could not take note of: it would be nobody's. Raises Unanswered."""
        try:
            self.slurm.cancel([job_id])
        except PitError:
            what = f"job {job_id} is queued, and its run cannot take note of it: {error}"
            raise Unanswered(what, where=str(self.run_dir), hint="run the same command again later") from error
        self._forget()

    def _forget(self) -> None:
        """Leave nothing of a submission that came to nothing."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _say(self, what: str) -> None:
        print(f"pit: {what}", file=sys.stderr, flush=True)


def require_cluster(site: Site, slurm: Client) -> None:
    """Raise ClusterError where another cluster answers in place of the site's: its nodes are not meant.

    To be called before a job is submitted; asked once in a process.
    """
    said = site.slurm.cluster
    answered = _cluster(site, slurm) if said else ""
    if answered and answered.lower() != said.lower():
        what = f'site "{site.name}": cluster "{answered}" answers (expected "{said}")'
        hint = f"pit site check --live {site.name}; see slurm.conf, slurm.bin and slurm.cluster of its file"
        raise ClusterError(what, where=f"site {site.name}", hint=hint)


def _cluster(site: Site, slurm: Client) -> str:
    """What the cluster that answers for a site calls itself; "" while nobody answers."""
    way = store.key(site)
    if way not in _CLUSTERS:
        with contextlib.suppress(PitError):
            _CLUSTERS[way] = slurm.config().cluster
    return _CLUSTERS.get(way, "")


def _as_newest(run_dir: Path, job: JobRef) -> None:
    before = None
    with contextlib.suppress(DataError):
        before = run_folder.read(run_dir / "job.json", JobRef)
    if before is None or before.number < job.number:
        run_folder.write(run_dir / "job.json", job)
