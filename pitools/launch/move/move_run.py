"""Move a run to another site: stop it with a checkpoint, copy that with its code and data, and submit it there.

    plan for the target ─▶ copy datasets ─▶ verdict "moving" ─▶ USR2, wait ─▶ newest good checkpoint ─▶ copy, verify
                                                  │                                                        │
                              no job, requeue or cron continues the run         submit there ─▶ verdict "moved"

<run>/move.json     pit.move/1: the target site and the new run's id, with which a repeated command continues

A failure before the submission undoes the move, and the run continues at its own site. After a submission of unknown
outcome nothing is undone: the same command, repeated, finds the job.
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
from pitools.slurm.states import UNKNOWN, is_final
from pitools.slurm.transport import run_command

STOP_TIMEOUT_S = 600.0
_SIGNAL_AGAIN_S, _POLL_S = 30.0, 0.1
# Between two queries of Slurm; the second once the job's script has recorded its end.
_QUERY_PAUSE_S, _LAST_QUERY_PAUSE_S = 10.0, 0.5


class MoveResult(Record, frozen=True, kw_only=True, tag="pit.move-result/1"):
    """A run that was moved. run_id, new_run_id: its id before and after. site, run_dir, job_id: of the new run.

    step: of the checkpoint from which it continues, or the saved steps that its program reported.
    """

    run_id: str
    new_run_id: str
    site: str
    run_dir: str
    job_id: str
    step: int


def move_run(run_dir: Path, site: Site, target_site: Site, *, stop_s: float = STOP_TIMEOUT_S) -> MoveResult:
    """Move a run of `site` to `target_site`. Safe to repeat, also after a kill.

    stop_s: seconds for the run to save and end. Raises UsageError for a finished run, and for progress without a file
    in the checkpoint folder; ConfigError for a request that the target cannot run; DataError for changed code, data or
    checkpoints; TryLater for a run that does not end in time; and the errors of `submit_run`. The run then continues at
    `site`. Raises OutcomeUnknown if it may have been submitted: repeat the call.
    """
    run_folder.require_own_run(run_dir, group_above=site.paths.runs_access == "group")
    old_plan = load_plan(run_dir)
    provenance.require_no_copy(run_dir, old_plan)
    if old_plan.site != site.name or target_site.name == site.name:
        raise UsageError(f'run {run_dir.name} is of site "{old_plan.site}"', where="--site", hint="give another site")
    with lock(run_dir / move_record.MOVE_LOCK, f"the move of run {run_dir.name}"):
        intent = _record_intent(run_dir, old_plan, target_site)
        request = provenance.request_with_own_code(run_dir, old_plan)
        if not intent.stop_requested:
            program_checkpoints.require_saved(run_dir, old_plan)
        plan = planning.make_plan(request, target_site, str(run_dir), request_text=old_plan.request_text)
        is_remote = remote.is_remote(plan, target_site)
        if is_remote:
            for dataset in remote.missing_datasets(plan, target_site):
                remote.send_dataset(dataset, target_site)
        run_folder.write_record(run_dir / move_record.MOVE_FILE, intent, durable=True)
        try:
            moving = _mark_moving(run_dir, intent)
            intent = _stop_with_checkpoint(run_dir, old_plan, site, intent, stop_s)
            step = program_checkpoints.step_to_resume(run_dir, old_plan)
            result = _start_at_target(
                run_dir, plan, target_site, intent, step, is_remote, lambda: _require_not_cancelled(run_dir, moving)
            )
        except OutcomeUnknown as error:
            hint = f"the run is stopped until then; repeat: pit launch move {run_dir.name} --site {target_site.name}"
            raise OutcomeUnknown(error.message, where=error.where, hint=hint) from error
        except BaseException as error:
            if _will_never_run(plan, target_site, intent, is_remote, error):
                _reopen(run_dir, site, intent)
            raise
        _mark_moved(run_dir, result, moving)
        return result


def _record_intent(run_dir: Path, plan: Plan, target_site: Site) -> MoveIntent:
    """Return the record of a move begun before, or of a new one. Raises UsageError for a finished or moved run."""
    verdict, intent = (
        apply_decision.read_verdict(run_dir),
        run_folder.read_record(run_dir / move_record.MOVE_FILE, MoveIntent),
    )
    if verdict and verdict.state == "succeeded":
        raise UsageError("the run has finished", where=str(run_dir), hint=f"pit launch show {run_dir.name}")
    if intent is None:
        new_run_id = run_folder.new_run_id(plan.name)
        return MoveIntent(new_run_id=new_run_id, target_site=target_site.name, t=timestamps.now_rfc3339())
    if verdict and verdict.code == "moved":
        raise UsageError(f"the run was {verdict.reason}", where=str(run_dir), hint=f"move that one: {verdict.moved_to}")
    if intent.target_site != target_site.name:
        hint = f"complete that move: pit launch move {run_dir.name} --site {intent.target_site}"
        raise UsageError(f'the run is being moved to site "{intent.target_site}"', where=str(run_dir), hint=hint)
    return intent


def _mark_moving(run_dir: Path, intent: MoveIntent) -> Verdict:
    """Write the verdict "moving", with which no job, requeue or cron continues the run. Raises ClusterError."""
    with lock(run_dir / apply_decision.RUN_LOCK, f"run {run_dir.name}", timeout_s=20.0):
        if apply_decision.read_verdict(run_dir) is None and cancel_request.pending_cancel(run_dir):
            hint = f"to withdraw the cancel: pit launch resume {run_dir.name} --force"
            raise ClusterError("the run is being cancelled", where=str(run_dir), hint=hint)
        reason = apply_decision.REASONS["moving"].format(site=intent.target_site, run=intent.new_run_id)
        return apply_decision.write_verdict(run_dir, "moved", reason, moved_to=intent.new_run_id)


def _stop_with_checkpoint(run_dir: Path, plan: Plan, site: Site, intent: MoveIntent, stop_s: float) -> MoveIntent:
    """Signal the run's job to save and end, and wait for its end. Raises TryLater; UsageError for a finished run."""
    numbers = submissions.job_numbers(run_dir)
    if numbers and submissions.is_unresolved(run_dir, numbers[-1]):
        exactly_once.find_submitted(run_dir, site, numbers[-1])
    ref = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
    if ref is None or is_final(_current_state(site, ref)):
        return intent
    submissions.require_same_cluster(site, ref)
    intent = replace(intent, stop_requested=True)
    run_folder.write_record(run_dir / move_record.MOVE_FILE, intent, durable=True)
    began = time.monotonic()
    signalled_at = queried_at = -_SIGNAL_AGAIN_S
    while True:
        elapsed_s = time.monotonic() - began
        is_ending = site.scheduler == "none" or _has_exited(run_dir, ref)
        if elapsed_s - queried_at > (_LAST_QUERY_PAUSE_S if is_ending else _QUERY_PAUSE_S):
            queried_at, state = elapsed_s, _current_state(site, ref)
            if is_final(state) or (state == UNKNOWN and slurm_query.is_forgotten(site, ref.job_id)):
                break
            # Repeated, because a signal before the ranks have started is lost.
            if elapsed_s - signalled_at > _SIGNAL_AGAIN_S:
                signalled_at = elapsed_s
                _signal_job(site, ref, state, _stop_signal(plan))
        if elapsed_s > stop_s:
            message = f"job {ref.job_id} did not save and end within {stop_s:g} s"
            raise TryLater(message, where=str(run_dir), hint="allow more time: --stop-within")
        time.sleep(_POLL_S)
    last_exit = run_folder.last_exit(run_dir)
    # A program that was cancelled without a signal may exit with code 0 before its last step.
    if (
        last_exit
        and last_exit.exit_code == 0
        and (_stop_signal(plan) or site.scheduler == "none" or state == "COMPLETED")
    ):
        with lock(run_dir / apply_decision.RUN_LOCK, f"run {run_dir.name}", timeout_s=20.0):
            (run_dir / "verdict.json").unlink(missing_ok=True)
            apply_decision.write_verdict(run_dir, "succeeded", "the program ended with code 0 before the move", 0)
        raise UsageError("the run has finished meanwhile", where=str(run_dir))
    return intent


