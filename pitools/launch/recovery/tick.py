"""Continue all unfinished runs of a site, once: after a lost login session, a failed node or an unreachable Slurm.

For cron. Concurrent ticks are harmless: the second one ends immediately. One query covers the jobs of all runs; for a
run with a pending or running job only its folder is read. Pending cancels are carried out.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from pitools.core.errors import DataError, PitError, TryLater
from pitools.core.fs import from_os_error, remove_tree
from pitools.core.locks import is_owned_by_user, lock
from pitools.core.record import Record
from pitools.launch import hooks
from pitools.launch.plan import load_plan
from pitools.launch.recovery import requeue_delay, slurm_query
from pitools.launch.recovery.resume import ResumeResult, clear_absence, resume_run
from pitools.launch.submission import submissions
from pitools.run import cancel_request, move_record, run_folder
from pitools.site.schema import Site
from pitools.slurm.states import UNKNOWN, is_final

MAX_TICK_S = 300.0
# A younger submission, or run folder, is left to the process that made it.
_SUBMISSION_GRACE_S, _PREPARATION_GRACE_S, _ARRAY_GRACE_S = 60.0, 600.0, 3600.0

_ABANDONED_AFTER_S = 7 * 86400.0

T = TypeVar("T")
ReportError = Callable[[Path, PitError], None]


class TickErrors(Record, frozen=True, kw_only=True, tag="pit.tick-errors/1"):
    """What a user's last tick of a site printed on stderr."""

    lines: tuple[str, ...] = ()


class TickRunning(TryLater):
    """Another tick of these runs is running."""


def tick_runs(
    runs: Path, site: Site, report_error: ReportError, *, max_tick_s: float = MAX_TICK_S
) -> Iterator[ResumeResult]:
    """Continue every run of the site that is due; yield one record for each that changed.

    report_error: called with the error of a single run; the other runs are continued. max_tick_s: after this time no
    further run is begun; the next tick continues. Raises TickRunning during another tick of this user, ClusterError for
    a lock file that another user made, and what querying raises.
    """
    if not runs.is_dir():
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(tick_lock_path(runs), "the lock of this user's ticks", is_own=True))
        except TryLater as error:
            raise TickRunning("another tick is running", where=str(runs)) from error
        _remove_abandoned_dirs(runs)
        yield from _tick_locked(runs, site, report_error, time.monotonic() + max_tick_s)


def _remove_abandoned_dirs(runs: Path) -> None:
    """Remove this user's folders `.<run id>`, in which killed submitters were building a run a week ago or more."""
    with contextlib.suppress(OSError):
        for path in runs.glob(".*"):
            path_stat = path.lstat()
            is_own_dir = stat.S_ISDIR(path_stat.st_mode) and path_stat.st_uid == os.geteuid()
            is_old = time.time() - path_stat.st_mtime > _ABANDONED_AFTER_S
            if is_own_dir and is_old and run_folder.run_id_sort_key(path.name)[0]:
                remove_tree(path)


def tick_lock_path(runs: Path) -> Path:
    """Return the path of the lock of this user's ticks; each user of a shared folder of runs has one."""
    return runs / f".tick.{os.geteuid()}.lock"


def last_tick_errors(runs: Path, site: Site) -> tuple[str, ...]:
    """Return what this user's last tick of the site printed; a file of another user is ignored."""
    path = _tick_errors_path(runs, site)
    with contextlib.suppress(DataError, OSError):
        if path.lstat().st_uid == os.geteuid() and (last := run_folder.read_record(path, TickErrors)):
            return last.lines
    return ()


def record_tick_errors(runs: Path, site: Site, lines: tuple[str, ...]) -> None:
    """Record what this tick printed, so that cron does not mail it again; if that fails, cron mails it again."""
    if lines != last_tick_errors(runs, site):
        with contextlib.suppress(PitError, OSError):
            run_folder.write_record(_tick_errors_path(runs, site), TickErrors(lines=lines))


def _tick_errors_path(runs: Path, site: Site) -> Path:
    return runs / f".tick.{site.name}.{os.geteuid()}.json"


def _tick_locked(runs: Path, site: Site, report_error: ReportError, deadline: float) -> Iterator[ResumeResult]:
    refs: dict[Path, run_folder.JobRef | None] = {}
    for path in unfinished_runs(runs, site, report_error):
        try:
            refs[path] = None if _has_unresolved_submission(path) else submissions.latest_job(path)
        except (PitError, OSError) as error:
            report_error(path, _as_pit_error(error, path))
    for path, state in _due(refs, site, report_error):
        try:
            if time.monotonic() > deadline:
                report_error(
                    path, TryLater("not checked: the tick is out of time; the next one continues", where=str(path))
                )
                return
            result = resume_run(path, site, state=state)
        except (PitError, OSError) as error:  # an archived run or a stale file handle must not stop the other runs
            report_error(path, _as_pit_error(error, path))
            continue
        if result.action not in ("untouched", "already_ended"):
            yield result
    for path in run_folder.run_dirs(runs):
        try:
            if hooks.is_pending(path) and is_owned_by_user(path) and time.monotonic() < deadline:
                run_folder.require_own_run(path, group_above=site.paths.runs_access == "group")
                hooks.deliver(path)
        except (PitError, OSError) as error:
            report_error(path, _as_pit_error(error, path))


