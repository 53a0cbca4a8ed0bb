"""The collector of runs: their ledgers, recoveries and staging, from the files in their folders, in which anybody may
write: so only starts that accounting knows count, each for one run of its user.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from msgspec.structs import replace

from pitools.core.errors import PitError
from pitools.core.timestamps import seconds_between, unix_to_rfc3339
from pitools.ledger.believed import believed_rows, in_turn, start_key
from pitools.ledger.records import RunLedger, State
from pitools.ledger.recoveries import newest_s, read_recoveries
from pitools.ledger.run_ledger import fleet_runs, run_ledger
from pitools.monitor.export import state
from pitools.monitor.export.samples import Samples
from pitools.monitor.export.state import RunMark, WorkerState
from pitools.run import run_folder
from pitools.run.attempt_records import SUCCEEDED, AttemptStart, CauseKind, Verdict
from pitools.run.run_folder import JobRef
from pitools.site.schema import Site
from pitools.slurm.records import AccountingRow
from pitools.stage.stage import StageResult

WINDOW_S = 24 * 3600.0
"""What the ratios are of, and how far back the first query counts."""

IDLE_AFTER_S = 600.0
_LATE_S = 900.0  # a run's files may be written, or seen over NFS, so long after its end
_KEEP_S = 30 * 24 * 3600.0
_MAX_MARKS = 2000
LOOK_S = 60.0  # after which a look begins no further run


def query_runs(site: Site, before: WorkerState, running_jobs: frozenset[str] | None) -> tuple[Samples, WorkerState]:
    """Return the gauges, and the state with counters, after a look at the runs that ran since the look before.

    running_jobs: raw ids of the cluster's running jobs; None if unknown. Raises PitError, OSError.
    """
    now_s, deadline = time.time(), time.monotonic() + LOOK_S
    last_s = before.clocks.get("runs", 0.0)
    since = unix_to_rfc3339((last_s or now_s - WINDOW_S) - _LATE_S)
    marks, counts, gauges = dict(before.runs), _zeros(), Samples()
    oldest = unix_to_rfc3339(now_s - _KEEP_S)
    waiting = {run_id for run_id, mark in marks.items() if mark.is_shown and not mark.is_over and mark.until > oldest}
    found = sorted(fleet_runs(site, since, going=waiting), key=lambda one: marks.get(one.name, RunMark()).seen_s)
    run_dirs = in_turn(found)  # the longest unread of each owner first
    rows = believed_rows(site, run_dirs, {start: run_id for run_id, mark in marks.items() for start in mark.starts})
    counted_s = now_s
    for run_dir in run_dirs:
        mark, own = marks.get(run_dir.name), None if rows is None else rows.get(run_dir)
        if time.monotonic() > deadline or (rows is not None and own is None):
            counted_s = min(counted_s, mark.seen_s if mark else last_s)
            continue
        unread = replace(mark or RunMark(is_shown=False), seen_s=now_s)
        if own is not None and not own:
            marks[run_dir.name] = replace(unread, is_running=False, gpus=0, is_shown=False)
            continue
        try:
            ledger = run_ledger(run_dir, own or (), only_rows=own is not None)
            run_counts = Samples()
            counted = count_run(run_dir, ledger, mark or RunMark(), run_counts, own)
        except (PitError, OSError):
            marks[run_dir.name] = unread
            continue
        # A run that began before the last look and has no mark of it goes on after that was dropped: it was counted.
        is_late = not (mark and mark.resource) and last_s and (seconds_between(ledger.since, since) or 0.0) > 0
        marks[run_dir.name] = replace(counted, seen_s=now_s)
        if not is_late:
            counts.merge(run_counts)
    totals = state.totals_of(before)
    totals.merge(counts)
    going = [
        run_dir for run_dir in run_dirs if (mark := marks.get(run_dir.name)) and mark.is_shown and not mark.is_over
    ]
    for run_dir in going:
        gauges.add("pit_runs", 1, "running" if marks[run_dir.name].is_running else "pending")
        if running_jobs is not None:
            _add_idle(gauges, run_dir, marks[run_dir.name].gpus, running_jobs, now_s)
    kept = sorted(marks.items(), key=lambda item: (item[1].is_shown, item[1].seen_s))[-_MAX_MARKS:]
    marks = {run_id: mark for run_id, mark in kept if mark.seen_s >= now_s - _KEEP_S}
    add_goodput(gauges, [mark for mark in marks.values() if mark.until >= unix_to_rfc3339(now_s - WINDOW_S)])
    clocks = {**before.clocks, "runs": counted_s}
    return gauges, replace(before, totals=totals.rows(), clocks=clocks, runs=marks)


def _zeros() -> Samples:
    """Return the counters of all causes and origins, at 0."""
    counts = Samples()
    for cause in get_args(CauseKind):
        counts.touch("pit_runs_ended_total", cause)
        if cause != SUCCEEDED:
            counts.touch("pit_recoveries_total", cause)
    for origin in ("source", "peer", "linked", "node"):
        counts.touch("pit_stage_bytes_total", origin)
    for name in ("pit_recovery_seconds", "pit_stage_seconds", "pit_run_queue_seconds_total"):
        counts.touch(name)
    return counts


def count_run(
    run_dir: Path, ledger: RunLedger, mark: RunMark, counts: Samples, rows: Sequence[AccountingRow] | None = None
) -> RunMark:
    """Count what of a run was not counted yet; return its new mark. rows: of its jobs, if others do not count."""
    seconds = count_seconds(ledger, mark.seconds, counts)
    queue_s = max(mark.queue_s, ledger.queue_s)
    counts.add("pit_run_queue_seconds_total", queue_s - mark.queue_s)
    verdict = run_folder.read_or_none(run_dir / "verdict.json", Verdict)
    if verdict and not mark.is_over:
        counts.add("pit_runs_ended_total", 1, verdict.kind)
    attempts = [one for one in run_folder.attempt_dirs(run_dir) if rows is None or _has_row(one, rows)]
    closed = set(mark.attempts)
    recovered = {recovery.attempt: recovery for recovery in read_recoveries(run_dir, attempts)}
    for attempt in attempts:
        recovery = recovered.get(attempt.name)
        if attempt.name in closed or not (recovery or verdict):
            continue
        closed.add(attempt.name)
        _count_staging(attempt, counts)
        if recovery:
            counts.add("pit_recoveries_total", 1, recovery.kind)
        if recovery and recovery.took_s is not None:
            counts.observe("pit_recovery_seconds", recovery.took_s)
    return RunMark(
        resource=ledger.resource,
        until=ledger.until,
        seconds=seconds,
        queue_s=queue_s,
        allocated_s=ledger.allocated_s,
        productive_s=None if ledger.goodput is None else ledger.goodput * ledger.allocated_s,
        attempts=tuple(sorted(closed)),
        is_running=ledger.is_running,
        gpus=ledger.count * ledger.nodes if ledger.is_running and ledger.resource == "gpu" else 0,
        starts=tuple(map(start_key, rows or ())),
        is_over=verdict is not None,
    )


def _has_row(attempt: Path, rows: Sequence[AccountingRow]) -> bool:
    """Return whether accounting has the start of an attempt's job."""
    start = run_folder.read_or_none(attempt / "start.json", AttemptStart)
    return start is not None and sum(start.job_id in (row.job_id, row.raw_id) for row in rows) > start.restart_count