def _has_exited(run_dir: Path, ref: run_folder.JobRef) -> bool:
    """Return whether the job's script has recorded the end of its ranks."""
    last_exit = run_folder.last_exit(run_dir)
    return last_exit is not None and last_exit.job_id == ref.job_id


def _current_state(site: Site, ref: run_folder.JobRef) -> str:
    """Return the job's state by a query, never from the cache; UNANSWERED, which proves nothing, if it fails."""
    try:
        if site.scheduler == "none":
            return slurm_query.job_states(site, [ref])[ref.job_id]
        return client(site).state_of([ref.job_id])[ref.job_id]
    except TryLater:
        return "UNANSWERED"


def _stop_signal(plan: Plan) -> str:
    """Return the signal at which a run saves and ends; "" for a command whose request names no signal."""
    if not plan.request.command:
        return "USR2"
    return plan.job.signal.rpartition(":")[2].partition("@")[0].removeprefix("SIG")


def _signal_job(site: Site, ref: run_folder.JobRef, state: str, stop_signal: str) -> None:
    """Send a running job its signal to save and end; cancel a job that is pending, or has no such signal."""
    if site.scheduler == "none":
        if local_process.is_alive(ref):
            # A supervisor forwards USR2. Any other signal becomes TERM, which the ranks receive as well.
            os.kill(ref.pid, signal.SIGUSR2 if stop_signal == "USR2" else signal.SIGTERM)
        elif local_process.is_alive(ref) is None:
            problem = f"the run's process is on host {ref.host}"
            raise ClusterError(problem, where=ref.job_id, hint=f"repeat the command on {ref.host}")
    elif state == "PENDING" or not stop_signal:
        client(site).cancel([ref.job_id])
    else:
        # To the steps alone, without --batch: the batch script would end its ranks within seconds.
        run_command(client(site).transport, ["scancel", f"--signal={stop_signal}", ref.job_id], env={})


