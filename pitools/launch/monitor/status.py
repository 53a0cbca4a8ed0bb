"""Return the state of runs, from their folders, and from Slurm for what a folder does not hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pitools.core import timestamps
from pitools.core.errors import PitError
from pitools.core.fs import from_os_error
from pitools.launch import slurm_cache
from pitools.launch.diagnosis import log_timestamps
from pitools.launch.monitor.run_snapshot import RunSnapshot
from pitools.launch.recovery import slurm_query
from pitools.launch.submission import local_process
from pitools.run import move_record, run_folder, steps
from pitools.run.attempt_records import AttemptStart
from pitools.site.schema import Site
from pitools.slurm.states import UNKNOWN, is_final, is_held

YOUNG_JOB_S = 5.0  # greatest age of a cached state for a single query
_YOUNG_ATTEMPT_S = 60.0  # the shared cache of Slurm's states may be this old

# A verdict's cause → Slurm's state; any other cause is FAILED.
_STATES = {
    "cancelled": "CANCELLED",
    "moved": "CANCELLED",
    "time-limit": "TIMEOUT",
    "memory": "OUT_OF_MEMORY",
    "preempted": "PREEMPTED",
    "succeeded": "COMPLETED",
}

_UNDATED = "1970-01-01T00:00:00Z"  # the time of a cancel with a damaged record

ReportError = Callable[[Path, PitError], None]


def run_status(
    run_dir: Path, site: Site, *, query_slurm: bool = True, max_age_s: float = YOUNG_JOB_S
) -> run_folder.RunRecord:
    """Return the run's record. `query_slurm=False` reads the folder alone: the state may then be UNKNOWN."""
    (run,) = run_statuses([run_dir], site, query_slurm=query_slurm, max_age_s=max_age_s)
    return run


def run_statuses(
    run_dirs: Sequence[Path],
    site: Site,
    *,
    query_slurm: bool = True,
    max_age_s: float = YOUNG_JOB_S,
    report_error: ReportError | None = None,
) -> list[run_folder.RunRecord]:
    """Return the records of runs of one site, with at most one query of Slurm.

    max_age_s: greatest age of a cached state, in seconds. report_error: gets the error of an unreadable run, which is
    then left out; with None the error is raised. Raises the errors of the query.
    """
    snapshots = _read_snapshots(run_dirs, report_error)
    # Job by job, not by id: two local runs may have had the same process id.
    open_jobs = [job for run in snapshots if (job := open_job(run, site))]
    states: dict[str, str] = {}
    pending: dict[str, slurm_cache.CachedState] = {}
    if query_slurm and open_jobs and site.scheduler == "slurm":
        states = slurm_query.job_states(site, open_jobs, max_age_s=max_age_s)
        pending = slurm_query.pending_info(site, [ref.job_id for ref in open_jobs if states[ref.job_id] == "PENDING"])
        # Read again: a run may have ended during the query.
        snapshots = _read_snapshots([run.run_dir for run in snapshots], report_error)
    return [
        _run_record(run, states.get(run.job_id) or _state_from_dir(site, run), pending.get(run.job_id))
        for run in snapshots
    ]


def open_job(snapshot: RunSnapshot, site: Site) -> run_folder.JobRef | None:
    """Return the run's newest job if the folder does not say that the run has ended; else None."""
    return snapshot.job if snapshot.job and not is_final(_state_from_dir(site, snapshot)) else None


def record_of(snapshot: RunSnapshot, site: Site, cached: slurm_cache.CachedState | None) -> run_folder.RunRecord:
    """Return the record of a run by its folder and the cached state of its newest job; None: by the folder alone."""
    answered = cached and not (cached.failure and cached.state == UNKNOWN)
    state = cached.state if cached and answered else _state_from_dir(site, snapshot)
    return _run_record(snapshot, state, cached)


def _read_snapshots(run_dirs: Sequence[Path], report_error: ReportError | None) -> list[RunSnapshot]:
    snapshots = []
    for run_dir in run_dirs:
        try:
            snapshots.append(RunSnapshot.read(run_dir))
        except (PitError, OSError) as error:
            if report_error is None:
                raise
            report_error(run_dir, error if isinstance(error, PitError) else from_os_error(error, run_dir))
    return snapshots


