"""A run goes on at another site: stopped where it is with a checkpoint, which goes along with its code and its data.

    plan for there ─▶ data there ─▶ verdict "being moved" ─▶ USR2, wait ─▶ newest good checkpoint ─▶ copied, verified
                                             │                                                            │
                                 nobody continues it from here on                 job there ─▶ verdict "moved to …"

<run>/move.json     pit.move/1: where to, and under which name: whoever is killed on the way finds it, and goes on

What fails before there is a job there is taken back, and the run goes on where it was. Where it is not known whether
there is one, nothing is taken back: the same command again finds out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from pitools.core import timestamps
from pitools.core.errors import ClusterError, PitError, TryLater, UsageError
from pitools.core.locks import held
from pitools.core.record import Record
from pitools.launch import plan as planning
from pitools.launch.move import checkpoint_transfer, program_checkpoints
from pitools.launch.plan import Plan, load_plan
from pitools.launch.provenance import provenance
from pitools.launch.recovery import apply_decision, slurm_query
from pitools.launch.recovery.resume import resume
from pitools.launch.submission import exactly_once, local_process, submissions, submit
from pitools.launch.tickets import remote
from pitools.run import cancel_request, move_record, run_folder
from pitools.run.attempt_records import Verdict
from pitools.run.move_record import Move
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.errors import Unanswered
from pitools.slurm.states import UNKNOWN, is_finished
from pitools.slurm.transport import call

STOP_S = 600.0
_REPEAT_S, _LOOK_S = 30.0, 0.1
_ASK_S, _ASK_LAST_S = 10.0, 0.5  # a controller is asked seldom, until the job itself says that it is over


class Moved(Record, frozen=True, kw_only=True, tag="pit.moved/1"):
    """A run that goes on elsewhere. run_id: the old one; to: the new one. step: that it goes on from."""

    run_id: str
    to: str
    site: str
    run_dir: str
    job_id: str
    step: int


def move(run_dir: Path, site: Site, other: Site, *, stop_s: float = STOP_S) -> Moved:
    """Let a run of `site` go on at `other`; returns where. Safe to repeat, also after it was killed.

    stop_s: how long it may take to save and end. Raises UsageError for a run that has finished, or has made progress
    of which nothing is in its checkpoint folder, ConfigError for one that does not fit there, DataError for code, data
    or a checkpoint that is not what it was, TryLater where it does not stop in time, and what submitting raises; the
    run then goes on here. Raises Unanswered where it may have been submitted: run it again.
    """
    run_folder.require_own(run_dir, group_above=site.paths.runs_access == "group")
    was = load_plan(run_dir)
    provenance.require_no_copy(run_dir, was)
    if was.site != site.name or other.name == site.name:
        raise UsageError(f'run {run_dir.name} is of site "{was.site}"', where="--site", hint="name another")
    with held(run_dir / ".move", f"the move of run {run_dir.name}"):
        mine = _intend(run_dir, was, other)
        request = provenance.in_own_code(run_dir, was)
        if not mine.ended:
            program_checkpoints.require_saved(run_dir, was)
        plan = planning.make(request, other, str(run_dir), request_text=was.request_text)
        is_far = remote.is_far(plan, other)
        if is_far:
            for staged in remote.missing(plan, other):
                remote.send(staged, other)
        run_folder.write(run_dir / move_record.FILE, mine, durable=True)
        try:
            stopped = _hold(run_dir, mine)
            mine = _stop(run_dir, was, site, mine, stop_s)
            step = program_checkpoints.step_to_go_on_from(run_dir, was)
            made = _begin(run_dir, plan, other, mine, step, is_far, lambda: _require(run_dir, stopped))
        except Unanswered as error:
            hint = f"it is stopped here until that is known: pit launch move {run_dir.name} --site {other.name}"
            raise Unanswered(error.what, where=error.where, hint=hint) from error
        except BaseException as error:
            if _is_not_there(plan, other, mine, is_far, error):
                _take_back(run_dir, site, mine)
            raise
        _conclude(run_dir, made, stopped)
        return made


def _intend(run_dir: Path, was: Plan, other: Site) -> Move:
    """What was begun before, or a new move. Raises UsageError where there is nothing to move."""
    given, before = apply_decision.verdict(run_dir), run_folder.read(run_dir / move_record.FILE, Move)
    if given and given.state == "finished":
        raise UsageError("the run has finished", where=str(run_dir), hint=f"pit launch show {run_dir.name}")
    if before is None:
        return Move(to=run_folder.new_id(was.name), site=other.name, t=timestamps.now())
    if given and given.code == "moved":
        raise UsageError(f"the run was {given.reason}", where=str(run_dir), hint=f"move that one: {given.moved_to}")
    if before.site != other.name:
        hint = f"finish that first: pit launch move {run_dir.name} --site {before.site}"
        raise UsageError(f'it is being moved to "{before.site}"', where=str(run_dir), hint=hint)
    return before


def _hold(run_dir: Path, mine: Move) -> Verdict:
    """From here on nobody continues the run, neither its own job, nor Slurm, nor cron; returns what says so."""
    with held(run_dir / apply_decision.LOCK, f"run {run_dir.name}", wait_s=20.0):
        if apply_decision.verdict(run_dir) is None and cancel_request.read(run_dir):
            hint = f"take that back: pit launch resume {run_dir.name} --force"
            raise ClusterError("its cancel was asked for", where=str(run_dir), hint=hint)
        reason = apply_decision.REASONS["moving"].format(site=mine.site, run=mine.to)
        return apply_decision.conclude(run_dir, "cancelled", reason, moved_to=mine.to)


def _stop(run_dir: Path, was: Plan, site: Site, mine: Move, stop_s: float) -> Move:
    """Ask the run's job to save and end, and wait for it. Raises TryLater, UsageError where it has finished."""
    known = submissions.numbers(run_dir)
    if known and submissions.is_open(run_dir, known[-1]):  # nobody has heard yet what became of it
        exactly_once.find(run_dir, site, known[-1])
    ref = run_folder.read(run_dir / "job.json", run_folder.JobRef)
    if ref is None or is_finished(_state(site, ref)):
        return mine
    submissions.check_cluster(site, ref)
    mine = replace(mine, ended=True)
    run_folder.write(run_dir / move_record.FILE, mine, durable=True)
    began = time.monotonic()
    asked = looked = -_REPEAT_S
    while True:
        now = time.monotonic() - began
        if now - looked > (_ASK_LAST_S if site.scheduler == "none" or _has_exited(run_dir, ref) else _ASK_S):
            looked, state = now, _state(site, ref)
            if is_finished(state) or (state == UNKNOWN and slurm_query.is_gone(site, ref.job_id)):
                break
            # Again now and then: before its ranks have begun there is nobody to hear it.
            if now - asked > _REPEAT_S:
                asked = now
                _ask(site, ref, state, _notice(was))
        if now > stop_s:
            what = f"job {ref.job_id} did not save and end within {stop_s:g} s"
            raise TryLater(what, where=str(run_dir), hint="give it longer: --stop-within")
        time.sleep(_LOOK_S)
    ended = run_folder.last_exit(run_dir)
    # What was ended, and not asked, may call that a success.
    if ended and ended.exit_code == 0 and (_notice(was) or site.scheduler == "none" or state == "COMPLETED"):
        with held(run_dir / apply_decision.LOCK, f"run {run_dir.name}", wait_s=20.0):
            (run_dir / "verdict.json").unlink(missing_ok=True)
            apply_decision.conclude(run_dir, "finished", "it made its last step while it was asked to stop", 0)
        raise UsageError("the run has finished meanwhile", where=str(run_dir))
    return mine