def _start_at_target(
    run_dir: Path,
    plan: Plan,
    target_site: Site,
    intent: MoveIntent,
    step: int | None,
    is_remote: bool,
    check: Callable[[], None],
) -> MoveResult:
    """Start the run at the target site, or find its job of an earlier call. Raises the errors of `move_run`.

    check: raises to prevent the start; called first, and again just before the submission.
    """
    check()
    steps = program_checkpoints.program_progress(run_dir) if step is None else step
    if is_remote:
        job_id = checkpoint_transfer.submit_with_checkpoint(
            run_dir, plan, target_site, intent.new_run_id, step, before_submit=check
        ).job_id
        target_dir = remote.ticket_dir(target_site, intent.new_run_id)
    else:
        new_run_dir = Path(plan.runs_dir) / intent.new_run_id
        if _was_never_submitted(new_run_dir):
            with lock(new_run_dir / apply_decision.RUN_LOCK, f"run {new_run_dir.name}"):  # not while `tick` submits it
                if _was_never_submitted(new_run_dir):
                    shutil.rmtree(new_run_dir)
        if new_run_dir.exists():
            job_id = resume_run(new_run_dir, target_site).job_id
        else:

            def populate(building: Path) -> None:
                checkpoint_transfer.copy_checkpoint_for_run(run_dir, step, building, intent.new_run_id)
                check()

            submit.submit_run(plan, target_site, run_id=intent.new_run_id, populate=populate)
            ref = run_folder.read_record(new_run_dir / "job.json", run_folder.JobRef)
            job_id = ref.job_id if ref else ""
            run_folder.append_event(new_run_dir, "moved-here", run=run_dir.name, site=plan.site, step=steps)
        target_dir = str(new_run_dir)
    return MoveResult(
        run_id=run_dir.name,
        new_run_id=intent.new_run_id,
        site=target_site.name,
        run_dir=target_dir,
        job_id=job_id,
        step=steps,
    )


