"""Carry out a tick's actions at one site. Each is safe to repeat.

They are: submit a ticket, withdraw one, cancel its job, fetch its run, remove its folder, and release its nodes. The
first two are in the job's journal before they are done; if the outcome is uncertain, the next tick queries first.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from pitools.core.errors import (
    ClusterError,
    ConfigError,
    DataError,
    NoSpace,
    PitError,
    TryLater,
    Unreachable,
    UsageError,
)
from pitools.launch.plan import Plan
from pitools.launch.tickets import remote, shared_fs
from pitools.launch.tickets.ticket_state import FolderNotCreated, TicketState
from pitools.place.dispatch import continuation, options, wait_recorder
from pitools.place.dispatch.journal import EntryKind, QueueJob, QueueTicket
from pitools.place.dispatch.queue_state import QueueState
from pitools.place.types import Submit
from pitools.run.run_folder import JobRef
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.errors import OutcomeUnknown

MAX_SUBMISSIONS_PER_TICK = 32  # submissions to one site in one tick


Pairs = Sequence[tuple[QueueJob, QueueTicket]]


class SiteBackend(Protocol):
    """The operations on a site's tickets; see launch/tickets/shared_fs.py."""

    def runs_dir(self, site: Site) -> str: ...  # noqa: D102
    def submit_ticket(self, plan: Plan, site: Site, *, name: str) -> JobRef: ...  # noqa: D102
    def ticket_states(self, site: Site, names: Sequence[str]) -> dict[str, TicketState]: ...  # noqa: D102
    def revoke(self, site: Site, names: Sequence[str]) -> dict[str, bool]: ...  # noqa: D102
    def withdraw_grants(self, site: Site, names: Sequence[str]) -> None: ...  # noqa: D102
    def cancel_tickets(self, site: Site, jobs: Mapping[str, str]) -> None: ...  # noqa: D102
    def remove_ticket_dirs(self, site: Site, names: Sequence[str]) -> None: ...  # noqa: D102


def backend(site: Site) -> SiteBackend:
    """Return the backend of a site: over ssh, or over a shared file system."""
    return remote if site.connection.kind == "ssh" else shared_fs


def _by_runs_dir(site: Site, tickets: Pairs) -> list[tuple[Site, Pairs]]:
    """Group a site's tickets by their folders of runs; return each group with the site that has this folder.

    The site file, or PIT_RUNS, may name another folder than when a ticket was submitted.
    """
    groups: dict[str, list[tuple[QueueJob, QueueTicket]]] = {}
    for job, ticket in tickets:
        groups.setdefault(ticket.runs_dir, []).append((job, ticket))
    return [(replace(site, paths=replace(site.paths, runs=runs_dir)), pairs) for runs_dir, pairs in groups.items()]


def query_states(site: Site, tickets: Pairs) -> dict[str, TicketState]:
    """Return the states of these tickets, and of the user's other jobs there, by name. Raises Unreachable."""
    states: dict[str, TicketState] = {}
    for group_site, pairs in _by_runs_dir(site, tickets):
        names = [ticket.name for _, ticket in pairs]
        reply = backend(site).ticket_states(group_site, names)
        # A reply also has the tickets of other folders, but not their grants.
        states = reply | states | {name: reply[name] for name in names}
    return states


def remove_dirs(state: QueueState, site: Site, tickets: Pairs) -> None:
    """Remove the folders of these tickets, which never ran, then journal that nothing is left of them."""
    for group_site, pairs in _by_runs_dir(site, tickets):
        backend(site).remove_ticket_dirs(group_site, [ticket.name for _, ticket in pairs])
        for job, ticket in pairs:
            state.append_entry(job, EntryKind.SETTLED, ticket.number)


def fetch_runs(state: QueueState, site: Site, tickets: Pairs) -> None:
    """Copy the logs and records of these tickets' runs into the jobs' folders. Raises Unreachable.

    Of a run that was stopped, also its checkpoints, once there is room; then decide whether the job goes on.
    """
    for job, ticket, group_site in [(*pair, at) for at, pairs in _by_runs_dir(site, tickets) for pair in pairs]:
        if ticket.state == "stopped" and not job.is_cancelled:
            try:
                _settle_stopped(state, group_site, job, ticket)
            except NoSpace as error:  # tried again by the next tick; the site's other tickets go on
                if ticket.reason != (reason := f"its checkpoints stay at {site.name} until there is room: {error}"):
                    state.append_entry(job, EntryKind.STOPPED, ticket.number, state=ticket.end_state, reason=reason)
            continue
        reason = ""
        try:
            if site.connection.kind == "ssh":
                remote.fetch_run(group_site, ticket.name, Path(job.path) / "run")
        except (ClusterError, DataError, NoSpace) as error:
            reason = f"its logs stay at {site.name}: {error}"
        state.append_entry(job, EntryKind.SETTLED, ticket.number, reason=reason)


