"""A job's journal: one line for each decision and each observation, and their fold into the job's state.

An intent is written before its action. It names the ticket `<job-id>.<n>`, which is the name of its Slurm job and of
its run folder: after a crash, the outcome of an intent is found by this name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Literal

import msgspec

from pitools.core import journal
from pitools.core.record import Record
from pitools.launch.request import Request
from pitools.place.types import site_of
from pitools.run.attempt_records import Cause

# A job ends once so many of its tickets ended before their grant: its script, or a prolog, fails everywhere.
MAX_FAILED_STARTS = 3


class EntryKind(StrEnum):
    """The kind of an entry: a decision or an observation."""

    SUBMIT = "submit"
    SUBMITTED = "submitted"
    REFUSED = "refused"
    DEFERRED = "deferred"
    HELD = "held"
    STARTED = "started"
    WITHDRAW = "withdraw"
    VOID = "void"
    SETTLED = "settled"
    UNKNOWN = "unknown"
    STOPPED = "stopped"
    ENDED = "ended"
    CANCELLED = "cancelled"


class QueuedRequest(Record, frozen=True, kw_only=True, tag="pit.queued-request/1"):
    """A queued request. sites: names of the sites where it may run. tier: `low`, `high` or "", for the order.

    owner: run times are learnt from earlier jobs of the same owner and name.
    """

    job_id: str
    request: Request
    sites: tuple[str, ...]
    queued_at: str
    tier: str = ""
    owner: str = ""
    request_text: str = ""


class JournalEntry(Record, frozen=True, kw_only=True, tag="pit.journal-entry/1"):
    """One line of a job's journal: a decision (submit, withdraw) or an observation (the rest) on a ticket.

    ticket: its number. pool: `site/partition`. runs_dir: the absolute folder of runs at the site, of a `submit`.
    data: name → folder here of each dataset, of a `submit`. slurm_id, state: Slurm's id and state. reason: text for
    `list`. run_dir, cause: of a `settled` ticket whose run was stopped: its folder here, and why it was.
    """

    t: str
    kind: EntryKind
    ticket: int = 0
    pool: str = ""
    runs_dir: str = ""
    data: dict[str, str] = {}
    slurm_id: str = ""
    state: str = ""
    exit_code: int | None = None
    reason: str = ""
    run_dir: str = ""
    cause: Cause | None = None


class QueueTicket(msgspec.Struct, frozen=True, kw_only=True):
    """One ticket, folded from the journal.

    state: intended (sent, no answer yet), pending, started, withdrawing, void (will never run, since
    `voided_at`), over (has run), stopped (has run, and the job goes on from its checkpoints). is_settled: nothing is
    left to do. unknown_since: since when Slurm does not know the ticket although it was started; doubt_reason: in which
    way (launch/tickets/ticket_state.py). runs_dir: the folder of its run folder, whatever the site file says later.
    data: its datasets, name → folder here. end_state: Slurm's state if it was stopped, or if it ended, or was stuck,
    before its grant. held_reason: Slurm's reason if a person has to release it. is_deferred: void because the site
    could not take it for now (busy, disk full). run_dir, cause: of a settled one that was stopped, as in the journal.
    """

    number: int
    name: str
    pool: str
    submitted_at: str
    runs_dir: str
    data: dict[str, str] = {}
    state: Literal["intended", "pending", "started", "withdrawing", "void", "over", "stopped"] = "intended"
    slurm_id: str = ""
    voided_at: str = ""
    end_state: str = ""
    held_reason: str = ""
    is_deferred: bool = False
    unknown_since: str = ""
    doubt_reason: str = ""
    is_settled: bool = False
    reason: str = ""
    run_dir: str = ""
    cause: Cause | None = None

    @property
    def site(self) -> str:
        """The name of the ticket's site."""
        return site_of(self.pool)

    @property
    def is_live(self) -> bool:
        """Whether the ticket may still run, or runs."""
        return self.state not in ("void", "over", "stopped")

    @property
    def is_queued(self) -> bool:
        """Whether the ticket may still start."""
        return self.is_live and not self.is_running

    @property
    def is_running(self) -> bool:
        """Whether the ticket has claimed the job's grant."""
        return self.state == "started"


QueueJobState = Literal["queued", "submitted", "running", "done", "failed", "cancelled"]


class QueueJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job of the queue, folded from its journal.

    end_entry: the entry that ended the job. refusals: refused submissions. is_cancelled: `pit place cancel` was called.
    declared_lost: numbers of the tickets of `pit place declare-lost`.
    """

    request: QueuedRequest
    path: Path
    tickets: tuple[QueueTicket, ...] = ()
    state: QueueJobState = "queued"
    end_entry: JournalEntry | None = None
    refusals: tuple[JournalEntry, ...] = ()
    is_cancelled: bool = False
    declared_lost: frozenset[int] = frozenset()

    @property
    def job_id(self) -> str:
        """The job's id, the first part of its tickets' names."""
        return self.request.job_id

    @property
    def live(self) -> list[QueueTicket]:
        """The tickets that may still run, or run."""
        return [ticket for ticket in self.tickets if ticket.is_live]

    @property
    def stopped(self) -> list[QueueTicket]:
        """The tickets whose runs were stopped, to be continued; the newest one's checkpoints count."""
        return [ticket for ticket in self.tickets if ticket.state == "stopped"]

    @property
    def has_failed_starts(self) -> bool:
        """Whether so many tickets were ended by Slurm before their grant that the job ends."""
        failed = [ticket for ticket in self.tickets if ticket.state == "void" and ticket.end_state]
        return len(failed) >= MAX_FAILED_STARTS

    @property
    def is_over(self) -> bool:
        """Whether the job is done, failed or cancelled."""
        return self.state in ("done", "failed", "cancelled")


def read_journal(path: Path) -> list[JournalEntry]:
    """Return the complete entries of a journal. Raises DataError."""
    return journal.read_journal(path, JournalEntry)


def append_entry(job: QueueJob, entry: JournalEntry) -> QueueJob:
    """Append an entry, fsynced where it cannot be recovered elsewhere, and return the job after it."""
    # Intents are known to the journal alone, and the grant of a stopped ticket is revoked, as if it had never run. The
    # rest can be observed again, or follows from the grants.
    journal.append_record(job.path / "journal.jsonl", entry, durable=entry.kind in ("submit", "stopped"))
    return fold_entries(job, [entry])


def fold_entries(job: QueueJob, entries: Iterable[JournalEntry]) -> QueueJob:
    """Return the job after these entries."""
    tickets = {ticket.number: ticket for ticket in job.tickets}
    end, refusals = job.end_entry, list(job.refusals)
    for entry in entries:
        if entry.kind is EntryKind.SUBMIT:
            tickets[entry.ticket] = QueueTicket(
                number=entry.ticket,
                name=f"{job.job_id}.{entry.ticket}",
                pool=entry.pool,
                submitted_at=entry.t,
                runs_dir=entry.runs_dir,
                data=entry.data,
                reason=entry.reason,
            )
        elif entry.kind is EntryKind.CANCELLED:
            end = entry
        elif ticket := tickets.get(entry.ticket):
            tickets[entry.ticket] = _apply_to_ticket(ticket, entry)
            end = entry if entry.kind is EntryKind.ENDED else end
        refusals += [entry] if entry.kind is EntryKind.REFUSED else []
    folded = tuple(tickets.values())
    return msgspec.structs.replace(
        job, tickets=folded, end_entry=end, refusals=tuple(refusals), state=_job_state(folded, end)
    )


def _apply_to_ticket(ticket: QueueTicket, entry: JournalEntry) -> QueueTicket:
    """Return the ticket after an entry."""
    changes: dict[str, object] = {
        "slurm_id": entry.slurm_id or ticket.slurm_id,
        "reason": entry.reason or ticket.reason,
    }
    match entry.kind:
        case EntryKind.SUBMITTED:
            changes["state"] = "pending"
        case EntryKind.HELD:
            changes["held_reason"] = entry.state
        case EntryKind.STARTED:
            changes |= {"state": "started", "unknown_since": ""}
        case EntryKind.UNKNOWN:
            changes |= {"unknown_since": entry.t, "doubt_reason": entry.state}
        case EntryKind.WITHDRAW:
            changes |= {"state": "withdrawing", "end_state": entry.state or ticket.end_state}
        case EntryKind.VOID | EntryKind.REFUSED | EntryKind.DEFERRED:
            changes |= {"state": "void", "voided_at": entry.t, "is_deferred": entry.kind is EntryKind.DEFERRED}
        case EntryKind.SETTLED:
            changes |= {"is_settled": True, "run_dir": entry.run_dir, "cause": entry.cause}
        case EntryKind.STOPPED:
            changes |= {"state": "stopped", "end_state": entry.state}
        case EntryKind.ENDED:
            changes["state"] = "over"
    return msgspec.structs.replace(ticket, **changes)


def _job_state(tickets: Sequence[QueueTicket], end: JournalEntry | None) -> QueueJobState:
    if end is not None:
        if end.kind is EntryKind.CANCELLED or end.state == "CANCELLED":
            return "cancelled"
        return "done" if end.state == "COMPLETED" else "failed"
    if any(ticket.is_running for ticket in tickets):
        return "running"
    return "submitted" if any(ticket.is_live for ticket in tickets) else "queued"
