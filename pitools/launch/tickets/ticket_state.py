"""Determine a ticket's state from Slurm's answers and the ticket's run folder.

Shared and remote sites differ only in how both are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from pitools.core.errors import NoSpace, PitError
from pitools.launch import exit_codes
from pitools.launch.submission import grant
from pitools.run.attempt_records import Decision
from pitools.run.run_folder import AttemptExit
from pitools.slurm.client import Client
from pitools.slurm.records import SlurmJob
from pitools.slurm.states import UNKNOWN, is_final

ABSENT = "ABSENT"
FORGOTTEN = "FORGOTTEN"
_SIGNAL_BASE = 128


class FolderNotCreated(NoSpace):
    """There is no room for the ticket's run folder: no job of the ticket can exist."""


@contextmanager
def before_submission() -> Iterator[None]:
    """Raise NoSpace as FolderNotCreated, in work that precedes the call of sbatch."""
    try:
        yield
    except NoSpace as error:
        raise FolderNotCreated(error.message, where=error.where, hint=error.hint) from error


class TicketState(NamedTuple):
    """The state of a ticket.

    state: Slurm's job state; ABSENT: in neither slurmctld nor the folder's records; UNKNOWN: submitted, but not in
    slurmctld; FORGOTTEN: nor with an end in a working accounting. grant: see grant.py. job: as in squeue, or None.
    """

    state: str
    job_id: str = ""
    grant: str = ""
    exit_code: int | None = None
    job: SlurmJob | None = None

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, according to Slurm."""
        return is_final(self.state)


def jobs_by_name(jobs: Iterable[SlurmJob], grants: Mapping[str, str]) -> dict[str, SlurmJob]:
    """Return the job of each name; of several after a submission of unknown outcome, the granted job.

    grants: name → grant token.
    """
    by_name: dict[str, SlurmJob] = {}
    for job in jobs:
        if job.name not in by_name or grants.get(job.name) == grant.grant_token(job.raw_id):
            by_name[job.name] = job
    return by_name


def recorded_exit_code(attempt_exit: AttemptExit | None, decision: Decision | None) -> int | None:
    """Return the exit code in the records of a run's last attempt, None before its end.

    STOPPED_FOR_RESUME if the run itself decided that it is to go on after its time limit, whatever its program's code.
    """
    if decision and (decision.action, decision.kind) == ("defer", "time-limit"):
        return exit_codes.STOPPED_FOR_RESUME
    return attempt_exit.exit_code if attempt_exit else None


def state_of_listed(job: SlurmJob, grant: str, exit_code: int | None) -> TicketState:
    """Return the state of a ticket in slurmctld's list. exit_code: as recorded by its run, None if not recorded."""
    # The script's record counts: a slurmctld that was down at the job's end may list it as running for minutes.
    state = "COMPLETED" if exit_code == 0 else job.state
    return TicketState(state, job.raw_id, grant, exit_code if is_final(state) else None, job)


def state_of_unlisted(job_id: str, grant: str, exit_code: int | None) -> TicketState:
    """Return the state of a ticket that slurmctld does not list. job_id: as recorded in its folder."""
    state = UNKNOWN if job_id else ABSENT
    # From 128 on a signal ended the run: only Slurm could report whether by a cancel, a preemption or a time limit.
    if exit_code is not None and exit_code < _SIGNAL_BASE:
        state = "FAILED" if exit_code else "COMPLETED"
    return TicketState(state, job_id, grant, exit_code)


def state_without_id(grant: str, exit_code: int | None) -> TicketState:
    """Return the state of a ticket that slurmctld does not list, and whose recorded job id is unreadable."""
    state = state_of_unlisted("", grant, exit_code)
    return state._replace(state=UNKNOWN) if state.state == ABSENT else state


def with_accounting(slurm: Client, states: Mapping[str, TicketState]) -> dict[str, TicketState]:
    """Return the states of tickets not in slurmctld, by name, with their ends from accounting: at most one sacct."""
    open_ids = {state.job_id: name for name, state in states.items() if not state.is_over and state.job_id}
    updated = dict(states)
    if not open_ids:
        return updated
    try:
        accounted = slurm.accounting(list(open_ids), all_starts=False)
    except PitError:  # no accounting: the folder's records are all there is
        return updated
    for name in open_ids.values():
        updated[name] = updated[name]._replace(state=FORGOTTEN)
    for job in accounted:
        name = open_ids.get(job.raw_id, "")
        # A job that slurmctld has dropped neither waits nor runs, whatever state slurmdbd has; and its id may have been
        # reused.
        if name and job.name == name and is_final(job.state):
            updated[name] = updated[name]._replace(state=job.state, exit_code=job.exit_code)
    return updated
