"""The collector of runs: their ledgers, recoveries and staging, from the files in their folders, in which anybody may
write: so only starts that accounting knows count, each for one run of its user.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from msgspec.structs import replace

from pitools.core.errors import PitError
from pitools.core.timestamps import seconds_between, unix_to_rfc3339
from pitools.ledger.records import RunLedger, State
from pitools.ledger.recoveries import newest_s, read_recoveries
from pitools.ledger.run_ledger import MAX_JOBS, fleet_runs, job_ids, owner, read_rows, rows_by_id, run_ledger
from pitools.monitor.export import state
from pitools.monitor.export.samples import Samples
from pitools.monitor.export.state import RunMark, WorkerState
from pitools.run import run_folder
from pitools.run.attempt_records import SUCCEEDED, AttemptStart, CauseKind, Verdict
from pitools.run.run_folder import JobRef, run_id_sort_key
from pitools.site.schema import Site
from pitools.slurm.errors import SlurmReason, SlurmRefused
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
    run_dirs = _in_turn(fleet_runs(site, since, going=waiting), marks)
    rows = _rows_by_run(site, run_dirs, marks)
    counted_s = now_s
    for run_dir in run_dirs:
        mark, own = marks.get(run_dir.name), None if rows is None else rows.get(run_dir.name)
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


def _in_turn(run_dirs: Iterable[Path], marks: Mapping[str, RunMark]) -> list[Path]:
    """Return runs by turns of their owners, the longest unread of each first: no user keeps others' from being read."""
    by_owner: dict[str, list[Path]] = defaultdict(list)
    for run_dir in sorted(run_dirs, key=lambda run_dir: marks.get(run_dir.name, RunMark()).seen_s):
        by_owner[owner(run_dir)].append(run_dir)
    return [run_dir for turn in itertools.zip_longest(*by_owner.values()) for run_dir in turn if run_dir]


def _rows_by_run(
    site: Site, run_dirs: Sequence[Path], marks: Mapping[str, RunMark]
) -> dict[str, list[AccountingRow]] | None:
    """Return the rows of each run that belong to it, for as many runs as sacct can be asked at once.

    A start belongs to the run of its user whose id is its job's name, else (of an array of runs) to the oldest that has
    its id. None for a site without accounting.
    """
    ids: dict[Path, list[str]] = {}
    left = MAX_JOBS
    for run_dir in run_dirs:
        if (left := left - len(own := job_ids(run_dir))) < 0:
            break
        ids[run_dir] = own
    try:
        rows = read_rows(site, itertools.chain(*ids.values()))
    except SlurmRefused as error:
        if error.reason is SlurmReason.ACCOUNTING_DISABLED:
            return None
        raise
    by_id = rows_by_id(row for row in rows if row.user)
    taken = {start: run_id for run_id, mark in marks.items() for start in mark.starts}
    by_run: dict[str, list[AccountingRow]] = {}
    for run_dir in sorted(ids, key=lambda one: (not run_id_sort_key(one.name)[0], run_id_sort_key(one.name))):
        named = {id(row): row for job_id in ids[run_dir] for row in by_id.get(job_id, ())}
        user, run_id = owner(run_dir), run_dir.name
        by_run[run_id] = [
            row
            for row in named.values()
            if row.user == user and _run_id(row) in ("", run_id) and taken.setdefault(_start_key(row), run_id) == run_id
        ]
    return by_run


def _run_id(row: AccountingRow) -> str:
    """Return the run's id in a job's name, `<run id>` or `<run id>.<job>`; "" for another name."""
    run_id = re.sub(r"\.\d+$", "", row.name)
    return run_id if run_id_sort_key(run_id)[0] else ""


def _start_key(row: AccountingRow) -> str:
    return f"{row.raw_id} {row.submit}"


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
        starts=tuple(map(_start_key, rows or ())),
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
