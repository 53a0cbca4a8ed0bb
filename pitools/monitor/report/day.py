"""Read what happened on a day, in UTC: the folders of runs, and the journals of incidents, that this user may read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from pitools.core.errors import PitError
from pitools.core.fs import from_os_error
from pitools.core.timestamps import to_rfc3339
from pitools.launch.plan import load_plan
from pitools.launch.recovery import apply_decision
from pitools.launch.run_lookup import missing_runs_dir, runs_dir
from pitools.ledger.believed import believed_runs
from pitools.ledger.records import RunLedger
from pitools.monitor.report.attempts import Attempt, read_attempts
from pitools.monitor.usage import ingest, store
from pitools.monitor.usage.report import UsageRow, usage_rows
from pitools.node.check.config import load_config
from pitools.node.control.incidents import Incident, read_incidents
from pitools.run import run_folder
from pitools.run.attempt_records import Verdict
from pitools.site.connect import client
from pitools.site.schema import Site

USAGE_BY = ("site", "user", "account")


class DayRun(NamedTuple):
    """A run with an attempt, or its end, on that day. ledger: of the whole run; None where it cannot be made."""

    run_id: str
    site: str
    attempts: list[Attempt]
    verdict: Verdict | None
    ledger: RunLedger | None


class Day(NamedTuple):
    """A day of some sites. since, until: RFC 3339. incidents: (site, incident). notes: what was left out, and why.

    usage: of all jobs that Slurm shows to this user, by `site`, `user` and `account`; {} without accounting.
    """

    since: str
    until: str
    sites: tuple[str, ...]
    runs: list[DayRun]
    incidents: list[tuple[str, Incident]]
    notes: list[str]
    usage: dict[str, list[UsageRow]]

    def holds(self, moment: str) -> bool:
        """Return whether a time is on that day."""
        return self.since <= moment < self.until


def read_day(sites: Sequence[Site], day: date) -> Day:
    """Return a day. A site, or a run, that cannot be read is left out, and noted."""
    begin = datetime(day.year, day.month, day.day, tzinfo=UTC)
    since, until = to_rfc3339(begin), to_rfc3339(begin + timedelta(days=1))
    read = Day(since, until, tuple(site.name for site in sites), [], [], [], {})
    for site in sites:
        try:
            _read_runs(site, read)
        except (PitError, OSError) as error:
            read.notes.append(f"{site.name}: no runs: {error}")
        try:
            _read_incidents(site, read)
        except (PitError, OSError) as error:
            read.notes.append(f"{site.name}: no incidents: {error}")
    if with_slurm := [site for site in sites if site.scheduler == "slurm"]:
        _read_usage(with_slurm, begin, read)
    return read


def _read_usage(sites: Sequence[Site], begin: datetime, day: Day) -> None:
    """Read what is new in the accounting into this user's own store, as `pit monitor usage` does, and sum it up."""
    since = int(begin.timestamp())
    until = min(since + 86400, int(datetime.now(UTC).timestamp()))
    try:
        with store.open_store(store.default_path()) as opened:
            answered = []
            for site in sites:
                try:
                    ingest.ingest_site(opened, site, client(site).transport, since)
                    answered.append(site)
                except PitError as error:
                    day.notes.append(f"{site.name}: no usage: {error}")
            for by in USAGE_BY if answered else ():
                day.usage[by] = usage_rows(opened, answered, since, until, by)
    except PitError as error:
        day.notes.append(f"no usage: {error}")


def _read_runs(site: Site, day: Day) -> None:
    if missing := missing_runs_dir(site):
        raise missing
    chosen: dict[Path, tuple[list[Attempt], Verdict | None]] = {}
    closed = run_folder.count_closed(runs_dir(site))
    for run_dir in run_folder.run_dirs(runs_dir(site)):
        try:
            verdict = apply_decision.read_verdict(run_dir)
            if (verdict and verdict.t < day.since) or load_plan(run_dir).site != site.name:
                continue
            attempts = [one for one in read_attempts(run_dir) if (one.started or one.ended or day.until) < day.until]
            is_end_here = verdict is not None and day.holds(verdict.t)
            if is_end_here or any((one.over or day.until) >= day.since for one in attempts):
                chosen[run_dir] = attempts, verdict
        except PermissionError:  # another user's: its name may tell more than they want
            closed += 1
        except (PitError, OSError) as error:
            problem = error if isinstance(error, PitError) else from_os_error(error, run_dir)
            day.notes.append(f"{site.name}: {run_dir.name} is left out: {problem.message}")
    if closed:
        day.notes.append(f"{site.name}: {closed} runs are left out: this user may not read them")

    def note(run_id: str, error: PitError) -> None:
        what = f"{run_id} is without a ledger" if run_id else "without sacct, so copies of runs count"
        day.notes.append(f"{site.name}: {what}: {error}")

    for run_dir, ledger, _ in believed_runs(site, list(chosen), note):
        attempts, verdict = chosen.pop(run_dir)
        if ledger and not verdict and "" < ledger.until < day.since:  # it was killed long before its time limit
            continue
        day.runs.append(DayRun(run_dir.name, site.name, attempts, verdict, ledger))
    if chosen:
        day.notes.append(f"{site.name}: {len(chosen)} folders are left out: sacct has no job of their owners for them")


def _read_incidents(site: Site, day: Day) -> None:
    """Add the incidents that were open on that day, of a site whose file of checks is on this machine."""
    config = load_config(Path(site.node.config) if site.node.config else None)
    if not config.spool:
        return
    journal = read_incidents(Path(config.spool) / "control" / "journal.jsonl")
    day.notes.extend(journal.problems)
    for incident in journal.incidents.values():
        if incident.opened_at < day.until and (incident.over_at or day.until) >= day.since:
            day.incidents.append((site.name, incident))
