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
from pitools.core.locks import lock
from pitools.core.record import Record
from pitools.launch import plan as planning
from pitools.launch.move import checkpoint_transfer, program_checkpoints
from pitools.launch.plan import Plan, load_plan
from pitools.launch.provenance import provenance
from pitools.launch.recovery import apply_decision, slurm_query
from pitools.launch.recovery.resume import resume_run
from pitools.launch.submission import exactly_once, local_process, submissions, submit
from pitools.launch.tickets import remote
from pitools.run import cancel_request, move_record, run_folder
from pitools.run.attempt_records import Verdict
from pitools.run.move_record import MoveIntent
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.errors import OutcomeUnknown
from pitools.slurm.states import UNKNOWN, is_finished
from pitools.slurm.transport import run_command

STOP_TIMEOUT_S = 600.0
_SIGNAL_AGAIN_S, _POLL_S = 30.0, 0.1
_SIGNAL_PAUSE_S, _LAST_SIGNAL_PAUSE_S = (
    10.0,
    0.5,
)  # a controller is asked seldom, until the job itself says that it is over


class MoveResult(Record, frozen=True, kw_only=True, tag="pit.move-result/1"):
    """A run that goes on elsewhere. run_id: the old one; new_run_id: the new one. step: that it goes on from."""

    run_id: str
    new_run_id: str
    site: str
    run_dir: str
    job_id: str
    step: int


def move_run(run_dir: Path, site: Site, target_site: Site, *, stop_s: float = STOP_TIMEOUT_S) -> MoveResult:
    """Let a run of `site` go on at `target_site`; returns where. Safe to repeat, also after it was killed.

    stop_s: how long it may take to save and end. Raises UsageError for a run that has finished, or has made progress
    of which nothing is in its checkpoint folder, ConfigError for one that does not fit there, DataError for code, data
    or a checkpoint that is not what it was, TryLater where it does not stop in time, and what submitting raises; the
    run then goes on here. Raises Unanswered where it may have been submitted: run it again.
    """
    run_folder.require_own_run(run_dir, group_above=site.paths.runs_access == "group")
    was = load_plan(run_dir)
    provenance.require_no_copy(run_dir, was)
    if was.site != site.name or target_site.name == site.name:
        raise UsageError(f'run {run_dir.name} is of site "{was.site}"', where="--site", hint="name another")
    with lock(run_dir / ".move", f"the move of run {run_dir.name}"):
        mine = _record_intent(run_dir, was, target_site)
        request = provenance.in_own_code(run_dir, was)
        if not mine.job_ended:
            program_checkpoints.require_saved(run_dir, was)
        plan = planning.make_plan(request, target_site, str(run_dir), request_text=was.request_text)
        is_far = remote.is_remote(plan, target_site)
        if is_far:
            for staged in remote.missing_datasets(plan, target_site):
                remote.send_dataset(staged, target_site)
        run_folder.write_record(run_dir / move_record.FILE, mine, durable=True)
        try:
            stopped = _conclude_as_moved(run_dir, mine)
            mine = _stop_with_checkpoint(run_dir, was, site, mine, stop_s)
            step = program_checkpoints.step_to_resume(run_dir, was)
            made = _start_at_target(
                run_dir, plan, target_site, mine, step, is_far, lambda: _require_not_cancelled(run_dir, stopped)
            )
        except OutcomeUnknown as error:
            hint = f"it is stopped here until that is known: pit launch move {run_dir.name} --site {target_site.name}"
            raise OutcomeUnknown(error.message, where=error.where, hint=hint) from error
        except BaseException as error:
            if _will_never_run(plan, target_site, mine, is_far, error):
                _reopen(run_dir, site, mine)
            raise
        _conclude_moved(run_dir, made, stopped)
        return made


def _record_intent(run_dir: Path, plan: Plan, target_site: Site) -> MoveIntent:
    """What was begun before, or a new move. Raises UsageError where there is nothing to move."""
    given, before = apply_decision.read_verdict(run_dir), run_folder.read_record(run_dir / move_record.FILE, MoveIntent)
    if given and given.state == "finished":
        raise UsageError("the run has finished", where=str(run_dir), hint=f"pit launch show {run_dir.name}")
    if before is None:
        new_run_id = run_folder.new_run_id(plan.name)
        return MoveIntent(new_run_id=new_run_id, target_site=target_site.name, t=timestamps.now_rfc3339())
    if given and given.code == "moved":
        raise UsageError(f"the run was {given.reason}", where=str(run_dir), hint=f"move that one: {given.moved_to}")
    if before.target_site != target_site.name:
        hint = f"finish that first: pit launch move {run_dir.name} --site {before.target_site}"
        raise UsageError(f'it is being moved to "{before.target_site}"', where=str(run_dir), hint=hint)
    return before


