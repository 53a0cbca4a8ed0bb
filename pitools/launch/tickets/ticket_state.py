"""What is known of a ticket, put together from what Slurm says and what the ticket's own folder does.

Near and far sites differ in how both are read, and in nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pitools.core.errors import PitError
from pitools.launch.submission import grant
from pitools.slurm.client import Client
from pitools.slurm.records import SlurmJob
from pitools.slurm.states import UNKNOWN, is_finished

ABSENT = "ABSENT"
FORGOTTEN = "FORGOTTEN"
_SIGNAL_BASE = 128


class TicketState(NamedTuple):
    """What is known of a ticket. leave: its word, see grant.py. job: as squeue shows it, if it does.

    state: Slurm's word; ABSENT: nobody knows it; UNKNOWN: it was queued, and Slurm cannot say what became of it;
    FORGOTTEN: nor has Slurm's accounting, which answers, ever heard of its end.
    """

    state: str
    job_id: str = ""
    grant: str = ""
    exit_code: int | None = None
    job: SlurmJob | None = None

    @property
    def is_over(self) -> bool:
        """Whether Slurm will not run it any more, as far as Slurm knows."""
        return is_finished(self.state)


def jobs_by_name(jobs: Iterable[SlurmJob], grants: Mapping[str, str]) -> dict[str, SlurmJob]:
    """The job of each name; of several that a doubtful submission made, the one that has leave. grants: name →
    leave."""
    found: dict[str, SlurmJob] = {}
    for job in jobs:
        if job.name not in found or grants.get(job.name) == grant.grant_token(job.raw_id):
            found[job.name] = job
    return found


def state_of_listed(job: SlurmJob, grant: str, exit_code: int | None) -> TicketState:
    """A ticket in slurmctld's list. exit_code: as its run wrote it down, if it did."""
    # Its script says so itself; a slurmctld that was away at that moment may believe otherwise for minutes.
    state = "COMPLETED" if exit_code == 0 else job.state
    return TicketState(state, job.raw_id, grant, exit_code if is_finished(state) else None, job)


def state_of_unlisted(job_id: str, grant: str, exit_code: int | None) -> TicketState:
    """A ticket that slurmctld does not list. job_id: as its folder has it."""
    state = UNKNOWN if job_id else ABSENT
    if (
        exit_code is not None and exit_code < _SIGNAL_BASE
    ):  # else who ended it, and to what end, Slurm would have to say
        state = "FAILED" if exit_code else "COMPLETED"
    return TicketState(state, job_id, grant, exit_code)


def state_without_id(grant: str, exit_code: int | None) -> TicketState:
    """A ticket that slurmctld does not list and that was queued, under an id that cannot be read."""
    seen = state_of_unlisted("", grant, exit_code)
    return seen._replace(state=UNKNOWN) if seen.state == ABSENT else seen


def with_accounting(slurm: Client, states: Mapping[str, TicketState]) -> dict[str, TicketState]:
    """What slurmctld has forgotten (name → seen), with the ends that its accounting remembers: at most one sacct."""
    open_ids = {seen.job_id: name for name, seen in states.items() if not seen.is_over and seen.job_id}
    found = dict(states)
    if not open_ids:
        return found
    try:
        kept = slurm.accounting(list(open_ids), attempts=False)
    except PitError:  # no accounting: the folder has said what there is
        return found
    for name in open_ids.values():
        found[name] = found[name]._replace(state=FORGOTTEN)
    for job in kept:
        name = open_ids.get(job.raw_id, "")
        # What slurmctld has forgotten does not wait or run, whatever the database was told last; and the number may be
        # another job's by now.
        if name and job.name == name and is_finished(job.state):
            found[name] = found[name]._replace(state=job.state, exit_code=job.exit_code)
    return found
