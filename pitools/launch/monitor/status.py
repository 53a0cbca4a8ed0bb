"""What a run is now: its folder first, Slurm only for what the folder cannot say."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pitools.core import timestamps
from pitools.core.errors import ClusterError, NoSpace, PitError, TryLater
from pitools.core.fs import os_error
from pitools.launch import slurm_cache
from pitools.launch.diagnosis import explain, log_timestamps
from pitools.launch.monitor.run_snapshot import RunSnapshot, last_step
from pitools.launch.recovery import requeue_hold, slurm_query
from pitools.launch.recovery.cancel_run import cancel
from pitools.launch.recovery.resume import Resumed, resume
from pitools.launch.submission import local_process
from pitools.run import run_folder, steps
from pitools.run.attempt_records import Start
from pitools.site.schema import Site
from pitools.slurm.states import UNKNOWN, is_finished, is_held

_NEW_S = 5.0  # who looks once wants to see what is
_LOOK_S, _LAST_LOOK_S = 2.0, 30.0
_FRESH_S = 60.0  # what Slurm said last, shared with others, may be as old
_BETWEEN_S = 1.5  # from a job's end to what Slurm and its own script have to say of it
_LOST_AFTER = 6  # answers in a row, over a minute or more
_HELD_BACK_S = 5.0
_LOST_S, _LOST_PAUSE_S = 1200.0, 30.0  # `resume` goes on without a job that was missed for ten minutes

# A verdict's cause in Slurm's words; any other is a failure.
_STATES = {
    "cancelled": "CANCELLED",
    "time-limit": "TIMEOUT",
    "memory": "OUT_OF_MEMORY",
    "preempted": "PREEMPTED",
    "finished": "COMPLETED",
}

_UNDATED = "1970-01-01T00:00:00Z"  # of a cancel whose record is damaged

Tell = Callable[[Path, PitError], None]

__all__ = ["Watch", "cancel", "continued", "last_step", "once", "show", "show_all", "summary", "wait"]


def show(run_dir: Path, site: Site, *, ask: bool = True, max_age_s: float = _NEW_S) -> run_folder.Run:
    """The run's record. `ask=False` never calls Slurm: the state is then what the folder says, or UNKNOWN."""
    (run,) = show_all([run_dir], site, ask=ask, max_age_s=max_age_s)
    return run


def show_all(
    run_dirs: Sequence[Path], site: Site, *, ask: bool = True, max_age_s: float = _NEW_S, tell: Tell | None = None
) -> list[run_folder.Run]:
    """The records of runs of one site, for which Slurm is asked once at most, and what it said is no older than that.

    tell: hears what is wrong with a single run, which is left out then; None: that is raised. Raises what asking
    raises.
    """
    seen = _read(run_dirs, tell)
    # By run: of two local runs the processes may have had one id.
    to_ask = [one.job for one in seen if one.job and not is_finished(_of_folder(site, one))]
    said: dict[str, str] = {}
    waits: dict[str, slurm_cache.Told] = {}
    if ask and to_ask and site.scheduler == "slurm":
        said = slurm_query.states(site, to_ask, max_age_s=max_age_s)
        waits = slurm_query.waiting(site, [ref.job_id for ref in to_ask if said[ref.job_id] == "PENDING"])
        seen = _read([one.run_dir for one in seen], tell)  # a run may have ended while Slurm was asked
    return [_record(one, said.get(one.job_id) or _of_folder(site, one), waits.get(one.job_id)) for one in seen]


def _read(run_dirs: Sequence[Path], tell: Tell | None) -> list[RunSnapshot]:
    found = []
    for run_dir in run_dirs:
        try:
            found.append(RunSnapshot.of(run_dir))
        except (PitError, OSError) as error:
            if tell is None:
                raise
            tell(run_dir, error if isinstance(error, PitError) else os_error(error, run_dir))
    return found


def _of_folder(site: Site, seen: RunSnapshot) -> str:
    """The state as far as the folder knows it: a job that Slurm may have requeued has not ended for certain."""
    if seen.verdict:
        return _STATES.get(seen.verdict.kind, "FAILED")
    if seen.job is None:
        return UNKNOWN
    if site.scheduler == "none" and local_process.alive(seen.job):
        return "RUNNING" if seen.attempts else "PENDING"
    if seen.ended and (seen.ended.state or seen.ended.exit_code == 0):
        return seen.ended.state or "COMPLETED"
    if site.scheduler == "none":
        return UNKNOWN if local_process.alive(seen.job) is None else "FAILED"
    return "RUNNING" if seen.attempts and not (seen.ended or seen.damaged) else UNKNOWN


