"""Make the ledgers of runs, and of jobs of other programs."""

from __future__ import annotations

import itertools
import math
import pwd
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pitools.core import timestamps
from pitools.core.errors import DataError, PitError, UsageError
from pitools.core.fs import from_os_error, open_regular
from pitools.core.record import decode_json
from pitools.ledger.allocations import (
    Allocation,
    from_folder,
    from_rows,
    in_order,
    is_of,
    queued_s,
    with_repeats,
)
from pitools.ledger.evidence import Attempt, read_attempts, submitted
from pitools.ledger.job_stats import gpu_utilization
from pitools.ledger.records import RunLedger, State
from pitools.ledger.timeline import account, typical_step_s
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart, Verdict
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.site.template import expand_placeholders
from pitools.slurm.fields import count_gpus
from pitools.slurm.records import AccountingRow

SHORT_TIMEOUT_S = 5.0  # of `sacct`, where the goodput stands beside what was asked for
_MAX_NAMED = 3  # logs
_MAX_PLAN_BYTES = 16 << 20
_JOB_ID = re.compile(r"\d{1,10}([_+]\d{1,10})?")  # not the tasks of a whole array
MAX_JOBS, _MAX_JOBS_OF_RUN = 5_000, 100  # asked for at once; an argument has at most 128 KiB
_CLOCKS_S = 60.0  # that the clocks of the login node and of slurmctld may differ by
Rows = Sequence[AccountingRow]


class _Job(msgspec.Struct):
    nodes: int = 1
    gpus_per_node: int = 0


class _Plan(msgspec.Struct):
    """What is needed of pit.plan/1."""

    name: str
    site: str
    job: _Job


def run_ledger(
    run_dir: Path, rows: Rows | Mapping[str, Rows] = (), *, only_rows: bool = False, now: float | None = None
) -> RunLedger:
    """Return the ledger of a run. Raises DataError for a folder that is no run or cannot be made sense of, OSError.

    rows: each start of its jobs (`sacct -D`), or `rows_by_id`; others, and older ones of that id, are left out.
    only_rows: leave out starts without a row, of which the folder alone tells. now: Unix time, s, for a running run.
    """
    try:
        by_job = rows if isinstance(rows, Mapping) else rows_by_id(rows)
        return _run_ledger(run_dir, by_job, only_rows, time.time() if now is None else now)
    except (PitError, OSError):
        raise
    except Exception as error:  # a user's files can hold anything: that must end no report of other runs
        raise DataError(f"no ledger of it: {type(error).__name__}: {error}", where=str(run_dir)) from error


def rows_by_id(rows: Iterable[AccountingRow]) -> dict[str, list[AccountingRow]]:
    """Return id → rows, by each id of a row."""
    found: dict[str, list[AccountingRow]] = {}
    for row in rows:
        for job_id in _ids(row):
            found.setdefault(job_id, []).append(row)
    return found


def _ids(row: AccountingRow) -> set[str]:
    """Return the ids under which sacct gives a row: of a task of an array also the array's."""
    return {row.job_id, row.raw_id, row.job_id.partition("_")[0]}


def _run_ledger(run_dir: Path, by_job: Mapping[str, Sequence[AccountingRow]], only_rows: bool, now: float) -> RunLedger:
    plan = _read_plan(run_dir)
    submits = submitted(run_dir)
    attempts = read_attempts(run_dir, now)
    job_ids = [*(attempt.job_id for attempt in attempts), *submits]
    of_jobs = {id(row): row for job_id in job_ids for row in by_job.get(job_id, ())}
    oldest = min(submits.values(), default=0.0) - _CLOCKS_S
    rows = in_order(row for row in of_jobs.values() if (timestamps.rfc3339_to_unix(row.submit) or oldest) >= oldest)
    if only_rows:
        attempts = [one for one in attempts if sum(is_of(row, one) for row in rows) > one.start]
        submits = {}
    is_over = (run_dir / "verdict.json").exists()
    if is_over:  # accounting that lags behind, or that missed the end, has its job still running
        now = min(now, max((attempt.last_evidence for attempt in attempts), default=now))
    is_running = not is_over and _is_running(attempts, rows, now)
    is_gpu = plan.job.gpus_per_node > 0 or any(count_gpus(row.alloc_tres) for row in rows)
    in_rows = [any(is_of(row, attempt) for row in rows) for attempt in attempts]
    pairs = with_repeats(attempts)
    allocations, waited_s = from_folder(
        [pair for pair, has_row in zip(pairs, in_rows, strict=True) if not has_row],
        submits,
        plan.job.gpus_per_node if is_gpu else 1,
        now if is_running else None,
    )
    own = [pair for pair, has_row in zip(pairs, in_rows, strict=True) if has_row]
    allocations += from_rows(rows, own, plan.job.gpus_per_node if is_gpu else None, now)
    started = {row_id for row in rows for row_id in _ids(row)} | {each.job_id for each in attempts}
    pending = [] if is_over else [max(now - t, 0.0) for job_id, t in submits.items() if job_id not in started]
    typical_s = typical_step_s(attempts)
    return _ledger(
        allocations,
        [account(allocation, typical_s) for allocation in allocations],
        waited_s + queued_s(rows, now) + sum(pending),
        is_known=any(attempt.steps for attempt in attempts),
        run_id=run_dir.name,
        name=plan.name,
        site=plan.site,
        user=owner(run_dir),
        source="run",
        is_running=is_running,
        resource="gpu" if is_gpu else "node",
        nodes=rows[-1].nodes if rows else attempts[-1].nodes if attempts else plan.job.nodes,
        attempts=len(attempts),
        is_accounted=bool(rows) and all(in_rows) and not (is_over and any(row.start and not row.end for row in rows)),
        bad_logs=_first([bad for attempt in attempts for bad in attempt.bad_logs]),
    )


