"""Reconcile the queue's jobs with the states of their tickets at the sites."""

from __future__ import annotations

import time
from datetime import datetime
from typing import NamedTuple

from pitools.core import timestamps
from pitools.launch.submission import grant
from pitools.launch.tickets.ticket_state import ABSENT, FORGOTTEN, TicketState
from pitools.place.dispatch import continuation
from pitools.place.dispatch.journal import MAX_FAILED_STARTS, EntryKind, QueueJob, QueueTicket
from pitools.place.dispatch.queue_state import QueueState
from pitools.slurm.states import PendingReason, pending_reason

# A granted job that neither slurmctld nor accounting knows counts as ended after this time: slurmctld polls its nodes
# every SlurmdTimeout / 3, 100 s by default, and kills the jobs there that it does not know.
ORPHAN_AFTER_S = 120.0


class SiteActions(NamedTuple):
    """Actions due at one site. revoke: tickets to withdraw. cancel: Slurm jobs to cancel, id → name.

    remove: tickets that never ran and that Slurm does not know. fetch: tickets that have run. release_nodes:
    jobs that Slurm requeued while constrained to the nodes of their first start, each with its Slurm id.
    """

    revoke: list[tuple[QueueJob, QueueTicket]]
    cancel: dict[str, str]
    remove: list[tuple[QueueJob, QueueTicket]]
    fetch: list[tuple[QueueJob, QueueTicket]]
    release_nodes: list[tuple[QueueJob, str]]


def reconcile_tickets(
    state: QueueState, site: str, queried_at: str, tickets: dict[str, TicketState], up_since: str = ""
) -> SiteActions:
    """Journal what changed of a site's tickets and return the actions due there.

    queried_at: when the site was queried. up_since: since when the site has answered without a gap, as RFC 3339.
    """
    actions = SiteActions([], {}, [], [], [])
    time = timestamps.now_rfc3339()
    for job, ticket in state.tickets(site):
        # The reply lacks tickets submitted since the query. One dated in the future counts: the clock was set back.
        is_newer_than_reply = queried_at <= ticket.submitted_at <= time
        if not is_newer_than_reply:
            _reconcile_ticket(
                state, state.jobs[job.job_id], ticket, tickets.get(ticket.name, TicketState(ABSENT)), actions, up_since
            )
    return actions


def _reconcile_ticket(
    state: QueueState, job: QueueJob, ticket: QueueTicket, observed: TicketState, actions: SiteActions, up_since: str
) -> None:
    # Only a job in slurmctld's own list is pending or running; accounting may be outdated.
    is_known = observed.job is not None or observed.is_over
    may_run = grant.is_granted(observed.grant)
    if ticket.is_live and (is_known or not may_run):
        # Before the journal: a tick killed in between must not leave the mark until the site is unreachable again.
        job = state.clear_lost(job, ticket)
    if ticket.state == "void":
        if is_known and not observed.is_over:
            actions.cancel[observed.job_id] = ticket.name
        elif ticket.end_state and job.has_failed_starts and not (job.is_over or job.is_cancelled):
            reason = f"{MAX_FAILED_STARTS} tickets failed, the last in {ticket.reason}"
            job = state.append_entry(job, EntryKind.ENDED, ticket.number, state="FAILED", reason=reason)
            actions.fetch.append((job, ticket))
        elif may_run:  # it ran although it was withdrawn: its folder stays
            state.append_entry(job, EntryKind.SETTLED, ticket.number)
        else:
            actions.remove.append((job, ticket))
    elif ticket.state in ("over", "stopped"):
        actions.fetch.append((job, ticket))
    elif ticket.state == "withdrawing":
        actions.revoke.append((job, ticket))
    elif may_run and continuation.is_stop(observed):
        reason = f"stopped at {ticket.site}: its checkpoints are being fetched"
        job = state.append_entry(
            job,
            EntryKind.STOPPED,
            ticket.number,
            state=observed.state,
            exit_code=observed.exit_code,
            slurm_id=observed.job_id,
            reason=reason,
            started_at=_started_at(observed),
        )
        actions.fetch.append((job, job.tickets[ticket.number - 1]))
    elif may_run and observed.is_over:
        code = 0 if observed.state == "COMPLETED" else observed.exit_code
        job = state.append_entry(
            job,
            EntryKind.ENDED,
            ticket.number,
            state=observed.state,
            exit_code=code,
            slurm_id=observed.job_id,
            started_at=_started_at(observed),
        )
        actions.fetch.append((job, ticket))
    elif observed.state == "CANCELLED" and not observed.grant and ticket.state == "pending":
        reason = f"cancelled at {ticket.site}, not by pitools"
        job = state.append_entry(
            job, EntryKind.ENDED, ticket.number, state=observed.state, reason=reason, slurm_id=observed.job_id
        )
        actions.fetch.append((job, ticket))
    elif not may_run and (observed.is_over or not is_known or observed.grant == grant.REVOKED):
        # It has certainly done nothing, and its record ensures that it never will.
        if observed.is_over and not observed.grant and observed.state != "CANCELLED":
            _record_failed_start(state, job, ticket, observed, observed.state)
        actions.revoke.append((job, ticket))
    elif not may_run and (stuck_reason := _stuck_reason(job, observed)):
        _record_failed_start(state, job, ticket, observed, stuck_reason)
        actions.revoke.append((job, ticket))
    elif is_known:
        _record_progress(state, job, ticket, observed, actions)
    elif not ticket.unknown_since or ticket.doubt_reason != observed.state:
        command = f"pit place declare-lost {ticket.site} {job.job_id}"
        reason = f"it ran, and {ticket.site} has no record of its end; if you know that it has not finished: {command}"
        state.append_entry(
            job, EntryKind.UNKNOWN, ticket.number, slurm_id=observed.job_id, state=observed.state, reason=reason
        )
    elif observed.state == FORGOTTEN and _age_s(max(ticket.unknown_since, up_since)) > ORPHAN_AFTER_S:
        # slurmctld restarted without its latest jobs, and has ended their processes on nodes. Without accounting the
        # job may also have run to its end: a person has to decide.
        state.append_entry(job, EntryKind.VOID, ticket.number, reason=f"{ticket.site} forgot it while it ran")