def _record(seen: RunSnapshot, state: str, told: slurm_cache.Told | None) -> run_folder.Run:
    if seen.verdict:
        state = _STATES.get(seen.verdict.kind, "FAILED")
    elif state == UNKNOWN and seen.ended and not seen.goes_on:
        # Where there is no accounting, Slurm forgets a job minutes after its end; its folder does not.
        state = "FAILED"
    elif state in (UNKNOWN, "PENDING") and not (told and is_held(told.reason)):
        state = _fresher(seen, state)
    said = seen.verdict or seen.cause
    code = seen.verdict.exit_code if seen.verdict else None
    if code is None and seen.ended and is_finished(state):
        code = seen.ended.exit_code
    asked = seen.cancel is not None and not seen.cancel.refused and seen.verdict is None
    told = told if state == "PENDING" else None
    return run_folder.Run(
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
        reason=_reason(seen, asked, state),
        is_over=seen.verdict is not None,
        cancel_asked=(seen.cancel.t or _UNDATED) if asked and seen.cancel else "",
        pending_reason=told.reason if told else "",
        expected_start=told.start if told else "",
    )


def _reason(seen: RunSnapshot, asked: bool, state: str) -> str:
    """What is to be said of a run in a sentence: why it ended, or what keeps that from being known."""
    if asked and seen.job and seen.job.host:  # a process of this machine
        return "its cancel was asked for, and its ranks still end; to try again: pit launch cancel"
    if asked:
        return "its cancel was asked for, and Slurm has not taken it yet; to try again: pit launch cancel"
    if seen.cancel and not seen.verdict and state != "COMPLETED":
        return f"its cancel was refused, and it goes on: {seen.cancel.refused}"
    if said := seen.verdict or seen.cause:
        return said.reason
    return seen.damaged if seen.job else "no job of it is known; see: pit launch resume"


def _fresher(seen: RunSnapshot, state: str) -> str:
    """A job just submitted waits, and one whose script has just begun runs, before Slurm's next answer says so."""
    if seen.job is None or seen.job.host:  # a process here: its supervisor is the last word
        return state
    last = run_folder.last_attempt(seen.run_dir)
    start = run_folder.read_or_none(last / "start.json", Start) if last else None
    if start and start.job_id == seen.job.job_id and not seen.ended and _is_fresh(start.started):
        return "RUNNING"
    return "PENDING" if _is_fresh(seen.job.submitted) else state


def _is_fresh(t: str) -> bool:
    since = log_timestamps.seconds_between(t, timestamps.now())
    return since is not None and abs(since) < _FRESH_S


class Watch:
    """Looks at a run until it has ended: its folder each time, and what Slurm told whoever asked last (`slurm_cache`).

    Slurm out of reach is waited through: it says nothing about the run. A job that Slurm, asked again and again, does
    not know has ended without a word: `lost` is then true.
    """

    def __init__(self, run_dir: Path, site: Site) -> None:
        self._run_dir, self._site = run_dir, site
        self._looked, self._unknown, self.lost = time.monotonic(), 0, False

    def look(self) -> run_folder.Run:
        """The run now."""
        run = show(self._run_dir, self._site, ask=False)
        # Its script has ended: what Slurm makes of that (failed, requeued, timed out) is to be known soon.
        ended = run.state == "FAILED" and self._site.scheduler == "slurm" and not run.is_over
        if is_finished(run.state) and not ended:
            return run
        every_s = _LOOK_S if self._site.scheduler == "slurm" else min(_LOOK_S * 1.5**self._unknown, _LAST_LOOK_S)
        if time.monotonic() - self._looked > every_s:
            self._looked = time.monotonic()
            try:
                run = show(self._run_dir, self._site, max_age_s=_NEW_S if ended else math.inf)
            except TryLater:
                return msgspec.structs.replace(run, state=UNKNOWN)
            self._unknown = self._unknown + 1 if run.state == UNKNOWN else 0
            self.lost = self._is_lost(run)
            return run
        return msgspec.structs.replace(run, state=UNKNOWN) if ended else run

    def _is_lost(self, run: run_folder.Run) -> bool:
        if self._site.scheduler == "none" or not run.job_id:
            return self._unknown >= _LOST_AFTER
        return run.state == UNKNOWN and slurm_cache.states(self._site, [run.job_id])[run.job_id].lost