def _first(bad_logs: Sequence[str]) -> str:
    more = [f"{len(bad_logs) - _MAX_NAMED} more logs"] if len(bad_logs) > _MAX_NAMED else []
    return "; ".join([*bad_logs[:_MAX_NAMED], *more])


def job_ledger(
    rows: Sequence[AccountingRow], *, site: str = "", admin_comment: str = "", now: float | None = None
) -> RunLedger:
    """Return the ledger of a job of another program. rows: one or more, all of one JobIDRaw.

    admin_comment: of its last start; jobstats' record is read from it. now: Unix time, s, for a running job.
    """
    rows, now = in_order(rows), time.time() if now is None else now
    is_gpu = any(count_gpus(row.alloc_tres) for row in rows)
    allocations = from_rows(rows, (), 0 if is_gpu else None, now)
    seconds = [account(allocation, 0.0) for allocation in allocations]
    busy = gpu_utilization(admin_comment) if is_gpu and allocations else []
    if busy:
        last = allocations[-1]
        of_one = last.length_s
        known = min(len(busy), last.resources)
        productive = of_one * known * sum(busy) / len(busy)
        seconds[-1] = dict.fromkeys(State, 0.0) | {
            State.PRODUCTIVE: productive,
            State.IDLE: of_one * known - productive,
            State.UNACCOUNTED: of_one * (last.resources - known),
        }
    return _ledger(
        allocations,
        seconds,
        queued_s(rows, now),
        is_known=bool(busy),
        run_id=rows[-1].job_id,
        name=rows[-1].name,
        site=site,
        user=rows[-1].user,
        source="sacct+js1" if busy else "sacct",
        is_running=bool(allocations) and allocations[-1].is_open,
        resource="gpu" if is_gpu else "node",
        nodes=rows[-1].nodes,
        attempts=len(allocations),
        is_accounted=True,
    )


def _ledger(
    allocations: Sequence[Allocation],
    parts: Sequence[dict[State, float]],
    waited_s: float,
    *,
    is_known: bool,
    nodes: int,
    **fields: Any,
) -> RunLedger:
    """Return the sum of allocations. parts: the seconds of each."""
    seconds = {state: sum(part[state] for part in parts) for state in State}
    allocated = sum(each.length_s * each.resources for each in allocations)
    ordered = sorted(allocations, key=lambda each: each.begin)
    latest = itertools.accumulate((each.end for each in ordered), max)  # tasks of an array overlap
    free = sum(max(each.begin - end, 0.0) * each.resources for end, each in zip(latest, ordered[1:], strict=False))
    productive = seconds[State.PRODUCTIVE]
    losses = {state: value for state, value in seconds.items() if state is not State.PRODUCTIVE}
    greatest = max(losses, key=lambda state: losses[state])
    has_time = allocated > 0 and is_known
    return RunLedger(
        since=timestamps.unix_to_rfc3339(ordered[0].begin) if ordered else "",
        until=timestamps.unix_to_rfc3339(max(each.end for each in ordered)) if ordered else "",
        count=ordered[-1].resources // max(nodes, 1) if ordered else 0,
        nodes=nodes,
        allocations=len(allocations),
        allocated_s=allocated,
        queue_s=waited_s,
        seconds=seconds,
        goodput=productive / allocated if has_time else None,
        calendar_goodput=productive / (allocated + free) if has_time else None,
        greatest_loss=greatest if losses[greatest] > 0 else "",
        **fields,
    )


def _read_plan(run_dir: Path) -> _Plan:
    try:
        with open_regular(run_dir / "plan.json") as file:
            return decode_json(file.read(_MAX_PLAN_BYTES), _Plan)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError) as error:
        raise DataError(f"no run: its plan.json is missing or damaged: {error}", where=str(run_dir)) from error


def owner(run_dir: Path) -> str:
    """Return the owner of a run's folder, of a link to one the link's; "" if unknown."""
    try:
        return pwd.getpwuid(run_dir.lstat().st_uid).pw_name
    except (KeyError, OSError):
        return ""


