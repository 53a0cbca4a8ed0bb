"""The queue's jobs in one tick, and all writing to their journals."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from pitools.core import timestamps
from pitools.core.errors import PitError, TryLater
from pitools.place.dispatch import store, wait_recorder
from pitools.place.dispatch.journal import EntryKind, JournalEntry, QueueJob, QueueTicket, append_entry
from pitools.run.attempt_records import Cause


class QueueState:
    """The jobs that are not archived, in one tick. Thread-safe. errors: of jobs that cannot be read or archived."""

    def __init__(self, queue_dir: Path) -> None:
        self.queue_dir = queue_dir
        self._lock = threading.Lock()
        self._is_closed = False
        jobs, broken = store.read_jobs(queue_dir)
        self.errors: list[PitError] = [*broken]
        self.jobs: dict[str, QueueJob] = {job.job_id: job for job in jobs}

    def close(self) -> None:
        """End all writing: an action that outlives its tick must not journal what a later tick has decided anew."""
        with self._lock:
            self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise TryLater("the tick has ended", where=str(self.queue_dir))

    def append_entry(
        self,
        job: QueueJob,
        kind: EntryKind,
        ticket_number: int = 0,
        *,
        reason: str = "",
        pool: str = "",
        slurm_id: str = "",
        state: str = "",
        exit_code: int | None = None,
        started_at: str = "",
        run_dir: str = "",
        cause: Cause | None = None,
    ) -> QueueJob:
        """Append an entry to a job's journal and return the job after it. started_at: start time by Slurm, if known."""
        entry = JournalEntry(
            t=timestamps.now_rfc3339(),
            kind=kind,
            ticket=ticket_number,
            reason=reason,
            pool=pool,
            slurm_id=slurm_id,
            state=state,
            exit_code=exit_code,
            run_dir=run_dir,
            cause=cause,
        )
        with self._lock:
            self._require_open()
            old_job = self.jobs[job.job_id]
            if ticket := next((one for one in old_job.tickets if one.number == ticket_number), None):
                wait_recorder.record_wait_end(ticket, kind, started_at, is_cancelled=state == "CANCELLED")
            after = self.jobs[job.job_id] = append_entry(old_job, entry)
        return after

    def record_intent(
        self, job_id: str, pool: str, runs_dir: str, reason: str, data: dict[str, str]
    ) -> tuple[QueueJob, QueueTicket]:
        """Journal a ticket with a new number before its submission; the job must have no live ticket."""
        with self._lock:
            self._require_open()
            job = self.jobs[job_id]
            assert not job.live, f"{job_id} has a ticket"
            entry = JournalEntry(
                t=timestamps.now_rfc3339(),
                kind=EntryKind.SUBMIT,
                ticket=len(job.tickets) + 1,
                pool=pool,
                runs_dir=runs_dir,
                data=data,
                reason=reason,
            )
            job = self.jobs[job_id] = append_entry(job, entry)
        return job, job.tickets[-1]

    def clear_lost(self, job: QueueJob, ticket: QueueTicket) -> QueueJob:
        """Remove a ticket's mark `lost`, as its site has answered for it. Returns the job."""
        with self._lock:
            job = self.jobs[job.job_id] = store.remove_lost_mark(self.jobs[job.job_id], ticket.number)
        return job

    def tickets(self, site: str) -> Iterator[tuple[QueueJob, QueueTicket]]:
        """Yield the tickets at a site that are not settled, each with its job."""
        for job in list(self.jobs.values()):
            for ticket in job.tickets:
                if ticket.site == site and not ticket.is_settled:
                    yield job, ticket

    def archive_finished(self) -> None:
        """Archive the jobs that are over and whose tickets are all settled; add what fails to `errors`."""
        for job in list(self.jobs.values()):
            if job.is_over and all(ticket.is_settled for ticket in job.tickets):
                try:
                    store.archive(self.queue_dir, job)
                except PitError as error:
                    self.errors.append(error)
                else:
                    del self.jobs[job.job_id]