def _conclude_as_moved(run_dir: Path, intent: MoveIntent) -> Verdict:
    """From here on nobody continues the run, neither its own job, nor Slurm, nor cron; returns what says so."""
    with lock(run_dir / apply_decision.RUN_LOCK, f"run {run_dir.name}", wait_s=20.0):
        if apply_decision.read_verdict(run_dir) is None and cancel_request.pending_cancel(run_dir):
            hint = f"take that back: pit launch resume {run_dir.name} --force"
            raise ClusterError("its cancel was asked for", where=str(run_dir), hint=hint)
        reason = apply_decision.REASONS["moving"].format(site=intent.target_site, run=intent.new_run_id)
        return apply_decision.write_verdict(run_dir, "cancelled", reason, moved_to=intent.new_run_id)


def _stop_with_checkpoint(run_dir: Path, plan: Plan, site: Site, intent: MoveIntent, stop_s: float) -> MoveIntent:
    """Ask the run's job to save and end, and wait for it. Raises TryLater, UsageError where it has finished."""
    known = submissions.submission_numbers(run_dir)
    if known and submissions.is_unresolved(run_dir, known[-1]):  # nobody has heard yet what became of it
        exactly_once.find_submitted(run_dir, site, known[-1])
    ref = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
    if ref is None or is_finished(_current_state(site, ref)):
        return intent
    submissions.require_same_cluster(site, ref)
    intent = replace(intent, job_ended=True)
    run_folder.write_record(run_dir / move_record.FILE, intent, durable=True)
    began = time.monotonic()
    asked = looked = -_SIGNAL_AGAIN_S
    while True:
        now = time.monotonic() - began
        if now - looked > (
            _LAST_SIGNAL_PAUSE_S if site.scheduler == "none" or _has_exited(run_dir, ref) else _SIGNAL_PAUSE_S
        ):
            looked, state = now, _current_state(site, ref)
            if is_finished(state) or (state == UNKNOWN and slurm_query.is_forgotten(site, ref.job_id)):
                break
            # Again now and then: before its ranks have begun there is nobody to hear it.
            if now - asked > _SIGNAL_AGAIN_S:
                asked = now
                _signal_job(site, ref, state, _stop_signal(plan))
        if now > stop_s:
            what = f"job {ref.job_id} did not save and end within {stop_s:g} s"
            raise TryLater(what, where=str(run_dir), hint="give it longer: --stop-within")
        time.sleep(_POLL_S)
    ended = run_folder.last_exit(run_dir)
    # What was ended, and not asked, may call that a success.
    if ended and ended.exit_code == 0 and (_stop_signal(plan) or site.scheduler == "none" or state == "COMPLETED"):
        with lock(run_dir / apply_decision.RUN_LOCK, f"run {run_dir.name}", wait_s=20.0):
            (run_dir / "verdict.json").unlink(missing_ok=True)
            apply_decision.write_verdict(run_dir, "finished", "it made its last step while it was asked to stop", 0)
        raise UsageError("the run has finished meanwhile", where=str(run_dir))
    return intent


def _has_exited(run_dir: Path, ref: run_folder.JobRef) -> bool:
    """Whether the job's script has seen its ranks end."""
    ended = run_folder.last_exit(run_dir)
    return ended is not None and ended.job_id == ref.job_id


def _current_state(site: Site, ref: run_folder.JobRef) -> str:
    """Slurm's word now, and not what anybody asked before; UNANSWERED says nothing about the job."""
    try:
        if site.scheduler == "none":
            return slurm_query.job_states(site, [ref])[ref.job_id]
        return client(site).state_of([ref.job_id])[ref.job_id]
    except TryLater:
        return "UNANSWERED"


def _stop_signal(plan: Plan) -> str:
    """The signal at which a run saves and ends; "" for a command that asks for none, and saves whenever it does."""
    if not plan.request.command:
        return "USR2"
    return plan.job.signal.rpartition(":")[2].partition("@")[0].removeprefix("SIG")


def _signal_job(site: Site, ref: run_folder.JobRef, state: str, notice: str) -> None:
    """Have a job that runs save and end, as before its time limit; one that waits, or hears no signal, is cancelled."""
    if site.scheduler == "none":
        if local_process.is_alive(ref):
            # A supervisor passes USR2 on; any other request is TERM, which its ranks get, too.
            os.kill(ref.pid, signal.SIGUSR2 if notice == "USR2" else signal.SIGTERM)
        elif local_process.is_alive(ref) is None:
            raise ClusterError(f"it is a process of host {ref.host}", where=ref.job_id, hint=f"run this on {ref.host}")
    elif state == "PENDING" or not notice:
        client(site).cancel([ref.job_id])
    else:
        # To its ranks, and not to the job: that would end them seconds later.
        run_command(client(site).transport, ["scancel", f"--signal={notice}", ref.job_id], env={})


