"""What people see of the queue: a row a job, a row a site, and why a job waits."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from pitools.core.errors import DataError, PitError
from pitools.core.fs import write_atomic
from pitools.core.record import Record
from pitools.place.dispatch.journal import Job, Ticket
from pitools.place.dispatch.reconcile import Board
from pitools.place.types import Pool
from pitools.run import run_folder

JOB_COLUMNS = ("job_id", "state", "pool", "run", "why")
SITE_COLUMNS = ("site", "state", "units", "free", "waiting", "ours_running", "ours_waiting", "why")


class SiteRow(Record, frozen=True, kw_only=True, tag="pit.place-site/1"):
    """A site as the last tick saw it. state: `up`, or `dark` since then. units, free: over its partitions.

    waiting: units that others wait for. ours_running, ours_waiting: jobs.
    """

    site: str
    state: str
    since: str
    units: int = 0
    free: int = 0
    waiting: int = 0
    ours_running: int = 0
    ours_waiting: int = 0
    why: str = ""


class Sites(Record, frozen=True, kw_only=True, tag="pit.place-sites/1"):
    """What the last tick saw, and when. broken: what is wrong with jobs that cannot be read.

    unfit: job id → what speaks against each partition of the sites that answered, where something does of all.
    """

    t: str
    sites: tuple[SiteRow, ...]
    broken: tuple[str, ...] = ()
    unfit: dict[str, str] = {}

    @property
    def dark(self) -> dict[str, SiteRow]:
        """The sites that do not answer."""
        return {row.site: row for row in self.sites if row.state == "dark"}


class JobRow(Record, frozen=True, kw_only=True, tag="pit.place-job/1"):
    """One job of the queue. state: queued, ticketed, in-doubt, running, done, failed or withdrawn.

    pool: where it runs, or where its first ticket waits. run, slurm_id: what it is called there. exit_code: of one that
    ended.
    """

    job_id: str
    state: str
    pool: str
    slurm_id: str
    tickets: int
    owner: str
    tier: str
    submitted: str
    why: str
    exit_code: int | None = None
    run: str = ""


class Ticked(NamedTuple):
    """What a tick left: every job that is not put away, the sites, and what went wrong, by site.

    is_deaf: sites were asked, and at each of them something went wrong.
    """

    jobs: list[JobRow]
    sites: Sites
    faults: dict[str, PitError]
    is_deaf: bool = False


def sites(place: Path) -> Sites:
    """What the last tick saw; nothing where a loss of power damaged its record: the next tick writes it anew."""
    with contextlib.suppress(DataError):
        if seen := run_folder.read(place / "sites.json", Sites):
            return seen
    return Sites(t="", sites=())


def write(
    place: Path,
    board: Board,
    asked: str,
    pools: Mapping[str, Pool],
    faults: Mapping[str, PitError],
    answered: Collection[str],
    unfit: Mapping[str, str],
) -> Ticked:
    """Keep what this tick saw, for `list` and `watch`, and for the next tick to know since when a site is dark.

    answered: the sites that did when they were asked at `asked`, whatever went wrong there afterwards. A site that was
    not asked is as it was seen last. unfit: as in Sites.
    """
    before = {row.site: row for row in sites(place).sites}
    names = {job_site for job in board.jobs.values() for job_site in job.asked.sites}
    names |= {ticket.site for job in board.jobs.values() for ticket in job.live}
    running, waiting = _ours(board)
    rows = []
    for name in sorted(names):
        old = before.get(name)
        if name not in answered and name not in faults:
            if old:
                rows.append(msgspec.structs.replace(old, ours_running=running[name], ours_waiting=waiting[name]))
            continue
        state = "dark" if name in faults else "up"
        since = old.since if old and old.state == state and not (state == "dark" and name in answered) else asked
        mine = [pool for pool in pools.values() if pool.pool.partition("/")[0] == name]
        row = SiteRow(site=name, state=state, since=since)
        # Partitions of one site mostly share its nodes: the largest stands for it. Else it is as last seen.
        if mine:
            top = max(mine, key=lambda pool: pool.units)
            row = msgspec.structs.replace(row, units=top.units, free=top.free, waiting=top.waiting)
        elif old:
            row = msgspec.structs.replace(old, state=state, since=since)
        why = ""
        if error := faults.get(name):
            why = error.what if error.where == name else str(error)
        rows.append(msgspec.structs.replace(row, ours_running=running[name], ours_waiting=waiting[name], why=why))
    seen = Sites(t=asked, sites=tuple(rows), broken=tuple(str(error) for error in board.errors), unfit=dict(unfit))
    write_atomic(place / "sites.json", msgspec.json.encode(seen) + b"\n", mode=0o600, durable=False)
    is_deaf = bool(faults) and faults.keys() >= set(answered)
    return Ticked([row_of(job, seen) for job in board.jobs.values()], seen, dict(faults), is_deaf)


def _ours(board: Board) -> tuple[Counter[str], Counter[str]]:
    live = [ticket for job in board.jobs.values() for ticket in job.live]
    running = Counter(ticket.site for ticket in live if ticket.is_running)
    return running, Counter(ticket.site for ticket in live if not ticket.is_running)


def row_of(job: Job, seen: Sites) -> JobRow:
    """The job as a row, with why it is where it is."""
    ticket = next((one for one in job.tickets if one.is_running or one.state == "over"), None)
    ticket = ticket or next(iter(job.live), None)
    doubtful = [one for one in job.live if one.site in seen.dark or one.unknown]
    state: str = job.state
    if doubtful and not job.is_over and (state != "running" or doubtful[0].is_running):
        state = "in-doubt"
    return JobRow(
        job_id=job.job_id,
        state=state,
        pool=ticket.pool if ticket else "",
        slurm_id=ticket.slurm_id if ticket else "",
        tickets=len(job.live),
        owner=job.asked.owner,
        tier=job.asked.tier,
        submitted=job.asked.submitted,
        why=_why(job, ticket, doubtful, seen),
        exit_code=job.end.exit_code if job.end else None,
        run=ticket.name if ticket else "",
    )


def _why(job: Job, ticket: Ticket | None, doubtful: list[Ticket], seen: Sites) -> str:
    dark = seen.dark
    if job.end:
        said = job.end.why or ("" if job.state == "done" else job.end.state.lower())
        if job.state == "failed" and ticket:
            said = f"{said}, exit code {job.end.exit_code}: pit launch logs {ticket.name} --site {ticket.site}"
        return said
    if doubtful:
        site = doubtful[0].site
        if site not in dark:
            return doubtful[0].why
        what = "runs" if doubtful[0].is_running else "may start or have started"
        return f"{what} at {site}, which is silent since {dark[site].since}: it waits for the answer"
    if job.is_cancelled:
        return "being withdrawn"
    if ticket:
        return ticket.why
    if seen.t < job.asked.submitted:
        return "nobody has looked at it yet: pit place tick, or watch"
    if dark.keys() >= set(job.asked.sites):
        return f"every site that it may use is silent; {dark[job.asked.sites[0]].why}"
    if job.job_id in seen.unfit:
        return f"it fits nowhere now: {seen.unfit[job.job_id]}"
    return (
        f"refused: {job.refusals[-1].why}" if job.refusals else "no site has room for it yet (pit place plan --explain)"
    )