def _settle_stopped(state: QueueState, site: Site, job: QueueJob, ticket: QueueTicket) -> None:
    """Queue a job again whose run was stopped, or end it where the policy does. Raises Unreachable."""
    run_dir = Path(ticket.runs_dir) / ticket.name
    try:
        # From here on its own job cannot go on, should a person requeue it.
        backend(site).withdraw_grants(site, [ticket.name])
        if site.connection.kind == "ssh":
            run_dir = job.path / f"run.{ticket.number}"
            if not run_dir.exists():  # a download that outlives its tick is journalled by the next one
                remote.fetch_resumable(site, ticket.name, run_dir)
        decision, cause = continuation.decide(site, job, ticket, run_dir)
    except (ClusterError, DataError) as error:
        reason = f"its run cannot be continued: {error}"
        job = state.append_entry(job, EntryKind.ENDED, ticket.number, state="FAILED", reason=reason)
        state.append_entry(job, EntryKind.SETTLED, ticket.number)
        return
    reason = f"{cause.kind} at {site.name}, to be continued: {cause.reason}"
    if decision.action == "done":  # it ended well all the same, after the signal
        reason = ""
        job = state.append_entry(job, EntryKind.ENDED, ticket.number, state="COMPLETED", exit_code=0)
    elif decision.action == "stop":
        end_state, reason = "CANCELLED" if decision.kind == "cancelled" else "FAILED", decision.reason
        job = state.append_entry(
            job, EntryKind.ENDED, ticket.number, state=end_state, exit_code=cause.exit_code, reason=reason
        )
    state.append_entry(job, EntryKind.SETTLED, ticket.number, reason=reason, run_dir=str(run_dir), cause=cause)
    for earlier in job.path.glob("run.*"):  # their checkpoints are in this one's run, or behind them
        if earlier != run_dir:
            shutil.rmtree(earlier, ignore_errors=True)


def revoke_tickets(state: QueueState, site: Site, tickets: Pairs) -> None:
    """Revoke the grants of these tickets, then cancel them in the site's queue.

    A ticket whose grant is claimed already stays, and is the job's. Raises Unreachable; the next tick repeats it.
    """
    for job, ticket in tickets:
        if ticket.state != "withdrawing":
            state.append_entry(job, EntryKind.WITHDRAW, ticket.number)
    revoked: dict[str, bool] = {}
    for group_site, pairs in _by_runs_dir(site, tickets):
        revoked |= backend(site).revoke(group_site, [ticket.name for _, ticket in pairs])
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
            planned, runs_dir = options.make_job_plan(job, site, partition), backend(site).runs_dir(site)
        except (ConfigError, DataError, UsageError) as error:
            state.append_entry(job, EntryKind.REFUSED, pool=decision.pool, reason=str(error))
            continue
        if name := _submit(state, site, job, decision, planned, runs_dir):
            on_submitted(decision, name)
        elif state.jobs[job.job_id].tickets[-1].is_deferred:
            return  # the planner gives the site nothing for a while


def _submit(state: QueueState, site: Site, job: QueueJob, decision: Submit, plan: Plan, runs_dir: str) -> str:
    """Submit one ticket and return its name; "" where it was refused, or deferred. Raises Unreachable."""
    data = {dataset.name: dataset.source for dataset in plan.data}
    job, ticket = state.record_intent(job.job_id, decision.pool, runs_dir, decision.reason, data)
    try:
        if job.stopped:
            ref = continuation.submit(plan, site, name=ticket.name, run_dir=Path(job.stopped[-1].run_dir))
        else:
            ref = backend(site).submit_ticket(plan, site, name=ticket.name)
    except OutcomeUnknown:
        raise
    except FolderNotCreated as error:  # on a full disk its grant could not be revoked, and need not be
        reason = f"{decision.pool}: {error}"
        state.append_entry(job, EntryKind.DEFERRED, ticket.number, pool=decision.pool, reason=reason)
        return ""
    except PitError as error:
        # Slurm answered that it has no such job. Should that be wrong, the job finds its grant revoked, or has it.
        if not backend(site).revoke(site, [ticket.name])[ticket.name]:
            state.append_entry(job, EntryKind.STARTED, ticket.number, reason=f"it runs, although: {error}")
            return ticket.name
        kind = EntryKind.REFUSED
        if isinstance(error, TryLater):  # Slurm is busy, or a disk is full
            kind = EntryKind.VOID if isinstance(error, Unreachable) else EntryKind.DEFERRED
        state.append_entry(job, kind, ticket.number, pool=decision.pool, reason=f"{decision.pool}: {error}")
        if kind is EntryKind.VOID:
            raise
        return ""
    state.append_entry(job, EntryKind.SUBMITTED, ticket.number, slurm_id=ref.job_id)
    if isinstance(ref, remote.RemoteJobRef) and ref.data_bytes:
        wait_recorder.record_site_transfer(site.name, ref.data_bytes, ref.data_s)
    return ticket.name
