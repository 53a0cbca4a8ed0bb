"""The jobs of the queue while a tick works on them, and what it learns of their tickets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from pitools.core import timestamps
from pitools.core.errors import DataError
from pitools.launch.submission import grant
from pitools.launch.tickets.ticket_state import ABSENT, FORGOTTEN, Seen
from pitools.place.dispatch import store, wait_log
from pitools.place.dispatch.journal import Entry, Job, Ticket, What, append

# How long a job that had leave may be unknown to a slurmctld and an accounting that answer, before it counts as ended
# by the former: it asks its nodes every SlurmdTimeout / 3, 100 s by default, and ends what it does not know there.
ORPHAN_S = 120.0


class Board:
    """Every job that is not put away. Entries are written through it, by any thread."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._lock = threading.Lock()
        found, self.broken = store.jobs(place)
        self.jobs: dict[str, Job] = {job.job_id: job for job in found}

    def note(
        self,
        job: Job,
        what: What,
        n: int = 0,
        *,
        why: str = "",
        pool: str = "",
        slurm_id: str = "",
        state: str = "",
        exit_code: int | None = None,
        began: str = "",
    ) -> Job:
        """Write an entry; returns the job as it then is. began: when its ticket started, if Slurm said."""
        entry = Entry(
            t=timestamps.now(), what=what, n=n, why=why, pool=pool, slurm_id=slurm_id, state=state, exit_code=exit_code
        )
        with self._lock:
            before = self.jobs[job.job_id]
            if ticket := next((one for one in before.tickets if one.n == n), None):
                wait_log.note(ticket, what, began, is_cancelled=state == "CANCELLED")
            after = self.jobs[job.job_id] = append(before, entry)
        return after

    def intend(self, job_id: str, pool: str, why: str) -> tuple[Job, Ticket]:
        """Write down a ticket that is about to be submitted, with a number of its own: the only one of the job's."""
        with self._lock:
            job = self.jobs[job_id]
            assert not job.live, f"{job_id} has a ticket"
            entry = Entry(t=timestamps.now(), what=What.SUBMIT, n=len(job.tickets) + 1, pool=pool, why=why)
            job = self.jobs[job_id] = append(job, entry)
        return job, job.tickets[-1]

    def found(self, job: Job, ticket: Ticket) -> Job:
        """Note that the ticket's site has answered for it: who gave it up as lost was wrong. Returns the job."""
        with self._lock:
            job = self.jobs[job.job_id] = store.unmark(self.jobs[job.job_id], ticket.n)
        return job

    def tickets(self, site: str) -> Iterator[tuple[Job, Ticket]]:
        """The tickets at a site that are not done with, each with its job."""
        for job in list(self.jobs.values()):
            for ticket in job.tickets:
                if ticket.site == site and not ticket.is_swept:
                    yield job, ticket

    def put_away(self) -> None:
        """Put away the jobs that are over and of which no site knows anything any more."""
        for job in list(self.jobs.values()):
            if job.is_over and all(ticket.is_swept for ticket in job.tickets):
                store.close(self.place, job)
                del self.jobs[job.job_id]

    @property
    def errors(self) -> list[DataError]:
        """What is wrong with jobs that could not be read."""
        return self.broken


class Due(NamedTuple):
    """What a look asks for at its site: tickets to take back, and jobs of Slurm to end, id → name.

    gone: names of tickets that never ran and that Slurm does not know any more. fetch: tickets that have run. lift:
    those that Slurm began and put back, by their ids, with nodes that were chosen for their first start.
    """

    take: list[tuple[Job, Ticket]]
    end: dict[str, str]
    gone: list[str]
    fetch: list[tuple[Job, Ticket]]
    lift: list[tuple[Job, str]]


def settle(board: Board, site: str, asked: str, seen: dict[str, Seen], up_since: str = "") -> Due:
    """Write down what was seen at a site when it was asked at `asked`; returns what is to be done there.

    up_since: since when it has answered without a break, as journals write times.
    """
    due = Due([], {}, [], [], [])
    now = timestamps.now()
    for job, ticket in board.tickets(site):
        # Of one that was placed meanwhile the answer knows nothing. Placed later than now: a clock was set back.
        if not asked <= ticket.placed <= now:
            _settle(board, job, ticket, seen.get(ticket.name, Seen(ABSENT)), due, up_since)
    return due


def _settle(board: Board, job: Job, ticket: Ticket, seen: Seen, due: Due, up_since: str) -> None:
    # Only who is in slurmctld's own list waits or runs, whatever accounting was told last.
    is_known = seen.job is not None or seen.is_over
    may_run = grant.may_run(seen.leave)
    if ticket.is_live and (is_known or not may_run):
        # First of all: a tick that is killed behind this must not leave the mark for the site's next silence.
        job = board.found(job, ticket)
    if ticket.state == "void":
        if not is_known or seen.is_over:
            board.note(job, What.SWEPT, ticket.n)
            due.gone.extend([] if may_run else [ticket.name])  # what one left that ran all the same is not ours to end
        else:
            due.end[seen.job_id] = ticket.name
    elif ticket.state == "over":
        due.fetch.append((job, ticket))
    elif ticket.state == "taken":
        due.take.append((job, ticket))
    elif may_run and seen.is_over:
        code = 0 if seen.state == "COMPLETED" else seen.exit_code
        job = board.note(
            job, What.ENDED, ticket.n, state=seen.state, exit_code=code, slurm_id=seen.job_id, began=_began(seen)
        )
        due.fetch.append((job, ticket))
    elif seen.state == "CANCELLED" and not seen.leave and ticket.state == "waiting":
        why = f"somebody cancelled it at {ticket.site}"
        job = board.note(job, What.ENDED, ticket.n, state=seen.state, why=why, slurm_id=seen.job_id)
        due.fetch.append((job, ticket))
    elif not may_run and (seen.is_over or not is_known or seen.leave == grant.NO):
        # It is certain to have done nothing, and its word makes certain that it never will.
        due.take.append((job, ticket))
    elif is_known:
        _advance(board, job, ticket, seen, due)
    elif not ticket.unknown or ticket.doubt != seen.state:
        why = f"it ran, and {ticket.site} does not know what became of it; if you do: pit place cancel --lost"
        board.note(job, What.UNKNOWN, ticket.n, slurm_id=seen.job_id, state=seen.state, why=why)
    elif seen.state == FORGOTTEN and _age_s(max(ticket.unknown, up_since)) > ORPHAN_S:
        # slurmctld came back without its latest jobs, and has ended what nodes still ran of them. Without accounting it
        # may as well have run to its end, and nobody remembers: then it is for people to say.
        board.note(job, What.VOID, ticket.n, why=f"{ticket.site} forgot it while it ran")


def _advance(board: Board, job: Job, ticket: Ticket, seen: Seen, due: Due) -> None:
    """A ticket that Slurm knows and that is not over: how far it has come."""
    if seen.state == "PENDING" and grant.may_run(seen.leave) and job.asked.request.topology != "none":
        due.lift.append((job, seen.job_id))
    if ticket.state == "intended":
        job = board.note(job, What.SUBMITTED, ticket.n, slurm_id=seen.job_id)
    if (ticket.state != "started" or ticket.unknown) and (seen.state != "PENDING" or grant.may_run(seen.leave)):
        board.note(job, What.STARTED, ticket.n, slurm_id=seen.job_id, began=_began(seen))


def _began(seen: Seen) -> str:
    return seen.job.start if seen.job else ""


def _age_s(moment: str) -> float:
    return time.time() - datetime.fromisoformat(moment).timestamp()