def wait(run_dir: Path, site: Site, seen: Callable[[int], None], tell: Callable[[str], None]) -> run_folder.Run:
    """Wait until the run has its verdict, over as many jobs as that takes, or is lost.

    seen: gets its new steps. tell: gets a line for each attempt that fails on the way, and for a disk that is full.

    Continues it where that is due, as `resume` does; raises what that raises for good, and waits through TryLater.
    Raises ClusterError where Slurm holds its job until somebody releases it.
    """
    watch, shown, known_at, looked_at = Watch(run_dir, site), 0, time.monotonic(), 0.0
    told: set[str] = set()
    before, began = ("", 0, ""), known_at
    while True:
        run = watch.look()
        if run.steps > shown:
            seen(run.steps - shown)
            shown = run.steps
        if run.is_over:
            return run
        now = (run.job_id, run.attempts, run.cause)
        if now != before:
            for line in explain.ended(run_dir, told):
                tell(line)
        before = now
        if is_still_held(run, site, began):
            raise held_error(run)
        if (run.cancel_asked or may_be_held_back(run, site)) and time.monotonic() - looked_at > _HELD_BACK_S:
            looked_at = time.monotonic()
            continued(run_dir, site, once(told, tell))
        if is_finished(run.state) or watch.lost:
            done = continued(run_dir, site, once(told, tell))
            if done and done.action in ("over", "done", "stop"):
                return show(run_dir, site, ask=False)
            if not watch.lost or (done and done.action in ("resubmit", "submitted")):
                known_at = time.monotonic()
            elif site.scheduler == "none" or time.monotonic() - known_at > _LOST_S:
                return run
            time.sleep(_LOST_PAUSE_S if watch.lost and site.scheduler == "slurm" else _BETWEEN_S)
        time.sleep(0.5)


def is_still_held(run: run_folder.Run, site: Site, since: float) -> bool:
    """Whether Slurm, asked since a moment (time.monotonic), holds the run's job: what it said before may be over."""
    if not is_held(run.pending_reason):
        return False
    told = slurm_query.waiting(site, [run.job_id])[run.job_id]
    return is_held(told.reason) and told.age_s < time.monotonic() - since


def held_error(run: run_folder.Run) -> ClusterError:
    """The error that a run's job begins only when somebody releases it."""
    what = f"Slurm holds job {run.job_id} until it is released: {run.pending_reason}"
    hint = f"scontrol release {run.job_id}, then: pit launch watch {run.run_id}; or: pit launch cancel {run.run_id}"
    return ClusterError(what, where=run.run_dir, hint=hint)


def may_be_held_back(run: run_folder.Run, site: Site) -> bool:
    """Whether Slurm may have put the run's job back and hold it, which `resume` asks it about. Asks nobody."""
    if run.state != "PENDING" or not run.attempts:
        return False
    ref = run_folder.read_or_none(Path(run.run_dir) / "job.json", run_folder.JobRef)
    return ref is not None and requeue_hold.may_be(Path(run.run_dir), ref, site)


def continued(run_dir: Path, site: Site, tell: Callable[[str], None]) -> Resumed | None:
    """Continue a run if that is due; None where another process is at it, or Slurm or its disk has no room now.

    tell: gets what only a person can change: the disk.
    """
    try:
        return resume(run_dir, site)
    except NoSpace as error:
        tell(f"{run_dir.name} waits for room: {error}; {error.hint}")
        return None
    except TryLater:
        return None


def once(told: set[str], tell: Callable[[str], None]) -> Callable[[str], None]:
    """The same teller, silent about what is in `told` already; that gets what it says."""

    def say(text: str) -> None:
        if text not in told:
            told.add(text)
            tell(text)

    return say


def summary(run_dir: Path) -> steps.Summary | None:
    """What the step logs of the last attempt add up to."""
    last = run_folder.last_attempt(run_dir)
    return steps.summarize(steps.read(path) for path in (last / "steps").glob("*.jsonl")) if last else None
