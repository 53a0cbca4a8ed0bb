"""The report of a day: goodput, use and waits, runs, recoveries, incidents of nodes, staging."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from pitools.core.html_page import page, table, text
from pitools.core.timestamps import now_rfc3339, rfc3339_to_unix, unix_to_rfc3339
from pitools.core.units import format_duration
from pitools.ledger.records import RunLedger, State
from pitools.monitor.report.attempts import COLOURS, attempt_parts, staging_table, with_following
from pitools.monitor.report.day import Day, DayRun
from pitools.monitor.report.ledger_plot import hours, ledger_bars, ledger_table, sum_states
from pitools.monitor.report.svg import Part, bars, legend, time_ticks
from pitools.monitor.usage.report import UsageRow

_MAX_LINES = 40


def day_page(day: Day, user: str, now: datetime | None = None) -> str:
    """Return the page of a day. user: with whose rights it was read."""
    now_s = (now or datetime.now(UTC)).timestamp()
    title = f"{day.since[:10]}: {', '.join(day.sites)}"
    rights = f"written {now_rfc3339()}, of what {user} may see; a run that touches the day (UTC) counts whole"
    body = [
        f"<h1>{text(title)}</h1><p class=note>{text(rights)}</p>",
        _totals(day),
        *_goodput(day),
        *_usage(day),
        *_runs(day, now_s),
        *_recoveries(day),
        *_incidents(day, now_s),
        *_staging(day),
        *_notes(day),
    ]
    return page(f"pit monitor: {title}", body)


def _totals(day: Day) -> str:
    ended = [run for run in day.runs if run.verdict and day.holds(run.verdict.t)]
    succeeded = sum(run.verdict is not None and run.verdict.state == "succeeded" for run in ended)
    rows = [
        ("runs", len(day.runs)), ("of which ended", len(ended)), ("of which succeeded", succeeded),
        ("attempts that began", sum(day.holds(one.started) for run in day.runs for one in run.attempts)),
        ("nodes with an incident", len({incident.node for _, incident in day.incidents})),
    ]  # fmt: skip
    return table(("", ""), rows)


def _by_resource(day: Day) -> Iterator[tuple[str, list[DayRun]]]:
    """Yield the runs with allocated time by resource: GPU-hours and node-hours do not add up."""
    for resource in ("gpu", "node"):
        if runs := [
            run for run in day.runs if run.ledger and run.ledger.resource == resource and run.ledger.allocated_s
        ]:
            yield resource, runs


def _ledgers(runs: Sequence[DayRun]) -> list[RunLedger]:
    return [run.ledger for run in runs if run.ledger]


def _goodput(day: Day) -> Iterator[str]:
    yield "<h2>Goodput and losses</h2>"
    for resource, runs in _by_resource(day):
        ledgers = _ledgers(runs)
        seconds = sum_states(ledgers)
        total = sum(seconds.values())
        productive = f"{seconds[State.PRODUCTIVE] / total:.1%}"
        yield f"<p><b>{productive}</b> of {hours(total)} {resource}-hours were productive.</p>"
        rows = [(site, _ledgers([run for run in runs if run.site == site])) for site in day.sites]
        yield ledger_bars([row for row in rows if row[1]])
        yield ledger_table(ledgers)
        largest = sorted(runs, key=lambda run: -_ledgers([run])[0].allocated_s)[:_MAX_LINES]
        yield f"<h2>By run, in {resource}-hours</h2>"
        yield ledger_bars([(run.run_id, _ledgers([run])) for run in largest])
        heads = ("run", "site", "user", f"{resource}-hours", "goodput", "greatest loss", "of it", "in the queue")
        yield table(heads, [_ledger_row(run.run_id, ledger) for run in largest for ledger in _ledgers([run])])
        if len(runs) > len(largest):
            yield f"<p class=note>the {len(largest)} largest of {len(runs)}</p>"


def _ledger_row(run_id: str, ledger: RunLedger) -> tuple[object, ...]:
    loss = ledger.seconds[State(ledger.greatest_loss)] / ledger.allocated_s if ledger.greatest_loss else 0.0
    goodput = "-" if ledger.goodput is None else f"{ledger.goodput:.1%}"
    allocated, queued = hours(ledger.allocated_s), format_duration(ledger.queue_s)
    return run_id, ledger.site, ledger.user, allocated, goodput, ledger.greatest_loss, f"{loss:.1%}", queued


def _usage(day: Day) -> Iterator[str]:
    """Yield what all jobs used, waited and wasted on that day, cut at its ends."""
    heads = ("jobs", "GPU-h", "node-h", "useful", "cost", "wait, median", "wait, 95 %", "wasted hours, by cause")
    for by, rows in day.usage.items():
        yield f"<h2>Use by {by}</h2>"
        yield table((by, *heads), map(_usage_row, rows[:_MAX_LINES])) if rows else "<p class=note>no job</p>"


def _usage_row(row: UsageRow) -> tuple[object, ...]:
    all_hours = row.gpu_hours if row.resource == "gpu" else row.node_hours
    useful = f"{row.useful_hours / all_hours:.1%}" if all_hours else "-"
    waits = (None if wait is None else format_duration(wait) for wait in (row.wait_p50_s, row.wait_p95_s))
    waste = ", ".join(f"{cause} {lost:,.2f}" for cause, lost in row.waste_hours.items())
    cost = f"{row.cost:,.2f} {row.currency}" if row.cost else None
    gpu_hours = f"{row.gpu_hours:,.2f}" if row.gpu_hours else None
    return row.group, row.jobs, gpu_hours, f"{row.node_hours:,.2f}", useful, cost, *waits, waste


def _runs(day: Day, now_s: float) -> Iterator[str]:
    yield "<h2>Runs</h2>"
    begin, end = rfc3339_to_unix(day.since) or 0.0, min(now_s, rfc3339_to_unix(day.until) or 0.0)
    began = [run for run in day.runs if run.attempts]
    shown = sorted(began, key=lambda run: run.attempts[0].started)[-_MAX_LINES:]
    if not day.runs:
        yield "<p class=note>none</p>"
        return
    yield legend(COLOURS)
    parts = [(run.run_id, attempt_parts(run.attempts, now_s).values()) for run in shown]
    rows = [(run_id, [part for part in of_run if part.end >= begin]) for run_id, of_run in parts]
    yield bars(rows, begin, end, time_ticks(begin, end))
    stopped = [run for run in day.runs if run.verdict and run.verdict.state == "stopped" and day.holds(run.verdict.t)]
    if stopped:
        yield "<h2>Runs that stopped</h2>"
        rows_of = [(run.run_id, run.site, run.verdict.kind, run.verdict.reason) for run in stopped if run.verdict]
        yield table(("run", "site", "cause", "why"), rows_of[:_MAX_LINES])
    if len(began) > len(shown):
        yield f"<p class=note>the last {len(shown)} of {len(began)} that began</p>"


def _recoveries(day: Day) -> Iterator[str]:
    yield "<h2>Recoveries</h2>"
    rows = []
    for run in day.runs:
        for one, following in with_following(run.attempts):
            if one.recovery and following and day.holds(unix_to_rfc3339(one.recovery.began_s)):
                kind, took_s = one.recovery.kind, one.recovery.took_s
                took = "-" if took_s is None else format_duration(took_s)
                lost = max(0, one.cause.steps - following.saved_steps) if one.cause else 0
                why, nodes = (one.cause.reason, ",".join(one.cause.nodes)) if one.cause else ("", "")
                rows.append((run.run_id, run.site, one.name, kind, why, nodes, took, lost))
    heads = ("run", "site", "attempt", "cause", "why", "nodes at fault", "until its ranks", "steps to repeat")
    yield table(heads, rows[:_MAX_LINES]) if rows else "<p class=note>none</p>"
    causes = Counter(row[3] for row in rows)
    if len(causes) > 1:
        yield f"<p>{text(', '.join(f'{cause} {count}' for cause, count in causes.most_common()))}</p>"


def _incidents(day: Day, now_s: float) -> Iterator[str]:
    yield "<h2>Drains and incidents of nodes</h2>"
    if not day.incidents:
        yield "<p class=note>none in the journals of pit node that this user may read</p>"
        return
    begin, end = rfc3339_to_unix(day.since) or 0.0, min(now_s, rfc3339_to_unix(day.until) or 0.0)
    by_node: dict[str, list[Part]] = {}
    for site, one in day.incidents:
        over = rfc3339_to_unix(one.over_at) or end
        part = Part(rfc3339_to_unix(one.opened_at) or begin, over, "#D55E00", f"{one.check}: {one.message}")
        by_node.setdefault(f"{site} {one.node}", []).append(part)
    yield bars(sorted(by_node.items())[:_MAX_LINES], begin, end, time_ticks(begin, end))
    heads = ("site", "node", "check", "why", "began", "over", "how it ended")
    yield table(heads, [
        (site, one.node, one.check, one.message, one.opened_at[:19], one.over_at[:19], one.outcome or one.for_person)
        for site, one in day.incidents[:_MAX_LINES]
    ])  # fmt: skip


def _staging(day: Day) -> Iterator[str]:
    begin, end = rfc3339_to_unix(day.since) or 0.0, rfc3339_to_unix(day.until) or 0.0
    staged = [one for run in day.runs for each in run.attempts for one in each.staged if begin <= one.at < end]
    yield "<h2>Staging</h2>"
    yield staging_table(staged) if staged else "<p class=note>none</p>"


def _notes(day: Day) -> Iterator[str]:
    if day.notes:
        yield "<h2>Left out</h2><ul>"
        yield from (f"<li>{text(note)}</li>" for note in day.notes[:_MAX_LINES])
        yield "</ul>"
        if len(day.notes) > _MAX_LINES:
            yield f"<p class=note>and {len(day.notes) - _MAX_LINES} more</p>"
