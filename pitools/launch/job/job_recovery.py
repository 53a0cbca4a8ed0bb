"""What follows from the end of an attempt, asked and done by the job itself: judge, decide, settle."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pitools.core import hostlist
from pitools.core.errors import PitError
from pitools.launch.job.job_context import JobContext
from pitools.launch.plan import Plan, load_plan
from pitools.run import attempt_records as records
from pitools.site import load
from pitools.site.schema import Connection as Reached
from pitools.site.schema import Recovery, Site
from pitools.slurm.client import Client, Transport
from pitools.slurm.records import AccountingRow

_SLURM_TIMEOUT_S = 10.0


def diagnose_and_decide(
    job: JobContext,
    attempt: Path,
    *,
    accounting_row: AccountingRow | None = None,
    seconds_left: float | None = None,
    at_begin: bool = False,
    before_slurm_ends: bool = False,
) -> records.Decision:
    """Judge one attempt of this run, decide what follows, and settle it, as far as a job of the run may.

    at_begin: it is asked at the beginning of the next attempt, whose nodes are then what counts. before_slurm_ends:
    Slurm is about to end the job, and has not yet. Raises what judge, policy and settlement raise; whoever calls goes
    on without them.
    """
    from pitools.launch.diagnosis import diagnose
    from pitools.launch.recovery import apply_decision, policy, slurm_query

    plan = load_plan(job.run_dir)
    site = site_of_run(plan, job)
    if accounting_row and accounting_row.state == "NODE_FAIL":
        slurm_query.record_lost_nodes(apply_decision.without_ssh(site), attempt)
    cause = diagnose.diagnose_attempt(job.run_dir, attempt, accounting=accounting_row, in_job=True)
    history = apply_decision.cause_history(job.run_dir, before_attempt=attempt.name)
    here = hostlist.expand(job.node_list) if at_begin else None
    decided = policy.decide(plan, site, cause, history, in_job=True, seconds_left=seconds_left, allocation_nodes=here)
    if before_slurm_ends and decided.action == "wait" and site.recovery.chain == "requeue":
        # A job that ends by itself before Slurm ends it is not put back: it has to be asked for.
        decided = msgspec.structs.replace(decided, action="resubmit")
    return apply_decision.apply_from_job(job.run_dir, plan, site, cause, decided)


def conclude_run(job: JobContext, kind: records.CauseKind, reason: str = "") -> None:
    """Give the run its verdict. Raises TryLater where another process is at it, and what writing raises.

    reason: "" for a cancel.
    """
    from pitools.core import locks
    from pitools.launch.recovery import apply_decision

    with locks.lock(job.run_dir / apply_decision.RUN_LOCK, f"run {job.run_dir.name}", wait_s=_SLURM_TIMEOUT_S):
        apply_decision.write_verdict(job.run_dir, kind, reason, 1)


def complete_submission(job: JobContext, number: int) -> None:
    """Submit the run's job of this number, which somebody began to submit. Raises what submitting raises."""
    from pitools.launch.recovery import apply_decision
    from pitools.launch.submission import next_job

    plan = load_plan(job.run_dir)
    site = site_of_run(plan, job)
    if site.recovery.submit_from == "node" and site.recovery.chain != "none":
        next_job.submit_next_job(
            job.run_dir, plan, apply_decision.without_ssh(site), number=number, retry_for_s=_SLURM_TIMEOUT_S
        )


def site_of_run(plan: Plan, job: JobContext) -> Site:
    """The run's site as this node knows it; one that submits nothing where it does not, or for a lone ticket."""
    try:
        site = load.load_site(plan.site)
    except PitError:
        site = Site(name=plan.site, recovery=Recovery(chain="none"))
    if job.mode == "allocation":
        site = msgspec.structs.replace(site, recovery=msgspec.structs.replace(site.recovery, chain="none"))
    return site


def termination_of_this_job(job: JobContext, started: str) -> AccountingRow | None:
    """What ends this job, asked between its SIGTERM and its SIGKILL; None where Slurm does not say."""
    from pitools.launch.recovery import slurm_query

    here = Site(name="here", connection=Reached(timeout_s=_SLURM_TIMEOUT_S))
    return slurm_query.termination_reason(here, job.job_id, started)


def preemption_notice(job: JobContext, started: str) -> AccountingRow | None:
    """That this job has been told to make room since `started`, and is to end within its grace time; None if not."""
    try:
        known = Client(Transport(timeout_s=_SLURM_TIMEOUT_S)).job(job.job_id)
    except PitError:
        return None
    for one in known:
        # Slurm keeps whole seconds.
        if one.raw_id == job.job_id and one.preempted and one.preempted[:19] >= started[:19]:
            return AccountingRow(job_id=job.job_id, raw_id=job.job_id, state="PREEMPTED")
    return None


def last_accounting_row(job: JobContext) -> AccountingRow | None:
    """What accounting says of this job's last start that has ended; None where it says nothing."""
    try:
        found = Client(Transport(timeout_s=_SLURM_TIMEOUT_S)).accounting([job.job_id])
    except PitError:
        return None
    return next((one for one in reversed(found) if one.end and one.raw_id == job.job_id), None)