def _start_at_target(
    run_dir: Path,
    plan: Plan,
    target_site: Site,
    intent: MoveIntent,
    step: int | None,
    is_far: bool,
    require: Callable[[], None],
) -> MoveResult:
    """Start the run there, or find that it was started before. Raises as `move`.

    require: raises what keeps it from being started; asked again when all is there.
    """
    require()
    steps = program_checkpoints.program_progress(run_dir) if step is None else step
    if is_far:
        job_id, at = checkpoint_transfer.submit_with_checkpoint(
            run_dir, plan, target_site, intent.new_run_id, step, before_submit=require
        )
    else:
        new = Path(plan.runs) / intent.new_run_id
        if _was_never_submitted(new):
            shutil.rmtree(new)
        if new.exists():
            job_id = resume_run(new, target_site).job_id
        else:

            def seed(at: Path) -> None:
                checkpoint_transfer.copy_checkpoint_for_run(run_dir, step, at, intent.new_run_id)
                require()

            submit.submit_run(plan, target_site, run_id=intent.new_run_id, populate=seed)
            ref = run_folder.read_record(new / "job.json", run_folder.JobRef)
            job_id = ref.job_id if ref else ""
            run_folder.append_event(new, "moved-here", run=run_dir.name, site=plan.site, step=steps)
        at = str(new)
    return MoveResult(
        run_id=run_dir.name, new_run_id=intent.new_run_id, site=target_site.name, run_dir=at, job_id=job_id, step=steps
    )


def _was_never_submitted(new: Path) -> bool:
    """Whether whoever made the new run's folder was killed before anything could come of it."""
    # Where there is a script, `pit launch tick` may be about to submit it.
    is_begun = submissions.submission_numbers(new) or submissions.latest_job(new) or (new / "script.sbatch").exists()
    return new.is_dir() and not is_begun and not local_process.is_supervised(new)


def _will_never_run(plan: Plan, target_site: Site, intent: MoveIntent, is_far: bool, error: BaseException) -> bool:
    """Whether it is certain that no job of the new run will ever do anything; what is left of it there is removed."""
    if not is_far:
        return not (Path(plan.runs) / intent.new_run_id).exists()
    try:
        never = remote.revoke(target_site, [intent.new_run_id])[intent.new_run_id]
        if never:
            remote.remove_ticket_dirs(target_site, [intent.new_run_id])
        return never
    except PitError:
        # Where it could not even be asked it got no job; an interrupt may have come at any moment.
        return isinstance(error, PitError)


def _conclude_moved(run_dir: Path, result: MoveResult, stopped: Verdict) -> None:
    reason = apply_decision.REASONS["moved"].format(site=result.site, run=result.new_run_id, steps=result.step)
    said = Verdict(
        state="stopped",
        code="moved",
        kind="cancelled",
        reason=reason,
        t=timestamps.now_rfc3339(),
        moved_to=result.new_run_id,
        attempts=len(run_folder.attempt_dirs(run_dir)),
    )
    with lock(run_dir / apply_decision.RUN_LOCK, f"run {run_dir.name}", wait_s=20.0):
        hint = f"it had been submitted there by then: pit launch cancel {result.new_run_id} --site {result.site}"
        _require_not_cancelled(run_dir, stopped, hint)
        run_folder.write_record(run_dir / "verdict.json", said, durable=True)
    run_folder.append_event(run_dir, "moved", reason=reason)


def _require_not_cancelled(run_dir: Path, stopped: Verdict, hint: str = "") -> None:
    """Raise ClusterError where somebody has cancelled the run since it was stopped."""
    if apply_decision.read_verdict(run_dir) != stopped or cancel_request.pending_cancel(run_dir):
        raise ClusterError("the run was cancelled while it was being moved", where=str(run_dir), hint=hint)


def _reopen(run_dir: Path, site: Site, intent: MoveIntent) -> None:
    """Let the run go on where it was, if it was stopped for the move."""
    with contextlib.suppress(PitError, OSError):
        intent = run_folder.read_record(run_dir / move_record.FILE, MoveIntent) or intent
        given = apply_decision.read_verdict(run_dir)
        if given is None or given.code != "moving":
            (run_dir / move_record.FILE).unlink(missing_ok=True)
            return
        with lock(run_dir / apply_decision.RUN_LOCK, f"run {run_dir.name}", wait_s=20.0):
            (run_dir / "verdict.json").unlink(missing_ok=True)
            (run_dir / move_record.FILE).unlink(missing_ok=True)
            run_folder.append_event(run_dir, "not moved", site=intent.target_site)
        if cancel_request.pending_cancel(run_dir):
            return
        if intent.job_ended:
            # What anybody was told of its job some seconds ago may be that it runs.
            ref = submissions.latest_job(run_dir)
            said = resume_run(run_dir, site, force=True, state=_current_state(site, ref) if ref else "")
            print(f"pit: it goes on at {site.name}: {said.reason}", file=sys.stderr)
        return
    print(f"pit: let it go on with: pit launch resume --force {run_dir.name}", file=sys.stderr)
