"""Following the queue: tick again and again, and tell what changed, as lines or as a picture that is drawn again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from pitools.core.record import Record
from pitools.place.dispatch import status, store
from pitools.place.dispatch.tick import Ticker

if TYPE_CHECKING:
    from rich.console import Group

_SHOWN = 20
_WIDE = 100
_OTHER_S = 0.5  # how soon it is looked again while another tick is at work


def rounds(ticker: Ticker, every_s: float, seen: Callable[[status.Ticked], bool]) -> None:
    """Tick every so many seconds, and show what each left, until `seen` says that it is enough.

    Where another tick is at work, its results are shown instead.
    """
    while True:
        began = time.monotonic()
        ticked = ticker.tick()
        if seen(ticked or look(ticker.place)):
            return
        time.sleep(max(0.0, (every_s if ticked else min(every_s, _OTHER_S)) - (time.monotonic() - began)))


def look(place: Path) -> status.Ticked:
    """The queue as it is, without a tick. A job that cannot be read is left out."""
    seen = status.sites(place)
    return status.Ticked([status.row_of(job, seen) for job in store.jobs(place)[0]], seen, {})


def ended(place: Path, job_ids: Collection[str]) -> list[status.JobRow] | None:
    """The rows of these jobs once all of them are over; None before. Raises UsageError for one that is not there."""
    seen = status.sites(place)
    jobs = [store.find(place, job_id) for job_id in job_ids]
    return [status.row_of(job, seen) for job in jobs] if all(job.is_over for job in jobs) else None


class Changes:
    """Which rows are new or not as they were."""

    def __init__(self) -> None:
        self._jobs: dict[str, status.JobRow] = {}
        self._sites: dict[str, status.SiteRow] = {}

    def of(self, ticked: status.Ticked, place: Path) -> list[status.JobRow | status.SiteRow]:
        """The rows that changed since the last call; a job that was put away is shown once more, as it ended."""
        found: list[status.JobRow | status.SiteRow] = []
        found += [row for row in ticked.sites.sites if self._sites.get(row.site) != row]
        found += [row for row in ticked.jobs if self._jobs.get(row.job_id) != row]
        here = {row.job_id for row in ticked.jobs}
        for job_id, row in self._jobs.items():
            if job_id not in here and row.state not in ("done", "failed", "withdrawn"):
                found.append(status.row_of(store.find(place, job_id), ticked.sites))
        self._sites = {row.site: row for row in ticked.sites.sites}
        self._jobs = {row.job_id: row for row in ticked.jobs}
        return found


class News:
    """What people should know of sites and jobs, each thing once: when it begins, and of a site also when it ends.

    before: what they know already; mine: the jobs that they wait for, of which they hear why they do not run.
    """

    def __init__(self, before: status.Sites | None = None, mine: Collection[str] = ()) -> None:
        self._dark = set(before.dark) if before else set[str]()
        self._broken = set(before.broken) if before else set[str]()
        self._mine, self._whys = frozenset(mine), set[str]()

    def of(self, ticked: status.Ticked) -> list[str]:
        """What is new since the last call, as lines."""
        seen = ticked.sites
        told = [f"{site}: {row.why}" for site, row in seen.dark.items() if site not in self._dark]
        told += [f"{row.site}: it answers again" for row in seen.sites if row.state == "up" and row.site in self._dark]
        told += [text for text in seen.broken if text not in self._broken]
        stuck: dict[str, list[str]] = {}
        for row in ticked.jobs:
            if row.job_id in self._mine and row.state in ("queued", "in-doubt"):
                stuck.setdefault(row.why, []).append(row.job_id)
        for why, job_ids in stuck.items():
            if why not in self._whys:
                told.append(f"{job_ids[0] if len(job_ids) == 1 else f'{len(job_ids)} jobs'}: {why}")
        self._dark, self._broken, self._whys = set(seen.dark), set(seen.broken), set(stuck)
        return told


class Change(Record, frozen=True, kw_only=True, tag="pit.place-change/1"):
    """A job or a site that changed, as a row of a table that has both. free: units, of a site."""

    what: str
    name: str
    state: str
    pool: str = ""
    free: int | None = None
    why: str = ""


def change(row: status.JobRow | status.SiteRow) -> Change:
    """The row with the columns that jobs and sites have in common."""
    if isinstance(row, status.JobRow):
        return Change(what="job", name=row.job_id, state=row.state, pool=row.pool, why=row.why)
    return Change(what="site", name=row.site, state=row.state, free=row.free, why=row.why)


def picture(ticked: status.Ticked, latest: list[str]) -> Group:
    """The sites, the jobs by state, and the latest changes, for a terminal."""
    from collections import Counter

    from rich.console import Group
    from rich.table import Table

    from pitools.core.output import cell

    is_wide = shutil.get_terminal_size().columns >= _WIDE
    at_sites = status.SITE_COLUMNS if is_wide else ("site", "state", "free", "why")
    of_jobs = ("job_id", "state", "pool", "slurm_id", "why") if is_wide else ("job_id", "state", "pool")
    table = Table(title=f"sites, {ticked.sites.t}", title_justify="left")
    for name in at_sites:
        table.add_column(name.replace("_", " "), no_wrap=True)
    for row in ticked.sites.sites:
        table.add_row(*(cell(getattr(row, name)) for name in at_sites), style="red" if row.why else None)
    counts = Counter(row.state for row in ticked.jobs)
    states = "  ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "no jobs"
    jobs = Table(title=states, title_justify="left")
    for name in of_jobs:
        jobs.add_column(name.replace("_", " "), no_wrap=True)
    for job in ticked.jobs[:_SHOWN]:
        jobs.add_row(*(cell(getattr(job, name)) for name in of_jobs))
    return Group(table, jobs, "\n".join(latest[-10:]))


def sentences(rows: list[status.JobRow | status.SiteRow]) -> list[str]:
    """Changes as lines for people."""
    return [
        f"{row.job_id}: {row.state} {row.pool} {row.why}".rstrip()
        if isinstance(row, status.JobRow)
        else f"{row.site}: {row.state}, {row.free} of {row.units} free {row.why}".rstrip()
        for row in rows
    ]
