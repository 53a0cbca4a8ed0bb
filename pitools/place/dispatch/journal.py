"""A job's journal: what was decided and seen, one line each, and what the job is in consequence.

An intent is written before it is acted on, with a name that only this act has (`<job-id>.<n>`, which becomes the job's
name in Slurm and its run's folder): whoever finds an intent with no outcome looks for that name before anything else.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Literal

import msgspec

from pitools.core.errors import DataError
from pitools.core.fs import os_error, sync_dir
from pitools.core.record import Record, decode_json
from pitools.launch.request import Request


class What(StrEnum):
    """What an entry tells: something decided, or something seen."""

    SUBMIT = "submit"
    SUBMITTED = "submitted"
    REFUSED = "refused"
    STARTED = "started"
    WITHDRAW = "withdraw"
    VOID = "void"
    SWEPT = "swept"
    UNKNOWN = "unknown"
    ENDED = "ended"
    CANCELLED = "cancelled"


class Queued(Record, frozen=True, kw_only=True, tag="pit.queued/1"):
    """What was asked for. sites: where it may run, each a site's name. tier: for the order over all sites.

    owner: with the request's name, whose earlier jobs tell how long it will run.
    """

    job_id: str
    request: Request
    sites: tuple[str, ...]
    submitted: str
    tier: str = ""
    owner: str = ""
    request_text: str = ""


class Entry(Record, frozen=True, kw_only=True, tag="pit.place-entry/1"):
    """One line of a job's journal: something decided (submit, withdraw) or seen (the rest) of ticket n.

    pool: `site/partition`. slurm_id, state: Slurm's number and word. why: for people.
    """

    t: str
    what: What
    n: int = 0
    pool: str = ""
    slurm_id: str = ""
    state: str = ""
    exit_code: int | None = None
    why: str = ""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """One ticket as its journal tells it.

    state: intended (sent, no answer known), waiting, started, taken (being taken back), void (will never run, since
    `voided`), over (has run). is_swept: nothing is left to do about it.
    unknown: since when it runs, or ran, and Slurm does not know it, and in which way (`doubt`, see
    launch/tickets/ticket_state.py).
    """

    n: int
    name: str
    pool: str
    placed: str
    state: Literal["intended", "waiting", "started", "taken", "void", "over"] = "intended"
    slurm_id: str = ""
    voided: str = ""
    unknown: str = ""
    doubt: str = ""
    is_swept: bool = False
    why: str = ""

    @property
    def site(self) -> str:
        """The site whose queue it is in."""
        return self.pool.partition("/")[0]

    @property
    def is_live(self) -> bool:
        """Whether it may still run, or runs."""
        return self.state not in ("void", "over")

    @property
    def is_running(self) -> bool:
        """Whether the job is this ticket's for good: it has leave, and nothing else may have it."""
        return self.state == "started"


State = Literal["queued", "ticketed", "running", "done", "failed", "withdrawn"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One job of the queue with all that its journal says.

    end: the entry that ended it. refusals: what sites would not take. is_cancelled: somebody wants it withdrawn. lost:
    tickets, by number, that somebody answers for: they will not run.
    """

    asked: Queued
    path: Path
    tickets: tuple[Ticket, ...] = ()
    state: State = "queued"
    end: Entry | None = None
    refusals: tuple[Entry, ...] = ()
    is_cancelled: bool = False
    lost: frozenset[int] = frozenset()

    @property
    def job_id(self) -> str:
        """Its name in the queue, and the first part of its tickets' names."""
        return self.asked.job_id

    @property
    def live(self) -> list[Ticket]:
        """Its tickets that may still run, or run."""
        return [ticket for ticket in self.tickets if ticket.is_live]

    @property
    def is_over(self) -> bool:
        """Whether nothing will happen to it any more."""
        return self.state in ("done", "failed", "withdrawn")


def read_journal(path: Path) -> list[Entry]:
    """The whole lines of a journal; a last one that power loss cut short was never acted on. Raises DataError."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    try:
        return [decode_json(line, Entry) for line in lines]
    except msgspec.DecodeError as error:
        raise DataError(f"not a journal of the queue: {error}", where=str(path)) from error


def append(job: Job, entry: Entry) -> Job:
    """Write one entry, durably where nothing else would tell it again; returns the job as it then is."""
    path = job.path / "journal.jsonl"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                os.ftruncate(descriptor, path.read_bytes().rfind(b"\n") + 1)
            line = msgspec.json.encode(entry) + b"\n"
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            # What nobody but the journal knows. All else can be seen again, or follows from the tickets' own words.
            if entry.what == "submit":
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if not size:
            sync_dir(path.parent)
    except OSError as error:
        raise os_error(error, path) from error
    return fold(job, [entry])


def fold(job: Job, entries: Iterable[Entry]) -> Job:
    """The job after these entries."""
    tickets = {ticket.n: ticket for ticket in job.tickets}
    end, refusals = job.end, list(job.refusals)
    for entry in entries:
        if entry.what is What.SUBMIT:
            tickets[entry.n] = Ticket(
                n=entry.n, name=f"{job.job_id}.{entry.n}", pool=entry.pool, placed=entry.t, why=entry.why
            )
        elif entry.what is What.CANCELLED:
            end = entry
        elif ticket := tickets.get(entry.n):
            tickets[entry.n] = _ticket(ticket, entry)
            end = entry if entry.what is What.ENDED else end
        refusals += [entry] if entry.what is What.REFUSED else []
    known = tuple(tickets.values())
    return msgspec.structs.replace(job, tickets=known, end=end, refusals=tuple(refusals), state=_state(known, end))


def _ticket(ticket: Ticket, entry: Entry) -> Ticket:
    """The ticket after an entry about it."""
    changes: dict[str, object] = {"slurm_id": entry.slurm_id or ticket.slurm_id, "why": entry.why or ticket.why}
    match entry.what:
        case What.SUBMITTED:
            changes["state"] = "waiting"
        case What.STARTED:
            changes |= {"state": "started", "unknown": ""}
        case What.UNKNOWN:
            changes |= {"unknown": entry.t, "doubt": entry.state}
        case What.WITHDRAW:
            changes |= {"state": "taken"}
        case What.VOID | What.REFUSED:
            changes |= {"state": "void", "voided": entry.t}
        case What.SWEPT:
            changes["is_swept"] = True
        case What.ENDED:
            changes["state"] = "over"
    return msgspec.structs.replace(ticket, **changes)


def _state(tickets: Sequence[Ticket], end: Entry | None) -> State:
    if end is not None:
        if end.what is What.CANCELLED or end.state == "CANCELLED":
            return "withdrawn"
        return "done" if end.state == "COMPLETED" else "failed"
    if any(ticket.is_running for ticket in tickets):
        return "running"
    return "ticketed" if any(ticket.is_live for ticket in tickets) else "queued"