def _record_failed_start(
    state: QueueState, job: QueueJob, ticket: QueueTicket, observed: TicketState, end_state: str
) -> None:
    reason = f"{ticket.pool}: {end_state} before its first command"
    state.append_entry(job, EntryKind.WITHDRAW, ticket.number, state=end_state, slurm_id=observed.job_id, reason=reason)


def _held_reason(observed: TicketState) -> str:
    """Return Slurm's reason if a job is pending until it is released, or can never start; else ""."""
    reason = observed.job.reason if observed.job and observed.state == "PENDING" else ""
    return reason if pending_reason(reason) in (PendingReason.HELD, PendingReason.BAD_CONSTRAINTS) else ""


def _stuck_reason(job: QueueJob, observed: TicketState) -> str:
    """Return Slurm's reason if a pending ticket is to be withdrawn, as it will not start; else "".

    A hold by a person is respected: by the user always, by an operator unless the job may go to another site.
    """
    reason = _held_reason(observed)
    if reason.startswith("JobHeldUser") or (reason.startswith("JobHeldAdmin") and len(job.request.sites) == 1):
        return ""
    return reason


def _record_progress(
    state: QueueState, job: QueueJob, ticket: QueueTicket, observed: TicketState, actions: SiteActions
) -> None:
    """Journal the progress of a ticket that Slurm knows and that is not over."""
    if observed.state == "PENDING" and grant.is_granted(observed.grant) and job.request.request.topology != "none":
        actions.release_nodes.append((job, observed.job_id))
    if ticket.held_reason != (held_reason := _held_reason(observed)):
        job = state.append_entry(job, EntryKind.HELD, ticket.number, state=held_reason)
    if ticket.state == "intended":
        job = state.append_entry(job, EntryKind.SUBMITTED, ticket.number, slurm_id=observed.job_id)
    if (ticket.state != "started" or ticket.unknown_since or not ticket.slurm_id) and (
        observed.state != "PENDING" or grant.is_granted(observed.grant)
    ):
        state.append_entry(
            job, EntryKind.STARTED, ticket.number, slurm_id=observed.job_id, started_at=_started_at(observed)
        )


def _started_at(observed: TicketState) -> str:
    return observed.job.start if observed.job else ""


def _age_s(moment: str) -> float:
    return time.time() - datetime.fromisoformat(moment).timestamp()
