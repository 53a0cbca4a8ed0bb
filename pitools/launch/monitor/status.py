"""What a run is now: its folder first, Slurm only for what the folder cannot say."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pitools.core import timestamps
from pitools.core.errors import ClusterError, NoSpace, PitError, TryLater
from pitools.core.fs import from_os_error
from pitools.launch import slurm_cache
from pitools.launch.diagnosis import explain, log_timestamps
from pitools.launch.monitor.run_snapshot import RunSnapshot, last_step
from pitools.launch.recovery import requeue_hold, slurm_query
from pitools.launch.recovery.cancel_run import cancel_run
from pitools.launch.recovery.resume import ResumeResult, resume_run
from pitools.launch.submission import local_process
from pitools.run import run_folder, steps
from pitools.run.attempt_records import AttemptStart
from pitools.site.schema import Site
from pitools.slurm.states import UNKNOWN, is_finished, is_held

_YOUNG_JOB_S = 5.0  # who looks once wants to see what is
_POLL_S, _MAX_POLL_S = 2.0, 30.0
_YOUNG_ATTEMPT_S = 60.0  # what Slurm said last, shared with others, may be as old
_RESUME_PAUSE_S = 1.5  # from a job's end to what Slurm and its own script have to say of it
_LOST_AFTER_TRIES = 6  # answers in a row, over a minute or more
_HELD_CHECK_S = 5.0
_LOST_TIMEOUT_S, _LOST_PAUSE_S = 1200.0, 30.0  # `resume` goes on without a job that was missed for ten minutes

# A verdict's cause in Slurm's words; any other is a failure.
_STATES = {
    "cancelled": "CANCELLED",
    "time-limit": "TIMEOUT",
    "memory": "OUT_OF_MEMORY",
    "preempted": "PREEMPTED",
    "finished": "COMPLETED",
}

_UNDATED = "1970-01-01T00:00:00Z"  # of a cancel whose record is damaged

ReportError = Callable[[Path, PitError], None]

__all__ = [
    "RunPoller",
    "cancel_run",
    "last_step",
    "report_once",
    "run_status",
    "run_statuses",
    "step_summary",
    "try_resume",
    "wait_for_run",
]


def run_status(
    run_dir: Path, site: Site, *, query_slurm: bool = True, max_age_s: float = _YOUNG_JOB_S
) -> run_folder.RunRecord:
    """The run's record. `ask=False` never calls Slurm: the state is then what the folder says, or UNKNOWN."""
    (run,) = run_statuses([run_dir], site, query_slurm=query_slurm, max_age_s=max_age_s)
    return run


def run_statuses(
    run_dirs: Sequence[Path],
    site: Site,
    *,
    query_slurm: bool = True,
    max_age_s: float = _YOUNG_JOB_S,
    report_error: ReportError | None = None,
) -> list[run_folder.RunRecord]:
    """The records of runs of one site, for which Slurm is asked once at most, and what it said is no older than that.

    report_error: hears what is wrong with a single run, which is left out then; None: that is raised. Raises what
    asking raises.
    """
    seen = _read_snapshots(run_dirs, report_error)
    # By run: of two local runs the processes may have had one id.
    to_ask = [one.job for one in seen if one.job and not is_finished(_state_from_dir(site, one))]
    said: dict[str, str] = {}
    waits: dict[str, slurm_cache.CachedState] = {}
    if query_slurm and to_ask and site.scheduler == "slurm":
        said = slurm_query.job_states(site, to_ask, max_age_s=max_age_s)
        waits = slurm_query.pending_info(site, [ref.job_id for ref in to_ask if said[ref.job_id] == "PENDING"])
        seen = _read_snapshots(
            [one.run_dir for one in seen], report_error
        )  # a run may have ended while Slurm was asked
    return [_run_record(one, said.get(one.job_id) or _state_from_dir(site, one), waits.get(one.job_id)) for one in seen]


def _read_snapshots(run_dirs: Sequence[Path], tell: ReportError | None) -> list[RunSnapshot]:
    found = []
    for run_dir in run_dirs:
        try:
            found.append(RunSnapshot.read(run_dir))
        except (PitError, OSError) as error:
            if tell is None:
                raise
            tell(run_dir, error if isinstance(error, PitError) else from_os_error(error, run_dir))
    return found


def _state_from_dir(site: Site, seen: RunSnapshot) -> str:
    """The state as far as the folder knows it: a job that Slurm may have requeued has not ended for certain."""
    if seen.verdict:
        return _STATES.get(seen.verdict.kind, "FAILED")
    if seen.job is None:
        return UNKNOWN
    if site.scheduler == "none" and local_process.is_alive(seen.job):
        return "RUNNING" if seen.attempts else "PENDING"
    if seen.exit and (seen.exit.state or seen.exit.exit_code == 0):
        return seen.exit.state or "COMPLETED"
    if site.scheduler == "none":
        return UNKNOWN if local_process.is_alive(seen.job) is None else "FAILED"
    return "RUNNING" if seen.attempts and not (seen.exit or seen.damaged) else UNKNOWN