def _state_from_dir(site: Site, snapshot: RunSnapshot) -> str:
    """Return the state by the folder alone; UNKNOWN for an ended attempt that Slurm may have requeued."""
    if snapshot.verdict:
        return _STATES.get(snapshot.verdict.kind, "FAILED")
    if snapshot.job is None:
        return UNKNOWN
    if site.scheduler == "none" and local_process.is_alive(snapshot.job):
        return "RUNNING" if snapshot.attempts else "PENDING"
    if snapshot.exit and (snapshot.exit.state or snapshot.exit.exit_code == 0):
        return snapshot.exit.state or "COMPLETED"
    if site.scheduler == "none":
        return UNKNOWN if local_process.is_alive(snapshot.job) is None else "FAILED"
    return "RUNNING" if snapshot.attempts and not (snapshot.exit or snapshot.damaged) else UNKNOWN


def _run_record(snapshot: RunSnapshot, state: str, cached: slurm_cache.CachedState | None) -> run_folder.RunRecord:
    if snapshot.verdict:
        state = _STATES.get(snapshot.verdict.kind, "FAILED")
    elif state == UNKNOWN and snapshot.exit and not snapshot.continues:
        # Without accounting, Slurm forgets a job minutes after its end; the folder has its exit code.
        state = "FAILED"
    elif state in (UNKNOWN, "PENDING") and not (cached and is_held(cached.reason)):
        state = _state_if_newer(snapshot, state)
    cause = snapshot.verdict or snapshot.cause
    exit_code = snapshot.verdict.exit_code if snapshot.verdict else None
    if exit_code is None and snapshot.exit and is_final(state):
        exit_code = snapshot.exit.exit_code
    cancel_pending = snapshot.cancel is not None and not snapshot.cancel.refused_by_slurm and snapshot.verdict is None
    cached = cached if state == "PENDING" else None
    return run_folder.RunRecord(
        run_id=snapshot.run_dir.name,
        name=snapshot.plan.name,
        site=snapshot.plan.site,
        job_id=snapshot.job_id,
        run_dir=str(snapshot.run_dir),
        state=state,
        exit_code=exit_code,
        nodes=snapshot.plan.job.nodes,
        created=snapshot.created,
        attempt=snapshot.attempt,
        attempts=snapshot.attempts,
        steps=snapshot.steps,
        cause=cause.kind if cause else "",
        reason=_run_reason(snapshot, cancel_pending, state),
        is_over=snapshot.verdict is not None,
        cancel_requested=(snapshot.cancel.t or _UNDATED) if cancel_pending and snapshot.cancel else "",
        pending_reason=cached.reason if cached else "",
        expected_start=cached.start if cached else "",
        params=snapshot.plan.request.params,
        loss=snapshot.loss,
    )


def _run_reason(snapshot: RunSnapshot, cancel_pending: bool, state: str) -> str:
    """Return why a run ended, or why that is not known, in one sentence."""
    if cancel_pending and snapshot.job and snapshot.job.host:  # a process of this machine
        return "cancel requested, its ranks are still ending; to try again: pit launch cancel"
    if cancel_pending:
        return "cancel requested, Slurm has not accepted it yet; to try again: pit launch cancel"
    if snapshot.cancel and not snapshot.verdict and state != "COMPLETED":
        return f"cancel refused by Slurm, the run continues: {snapshot.cancel.refused_by_slurm}"
    if move_error := move_record.interrupted_move(snapshot.run_dir) if snapshot.verdict else None:
        return f"{move_error.message}; to complete it: {move_error.hint}"
    if cause := snapshot.verdict or snapshot.cause:
        return cause.reason
    return snapshot.damaged if snapshot.job else "the run has no known job; see: pit launch resume"


def _state_if_newer(snapshot: RunSnapshot, state: str) -> str:
    """Return PENDING for a job just submitted and RUNNING for one just started, if Slurm's cached state is older."""
    if snapshot.job is None or snapshot.job.host:  # a local process: its supervisor's state is current
        return state
    attempt = run_folder.last_attempt(snapshot.run_dir)
    start = run_folder.read_or_none(attempt / "start.json", AttemptStart) if attempt else None
    if start and start.job_id == snapshot.job.job_id and not snapshot.exit and _is_fresh(start.started):
        return "RUNNING"
    return "PENDING" if _is_fresh(snapshot.job.submitted) else state


def _is_fresh(t: str) -> bool:
    age_s = log_timestamps.seconds_between(t, timestamps.now_rfc3339())
    return age_s is not None and abs(age_s) < _YOUNG_ATTEMPT_S


def step_summary(run_dir: Path) -> steps.StepSummary | None:
    """Return the totals of the last attempt's step logs, or None without an attempt."""
    attempt = run_folder.last_attempt(run_dir)
    return (
        steps.summarize_steps(steps.read_step_log(path) for path in (attempt / "steps").glob("*.jsonl"))
        if attempt
        else None
    )
