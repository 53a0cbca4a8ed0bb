"""Follow the queue: tick repeatedly, and print the changes as lines or as a live table."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from pitools.core.errors import PitError
from pitools.core.record import Record
from pitools.place.dispatch import status, store
from pitools.place.dispatch.tick import Dispatcher

if TYPE_CHECKING:
    from rich.console import Group

_MAX_MESSAGES = 20
_WIDE_COLUMNS = 100
_OTHER_TICK_S = 0.5  # polling interval while another process ticks


def tick_until(ticker: Dispatcher, every_s: float, on_tick: Callable[[status.TickResult], bool]) -> None:
    """Tick every `every_s` seconds and pass each result to `on_tick`, until that returns True.

    While another process ticks, its results are passed instead.
    """
    while True:
        start_s = time.monotonic()
        ticked = ticker.tick()
        if on_tick(ticked or read_queue(ticker.queue_dir)):
            return
        time.sleep(max(0.0, (every_s if ticked else min(every_s, _OTHER_TICK_S)) - (time.monotonic() - start_s)))


def read_queue(queue_dir: Path) -> status.TickResult:
    """Return the queue's state without a tick. Unreadable jobs are left out."""
    sites = status.read_site_status(queue_dir)
    return status.TickResult([status.job_row(job, sites) for job in store.read_jobs(queue_dir)[0]], sites, {})


def finished_rows(queue_dir: Path, job_ids: Collection[str]) -> list[status.QueueJobRow] | None:
    """Return the rows of these jobs once all of them are over, else None. Raises UsageError for an unknown id."""
    sites = status.read_site_status(queue_dir)
    jobs = [store.find_job(queue_dir, job_id) for job_id in job_ids]
    return [status.job_row(job, sites) for job in jobs] if all(job.is_over for job in jobs) else None


class ChangedRows:
    """Finds the rows that are new or changed since the last call."""

    def __init__(self) -> None:
        self._jobs: dict[str, status.QueueJobRow] = {}
        self._sites: dict[str, status.SiteStatusRow] = {}

    def changed(self, ticked: status.TickResult, queue_dir: Path) -> list[status.QueueJobRow | status.SiteStatusRow]:
        """Return the rows that changed since the last call. A job archived since then is returned once, as it ended."""
        rows: list[status.QueueJobRow | status.SiteStatusRow] = []
        rows += [row for row in ticked.sites.sites if self._sites.get(row.site) != row]
        rows += [row for row in ticked.jobs if self._jobs.get(row.job_id) != row]
        job_ids = {row.job_id for row in ticked.jobs}
        for job_id, row in self._jobs.items():
            if job_id not in job_ids and row.state not in ("done", "failed", "cancelled"):
                with contextlib.suppress(PitError):  # damaged, which the status reports, or removed
                    rows.append(status.job_row(store.find_job(queue_dir, job_id), ticked.sites))
        self._sites = {row.site: row for row in ticked.sites.sites}
        self._jobs = {row.job_id: row for row in ticked.jobs}
        return rows


class Messages:
    """Collects messages for the user, each once: new problems of sites, their end, and reasons why jobs wait.

    previous: a status whose errors were already reported. own_jobs: the jobs whose reasons are reported.
    """

    def __init__(self, previous: status.DispatchStatus | None = None, own_jobs: Collection[str] = ()) -> None:
        self._problems = _problems(previous) if previous else dict[str, str]()
        self._broken = set(previous.broken) if previous else set[str]()
        self._own_jobs, self._reasons = frozenset(own_jobs), set[str]()

    def new_messages(self, ticked: status.TickResult) -> list[str]:
        """Return the messages that are new since the last call."""
        sites = ticked.sites
        problems = _problems(sites)
        messages = [
            f"{site}: {row.reason}" for site, row in sites.not_up.items() if problems[site] != self._problems.get(site)
        ]
        messages += [f"{row.site}: up again" for row in sites.sites if row.state == "up" and row.site in self._problems]
        messages += [text for text in sites.broken if text not in self._broken]
        stuck: dict[str, list[str]] = {}
        for row in ticked.jobs:
            if row.job_id in self._own_jobs and row.state in ("queued", "in-doubt"):
                stuck.setdefault(row.reason, []).append(row.job_id)
        for reason, job_ids in stuck.items():
            if reason not in self._reasons:
                messages.append(f"{job_ids[0] if len(job_ids) == 1 else f'{len(job_ids)} jobs'}: {reason}")
        self._problems, self._broken, self._reasons = problems, set(sites.broken), set(stuck)
        return messages


def _problems(sites: status.DispatchStatus) -> dict[str, str]:
    """Return site → what makes its problem another one: not the reason why it does not answer, nor a count or time."""
    return {
        site: row.state if row.state in ("unreachable", "busy") else re.sub(r"[\d.]+", "", f"{row.state} {row.reason}")
        for site, row in sites.not_up.items()
    }


class QueueChangeRow(Record, frozen=True, kw_only=True, tag="pit.queue-change-row/1"):
    """A job or a site that changed, as a row of a table that has both. free: units, of a site."""

    kind: str
    name: str
    state: str
    pool: str = ""
    free: int | None = None
    reason: str = ""


def to_change_row(row: status.QueueJobRow | status.SiteStatusRow) -> QueueChangeRow:
    """Return the row with the columns common to jobs and sites."""
    if isinstance(row, status.QueueJobRow):
        return QueueChangeRow(kind="job", name=row.job_id, state=row.state, pool=row.pool, reason=row.reason)
    return QueueChangeRow(kind="site", name=row.site, state=row.state, free=row.free, reason=row.reason)


def live_table(ticked: status.TickResult, latest: list[str]) -> Group:
    """Return the sites, the jobs by state, and the latest changes, as a table for a terminal."""
    from collections import Counter

    from rich.console import Group
    from rich.table import Table

    from pitools.core.output import format_cell

    is_wide = shutil.get_terminal_size().columns >= _WIDE_COLUMNS
    at_sites = status.SITE_COLUMNS if is_wide else ("site", "state", "free", "reason")
    of_jobs = ("job_id", "state", "pool", "slurm_id", "reason") if is_wide else ("job_id", "state", "pool")
    table = Table(title=f"sites, {ticked.sites.ticked_at}", title_justify="left")
    for name in at_sites:
        table.add_column(name.replace("_", " "), no_wrap=True)
    for row in ticked.sites.sites:
        table.add_row(*(format_cell(getattr(row, name)) for name in at_sites), style="red" if row.reason else None)
    counts = Counter(row.state for row in ticked.jobs)
    states = "  ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "no jobs"
    jobs = Table(title=states, title_justify="left")
    for name in of_jobs:
        jobs.add_column(name.replace("_", " "), no_wrap=True)
    for job in ticked.jobs[:_MAX_MESSAGES]:
        jobs.add_row(*(format_cell(getattr(job, name)) for name in of_jobs))
    return Group(table, jobs, "\n".join(latest[-10:]))


def change_lines(rows: list[status.QueueJobRow | status.SiteStatusRow]) -> list[str]:
    """Return the changes as lines of text."""
    return [
        f"{row.job_id}: {row.state} {row.pool} {row.reason}".rstrip()
        if isinstance(row, status.QueueJobRow)
        else f"{row.site}: {row.state}, {row.free} of {row.units} free {row.reason}".rstrip()
        for row in rows
    ]