def _run_record(seen: RunSnapshot, state: str, cached: slurm_cache.CachedState | None) -> run_folder.RunRecord:
    if seen.verdict:
        state = _STATES.get(seen.verdict.kind, "FAILED")
    elif state == UNKNOWN and seen.exit and not seen.continues:
        # Where there is no accounting, Slurm forgets a job minutes after its end; its folder does not.
        state = "FAILED"
    elif state in (UNKNOWN, "PENDING") and not (cached and is_held(cached.reason)):
        state = _state_if_newer(seen, state)
    said = seen.verdict or seen.cause
    code = seen.verdict.exit_code if seen.verdict else None
    if code is None and seen.exit and is_finished(state):
        code = seen.exit.exit_code
    asked = seen.cancel is not None and not seen.cancel.refused_by_slurm and seen.verdict is None
    cached = cached if state == "PENDING" else None
    return run_folder.RunRecord(
        run_id=seen.run_dir.name,
        name=seen.plan.name,
        site=seen.plan.site,
        job_id=seen.job_id,
        run_dir=str(seen.run_dir),
        state=state,
        exit_code=code,
        nodes=seen.plan.job.nodes,
        created=seen.created,
        attempt=seen.attempt,
        attempts=seen.attempts,
        steps=seen.steps,
        cause=said.kind if said else "",
        reason=_run_reason(seen, asked, state),
        is_over=seen.verdict is not None,
        cancel_requested=(seen.cancel.t or _UNDATED) if asked and seen.cancel else "",
        pending_reason=cached.reason if cached else "",
        expected_start=cached.start if cached else "",
    )


def _run_reason(seen: RunSnapshot, asked: bool, state: str) -> str:
    """What is to be said of a run in a sentence: why it ended, or what keeps that from being known."""
    if asked and seen.job and seen.job.host:  # a process of this machine
        return "its cancel was asked for, and its ranks still end; to try again: pit launch cancel"
    if asked:
        return "its cancel was asked for, and Slurm has not taken it yet; to try again: pit launch cancel"
    if seen.cancel and not seen.verdict and state != "COMPLETED":
        return f"its cancel was refused, and it goes on: {seen.cancel.refused_by_slurm}"
    if said := seen.verdict or seen.cause:
        return said.reason
    return seen.damaged if seen.job else "no job of it is known; see: pit launch resume"


def _state_if_newer(seen: RunSnapshot, state: str) -> str:
    """A job just submitted waits, and one whose script has just begun runs, before Slurm's next answer says so."""
    if seen.job is None or seen.job.host:  # a process here: its supervisor is the last word
        return state
    last = run_folder.last_attempt(seen.run_dir)
    start = run_folder.read_or_none(last / "start.json", AttemptStart) if last else None
    if start and start.job_id == seen.job.job_id and not seen.exit and _is_fresh(start.started):
        return "RUNNING"
    return "PENDING" if _is_fresh(seen.job.submitted) else state


def _is_fresh(t: str) -> bool:
    since = log_timestamps.seconds_between(t, timestamps.now_rfc3339())
    return since is not None and abs(since) < _YOUNG_ATTEMPT_S


class RunPoller:
    """Looks at a run until it has ended: its folder each time, and what Slurm told whoever asked last (`slurm_cache`).

    Slurm out of reach is waited through: it says nothing about the run. A job that Slurm, asked again and again, does
    not know has ended without a word: `lost` is then true.
    """

    def __init__(self, run_dir: Path, site: Site) -> None:
        self._run_dir, self._site = run_dir, site
        self._looked, self._unknown, self.lost = time.monotonic(), 0, False

    def poll(self) -> run_folder.RunRecord:
        """The run now."""
        run = run_status(self._run_dir, self._site, query_slurm=False)
        # Its script has ended: what Slurm makes of that (failed, requeued, timed out) is to be known soon.
        ended = run.state == "FAILED" and self._site.scheduler == "slurm" and not run.is_over
        if is_finished(run.state) and not ended:
            return run
        every_s = _POLL_S if self._site.scheduler == "slurm" else min(_POLL_S * 1.5**self._unknown, _MAX_POLL_S)
        if time.monotonic() - self._looked > every_s:
            self._looked = time.monotonic()
            try:
                run = run_status(self._run_dir, self._site, max_age_s=_YOUNG_JOB_S if ended else math.inf)
            except TryLater:
                return msgspec.structs.replace(run, state=UNKNOWN)
            self._unknown = self._unknown + 1 if run.state == UNKNOWN else 0
            self.lost = self._is_lost(run)
            return run
        return msgspec.structs.replace(run, state=UNKNOWN) if ended else run

    def _is_lost(self, run: run_folder.RunRecord) -> bool:
        if self._site.scheduler == "none" or not run.job_id:
            return self._unknown >= _LOST_AFTER_TRIES
        return run.state == UNKNOWN and slurm_cache.cached_states(self._site, [run.job_id])[run.job_id].lost


