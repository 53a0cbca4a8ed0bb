"""All of a site's runs, once: what a lost login session, a dead node or a silent Slurm left undone is done.

For cron. Two at once do no harm: the second ends at once. Slurm is asked one question for all runs; a run that goes on
by itself costs a look at its folder. A cancel that Slurm had not taken is carried out.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from pitools.core.errors import DataError, PitError, TryLater
from pitools.core.fs import from_os_error
from pitools.core.locks import is_owned_by_user, lock
from pitools.core.record import Record
from pitools.launch.plan import load_plan
from pitools.launch.recovery import requeue_hold, slurm_query
from pitools.launch.recovery.resume import ResumeResult, clear_absence, resume_run
from pitools.launch.submission import submissions
from pitools.run import cancel_request, run_folder
from pitools.site.schema import Site
from pitools.slurm.states import UNKNOWN, is_finished

TICK_LOCK = ".tick.lock"
MAX_TICK_S = 300.0
_YOUNG_S = 60.0  # a submission that was begun just now is still its own process's

T = TypeVar("T")
ReportError = Callable[[Path, PitError], None]


class Troubles(Record, frozen=True, kw_only=True, tag="pit.tick-troubles/1"):
    """What a user's last tick of a site had to tell on stderr."""

    lines: tuple[str, ...] = ()


class TickRunning(TryLater):
    """Another tick is at work on these runs."""


def tick_runs(
    runs: Path, site: Site, report_error: ReportError, *, longest_s: float = MAX_TICK_S
) -> Iterator[ResumeResult]:
    """Continue every run of the site that is due; yields one record for each that changed.

    report_error: hears what went wrong with a single run; the others are done all the same. longest_s: no further run
    is begun after; the next tick goes on. Raises Busy while another tick is at work, and what asking Slurm raises.
    """
    if not runs.is_dir():
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(runs / TICK_LOCK, "this folder of runs"))
        except TryLater as error:
            raise TickRunning("another tick is at work", where=str(runs)) from error
        yield from _tick_locked(runs, site, report_error, time.monotonic() + longest_s)


def troubles(runs: Path, site: Site) -> tuple[str, ...]:
    """Return what this user's last tick of the site had to tell; a file of another user's says nothing of that."""
    path = _troubles_path(runs, site)
    with contextlib.suppress(DataError, OSError):
        if path.lstat().st_uid == os.geteuid() and (last := run_folder.read_record(path, Troubles)):
            return last.lines
    return ()


def keep_troubles(runs: Path, site: Site, lines: tuple[str, ...]) -> None:
    """Write down what this tick had to tell, so that cron does not mail it again; where it cannot, cron does."""
    if lines != troubles(runs, site):
        with contextlib.suppress(PitError, OSError):
            run_folder.write_record(_troubles_path(runs, site), Troubles(lines=lines))


def _troubles_path(runs: Path, site: Site) -> Path:
    return runs / f".tick.{site.name}.{os.geteuid()}.json"


def _tick_locked(runs: Path, site: Site, tell: ReportError, until: float) -> Iterator[ResumeResult]:
    refs: dict[Path, run_folder.JobRef | None] = {}
    for path in unfinished_runs(runs, site, tell):
        try:
            refs[path] = None if _has_unresolved_submission(path) else submissions.latest_job(path)
        except (PitError, OSError) as error:
            tell(path, _as_pit_error(error, path))
    for path, state in _due(refs, site, tell):
        try:
            if time.monotonic() > until:
                tell(path, TryLater("no time was left for it: the next tick goes on", where=str(path)))
                return
            done = resume_run(path, site, state=state)
        except (PitError, OSError) as error:  # an archived run, a stale file handle: no reason to leave the others
            tell(path, _as_pit_error(error, path))
            continue
        if done.action not in ("untouched", "already_ended"):
            yield done


