"""One tick: query every site, journal what changed, withdraw tickets, decide, submit.

A tick may be killed anywhere: its intents are in the jobs' journals, and the next tick resolves them first. A site that
is unreachable, or refuses, does not stop the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

from pitools.core import timestamps
from pitools.core.errors import PitError
from pitools.place.clusters import snapshot
from pitools.place.clusters.parallel import SiteAnswer, SitePoller
from pitools.place.dispatch import planner, status, store, tickets
from pitools.place.dispatch.journal import EntryKind, QueueJob, QueueTicket
from pitools.place.dispatch.queue_state import QueueState
from pitools.place.dispatch.reconcile import SiteActions, reconcile_tickets
from pitools.place.dispatch.site_workers import SiteWorkers
from pitools.place.dispatch.wait_recorder import WaitRecorder
from pitools.place.types import Submit, Withdraw, site_of
from pitools.site.load import load_site
from pitools.site.schema import Site

QUERY_TIMEOUT_S = 20.0  # for the queries of all sites together
MAX_AGE_S = 15.0  # of a site's cached snapshot; our own jobs are queried in every tick
SUBMIT_FOR_S = 40.0  # no submission of a tick begins later: it has to end within ACTION_TIMEOUT_S of site_workers.py
FAILOVER_S = 120.0  # a site is unreachable for so long before its queued tickets go elsewhere
D = TypeVar("D", Submit, Withdraw)


class Dispatcher:
    """Runs ticks over one queue. Its memory between ticks is a cache only.

    repeats: another tick follows, which takes the answers that come late. If none does, a tick waits for all sites to
    the deadline: otherwise a slow one that was unreachable once would not be reached again.
    """

    def __init__(self, queue_dir: Path, decide: planner.Decide, *, repeats: bool = False) -> None:
        self.queue_dir = queue_dir
        self._repeats = repeats
        self._poller: SitePoller[planner.SiteReply] = SitePoller()
        self._planner = planner.Planner(decide, queue_dir)
        self._workers = SiteWorkers(queue_dir)  # of the current tick

    def tick(self) -> status.TickResult | None:
        """Tick once; None while another tick holds the lock. Raises ClusterError for a queue that cannot be written."""
        with store.tick_lock(self.queue_dir) as is_ours:
            if not is_ours:
                return None
            state, self._workers = QueueState(self.queue_dir), SiteWorkers(self.queue_dir)
            try:
                return self._tick(state)
            finally:
                state.close()
                self._workers.close()

    def _tick(self, state: QueueState) -> status.TickResult:
        sites, faults = self._load_sites(state)
        queried_at = timestamps.now_rfc3339()
        previous = status.read_site_status(self.queue_dir)
        rows = {row.site: row for row in previous.sites}
        answers = self._poller.query(
            {name: self._make_query(state, site) for name, site in sites.items()},
            QUERY_TIMEOUT_S,
            sites if self._repeats else (),
        )
        replies = {
            name: answer.value for name, answer in answers.items() if isinstance(answer.value, planner.SiteReply)
        }
        faults |= {name: one.value for name, one in answers.items() if isinstance(one.value, PitError)}
        actions = {
            name: reconcile_tickets(
                state, name, _queried_at(answers[name]), reply.tickets, _answering_since(rows.get(name), queried_at)
            )
            for name, reply in replies.items()
        }
        # Only sites whose query failed, or failed last time and goes on: another tick's action, or an error in the site
        # file, says nothing of tickets.
        queried = previous.unreachable.keys() & sites.keys() - answers.keys()
        unreachable_since = {
            name: row.since if (row := previous.unreachable.get(name)) else queried_at
            for name in queried.union(
                name for name, error in faults.items() if status.site_state(error, False) == "unreachable"
            )
        }
        self._collect_and_remove(state, sites, actions, faults)
        usable = replies.keys() - faults.keys()
        self._revoke(state, sites, actions, unreachable_since, usable, faults)
        replies_to_use = {name: reply for name, reply in replies.items() if name not in faults}
        view = self._planner.build_view(state, sites, replies_to_use, previous.postponed)
        self._apply(state, sites, view, planner.Decisions([], self._planner.plan_queue_moves(state, view)), faults)
        self._apply(state, sites, view, self._planner.decide(state, view), faults)
        _finish_cancelled(state)
        state.archive_finished()
        store.prune_archive(self.queue_dir)
        unfit, postponed = self._planner.unfit(state), self._planner.postponed
        return status.write_status(self.queue_dir, state, queried_at, view.pools, faults, replies, unfit, postponed)

    def _load_sites(self, state: QueueState) -> tuple[dict[str, Site], dict[str, PitError]]:
        """Lock the sites of open jobs and tickets. Return them, and the errors of those that cannot be used now."""
        sites: dict[str, Site] = {}
        faults: dict[str, PitError] = {}
        for job in state.jobs.values():
            names = {ticket.site for ticket in job.tickets if not ticket.is_settled}
            if not job.is_over and not any(ticket.is_running for ticket in job.tickets):
                names.update(job.request.sites)
            for name in names - sites.keys() - faults.keys():
                try:
                    site = load_site(name)
                    self._workers.lock(name)
                    sites[name] = site
                except PitError as error:
                    faults[name] = error
        return sites, faults

    def _make_query(self, state: QueueState, site: Site) -> Callable[[float], planner.SiteReply]:
        own = list(state.tickets(site.name))
        needs_snapshot = any(
            planner.is_undecided(job) and site.name in job.request.sites for job in state.jobs.values()
        )

        def query(left_s: float) -> planner.SiteReply:
            nodes_and_jobs = (
                snapshot.read_snapshot(site, timeout_s=left_s, max_age_s=MAX_AGE_S) if needs_snapshot else None
            )
            return planner.SiteReply(tickets.query_states(site, own), nodes_and_jobs)

        return query

    def _collect_and_remove(
        self,
        state: QueueState,
        sites: Mapping[str, Site],
        actions: Mapping[str, SiteActions],
        faults: dict[str, PitError],
    ) -> None:
        """Fetch ended runs, remove the folders of tickets that never ran, release the nodes of requeued jobs."""

        def act(name: str) -> None:
            tickets.fetch_runs(state, sites[name], actions[name].fetch)
            tickets.remove_dirs(state, sites[name], actions[name].remove)
            tickets.release_nodes(sites[name], actions[name].release_nodes)

        self._workers.run(
            [name for name, one in actions.items() if one.fetch or one.remove or one.release_nodes], act, faults
        )

    def _revoke(
        self,
        state: QueueState,
        sites: Mapping[str, Site],
        actions: Mapping[str, SiteActions],
        unreachable_since: Mapping[str, str],
        usable: Collection[str],
        faults: dict[str, PitError],
    ) -> None:
        """Revoke and cancel the tickets that the replies, cancelled jobs and unreachable sites call for."""
        _apply_lost_marks(state, unreachable_since)
        to_revoke = {name: list(one.revoke) for name, one in actions.items()}
        to_cancel = {name: dict(one.cancel) for name, one in actions.items()}
        pending = {(job.job_id, ticket.number) for pairs in to_revoke.values() for job, ticket in pairs}
        for job in state.jobs.values():
            for ticket in [*_unwanted_tickets(job), *_stranded_tickets(job, unreachable_since, usable)]:
                if (job.job_id, ticket.number) not in pending and ticket.site in sites:
                    to_revoke.setdefault(ticket.site, []).append((job, ticket))
            if job.is_cancelled:
                for ticket in job.live:
                    if ticket.is_running and ticket.slurm_id and ticket.site in actions:
                        to_cancel.setdefault(ticket.site, {})[ticket.slurm_id] = ticket.name

        def act(name: str) -> None:
            tickets.revoke_tickets(state, sites[name], to_revoke.get(name, ()))
            tickets.cancel_jobs(sites[name], to_cancel.get(name, {}))

        self._workers.run(to_revoke.keys() | to_cancel.keys(), act, faults)

    def _apply(
        self,
        state: QueueState,
        sites: Mapping[str, Site],
        view: planner.ClusterView,
        decisions: planner.Decisions,
        faults: dict[str, PitError],
    ) -> None:
        """Carry out the decisions."""
        deadline = time.monotonic() + SUBMIT_FOR_S
        submits = _by_site(decisions.submits)
        withdrawals = _by_site(decisions.withdrawals)
        recorder = WaitRecorder(view.pools, lambda job_id: self._planner.options(state.jobs[job_id], view))
        if submits:
            recorder.add_pending(list(state.jobs.values()))

        def act(name: str) -> None:
            pairs = [
                (job, ticket)
                for one in withdrawals.get(name, ())
                if (job := state.jobs[one.job_id])
                for ticket in job.live
                if ticket.pool == one.pool and ticket.is_queued
            ]
            tickets.revoke_tickets(state, sites[name], pairs)
            tickets.submit_all(
                state, sites[name], submits.get(name, ()), deadline=deadline, on_submitted=recorder.record_submission
            )

        self._workers.run([name for name in submits.keys() | withdrawals.keys() if name not in faults], act, faults)


def _unwanted_tickets(job: QueueJob) -> list[QueueTicket]:
    """Return the tickets of a cancelled job that have not started."""
    return [ticket for ticket in job.live if job.is_cancelled and ticket.is_queued]


def _stranded_tickets(
    job: QueueJob, unreachable_since: Mapping[str, str], usable: Collection[str]
) -> list[QueueTicket]:
    """Return the tickets queued where Slurm is unreachable for FAILOVER_S, of a job that may go to a usable site.

    Where only Slurm is unreachable they can be revoked; else they stay in doubt. unreachable_since: site → time.
    """
    limit = timestamps.to_rfc3339(datetime.fromisoformat(timestamps.now_rfc3339()) - timedelta(seconds=FAILOVER_S))
    if job.is_over or not set(job.request.sites).intersection(usable):
        return []
    # A site that took a ticket was reachable then, even if that tick did not write its status.
    return [
        one for one in job.live if one.is_queued and max(unreachable_since.get(one.site, "Z"), one.submitted_at) < limit
    ]


def _answering_since(row: status.SiteStatusRow | None, query_time: str) -> str:
    """Return since when a site, which has answered a query of this time, answers. row: of the previous tick."""
    return (row.answering_since if row else "") or query_time


def _apply_lost_marks(state: QueueState, unreachable: Collection[str]) -> None:
    """Void the tickets declared lost whose site is unreachable or does not know them."""
    for job in list(state.jobs.values()):
        for ticket in job.live:
            if ticket.number in job.declared_lost and (ticket.site in unreachable or ticket.unknown_since):
                state.append_entry(job, EntryKind.VOID, ticket.number, reason=f"declared lost at {ticket.site}")


def _finish_cancelled(state: QueueState) -> None:
    """End the cancelled jobs that have no live ticket."""
    for job in list(state.jobs.values()):
        if job.is_cancelled and not job.is_over and not job.live:
            state.append_entry(job, EntryKind.CANCELLED)


def _by_site(decisions: Sequence[D]) -> dict[str, list[D]]:
    by_site: dict[str, list[D]] = {}
    for decision in decisions:
        by_site.setdefault(site_of(decision.pool), []).append(decision)
    return by_site


def _queried_at(answer: SiteAnswer[planner.SiteReply]) -> str:
    """Return when a site was queried, as RFC 3339."""
    return timestamps.unix_to_rfc3339(answer.queried_s)