def _due(
    refs: dict[Path, run_folder.JobRef | None], site: Site, report_error: ReportError
) -> Iterator[tuple[Path, str]]:
    """Yield the runs to continue and the states of their jobs; first those to cancel, which need no state."""
    remaining = dict(refs)
    for path in refs:
        if _call_or_report(path, report_error, cancel_request.pending_cancel, path):
            del remaining[path]
            yield path, ""
    states = _states(remaining, site)
    for path, ref in remaining.items():
        state = states.get(path, "")
        if _call_or_report(path, report_error, _is_due, path, ref, state, site):
            yield path, state


def _states(refs: dict[Path, run_folder.JobRef | None], site: Site) -> dict[Path, str]:
    """Return the states of the runs' jobs by one query; local runs one by one, as their process ids may be equal."""
    refs_with_job = {path: ref for path, ref in refs.items() if ref}
    if site.scheduler == "none":
        return {path: slurm_query.job_states(site, [ref])[ref.job_id] for path, ref in refs_with_job.items()}
    states = slurm_query.job_states(site, list(refs_with_job.values()))
    return {path: states.get(ref.job_id, UNKNOWN) for path, ref in refs_with_job.items()}


def _call_or_report(path: Path, report_error: ReportError, function: Callable[..., T], *args: object) -> T | None:
    """Return what a function returns for a run; after an error report it and return None."""
    try:
        return function(*args)
    except (PitError, OSError) as error:
        report_error(path, _as_pit_error(error, path))
        return None


def unfinished_runs(runs: Path, site: Site, report_error: ReportError) -> list[Path]:
    """Return this user's runs of a site that have no verdict and may get further jobs, oldest first.

    report_error: called with the error of a run that cannot be read, or whose move was interrupted.

    Left out are tickets of `pit place`, which its dispatcher continues; runs from before there were verdicts; and runs
    of other users of the folder: the query is for this user's jobs, and the next job would be submitted as this user.
    """
    run_dirs = []
    for path in run_folder.run_dirs(runs):
        try:
            if (path / "verdict.json").exists():
                _report_interrupted_move(path, site, report_error)
            elif _is_recovered(path, site) and load_plan(path).site == site.name:
                run_dirs.append(path)
        except (PitError, OSError) as error:
            report_error(path, _as_pit_error(error, path))
    return run_dirs


def _report_interrupted_move(run_dir: Path, site: Site, report_error: ReportError) -> None:
    if not (run_dir / move_record.MOVE_FILE).exists() or not is_owned_by_user(run_dir):
        return
    if load_plan(run_dir).site == site.name and (error := move_record.interrupted_move(run_dir)):
        report_error(run_dir, error)


def _as_pit_error(error: PitError | OSError, path: Path) -> PitError:
    return error if isinstance(error, PitError) else from_os_error(error, path)


def _is_recovered(run_dir: Path, site: Site) -> bool:
    try:
        if not is_owned_by_user(run_dir):
            return False
        if cancel_request.pending_cancel(run_dir):  # also of runs that are never continued, such as arrays
            return True
        if site.scheduler == "slurm" and not (run_dir / "jobs").is_dir():
            return False
        first = run_folder.first_event(run_dir)
        return first is not None and first.event == "created" and not first.detail.get("ticket")
    except OSError:
        return False


def _has_unresolved_submission(run_dir: Path) -> bool:
    """Whether the newest submission was begun and its job is unknown."""
    numbers = submissions.job_numbers(run_dir)
    return bool(numbers) and submissions.is_unresolved(run_dir, numbers[-1])


def _is_due(run_dir: Path, ref: run_folder.JobRef | None, state: str, site: Site) -> bool:
    """Whether to continue a run: its job has ended, is unknown or may be held, or its submission is abandoned."""
    if ref is None:
        return is_abandoned(run_dir)
    if (
        is_final(state)
        or state == UNKNOWN
        or (state == "PENDING" and requeue_delay.is_possibly_delayed(run_dir, ref, site))
    ):
        return True
    clear_absence(run_dir, ref)
    return False


def is_abandoned(run_dir: Path) -> bool:
    """Whether the process that was submitting a run without a known job was probably killed, by the time since then."""
    numbers = submissions.job_numbers(run_dir)
    intent = (
        run_folder.read_record(submissions.job_dir(run_dir, numbers[-1]) / "intent.json", submissions.SubmissionIntent)
        if numbers
        else None
    )
    if intent is None:
        # The submitter writes the script immediately before it submits the job, and may first query Slurm's topology.
        script = run_dir / "script.sbatch"
        if script.exists():
            return (run_dir / "jobs").is_dir() and time.time() - script.stat().st_mtime > _SUBMISSION_GRACE_S
        return time.time() - run_dir.stat().st_ctime > _PREPARATION_GRACE_S  # the folder was renamed into place
    # The runs of an array are made before it is submitted: a large one takes minutes.
    grace_s = _ARRAY_GRACE_S if intent.task else _SUBMISSION_GRACE_S
    return (datetime.now(UTC) - datetime.fromisoformat(intent.last_tried_at)).total_seconds() > grace_s