def wait_for_run(
    run_dir: Path, site: Site, on_steps: Callable[[int], None], report: Callable[[str], None]
) -> run_folder.RunRecord:
    """Wait until the run has its verdict, over as many jobs as that takes, or is lost.

    on_steps: gets its new steps. report: gets a line for each attempt that fails on the way, and for a disk that is
    full.

    Continues it where that is due, as `resume` does; raises what that raises for good, and waits through TryLater.
    Raises ClusterError where Slurm holds its job until somebody releases it.
    """
    watch, shown, known_at, looked_at = RunPoller(run_dir, site), 0, time.monotonic(), 0.0
    told: set[str] = set()
    before, began = ("", 0, ""), known_at
    while True:
        run = watch.poll()
        if run.steps > shown:
            on_steps(run.steps - shown)
            shown = run.steps
        if run.is_over:
            return run
        now = (run.job_id, run.attempts, run.cause)
        if now != before:
            for line in explain.past_attempts(run_dir, told):
                report(line)
        before = now
        if is_still_held(run, site, began):
            raise held_error(run)
        if (run.cancel_requested or may_be_held_back(run, site)) and time.monotonic() - looked_at > _HELD_CHECK_S:
            looked_at = time.monotonic()
            try_resume(run_dir, site, report_once(told, report))
        if is_finished(run.state) or watch.lost:
            done = try_resume(run_dir, site, report_once(told, report))
            if done and done.action in ("already_ended", "done", "stop"):
                return run_status(run_dir, site, query_slurm=False)
            if not watch.lost or (done and done.action in ("resubmit", "submitted")):
                known_at = time.monotonic()
            elif site.scheduler == "none" or time.monotonic() - known_at > _LOST_TIMEOUT_S:
                return run
            time.sleep(_LOST_PAUSE_S if watch.lost and site.scheduler == "slurm" else _RESUME_PAUSE_S)
        time.sleep(0.5)


def is_still_held(run: run_folder.RunRecord, site: Site, since: float) -> bool:
    """Whether Slurm, asked since a moment (time.monotonic), holds the run's job: what it said before may be over."""
    if not is_held(run.pending_reason):
        return False
    told = slurm_query.pending_info(site, [run.job_id])[run.job_id]
    return is_held(told.reason) and told.age_s < time.monotonic() - since


def held_error(run: run_folder.RunRecord) -> ClusterError:
    """The error that a run's job begins only when somebody releases it."""
    what = f"Slurm holds job {run.job_id} until it is released: {run.pending_reason}"
    hint = f"scontrol release {run.job_id}, then: pit launch watch {run.run_id}; or: pit launch cancel {run.run_id}"
    return ClusterError(what, where=run.run_dir, hint=hint)


def may_be_held_back(run: run_folder.RunRecord, site: Site) -> bool:
    """Whether Slurm may have put the run's job back and hold it, which `resume` asks it about. Asks nobody."""
    if run.state != "PENDING" or not run.attempts:
        return False
    ref = run_folder.read_or_none(Path(run.run_dir) / "job.json", run_folder.JobRef)
    return ref is not None and requeue_hold.is_possibly_held(Path(run.run_dir), ref, site)


def try_resume(run_dir: Path, site: Site, report: Callable[[str], None]) -> ResumeResult | None:
    """Continue a run if that is due; None where another process is at it, or Slurm or its disk has no room now.

    report: gets what only a person can change: the disk.
    """
    try:
        return resume_run(run_dir, site)
    except NoSpace as error:
        report(f"{run_dir.name} waits for room: {error}; {error.hint}")
        return None
    except TryLater:
        return None


def report_once(reported: set[str], report: Callable[[str], None]) -> Callable[[str], None]:
    """The same teller, silent about what is in `reported` already; that gets what it says."""

    def say(text: str) -> None:
        if text not in reported:
            reported.add(text)
            report(text)

    return say


def step_summary(run_dir: Path) -> steps.StepSummary | None:
    """What the step logs of the last attempt add up to."""
    last = run_folder.last_attempt(run_dir)
    return (
        steps.summarize_steps(steps.read_step_log(path) for path in (last / "steps").glob("*.jsonl")) if last else None
    )
