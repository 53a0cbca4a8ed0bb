"""The lines of the screen: a partition, a run, an alert; and which runs are shown, in which order. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from pitools.launch.monitor.run_filter import filter_runs
from pitools.ledger.records import RunLedger, State
from pitools.monitor.live.alerts import Alert
from pitools.monitor.live.site_feeds import Queue, SiteFeeds
from pitools.monitor.live.table import Column, Row
from pitools.run.run_folder import RunRecord, run_id_sort_key

QUEUE_COLUMNS = (
    Column("SITE", 10, is_id=True),
    Column("PARTITION", 10, is_id=True),
    Column("STATE", 6, 2),
    Column("IDLE/NODES", 10, 1, is_number=True),
    Column("OUT", 4, 3, is_number=True),
    Column("GPUS", 9, 4, is_number=True),
    Column("RUN", 5, 1, is_number=True),
    Column("WAIT", 5, 1, is_number=True),
    Column("AGE", 5, 1, is_number=True),
    Column("WHY", 14, 5, grows=True),
)
RUN_COLUMNS = (
    Column("RUN", 32, is_id=True),
    Column("SITE", 10, 6, is_id=True),
    Column("STATE", 9),
    Column("STEPS", 8, 1, is_number=True),
    Column("STEP AGE", 8, 4, is_number=True),
    Column("LOSS", 9, 5, is_number=True),
    Column("GOODPUT", 7, 2, is_number=True),
    Column("TRIES", 5, 7, is_number=True),
    Column("WHY", 16, 3, grows=True),
)
ALERT_COLUMNS = (
    Column("SITE", 10, 1, is_id=True),
    Column("ALERT ON", 32, is_id=True),
    Column("WHAT", 30, grows=True),
    Column("WHEN", 5, 2, is_number=True),
    Column("NEXT", 40, 3, grows=True),
)
SORTS = ("newest", "state", "goodput", "step age", "site")
_STATE_ORDER = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "PENDING", "UNKNOWN")
_STATE_STYLES = {"RUNNING": "green", "PENDING": "yellow", "COMPLETED": "", "CANCELLED": "", "UNKNOWN": "yellow"}


class QueueItem(NamedTuple):
    """A line of the table of sites. queue: None for a site without partitions, or of which none is known yet."""

    site: SiteFeeds
    queue: Queue | None


class RunItem(NamedTuple):
    """A line of the table of runs. step_at: when its step log grew, Unix time. is_stale: its site does not answer."""

    record: RunRecord
    step_at: float
    ledger: RunLedger | None
    is_stale: bool


def queue_items(sites: Sequence[SiteFeeds]) -> list[QueueItem]:
    """Return the lines of the table of sites: one a partition."""
    items = []
    for site in sites:
        view = site.view
        items += [QueueItem(site, queue) for queue in (view.queues if view else ())] or [QueueItem(site, None)]
    return items


def run_items(sites: Sequence[SiteFeeds]) -> list[RunItem]:
    """Return the lines of the table of runs, of all sites."""
    items = []
    for site in sites:
        ledgers = (site.ledgers.answer.value if site.ledgers else None) or {}
        for run in (site.runs.answer.value if site.runs else None) or ():
            if record := run.record:
                is_stale = site.is_runs_stale or (not record.is_over and site.is_slurm_stale)
                items.append(RunItem(record, run.step_at, ledgers.get(record.run_id), is_stale))
    return items


def filter_items(items: Sequence[RunItem], text: str) -> list[RunItem]:
    """Return the runs that pass conditions, as of `pit launch list --where`, or whose id, site or state has the text.

    Raises UsageError for a condition that is wrong.
    """
    if not any(sign in text for sign in "=~<>"):
        low = text.lower()
        return [item for item in items if low in f"{item.record.run_id} {item.record.site} {item.record.state}".lower()]
    passed = set(map(id, filter_runs([item.record for item in items], text)))
    return [item for item in items if id(item.record) in passed]


def sort_items(items: Sequence[RunItem], order: str, *, is_reversed: bool = False) -> list[RunItem]:
    """Return the runs in an order of SORTS; those that are equal in it, the newest first."""
    is_oldest = is_reversed and order == "newest"
    newest = sorted(items, key=lambda item: run_id_sort_key(item.record.run_id), reverse=not is_oldest)
    return sorted(newest, key=lambda item: _sort_key(item, order), reverse=is_reversed)


def _sort_key(item: RunItem, order: str) -> Any:
    record = item.record
    if order == "state":
        return _STATE_ORDER.index(record.state) if record.state in _STATE_ORDER else len(_STATE_ORDER), record.state
    if order == "goodput":
        return 2.0 if item.ledger is None or item.ledger.goodput is None else item.ledger.goodput
    if order == "step age":  # of runs that make steps, the one that hangs first
        return (record.state != "RUNNING", item.step_at or time.time())
    return record.site if order == "site" else 0


def queue_row(item: QueueItem) -> Row:
    """Return the cells of a line of the table of sites."""
    site, queue = item
    feed = site.slurm or site.runs
    is_stale = site.is_slurm_stale if site.slurm else site.is_runs_stale
    age = short_time(site.slurm_age_s if site.slurm else feed.age_s) if feed else ""
    error = site.problem or (feed.answer.error if feed else None)
    if queue is None:
        state = "error" if error else "asking" if site.slurm else "no Slurm"
        return Row((site.name, state, *[""] * 6, age, error.message if error else ""), "dim" if is_stale else "")
    reason = error.message if error else queue.reason
    gpus = f"{queue.gpus_used}/{queue.gpus}" if queue.gpus else ""
    cells = (queue.partition, queue.state, f"{queue.idle}/{queue.nodes}", queue.unusable or "", gpus)
    style = "dim" if is_stale else "red" if queue.unusable or queue.state.upper() != "UP" else ""
    return Row((site.name, *cells, queue.running, queue.pending, age, reason), style)


def run_row(item: RunItem) -> Row:
    """Return the cells of a line of the table of runs."""
    record, ledger = item.record, item.ledger
    state = "cancelling" if record.cancel_requested else record.state.lower()
    age = short_time(time.time() - item.step_at) if item.step_at and record.state == "RUNNING" else ""
    why = record.cause if record.is_over or record.cause else ""
    why = f"{why}: {record.reason}" if why and record.state != "COMPLETED" and record.reason else why
    if record.state == "PENDING":
        start = f", starts about {record.expected_start[11:16]}" if record.expected_start else ""
        why = f"{record.pending_reason}{start}"
    elif ledger and ledger.greatest_loss and record.state in ("RUNNING", "COMPLETED"):
        share = ledger.seconds[State(ledger.greatest_loss)] / ledger.allocated_s
        why = f"{ledger.greatest_loss} ≈{share:.0%}"
    # By its folder alone: the time that only Slurm's accounting has is not in it.
    goodput = "" if ledger is None or ledger.goodput is None else f"≈{ledger.goodput:.0%}"
    loss = "" if record.loss is None else f"{record.loss:.4g}"
    cells = (record.run_id, record.site, state, record.steps or "", age, loss, goodput, record.attempts or "", why)
    return Row(cells, "dim" if item.is_stale else _STATE_STYLES.get(record.state, "red"))


def alert_row(alert: Alert) -> Row:
    """Return the cells of a line of the table of alerts."""
    at = alert.at[11:16]
    return Row(
        (alert.site, alert.subject or "the site", alert.text, at, alert.next),
        "red" if alert.level == "error" else "yellow",
    )


def short_time(seconds: float) -> str:
    """Return a duration of at most four signs: `12s`, `59m`, `36h`, `9d`; 0 s for a time to come, as of a save."""
    for size, unit in ((1, "s"), (60, "m"), (3600, "h")):
        if seconds < size * (60 if unit != "h" else 48):
            return f"{max(0.0, seconds) / size:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"
