"""What a run is now: its folder first, Slurm only for what the folder cannot say."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pitools.core import clock
from pitools.core.errors import ConfigError, PitError, TryLater
from pitools.launch import jobs, local, once, polling
from pitools.launch.plan import Plan
from pitools.launch.recover import asking, evidence, putback, settling, times
from pitools.launch.recover.resume import Resumed, resume
from pitools.launch.recover.settling import plan_of
from pitools.run import folder, steps
from pitools.run.attempt import Cause, Decision, Start, Verdict
from pitools.site.connect import client
from pitools.site.model import Site
from pitools.slurm.states import UNKNOWN, is_finished

_NEW_S = 5.0  # who looks once wants to see what is
_LOOK_S, _LAST_LOOK_S = 2.0, 30.0
_FRESH_S = 60.0  # what Slurm said last, shared with others, may be as old
_TAIL = 4096  # bytes: a step's line is a few hundred
_BETWEEN_S = 1.5  # from a job's end to what Slurm and its own script have to say of it
_LOST_AFTER = 6  # answers in a row, over a minute or more
_HELD_BACK_S = 5.0
_LOST_S, _LOST_PAUSE_S = 1200.0, 30.0  # `resume` goes on without a job that was missed for ten minutes

# A verdict's cause in Slurm's words; any other is a failure.
_STATES = {
    "cancelled": "CANCELLED", "time-limit": "TIMEOUT", "memory": "OUT_OF_MEMORY", "preempted": "PREEMPTED",
    "finished": "COMPLETED",
}  # fmt: skip

__all__ = ["Watch", "cancel", "continued", "last_step", "plan_of", "show", "show_all", "summary", "wait"]


def show(run_dir: Path, site: Site, *, ask: bool = True, max_age_s: float = _NEW_S) -> folder.Run:
    """The run's record. `ask=False` never calls Slurm: the state is then what the folder says, or UNKNOWN."""
    (run,) = show_all([run_dir], site, ask=ask, max_age_s=max_age_s)
    return run


def show_all(run_dirs: Sequence[Path], site: Site, *, ask: bool = True, max_age_s: float = _NEW_S) -> list[folder.Run]:
    """The records of runs of one site, for which Slurm is asked once at most, and what it said is no older than that.

    Raises DataError for what is no run, and what asking raises.
    """
    seen = [_Seen.of(run_dir) for run_dir in run_dirs]
    said = {one.job.job_id: _of_folder(site, one) for one in seen if one.job}
    to_ask = [one.job for one in seen if one.job and not is_finished(said[one.job.job_id])]
    if ask and to_ask and site.scheduler == "slurm":
        said |= asking.states(site, to_ask, max_age_s=max_age_s)
        seen = [_Seen.of(one.run_dir) for one in seen]  # a run may have ended while Slurm was asked
    return [_record(one, said.get(one.job.job_id, UNKNOWN) if one.job else UNKNOWN) for one in seen]


class _Seen(NamedTuple):
    """What a run's folder holds at one moment. attempt: the newest's name. ended: how it did."""

    run_dir: Path
    plan: Plan
    job: folder.JobRef | None
    attempt: str
    attempts: int
    steps: int
    ended: folder.Attempt | None
    cause: Cause | None
    decided: Decision | None
    verdict: Verdict | None

    @classmethod
    def of(cls, run_dir: Path) -> _Seen:
        made = folder.attempts(run_dir)
        last = made[-1] if made else run_dir / "attempts"
        step = last_step(last)
        return cls(
            run_dir, plan_of(run_dir), folder.read(run_dir / "job.json", folder.JobRef),
            made[-1].name if made else "", len(made),
            step.step + 1 if step else evidence.progress(run_dir),
            folder.read(last / "exit.json", folder.Attempt), settling.read(last / "cause.json", Cause),
            settling.read(last / "decision.json", Decision), folder.read(run_dir / "verdict.json", Verdict),
        )  # fmt: skip

    @property
    def goes_on(self) -> bool:
        """Whether the last attempt was decided not to be the last."""
        return bool(self.decided and self.decided.action in ("again", "resubmit", "wait"))


