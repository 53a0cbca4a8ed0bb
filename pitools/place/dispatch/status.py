"""The rows that `list` and `watch` show: one a job, with why it waits, and one a site."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from pitools.core.errors import ConfigError, DataError, PitError, TryLater, UsageError
from pitools.core.fs import write_atomic
from pitools.core.record import Record
from pitools.place.dispatch.journal import QueueJob, QueueTicket
from pitools.place.dispatch.queue_state import QueueState
from pitools.place.dispatch.site_workers import SiteBusy
from pitools.place.types import PoolState, site_of
from pitools.run import run_folder

JOB_COLUMNS = ("job_id", "state", "pool", "run", "reason")
SITE_COLUMNS = ("site", "state", "units", "free", "others_pending", "ours_running", "ours_pending", "reason")


class SiteStatusRow(Record, frozen=True, kw_only=True, tag="pit.site-status-row/1"):
    """A site as of the last tick. since: when its state began. units, free, others_pending: of its largest partition.

    state: `up`; `unreachable` (its query failed); `busy` (an action of an earlier tick goes on there); `misconfigured`
    (its site file is wrong); or `failing` (it answers, but an action failed). answering_since: since when it has
    answered in every tick; "" if it does not. others_pending: units that others' pending jobs request. ours_running,
    ours_pending: jobs.
    """

    site: str
    state: str
    since: str
    units: int = 0
    free: int = 0
    others_pending: int = 0
    ours_running: int = 0
    ours_pending: int = 0
    answering_since: str = ""
    reason: str = ""


class DispatchStatus(Record, frozen=True, kw_only=True, tag="pit.dispatch-status/1"):
    """The sites as of the last tick. broken: errors of jobs that cannot be read or archived.

    unfit: job id → why it has no option at the sites that answered. postponed: jobs that the tick had no time to
    estimate, in the order in which the next one does.
    """

    ticked_at: str
    sites: tuple[SiteStatusRow, ...]
    broken: tuple[str, ...] = ()
    unfit: dict[str, str] = {}
    postponed: tuple[str, ...] = ()

    @property
    def unreachable(self) -> dict[str, SiteStatusRow]:
        """The sites that do not answer."""
        return {row.site: row for row in self.sites if row.state == "unreachable"}

    @property
    def not_up(self) -> dict[str, SiteStatusRow]:
        """The sites in any other state than `up`."""
        return {row.site: row for row in self.sites if row.state != "up"}


class QueueJobRow(Record, frozen=True, kw_only=True, tag="pit.queue-job-row/1"):
    """One job of the queue. state: queued, submitted, in-doubt, running, done, failed or cancelled.

    pool: where the job runs or waits; where it ran last, if it was stopped and is queued again. run, slurm_id: its run
    id and Slurm id there. exit_code: of an ended job.
    """

    job_id: str
    state: str
    pool: str
    slurm_id: str
    owner: str
    tier: str
    queued_at: str
    reason: str
    exit_code: int | None = None
    run: str = ""


class TickResult(NamedTuple):
    """The result of a tick: the jobs that are not archived, the sites, and errors by site.

    exit_code: 0 unless every site failed; then 75 if one did not answer, else the highest code of their errors.
    """

    jobs: list[QueueJobRow]
    sites: DispatchStatus
    faults: dict[str, PitError]
    exit_code: int = 0


def read_site_status(queue_dir: Path) -> DispatchStatus:
    """Return the status that the last tick wrote; an empty one where the file is missing or damaged."""
    with contextlib.suppress(DataError):
        if recorded := run_folder.read_record(queue_dir / "sites.json", DispatchStatus):
            return recorded
    return DispatchStatus(ticked_at="", sites=())


def write_status(
    queue_dir: Path,
    queue: QueueState,
    queried_at: str,
    pools: Mapping[str, PoolState],
    faults: Mapping[str, PitError],
    answered: Collection[str],
    unfit: Mapping[str, str],
    postponed: tuple[str, ...] = (),
) -> TickResult:
    """Write this tick's status for `list` and `watch` and for the next tick, and return its result.

    answered: sites that answered the query at `queried_at`. The row of a site that was not queried stays as before.
    unfit, postponed: as in DispatchStatus.
    """
    previous = {row.site: row for row in read_site_status(queue_dir).sites}
    names = {job_site for job in queue.jobs.values() for job_site in job.request.sites}
    names |= {ticket.site for job in queue.jobs.values() for ticket in job.live}
    running, pending = _own_counts(queue)
    rows = []
    for name in sorted(names):
        old = previous.get(name)
        if name not in answered and name not in faults:
            if old:
                rows.append(msgspec.structs.replace(old, ours_running=running[name], ours_pending=pending[name]))
            continue
        state = site_state(faults.get(name), name in answered)
        since = old.since if old and old.state == state else queried_at
        answering_since = ((old.answering_since if old else "") or queried_at) if name in answered else ""
        own_pools = [pool for pool in pools.values() if site_of(pool.pool) == name]
        row = SiteStatusRow(site=name, state=state, since=since, answering_since=answering_since)
        # Partitions of one site mostly share its nodes: the largest counts. Otherwise its last known state.
        if own_pools:
            largest = max(own_pools, key=lambda pool: pool.units)
            row = msgspec.structs.replace(
                row, units=largest.units, free=largest.free, others_pending=largest.others_pending
            )
        elif old:
            row = msgspec.structs.replace(old, state=state, since=since, answering_since=answering_since)
        reason = ""
        if error := faults.get(name):
            reason = error.message if error.where == name else str(error)
        rows.append(msgspec.structs.replace(row, ours_running=running[name], ours_pending=pending[name], reason=reason))
    status = DispatchStatus(
        ticked_at=queried_at,
        sites=tuple(rows),
        broken=tuple(str(error) for error in queue.errors),
        unfit=dict(unfit),
        postponed=postponed,
    )
    write_atomic(queue_dir / "sites.json", msgspec.json.encode(status) + b"\n", mode=0o600, durable=False)
    jobs = [job_row(job, status) for job in queue.jobs.values()]
    return TickResult(jobs, status, dict(faults), _exit_code(faults, answered))


def site_state(error: PitError | None, has_answered: bool) -> str:
    """Return the state of a site, as in SiteStatusRow. has_answered: to the query."""
    if error is None:
        return "up"
    if isinstance(error, SiteBusy):
        return "busy"
    if has_answered:
        return "failing"
    return "misconfigured" if isinstance(error, ConfigError | UsageError) else "unreachable"  # UsageError: no file


def _exit_code(faults: Mapping[str, PitError], answered: Collection[str]) -> int:
    failed = {name: error for name, error in faults.items() if not isinstance(error, SiteBusy)}
    if set(answered) - failed.keys():
        return 0
    codes = {ConfigError.exit_code if isinstance(error, UsageError) else error.exit_code for error in failed.values()}
    return TryLater.exit_code if TryLater.exit_code in codes else max(codes, default=0)


def _own_counts(queue: QueueState) -> tuple[Counter[str], Counter[str]]:
    live = [ticket for job in queue.jobs.values() for ticket in job.live]
    running = Counter(ticket.site for ticket in live if ticket.is_running)
    return running, Counter(ticket.site for ticket in live if ticket.is_queued)


def job_row(job: QueueJob, status: DispatchStatus) -> QueueJobRow:
    """Return the row of a job."""
    ticket = next((one for one in job.tickets if one.is_running or one.state == "over"), None)
    ticket = ticket or next(iter([*job.live, *reversed(job.stopped)]), None)
    doubtful = [one for one in job.live if one.site in status.unreachable or one.unknown_since]
    state: str = job.state
    if doubtful and not job.is_over and (state != "running" or doubtful[0].is_running):
        state = "in-doubt"
    return QueueJobRow(
        job_id=job.job_id,
        state=state,
        pool=ticket.pool if ticket else "",
        slurm_id=ticket.slurm_id if ticket else "",
        owner=job.request.owner,
        tier=job.request.tier,
        queued_at=job.request.queued_at,
        reason=_reason(job, ticket, doubtful, status),
        exit_code=job.end_entry.exit_code if job.end_entry else None,
        run=ticket.name if ticket else "",
    )


def _reason(job: QueueJob, ticket: QueueTicket | None, doubtful: list[QueueTicket], status: DispatchStatus) -> str:
    unreachable, not_up = status.unreachable, status.not_up
    if job.end_entry:
        text = job.end_entry.reason or ("" if job.state == "done" else job.end_entry.state.lower())
        if job.state == "failed" and ticket:
            code = "" if job.end_entry.exit_code is None else f", exit code {job.end_entry.exit_code}"
            text = f"{text}{code}: pit launch logs {ticket.name} --site {ticket.site}"
        return text
    if doubtful:
        site = doubtful[0].site
        if site not in unreachable:
            return doubtful[0].reason
        state = "runs" if doubtful[0].is_running else "may start or have started"
        return f"{state} at {site}, which is unreachable since {unreachable[site].since}"
    if job.is_cancelled:
        return "being cancelled"
    if ticket and ticket.held_reason:
        return f"held at {ticket.site} ({ticket.held_reason}); to start it: scontrol release {ticket.slurm_id}"
    if ticket and ticket.site in not_up and not_up[ticket.site].state == "misconfigured":
        return f"{ticket.site} is misconfigured: {not_up[ticket.site].reason}"
    if ticket and ticket.is_live:
        return ticket.reason
    if status.ticked_at < job.request.queued_at:
        return "no tick has run since it was queued; run: pit place tick, or pit place watch"
    if not_up.keys() >= set(job.request.sites):
        row = not_up[job.request.sites[0]]
        return f"none of its sites is up: {row.site} is {row.state}: {row.reason}"
    if job.job_id in status.unfit:
        return status.unfit[job.job_id]
    if job.tickets and (job.tickets[-1].end_state or job.tickets[-1].is_deferred):
        return job.tickets[-1].reason
    return (
        f"refused: {job.refusals[-1].reason}"
        if job.refusals
        else "no site has room for it yet (pit place plan --explain)"
    )
