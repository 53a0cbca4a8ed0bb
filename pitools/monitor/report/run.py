"""The report of one run: its ledger, its attempts and why they ended, its steps, slow ranks, and what limits it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from pitools.core.errors import PitError, UsageError
from pitools.core.html_page import page, table, text
from pitools.core.timestamps import now_rfc3339
from pitools.launch.monitor import status
from pitools.ledger.run_ledger import ledgers_of
from pitools.monitor.report.attempts import COLOURS, Attempt, attempt_parts, read_attempts, staging_table
from pitools.monitor.report.ledger_plot import hours, ledger_bars, ledger_table
from pitools.monitor.report.svg import bars, legend, lines, time_ticks
from pitools.perf.attribute.buckets import split_steps
from pitools.perf.attribute.verdict import judge
from pitools.perf.read.files import find_files
from pitools.perf.read.read import read_table
from pitools.perf.stragglers import find_stragglers, read_rank_times
from pitools.run.run_folder import RunRecord
from pitools.run.steps import read_run_steps
from pitools.site.schema import Site

_MAX_RANKS = 64


def run_page(run_dir: Path, site: Site) -> str:
    """Return the page of a run. What cannot be read is said in its place. Raises DataError for another folder."""
    notes = []
    try:
        record = status.run_status(run_dir, site)
    except PitError as error:
        record = status.run_status(run_dir, site, query_slurm=False)
        notes.append(f"the state is from the folder alone: {error}")
    attempts = read_attempts(run_dir)
    body = [
        f"<h1>{text(record.run_id)}</h1><p class=note>at {text(site.name)}, written {now_rfc3339()}</p>",
        *(f"<p class=note>{text(note)}</p>" for note in notes),
        _facts(record),
        _ledger(run_dir, site),
        *_attempts(attempts),
        *_steps(run_dir),
        *_stragglers(run_dir),
        *_verdict(run_dir),
    ]
    if staged := [each for attempt in attempts for each in attempt.staged]:
        body += ["<h2>Staging</h2>", staging_table(staged)]
    return page(record.run_id, body)


def _facts(record: RunRecord) -> str:
    params = ", ".join(f"{name}={value}" for name, value in record.params.items())
    rows = [
        ("state", record.state.lower()), ("cause", record.cause), ("why", record.reason), ("created", record.created),
        ("nodes", record.nodes), ("steps", record.steps), ("last loss", record.loss), ("attempts", record.attempts),
        ("parameters", params), ("folder", record.run_dir),
    ]  # fmt: skip
    return table(("", ""), [row for row in rows if row[1] not in ("", None)])


def _ledger(run_dir: Path, site: Site) -> str:
    problems: list[PitError] = []
    ledger = ledgers_of(site, [run_dir], lambda _, error: problems.append(error)).get(run_dir)
    note = "".join(f"<p class=note>{text(error)}</p>" for error in problems)
    if ledger is None:
        return f"<h2>Goodput</h2>{note}"
    if not ledger.allocated_s:
        return "<h2>Goodput</h2><p class=note>nothing was allocated yet</p>"
    note += f"<p class=note>step logs with bad lines or none: {text(ledger.bad_logs)}</p>" if ledger.bad_logs else ""
    title = f"Goodput {ledger.goodput:.1%}" if ledger.goodput is not None else "Goodput: unknown, without a step log"
    allocated = f"{hours(ledger.allocated_s)} {ledger.resource}-hours allocated, {ledger.since} to {ledger.until}"
    queued = f"; {hours(ledger.queue_s)} h in the queue"
    return (
        f"<h2>{text(title)}</h2>{note}<p class=note>{text(allocated + queued)}</p>"
        f"{ledger_bars([(ledger.name, [ledger])])}{ledger_table([ledger])}"
    )


def _attempts(attempts: list[Attempt]) -> Iterator[str]:
    yield "<h2>Attempts</h2>"
    parts = attempt_parts(attempts, time.time())
    if parts:
        low, high = min(part.start for part in parts.values()), max(part.end for part in parts.values())
        rows = [(f"attempt {name}", [part]) for name, part in list(parts.items())[-40:]]
        yield legend(COLOURS)
        yield bars(rows, low, high, time_ticks(low, high))
    heads = ("attempt", "job", "nodes", "began", "ended", "saved steps", "why it ended", "", "then")
    yield table(heads, [
        (
            one.name, one.job_id, one.node_list, one.started[:19], one.ended[:19], one.saved_steps,
            one.cause.kind if one.cause else "", one.cause.reason if one.cause else "",
            one.decision.action if one.decision else "",
        )
        for one in attempts
    ])  # fmt: skip


def _steps(run_dir: Path) -> Iterator[str]:
    steps = [step for _, step in sorted(read_run_steps(run_dir).items())]
    yield "<h2>Steps of rank 0</h2>"
    if not steps:
        yield "<p class=note>no step log (pitools.run.steps.StepLog writes one)</p>"
        return
    losses = [(float(step.step), step.loss) for step in steps if step.loss is not None]
    yield lines({"loss": losses}, {}, "step", "loss")
    colours = {"whole step": "#0072B2", "input": "#D55E00"}
    times = {
        "whole step": [(float(step.step), step.wall_s) for step in steps],
        "input": [(float(step.step), step.input_s) for step in steps],
    }
    yield legend(colours)
    yield lines(times, colours, "step", "seconds")


def _stragglers(run_dir: Path) -> Iterator[str]:
    yield "<h2>Ranks</h2>"
    try:
        times = read_rank_times(run_dir)
        found = find_stragglers(times)
    except PitError as error:
        yield f"<p class=note>not compared: {text(error.message)}</p>"
        return
    if not found:
        steps = len(times.parts["compute"])
        yield f"<p>No slow rank among {len(times.ranks)}, over {steps} steps of the last attempt.</p>"
        return
    heads = ("rank", "node", "what is longer", "by seconds a step", "by share of a step", "probability if healthy")
    rows = [
        (
            one.rank,
            one.node,
            one.cause,
            one.excess_s,
            f"{one.effect:.1%}",
            f"{one.p:.2g}" if one.p > 1e-12 else "< 1e-12",
        )
        for one in found
    ]
    yield table(heads, rows[:_MAX_RANKS])


def _verdict(run_dir: Path) -> Iterator[str]:
    yield "<h2>What limits it</h2>"
    try:
        found = find_files([run_dir])
        spans = read_table(found)
        verdict = judge(split_steps(spans), spans.notes)
    except UsageError as error:
        yield f"<p class=note>unknown: {text(error.message)}; to record a trace: pit perf trace</p>"
        return
    except PitError as error:
        yield f"<p class=note>unknown: {text(error)}</p>"
        return
    forms = {"steps": "its step logs", "kineto": "a trace of PyTorch's profiler", "xplane": "an XLA profile"}
    source = next((name for form, name in forms.items() if any(one.form == form for one in found)), "its logs")
    size = f"{verdict.steps} steps of {verdict.ranks} ranks"
    yield f"<p><b>{text(verdict.verdict)}</b>, by {text(source)}: {size}</p><ul>"
    for line in verdict.evidence:
        yield f"<li>{text(line)}</li>"
    for advice in verdict.advice:
        gain = (
            f"gains about {advice.gain_ms:.3g} ms of {verdict.wall_ms:.4g} ms a step, at most {advice.ceiling_ms:.3g}"
        )
        yield f"<li>{text(f'{advice.cause}: {advice.remedy}: {gain}')}</li>"
    yield "</ul>"
    yield from (f"<p class=note>{text(note)}</p>" for note in verdict.notes)