def _has_exited(run_dir: Path, ref: run_folder.JobRef) -> bool:
    """Whether the job's script has seen its ranks end."""
    ended = run_folder.last_exit(run_dir)
    return ended is not None and ended.job_id == ref.job_id


def _state(site: Site, ref: run_folder.JobRef) -> str:
    """Slurm's word now, and not what anybody asked before; UNANSWERED says nothing about the job."""
    try:
        if site.scheduler == "none":
            return slurm_query.states(site, [ref])[ref.job_id]
        return client(site).state_of([ref.job_id])[ref.job_id]
    except TryLater:
        return "UNANSWERED"


def _notice(was: Plan) -> str:
    """The signal at which a run saves and ends; "" for a command that asks for none, and saves whenever it does."""
    if not was.request.command:
        return "USR2"
    return was.job.signal.rpartition(":")[2].partition("@")[0].removeprefix("SIG")


def _ask(site: Site, ref: run_folder.JobRef, state: str, notice: str) -> None:
    """Have a job that runs save and end, as before its time limit; one that waits, or hears no signal, is cancelled."""
    if site.scheduler == "none":
        if local_process.alive(ref):
            # A supervisor passes USR2 on; any other request is TERM, which its ranks get, too.
            os.kill(ref.pid, signal.SIGUSR2 if notice == "USR2" else signal.SIGTERM)
        elif local_process.alive(ref) is None:
            raise ClusterError(f"it is a process of host {ref.host}", where=ref.job_id, hint=f"run this on {ref.host}")
    elif state == "PENDING" or not notice:
        client(site).cancel([ref.job_id])
    else:
        # To its ranks, and not to the job: that would end them seconds later.
        call(client(site).reach, ["scancel", f"--signal={notice}", ref.job_id], env={})