def count_seconds(ledger: RunLedger, counted: Mapping[str, float], counts: Samples) -> dict[str, float]:
    """Count resource-seconds by state; return those counted in all, whose sum is never more than was allocated.

    A ledger moves seconds from productive to lost when steps are made again, and a counter cannot go down: then lost
    grows instead of productive, until the steps are made again. What nothing explains yet is counted at the end.
    """
    gains = {str(name): max(0.0, value - counted.get(name, 0.0)) for name, value in ledger.seconds.items()}
    if ledger.is_running:
        gains[State.UNACCOUNTED] = 0.0
    room = max(0.0, ledger.allocated_s - sum(counted.values()))
    share = min(1.0, room / total) if (total := sum(gains.values())) else 0.0
    for name, gain in gains.items():
        counts.add("pit_run_resource_seconds_total", gain * share, ledger.resource, name)
    return {name: counted.get(name, 0.0) + gain * share for name, gain in gains.items()}


def add_goodput(gauges: Samples, marks: Iterable[RunMark]) -> None:
    """Add the goodput of runs, weighted by what was allocated to them. Runs without evidence of it are left out."""
    sums: dict[str, tuple[float, float]] = {}
    for mark in marks:
        if mark.productive_s is not None:
            productive_s, allocated_s = sums.get(mark.resource, (0.0, 0.0))
            sums[mark.resource] = productive_s + mark.productive_s, allocated_s + mark.allocated_s
    for resource, (productive_s, allocated_s) in sums.items():
        if allocated_s:
            gauges.add("pit_goodput_ratio", productive_s / allocated_s, resource)


def _add_idle(gauges: Samples, run_dir: Path, gpus: int, running_jobs: frozenset[str], now_s: float) -> None:
    """Add a run's GPUs whose ranks make no steps, if it has a step log and its job runs."""
    job = run_folder.read_or_none(run_dir / "job.json", JobRef)
    if gpus and job and job.job_id in running_jobs and (last_step_s := _last_step_s(run_dir)):
        gauges.add("pit_held_watched_gpus", gpus)
        gauges.add("pit_held_idle_gpus", gpus if now_s - last_step_s > IDLE_AFTER_S else 0)


def _count_staging(attempt: Path, counts: Samples) -> None:
    for path in (attempt / "nodes").glob("*/*.json"):
        staged = run_folder.read_or_none(path, StageResult)
        if staged is None:
            continue
        read = staged.copied_bytes + staged.peer_bytes + staged.linked_bytes
        origins = (
            ("source", staged.copied_bytes),
            ("peer", staged.peer_bytes),
            ("linked", staged.linked_bytes),
            ("node", max(0, staged.bytes - read)),
        )
        for origin, size in origins:
            counts.add("pit_stage_bytes_total", size, origin)
        counts.observe("pit_stage_seconds", staged.wall_s)


def _last_step_s(run_dir: Path) -> float:
    attempt = run_folder.last_attempt(run_dir)
    return newest_s(attempt / "steps", "*.jsonl") if attempt else 0.0