def _is_running(attempts: Sequence[Attempt], rows: Sequence[AccountingRow], now: float) -> bool:
    """Return whether a job of the run runs: by its row, or else by its folder, until the job's time limit."""
    newest = attempts[-1] if attempts else None
    if newest is None or any(is_of(row, newest) for row in rows):
        return any(row.start and not row.end for row in rows)
    limit = newest.time_limit_at
    return newest.ended is None and (limit is None or now <= limit)


def fleet_runs(
    site: Site, since: str, report: Callable[[Path, PitError], None] = lambda *_: None, *, going: Collection[str] = ()
) -> Iterator[Path]:
    """Yield the folders of a site's runs that ran since a time (RFC 3339), newest first; Slurm is not queried.

    report: gets the error of a run that cannot be read, which is left out. Raises UsageError for another text,
    ClusterError where the folder of runs cannot be read.
    going: ids of runs that only a verdict ends: between two attempts the last may have ended long ago.
    """
    if (earliest := timestamps.rfc3339_to_unix(since)) is None:
        raise UsageError(f'"{since}" is no time (expected RFC 3339, as 2026-11-21T01:33:41Z)')
    for run_dir in reversed(run_folder.run_dirs(Path(expand_placeholders(site.paths.runs)).absolute())):
        try:
            if _read_plan(run_dir).site == site.name and not _ended_before(run_dir, earliest, run_dir.name in going):
                yield run_dir
        except (PitError, OSError) as error:
            report(run_dir, error if isinstance(error, PitError) else from_os_error(error, run_dir))


def _ended_before(run_dir: Path, moment: float, is_going: bool) -> bool:
    """Return whether a run has ended before a time, by its verdict or else, unless it is going, its last attempt."""
    verdict = run_folder.read_or_none(run_dir / "verdict.json", Verdict)
    last = None if verdict or is_going else run_folder.last_exit(run_dir)
    ended = timestamps.rfc3339_to_unix(verdict.t if verdict else last.ended if last else "")
    return ended is not None and ended < moment


def ledgers_of(
    site: Site,
    run_dirs: Sequence[Path],
    report: Callable[[str, PitError], None] = lambda *_: None,
    *,
    timeout_s: float = math.inf,
) -> dict[Path, RunLedger]:
    """Return the ledgers of runs of a site, with their rows of one `sacct`.

    report: gets "" and the error of sacct, or a run's id and the error for which that is left out. timeout_s: of sacct,
    where that is less than the site's.
    """
    rows: list[AccountingRow] = []
    try:
        rows = read_rows(site, (job_id for run_dir in run_dirs for job_id in job_ids(run_dir)), timeout_s)
    except PitError as error:
        report("", error)
    by_job, ledgers = rows_by_id(rows), {}
    for run_dir in run_dirs:
        try:
            ledgers[run_dir] = run_ledger(run_dir, by_job)
        except (PitError, OSError) as error:
            report(run_dir.name, error if isinstance(error, PitError) else from_os_error(error, run_dir))
    return ledgers


def read_rows(site: Site, job_ids: Iterable[str], timeout_s: float = math.inf) -> list[AccountingRow]:
    """Return the accounting rows of the first MAX_JOBS of jobs; [] without Slurm. Raises ClusterError."""
    ids = list(itertools.islice(dict.fromkeys(job_ids), MAX_JOBS))
    if not ids or site.scheduler != "slurm":
        return []
    limit_s = min(site.connection.timeout_s, timeout_s)
    connection = msgspec.structs.replace(site.connection, timeout_s=limit_s)
    return client(msgspec.structs.replace(site, connection=connection)).accounting(ids)


def job_ids(run_dir: Path) -> list[str]:
    """Return the ids of a run's jobs by its folder, 100 at most: anybody may have written there.

    The newest that were submitted, of which an array's id stands for its tasks, before those that only began.
    """
    submits, newest = submitted(run_dir), run_folder.attempt_dirs(run_dir)[-_MAX_JOBS_OF_RUN:]
    starts = (run_folder.read_or_none(folder / "start.json", AttemptStart) for folder in reversed(newest))
    began = (start.job_id for start in starts if start)
    named = dict.fromkeys([*sorted(submits, key=lambda job_id: -submits[job_id]), *began])
    return [job_id for job_id in named if _JOB_ID.fullmatch(job_id)][:_MAX_JOBS_OF_RUN]


def describe(ledger: RunLedger) -> str:
    """Return a ledger as one line: `goodput 78 %; greatest loss: input 12 %`; "" if its goodput is unknown."""
    if ledger.goodput is None:
        return ""
    text = f"goodput {ledger.goodput:.0%}".replace("%", " %")
    if not ledger.greatest_loss:
        return text
    share = ledger.seconds[State(ledger.greatest_loss)] / ledger.allocated_s
    return f"{text}; greatest loss: {ledger.greatest_loss} {share:.0%}".replace("%", " %").replace("  ", " ")
