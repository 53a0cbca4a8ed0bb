"""Carry out a tick's actions at one site: withdraw tickets and submit new ones. Each action is safe to repeat.

Each intent is in the job's journal before the action. An uncertain outcome is left as journalled: the next tick
queries first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pitools.core.errors import ClusterError, ConfigError, DataError, PitError, UsageError
from pitools.launch.plan import Plan
from pitools.launch.tickets import remote, shared_fs
from pitools.launch.tickets.ticket_state import TicketState
from pitools.place.dispatch import options, wait_log
from pitools.place.dispatch.journal import EntryKind, QueueJob, QueueTicket
from pitools.place.dispatch.reconcile import QueueState
from pitools.place.types import Submit
from pitools.run.run_folder import JobRef
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.errors import OutcomeUnknown

MAX_SUBMISSIONS_PER_TICK = 32  # submissions to one site in one tick


class SiteBackend(Protocol):
    """The operations on a site's tickets; see launch/tickets/shared_fs.py."""

    def submit_ticket(self, plan: Plan, site: Site, *, name: str) -> JobRef: ...  # noqa: D102
    def ticket_states(self, site: Site, names: Sequence[str]) -> dict[str, TicketState]: ...  # noqa: D102
    def revoke(self, site: Site, names: Sequence[str]) -> dict[str, bool]: ...  # noqa: D102
    def cancel_tickets(self, site: Site, jobs: Mapping[str, str]) -> None: ...  # noqa: D102
    def remove_ticket_dirs(self, site: Site, names: Sequence[str]) -> None: ...  # noqa: D102


def backend(site: Site) -> SiteBackend:
    """Return the backend of a site: over ssh, or over a shared file system."""
    return remote if site.connection.kind == "ssh" else shared_fs


def fetch_runs(state: QueueState, site: Site, tickets: Sequence[tuple[QueueJob, QueueTicket]]) -> None:
    """Copy the logs and records of these tickets' runs into the jobs' folders. Raises Unreachable."""
    for job, ticket in tickets:
        reason = ""
        try:
            if site.connection.kind == "ssh":
                remote.fetch_run(site, ticket.name, Path(job.path) / "run")
        except (ClusterError, DataError) as error:
            reason = f"its logs stay at {site.name}: {error}"
        state.append_entry(job, EntryKind.REMOVED, ticket.number, reason=reason)


def revoke_tickets(state: QueueState, site: Site, tickets: Sequence[tuple[QueueJob, QueueTicket]]) -> None:
    """Revoke the grants of these tickets, then cancel them in the site's queue.

    A ticket whose grant is claimed already stays, and is the job's. Raises Unreachable; the next tick repeats it.
    """
    if not tickets:
        return
    for job, ticket in tickets:
        if ticket.state != "withdrawing":
            state.append_entry(job, EntryKind.WITHDRAW, ticket.number)
    revoked = backend(site).revoke(site, [ticket.name for _, ticket in tickets])
    for job, ticket in tickets:
        if revoked[ticket.name]:
            state.append_entry(job, EntryKind.VOID, ticket.number)
        else:
            state.append_entry(job, EntryKind.STARTED, ticket.number, reason="it had begun already")
    # Out of the queue as well; if that fails now, the next tick finds it void and yet in the queue.
    cancel_jobs(
        site, {ticket.slurm_id: ticket.name for _, ticket in tickets if revoked[ticket.name] and ticket.slurm_id}
    )


def cancel_jobs(site: Site, jobs: Mapping[str, str]) -> None:
    """Cancel tickets' Slurm jobs, id → name. Safe to repeat."""
    if jobs:
        backend(site).cancel_tickets(site, jobs)


def release_nodes(site: Site, tickets: Sequence[tuple[QueueJob, str]]) -> None:
    """Remove the node constraint of tickets, (job, Slurm id). Safe to repeat. Raises Unreachable."""
    for job, slurm_id in tickets:
        with contextlib.suppress(ClusterError):  # it has started meanwhile
            wanted = job.request.request
            client(site).update(slurm_id, exclude=wanted.exclude, nodelist=wanted.nodelist)


def submit_all(
    state: QueueState,
    site: Site,
    decisions: Sequence[Submit],
    *,
    deadline: float,
    on_submitted: Callable[[Submit, str], None],
) -> None:
    """Submit decided tickets in order, up to MAX_SUBMISSIONS_PER_TICK or the deadline. Raises Unreachable.

    deadline: of time.monotonic(). on_submitted: called with each decision carried out and its ticket's name.
    """
    for decision in decisions[:MAX_SUBMISSIONS_PER_TICK]:
        if time.monotonic() > deadline:
            return
        job = state.jobs[decision.job_id]
        partition = decision.pool.partition("/")[2]
        try:
            planned = options.make_job_plan(job, site, partition)
        except (ConfigError, DataError, UsageError) as error:
            state.append_entry(job, EntryKind.REFUSED, pool=decision.pool, reason=str(error))
            continue
        if name := _submit(state, site, job, decision, planned):
            on_submitted(decision, name)


def _submit(state: QueueState, site: Site, job: QueueJob, decision: Submit, plan: Plan) -> str:
    """Submit one ticket and return its name; "" where it was refused."""
    job, ticket = state.record_intent(job.job_id, decision.pool, decision.reason)
    try:
        ref = backend(site).submit_ticket(plan, site, name=ticket.name)
    except OutcomeUnknown:
        raise
    except PitError as error:
        # Slurm answered that it has no such job. Should that be wrong, the job finds its grant revoked.
        backend(site).revoke(site, [ticket.name])
        is_refused = isinstance(error, (ClusterError, ConfigError, DataError, UsageError))
        state.append_entry(
            job,
            EntryKind.REFUSED if is_refused else EntryKind.VOID,
            ticket.number,
            pool=decision.pool,
            reason=str(error),
        )
        if not is_refused:
            raise
        return ""
    state.append_entry(job, EntryKind.SUBMITTED, ticket.number, slurm_id=ref.job_id)
    if isinstance(ref, remote.RemoteJobRef) and ref.data_bytes:
        wait_log.record_site_transfer(site.name, ref.data_bytes, ref.data_s)
    return ticket.name