def _begin(
    run_dir: Path, plan: Plan, other: Site, mine: Move, step: int | None, is_far: bool, require: Callable[[], None]
) -> Moved:
    """Start the run there, or find that it was started before. Raises as `move`.

    require: raises what keeps it from being started; asked again when all is there.
    """
    require()
    steps = program_checkpoints.progress(run_dir) if step is None else step
    if is_far:
        job_id, at = checkpoint_transfer.send(run_dir, plan, other, mine.to, step, before=require)
    else:
        new = Path(plan.runs) / mine.to
        if _is_unsent(new):
            shutil.rmtree(new)
        if new.exists():
            job_id = resume(new, other).job_id
        else:

            def seed(at: Path) -> None:
                checkpoint_transfer.copy(run_dir, step, at, mine.to)
                require()

            submit.run(plan, other, run_id=mine.to, seed=seed)
            ref = run_folder.read(new / "job.json", run_folder.JobRef)
            job_id = ref.job_id if ref else ""
            run_folder.note(new, "moved-here", run=run_dir.name, site=plan.site, step=steps)
        at = str(new)
    return Moved(run_id=run_dir.name, to=mine.to, site=other.name, run_dir=at, job_id=job_id, step=steps)


def _is_unsent(new: Path) -> bool:
    """Whether whoever made the new run's folder was killed before anything could come of it."""
    # Where there is a script, `pit launch tick` may be about to submit it.
    is_begun = submissions.numbers(new) or submissions.newest(new) or (new / "script.sbatch").exists()
    return new.is_dir() and not is_begun and not local_process.is_supervised(new)


def _is_not_there(plan: Plan, other: Site, mine: Move, is_far: bool, error: BaseException) -> bool:
    """Whether it is certain that no job of the new run will ever do anything; what is left of it there is removed."""
    if not is_far:
        return not (Path(plan.runs) / mine.to).exists()
    try:
        never = remote.take_back(other, [mine.to])[mine.to]
        if never:
            remote.forget(other, [mine.to])
        return never
    except PitError:
        # Where it could not even be asked it got no job; an interrupt may have come at any moment.
        return isinstance(error, PitError)


def _conclude(run_dir: Path, made: Moved, stopped: Verdict) -> None:
    reason = apply_decision.REASONS["moved"].format(site=made.site, run=made.to, steps=made.step)
    said = Verdict(
        state="stopped",
        code="moved",
        kind="cancelled",
        reason=reason,
        t=timestamps.now(),
        moved_to=made.to,
        attempts=len(run_folder.attempts(run_dir)),
    )
    with held(run_dir / apply_decision.LOCK, f"run {run_dir.name}", wait_s=20.0):
        hint = f"it had been submitted there by then: pit launch cancel {made.to} --site {made.site}"
        _require(run_dir, stopped, hint)
        run_folder.write(run_dir / "verdict.json", said, durable=True)
    run_folder.note(run_dir, "moved", reason=reason)


def _require(run_dir: Path, stopped: Verdict, hint: str = "") -> None:
    """Raise ClusterError where somebody has cancelled the run since it was stopped."""
    if apply_decision.verdict(run_dir) != stopped or cancel_request.read(run_dir):
        raise ClusterError("the run was cancelled while it was being moved", where=str(run_dir), hint=hint)


def _take_back(run_dir: Path, site: Site, mine: Move) -> None:
    """Let the run go on where it was, if it was stopped for the move."""
    with contextlib.suppress(PitError, OSError):
        mine = run_folder.read(run_dir / move_record.FILE, Move) or mine
        given = apply_decision.verdict(run_dir)
        if given is None or given.code != "moving":
            (run_dir / move_record.FILE).unlink(missing_ok=True)
            return
        with held(run_dir / apply_decision.LOCK, f"run {run_dir.name}", wait_s=20.0):
            (run_dir / "verdict.json").unlink(missing_ok=True)
            (run_dir / move_record.FILE).unlink(missing_ok=True)
            run_folder.note(run_dir, "not moved", site=mine.site)
        if cancel_request.read(run_dir):
            return
        if mine.ended:
            # What anybody was told of its job some seconds ago may be that it runs.
            ref = submissions.newest(run_dir)
            said = resume(run_dir, site, force=True, state=_state(site, ref) if ref else "")
            print(f"pit: it goes on at {site.name}: {said.reason}", file=sys.stderr)
        return
    print(f"pit: let it go on with: pit launch resume --force {run_dir.name}", file=sys.stderr)