def _of_folder(site: Site, seen: _Seen) -> str:
    """The state as far as the folder knows it: a job that Slurm may have requeued has not ended for certain."""
    if seen.verdict:
        return _STATES.get(seen.verdict.kind, "FAILED")
    if site.scheduler == "none" and seen.job and local.alive(seen.job):
        return "RUNNING" if seen.attempts else "PENDING"
    if seen.ended and (seen.ended.state or seen.ended.exit_code == 0):
        return seen.ended.state or "COMPLETED"
    if site.scheduler == "none" and seen.job:
        return UNKNOWN if local.alive(seen.job) is None else "FAILED"
    return "RUNNING" if seen.attempts and not seen.ended else UNKNOWN


def _record(seen: _Seen, state: str) -> folder.Run:
    if seen.verdict:
        state = _STATES.get(seen.verdict.kind, "FAILED")
    elif state == UNKNOWN and seen.ended and not seen.goes_on:
        # Where there is no accounting, Slurm forgets a job minutes after its end; its folder does not.
        state = "FAILED"
    elif state in (UNKNOWN, "PENDING"):
        state = _fresher(seen, state)
    said = seen.verdict or seen.cause
    code = seen.verdict.exit_code if seen.verdict else None
    if code is None and seen.ended and is_finished(state):
        code = seen.ended.exit_code
    return folder.Run(
        run_id=seen.run_dir.name,
        name=seen.plan.name,
        site=seen.plan.site,
        job_id=seen.job.job_id if seen.job else "",
        run_dir=str(seen.run_dir),
        state=state,
        exit_code=code,
        nodes=seen.plan.job.nodes,
        created=seen.job.submitted if seen.job else "",
        attempt=seen.attempt,
        attempts=seen.attempts,
        steps=seen.steps,
        cause=said.kind if said else "",
        reason=said.reason if said else "" if seen.job else "no job of it is known; see: pit launch resume",
        is_over=seen.verdict is not None,
    )


def _fresher(seen: _Seen, state: str) -> str:
    """A job just submitted waits, and one whose script has just begun runs, before Slurm's next answer says so."""
    if seen.job is None or seen.job.host:  # a process here: its supervisor is the last word
        return state
    last = folder.attempts(seen.run_dir)[-1:]
    start = settling.read(last[0] / "start.json", Start) if last else None
    if start and start.job_id == seen.job.job_id and not seen.ended and _is_fresh(start.started):
        return "RUNNING"
    return "PENDING" if _is_fresh(seen.job.submitted) else state


def _is_fresh(t: str) -> bool:
    since = times.seconds_between(t, clock.now())
    return since is not None and abs(since) < _FRESH_S


