"""Continue a job whose run was preempted, or ended by its time limit, in a new ticket at any site.

The same policy decides as for the next job of a run without a queue (launch/recovery/policy.py). The next ticket's run
begins with the checkpoints, the code and the datasets of the last one that was stopped.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from pitools.launch import exit_codes
from pitools.launch.plan import Plan, load_plan
from pitools.launch.provenance.code_copy import CODE_DIR
from pitools.launch.request import Request
from pitools.launch.tickets import shared_fs
from pitools.launch.tickets.ticket_state import TicketState
from pitools.place.dispatch.journal import QueueJob, QueueTicket
from pitools.run import cancel_request, run_folder
from pitools.run.attempt_records import Cause, CauseKind, Decision
from pitools.run.run_folder import JobRef
from pitools.site.schema import Site
from pitools.slurm.records import AccountingRow


def is_stop(observed: TicketState) -> bool:
    """Return whether a ticket's job was ended by a preemption or its time limit, or itself after their notice."""
    if not observed.is_over or observed.state in ("COMPLETED", "CANCELLED"):
        return False
    return observed.state in ("PREEMPTED", "TIMEOUT") or observed.exit_code in exit_codes.STOPPED_CODES


def decide(site: Site, job: QueueJob, ticket: QueueTicket, run_dir: Path) -> tuple[Decision, Cause]:
    """Decide whether a job goes on after a ticket whose run was stopped; return also why that was. Raises DataError.

    run_dir: the run's folder here. The action of the decision is "resubmit", "stop" or "done", as by a verdict or a
    cancel of the run itself.
    """
    from pitools.launch.diagnosis import diagnose
    from pitools.launch.recovery import apply_decision, policy

    plan = load_plan(run_dir)
    if attempt := run_folder.last_attempt(run_dir):
        row = AccountingRow(job_id=ticket.slurm_id, raw_id=ticket.slurm_id, state=ticket.end_state)
        cause = diagnose.diagnose_attempt(run_dir, attempt, accounting=row)
    else:
        kind: CauseKind = "time-limit" if ticket.end_state == "TIMEOUT" else "preempted"
        cause = Cause(attempt="", kind=kind, confidence="certain", reason=f"{kind} before its first attempt")
    history = [earlier.cause for earlier in job.stopped if earlier.cause and earlier.number < ticket.number]
    history += apply_decision.cause_history(run_dir, before_attempt=cause.attempt) if cause.attempt else []
    if (verdict := apply_decision.read_verdict(run_dir)) or cancel_request.pending_cancel(run_dir):
        kind = verdict.kind if verdict and verdict.kind != "moved" else "cancelled"
        reason = verdict.reason if verdict else apply_decision.REASONS["cancelled"]
        action: policy.Action = "done" if verdict and verdict.state == "succeeded" else "stop"
        return Decision(attempt=cause.attempt, action=action, kind=kind, reason=reason), cause
    # Whatever the site says of runs: here the queue submits the next job.
    queue_site = replace(site, recovery=replace(site.recovery, chain="fresh"))
    return policy.decide(plan, queue_site, cause, history), replace(cause, evidence=())


def request_to_run(job: QueueJob) -> Request:
    """Return a job's request; for one that was stopped, with the code and the datasets of that run."""
    request = job.request.request
    if not job.stopped:
        return request
    code_dir = Path(job.stopped[-1].run_dir) / CODE_DIR
    return replace(request, data=job.stopped[-1].data, workdir=str(code_dir) if code_dir.is_dir() else request.workdir)


def submit(plan: Plan, site: Site, *, name: str, run_dir: Path) -> JobRef:
    """Submit a ticket whose run begins with the checkpoints of a stopped run. Safe to repeat.

    run_dir: that run's folder here. Raises as the `submit_ticket` of the site's backend; DataError where all
    checkpoints are damaged.
    """
    from pitools.launch.move import checkpoint_transfer, program_checkpoints

    step = program_checkpoints.newest_step(run_dir)
    if site.connection.kind == "ssh":
        return checkpoint_transfer.submit_with_checkpoint(run_dir, plan, site, name, step, before_submit=lambda: None)

    def populate(building: Path) -> None:
        checkpoint_transfer.copy_checkpoint_for_run(run_dir, step, building, name)

    return shared_fs.submit_ticket(plan, site, name=name, populate=populate)