def _due(refs: dict[Path, run_folder.JobRef | None], site: Site, tell: ReportError) -> Iterator[tuple[Path, str]]:
    """Runs to be looked at closely, and the states of their jobs; first those to be cancelled, which need no state."""
    left = dict(refs)
    for path in refs:
        if _call_or_report(path, tell, cancel_request.pending_cancel, path):
            del left[path]
            yield path, ""
    known = _states(left, site)
    for path, ref in left.items():
        state = known.get(path, "")
        if _call_or_report(path, tell, _is_due, path, ref, state, site):
            yield path, state


def _states(refs: dict[Path, run_folder.JobRef | None], site: Site) -> dict[Path, str]:
    """The states of the runs' jobs; Slurm is asked once. Of two local runs the processes may have had one id."""
    found = {path: ref for path, ref in refs.items() if ref}
    if site.scheduler == "none":
        return {path: slurm_query.job_states(site, [ref])[ref.job_id] for path, ref in found.items()}
    known = slurm_query.job_states(site, list(found.values()))
    return {path: known.get(ref.job_id, UNKNOWN) for path, ref in found.items()}


def _call_or_report(path: Path, tell: ReportError, function: Callable[..., T], *args: object) -> T | None:
    """What a function says of a run; None, and told, where it cannot."""
    try:
        return function(*args)
    except (PitError, OSError) as error:
        tell(path, _as_pit_error(error, path))
        return None


def unfinished_runs(runs: Path, site: Site, report_error: ReportError) -> list[Path]:
    """This user's runs of a site that have no verdict and may have further jobs, oldest first.

    Not a ticket of `pit place`, whose queue sees to it, nor a run of before there were verdicts; nor one of another
    user of the same folder: Slurm was asked for this user's jobs, and the next job would be submitted as this user.
    """
    found = []
    for path in run_folder.run_dirs(runs):
        try:
            if (path / "verdict.json").exists() or not _is_recovered(path, site):
                continue
            if load_plan(path).site == site.name:
                found.append(path)
        except (PitError, OSError) as error:
            report_error(path, _as_pit_error(error, path))
    return found


def _as_pit_error(error: PitError | OSError, path: Path) -> PitError:
    return error if isinstance(error, PitError) else from_os_error(error, path)


def _is_recovered(run_dir: Path, site: Site) -> bool:
    try:
        if not is_owned_by_user(run_dir):
            return False
        if cancel_request.pending_cancel(run_dir):  # also of what is continued by nobody, such as an array
            return True
        if site.scheduler == "slurm" and not (run_dir / "jobs").is_dir():
            return False
        first = run_folder.first_event(run_dir)
        return first is not None and first.event == "created"
    except OSError:
        return False


def _has_unresolved_submission(run_dir: Path) -> bool:
    """Whether a submission was begun of which no job is known."""
    known = submissions.submission_numbers(run_dir)
    return bool(known) and submissions.is_unresolved(run_dir, known[-1])


def _is_due(run_dir: Path, ref: run_folder.JobRef | None, state: str, site: Site) -> bool:
    """Whether a run is to be looked at closely: its job is over, unknown or perhaps held back, or nobody's any more."""
    if ref is None:
        return _is_abandoned(run_dir)
    if is_finished(state) or state == UNKNOWN or (state == "PENDING" and requeue_hold.may_be_held(run_dir, ref, site)):
        return True
    clear_absence(run_dir, ref)
    return False


def _is_abandoned(run_dir: Path) -> bool:
    """Whether a run without a job is nobody's any more: what was begun some time ago, or came to nothing."""
    known = submissions.submission_numbers(run_dir)
    intent = (
        run_folder.read_record(submissions.job_dir(run_dir, known[-1]) / "intent.json", submissions.SubmissionIntent)
        if known
        else None
    )
    if intent is None:
        # Whoever makes a run writes its script, and then submits it.
        script = run_dir / "script.sbatch"
        return (run_dir / "jobs").is_dir() and script.exists() and time.time() - script.stat().st_mtime > _YOUNG_S
    return (datetime.now(UTC) - datetime.fromisoformat(intent.last_tried_at)).total_seconds() > _YOUNG_S