def _was_never_submitted(run_dir: Path) -> bool:
    """Return whether the new run's folder was made by a call that was killed before its submission."""
    # With a script in the folder, `pit launch tick` may be about to submit it.
    is_submitted = (
        submissions.job_numbers(run_dir) or submissions.latest_job(run_dir) or (run_dir / "script.sbatch").exists()
    )
    return run_dir.is_dir() and not is_submitted and not local_process.is_supervised(run_dir)


def _will_never_run(plan: Plan, target_site: Site, intent: MoveIntent, is_remote: bool, error: BaseException) -> bool:
    """Return whether certainly no job of the new run will ever run; then remove its files at the target site."""
    if not is_remote:
        return not (Path(plan.runs_dir) / intent.new_run_id).exists()
    try:
        is_revoked = remote.revoke(target_site, [intent.new_run_id])[intent.new_run_id]
        if is_revoked:
            remote.remove_ticket_dirs(target_site, [intent.new_run_id])
        return is_revoked
    except PitError:
        # An unreachable site got no job either. An interrupt may have occurred after the submission.
        return isinstance(error, PitError)


def _mark_moved(run_dir: Path, result: MoveResult, moving: Verdict) -> None:
    """Write the verdict "moved". Raises ClusterError for a run that was cancelled meanwhile."""
    reason = apply_decision.REASONS["moved"].format(site=result.site, run=result.new_run_id, steps=result.step)
    verdict = Verdict(
        state="stopped",
        code="moved",
        kind="moved",
        reason=reason,
        t=timestamps.now_rfc3339(),
        moved_to=result.new_run_id,
        attempts=len(run_folder.attempt_dirs(run_dir)),
    )
    with lock(run_dir / apply_decision.RUN_LOCK, f"run {run_dir.name}", timeout_s=20.0):
        hint = f"the new run is submitted: pit launch cancel {result.new_run_id} --site {result.site}"
        _require_not_cancelled(run_dir, moving, hint)
        run_folder.write_record(run_dir / "verdict.json", verdict, durable=True)
    run_folder.append_event(run_dir, "moved", reason=reason)


def _require_not_cancelled(run_dir: Path, moving: Verdict, hint: str = "") -> None:
    """Raise ClusterError for a run that was cancelled after it was stopped for the move."""
    if apply_decision.read_verdict(run_dir) != moving or cancel_request.pending_cancel(run_dir):
        raise ClusterError("the run was cancelled while it was being moved", where=str(run_dir), hint=hint)


def _reopen(run_dir: Path, site: Site, intent: MoveIntent) -> None:
    """Undo the move, and continue the run at its own site if it was stopped for the move."""
    with contextlib.suppress(PitError, OSError):
        intent = run_folder.read_record(run_dir / move_record.MOVE_FILE, MoveIntent) or intent
        verdict = apply_decision.read_verdict(run_dir)
        if verdict is None or verdict.code != "moving":
            (run_dir / move_record.MOVE_FILE).unlink(missing_ok=True)
            return
        with lock(run_dir / apply_decision.RUN_LOCK, f"run {run_dir.name}", timeout_s=20.0):
            (run_dir / "verdict.json").unlink(missing_ok=True)
            (run_dir / move_record.MOVE_FILE).unlink(missing_ok=True)
            run_folder.append_event(run_dir, "move-failed", site=intent.target_site)
        if cancel_request.pending_cancel(run_dir):
            return
        if intent.stop_requested:
            # The cache may still have the job as running.
            ref = submissions.latest_job(run_dir)
            resumed = resume_run(run_dir, site, force=True, state=_current_state(site, ref) if ref else "")
            print(f"pit: the run continues at {site.name}: {resumed.reason}", file=sys.stderr)
        return
    print(f"pit: to continue the run: pit launch resume --force {run_dir.name}", file=sys.stderr)
