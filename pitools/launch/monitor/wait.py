"""Wait for a run: poll its state, and continue it where it was interrupted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pitools.core.errors import ClusterError, NoSpace, TryLater
from pitools.launch import slurm_cache
from pitools.launch.diagnosis import explain
from pitools.launch.monitor.status import YOUNG_JOB_S, run_status
from pitools.launch.monitor.wait_reason import WaitReason
from pitools.launch.recovery import requeue_delay, slurm_query
from pitools.launch.recovery.resume import ResumeResult, resume_run
from pitools.run import run_folder
from pitools.site.schema import Site
from pitools.slurm.states import UNKNOWN, is_final, is_held

_POLL_S, _MAX_POLL_S = 2.0, 30.0
_RESUME_PAUSE_S = 1.5  # after a job's end, until Slurm and the job's script have recorded it
_LOST_AFTER_TRIES = 6  # polls in a row, over a minute or more
_HOLD_CHECK_S = 5.0
_LOST_TIMEOUT_S, _LOST_PAUSE_S = 1200.0, 30.0  # `resume` replaces a job that Slurm has not listed for ten minutes


class RunPoller:
    """Poll a run until it has ended: its folder at each poll, and Slurm's states through `slurm_cache`.

    An unreachable Slurm gives UNKNOWN, and polling continues. lost: Slurm has not listed the job for several polls; it
    has then ended without a record.
    """

    def __init__(self, run_dir: Path, site: Site) -> None:
        self._run_dir, self._site = run_dir, site
        self._polled_at, self._unknown_count, self.lost = time.monotonic(), 0, False

    def poll(self) -> run_folder.RunRecord:
        """Return the run's record. Queries Slurm at most every few seconds."""
        run = run_status(self._run_dir, self._site, query_slurm=False)
        # The script has ended: Slurm will soon report whether it failed, was requeued or timed out.
        ended = run.state == "FAILED" and self._site.scheduler == "slurm" and not run.is_over
        if is_final(run.state) and not ended:
            return run
        every_s = _POLL_S if self._site.scheduler == "slurm" else min(_POLL_S * 1.5**self._unknown_count, _MAX_POLL_S)
        if time.monotonic() - self._polled_at > every_s:
            self._polled_at = time.monotonic()
            try:
                run = run_status(self._run_dir, self._site, max_age_s=YOUNG_JOB_S if ended else math.inf)
            except TryLater:
                return msgspec.structs.replace(run, state=UNKNOWN)
            self._unknown_count = self._unknown_count + 1 if run.state == UNKNOWN else 0
            self.lost = self._is_lost(run)
            return run
        return msgspec.structs.replace(run, state=UNKNOWN) if ended else run

    def _is_lost(self, run: run_folder.RunRecord) -> bool:
        if self._site.scheduler == "none" or not run.job_id:
            return self._unknown_count >= _LOST_AFTER_TRIES
        return run.state == UNKNOWN and slurm_cache.cached_states(self._site, [run.job_id])[run.job_id].lost


def wait_for_run(
    run_dir: Path,
    site: Site,
    on_steps: Callable[[int], None],
    report: Callable[[str], None],
    timeout_s: float = math.inf,
) -> run_folder.RunRecord:
    """Wait until the run has its verdict, over as many jobs as that takes, or is lost, and return its record.

    on_steps: gets the number of new steps. report: gets a line for each failed attempt, for a full disk, and
    for what the run waits for before its first step.

    Continues an interrupted run, as `resume` does, and raises its errors except TryLater, which is retried. Raises
    ClusterError if Slurm holds the job until it is released, and TimeoutError.
    """
    poller, shown, last_known_at, checked_at = RunPoller(run_dir, site), 0, time.monotonic(), 0.0
    reported: set[str] = set()
    reason = WaitReason(run_dir)
    last_state, started_at = ("", 0, ""), last_known_at
    while True:
        run = poller.poll()
        if run.steps > shown:
            on_steps(run.steps - shown)
            shown = run.steps
        if run.is_over:
            return run
        left_s = started_at + timeout_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"run {run.run_id}: {run.state.lower()} after {timeout_s:g} s")
        if line := reason.changed_line(run):
            report(line)
        run_state = (run.job_id, run.attempts, run.cause)
        if run_state != last_state:
            for line in explain.past_attempts(run_dir, reported):
                report(line)
        last_state = run_state
        if is_still_held(run, site, started_at):
            raise held_error(run)
        if (run.cancel_requested or may_be_delayed(run, site)) and time.monotonic() - checked_at > _HOLD_CHECK_S:
            checked_at = time.monotonic()
            try_resume(run_dir, site, report_once(reported, report))
        if is_final(run.state) or poller.lost:
            result = try_resume(run_dir, site, report_once(reported, report))
            if result and result.action in ("already_ended", "done", "stop"):
                return run_status(run_dir, site, query_slurm=False)
            if not poller.lost or (result and result.action in ("resubmit", "submitted")):
                last_known_at = time.monotonic()
            elif site.scheduler == "none" or time.monotonic() - last_known_at > _LOST_TIMEOUT_S:
                return run
            pause_s = _LOST_PAUSE_S if poller.lost and site.scheduler == "slurm" else _RESUME_PAUSE_S
            time.sleep(min(pause_s, left_s))
        time.sleep(0.5)


def is_still_held(run: run_folder.RunRecord, site: Site, since: float) -> bool:
    """Return whether Slurm holds the run's job, by an answer newer than `since`, a time.monotonic()."""
    if not is_held(run.pending_reason):
        return False
    cached = slurm_query.pending_info(site, [run.job_id])[run.job_id]
    return is_held(cached.reason) and cached.age_s < time.monotonic() - since


def held_error(run: run_folder.RunRecord) -> ClusterError:
    """Return the error for a job that Slurm holds until it is released."""
    message = f"Slurm holds job {run.job_id} until it is released: {run.pending_reason}"
    hint = f"scontrol release {run.job_id}, then: pit launch watch {run.run_id}; or: pit launch cancel {run.run_id}"
    return ClusterError(message, where=run.run_dir, hint=hint)


def may_be_delayed(run: run_folder.RunRecord, site: Site) -> bool:
    """Return whether Slurm may have requeued and held the run's job, by its records alone. `resume` queries Slurm."""
    if run.state != "PENDING" or not run.attempts:
        return False
    ref = run_folder.read_or_none(Path(run.run_dir) / "job.json", run_folder.JobRef)
    return ref is not None and requeue_delay.is_possibly_delayed(Path(run.run_dir), ref, site)


def try_resume(run_dir: Path, site: Site, report: Callable[[str], None]) -> ResumeResult | None:
    """Continue an interrupted run. Return None if another process does so, Slurm is unreachable or the disk is full.

    report: gets a line for a full disk.
    """
    try:
        return resume_run(run_dir, site)
    except NoSpace as error:
        report(f"{run_dir.name} waits for disk space: {error}; {error.hint}")
        return None
    except TryLater:
        return None


def report_once(reported: set[str], report: Callable[[str], None]) -> Callable[[str], None]:
    """Return a `report` that drops the lines in `reported`, and adds the others to it."""

    def report_new(text: str) -> None:
        if text not in reported:
            reported.add(text)
            report(text)

    return report_new