def last_step(attempt: Path) -> steps.Step | None:
    """The last step that rank 0 wrote down, from the end of its log; None before there is one."""
    try:
        with (attempt / "steps" / "0.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = file.read().split(b"\n")[:-1]
        return msgspec.json.decode(lines[-1], type=steps.Step) if lines else None
    except (OSError, msgspec.DecodeError):
        return None


class Watch:
    """Looks at a run until it has ended: its folder each time, and what Slurm told whoever asked last (`polling`).

    Slurm out of reach is waited through: it says nothing about the run. A job that Slurm, asked again and again, does
    not know has ended without a word: `lost` is then true.
    """

    def __init__(self, run_dir: Path, site: Site) -> None:
        self._run_dir, self._site = run_dir, site
        self._looked, self._unknown, self.lost = time.monotonic(), 0, False

    def look(self) -> folder.Run:
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

    def _is_lost(self, run: folder.Run) -> bool:
        if self._site.scheduler == "none" or not run.job_id:
            return self._unknown >= _LOST_AFTER
        return run.state == UNKNOWN and polling.states(self._site, [run.job_id])[run.job_id].lost


def wait(run_dir: Path, site: Site, seen: Callable[[int], None]) -> folder.Run:
    """Wait until the run has its verdict, over as many jobs as that takes, or is lost; `seen` gets its new steps.

    Continues it where that is due, as `resume` does; raises what that raises for good, and waits through TryLater.
    """
    watch, shown, known_at, looked_at = Watch(run_dir, site), 0, time.monotonic(), 0.0
    while True:
        run = watch.look()
        if run.steps > shown:
            seen(run.steps - shown)
            shown = run.steps
        if run.is_over:
            return run
        if may_be_held_back(run, site) and time.monotonic() - looked_at > _HELD_BACK_S:
            looked_at = time.monotonic()
            continued(run_dir, site)
        if is_finished(run.state) or watch.lost:
            done = continued(run_dir, site)
            if done and done.action in ("over", "done", "stop"):
                return show(run_dir, site, ask=False)
            if not watch.lost or (done and done.action in ("resubmit", "submitted")):
                known_at = time.monotonic()
            elif site.scheduler == "none" or time.monotonic() - known_at > _LOST_S:
                return run
            time.sleep(_LOST_PAUSE_S if watch.lost and site.scheduler == "slurm" else _BETWEEN_S)
        time.sleep(0.5)


def may_be_held_back(run: folder.Run, site: Site) -> bool:
    """Whether Slurm may have put the run's job back and hold it, which `resume` asks it about. Asks nobody."""
    if run.state != "PENDING" or not run.attempts:
        return False
    ref = settling.read(Path(run.run_dir) / "job.json", folder.JobRef)
    return ref is not None and putback.may_be(Path(run.run_dir), ref, site)


def continued(run_dir: Path, site: Site) -> Resumed | None:
    """Continue a run if that is due; None where another process is at it, or Slurm has no time now."""
    try:
        return resume(run_dir, site)
    except TryLater:
        return None


def summary(run_dir: Path) -> steps.Summary | None:
    """What the step logs of the last attempt add up to."""
    made = folder.attempts(run_dir)
    return steps.summarize(steps.read(path) for path in (made[-1] / "steps").glob("*.jsonl")) if made else None


def cancel(run_dir: Path, site: Site) -> Verdict | None:
    """End a run for good, and every job of it; safe to repeat. Raises ConfigError when there is no job.

    Returns the verdict that it had before: of a run that has ended by itself nothing is cancelled. The verdict comes
    first: from then on nothing continues the run, whatever becomes of this process.
    """
    given = settling.verdict(run_dir)
    if given and given.kind != "cancelled":  # who cancelled it may not have lived to end its jobs
        return given
    if given and given.reason.startswith(settling.BEING_MOVED) and settling.cancelled_on_the_way(run_dir):
        given = None
    job = jobs.newest(run_dir)
    if job is None and not jobs.numbers(run_dir):
        # It may have lost its word of them: Slurm calls them by the run's name.
        hint = f"scancel --name={run_dir.name}" if site.scheduler == "slurm" else "its folder can go"
        raise ConfigError("the run has no job", where=str(run_dir), hint=hint)
    if given is None and show(run_dir, site, ask=False).state != "COMPLETED":
        settling.conclude(run_dir, "stopped", "cancelled", settling.CANCELLED)
    if site.scheduler == "none":
        if job:
            local.cancel(job)
    else:
        if job:
            jobs.check_cluster(site, job)
        made = [_known(run_dir, site, number) for number in jobs.numbers(run_dir)]
        if ids := dict.fromkeys(one.job_id for one in (*made, job) if one):
            client(site).cancel(list(ids))
        with contextlib.suppress(PitError):  # what is kept grows old by itself
            polling.changed(site)
    folder.note(run_dir, "cancel", job_id=job.job_id if job else "")
    return given


def _known(run_dir: Path, site: Site, number: int) -> folder.JobRef | None:
    """The run's k-th job, looked for where its sender never heard of it. One that begins later finds the verdict."""
    with contextlib.suppress(PitError):
        return once.find(run_dir, site, number) if jobs.is_open(run_dir, number) else jobs.known(run_dir, number)
    return None
