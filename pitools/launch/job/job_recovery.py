"""Diagnose an attempt, decide how the run continues, and apply the decision, from within the run's job."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pitools.core import hostlist
from pitools.core.errors import PitError
from pitools.launch.job.job_context import JobContext
from pitools.launch.plan import Plan, load_plan
from pitools.run import attempt_records as records
from pitools.run import run_folder
from pitools.site import load
from pitools.site.schema import Connection, Recovery, Site
from pitools.slurm.client import Client, Transport
from pitools.slurm.records import AccountingRow, SlurmJob

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
    """Diagnose one attempt of this run, decide how the run continues, and apply the decision as far as a job may.

    seconds_left: until the job's time limit. at_begin: whether the next attempt begins now: its nodes then count.
    before_slurm_ends: whether Slurm is about to end this job. Raises the errors of the diagnosis, the policy and the
    application; callers report them and continue.
    """
    from pitools.launch.diagnosis import diagnose
    from pitools.launch.recovery import apply_decision, policy, slurm_query

    plan = load_plan(job.run_dir)
    site = site_of_run(plan, job)
    if accounting_row and accounting_row.state == "NODE_FAIL":
        slurm_query.record_lost_nodes(apply_decision.without_ssh(site), attempt)
    cause = diagnose.diagnose_attempt(job.run_dir, attempt, accounting=accounting_row, in_job=True)
    history = apply_decision.cause_history(job.run_dir, before_attempt=attempt.name)
    nodes = hostlist.expand(job.node_list) if at_begin else None
    decision = policy.decide(
        plan,
        site,
        cause,
        history,
        in_job=True,
        is_ticket=run_folder.is_ticket(job.run_dir),
        seconds_left=seconds_left,
        allocation_nodes=nodes,
    )
    if before_slurm_ends and decision.action == "defer" and site.recovery.chain == "requeue":
        # Slurm does not requeue a job that exits before the preemption ends it: request the requeue explicitly.
        decision = msgspec.structs.replace(decision, action="resubmit")
    return apply_decision.apply_from_job(job.run_dir, plan, site, cause, decision)


def conclude_run(job: JobContext, kind: records.CauseKind, reason: str = "") -> None:
    """Write the run's verdict. Raises TryLater if another process has the run's lock, and ClusterError or NoSpace.

    reason: "" for a cancellation.
    """
    from pitools.core import locks
    from pitools.launch.recovery import apply_decision

    with locks.lock(job.run_dir / apply_decision.RUN_LOCK, f"run {job.run_dir.name}", timeout_s=_SLURM_TIMEOUT_S):
        apply_decision.write_verdict(job.run_dir, kind, reason, 1)


def complete_submission(job: JobContext, job_number: int) -> None:
    """Complete the run's interrupted submission with this job number. Raises the errors of `submit_next_job`."""
    from pitools.launch.recovery import apply_decision
    from pitools.launch.submission import next_job

    plan = load_plan(job.run_dir)
    site = site_of_run(plan, job)
    if site.recovery.submit_from == "node" and site.recovery.chain != "none":
        next_job.submit_next_job(
            job.run_dir, plan, apply_decision.without_ssh(site), job_number=job_number, retry_for_s=_SLURM_TIMEOUT_S
        )


def site_of_run(plan: Plan, job: JobContext) -> Site:
    """Return the run's site from this node's site files, with chain = "none" for a ticket.

    A node without the site file gets an empty site that submits no job.
    """
    try:
        site = load.load_site(plan.site)
    except PitError:
        site = Site(name=plan.site, recovery=Recovery(chain="none"))
    if job.mode == "allocation":
        site = msgspec.structs.replace(site, recovery=msgspec.structs.replace(site.recovery, chain="none"))
    return site


def query_own_termination(job: JobContext, started: str) -> AccountingRow | None:
    """Return why Slurm is ending this job, between its SIGTERM and its SIGKILL; None if Slurm reports no reason."""
    from pitools.launch.recovery import slurm_query

    site = Site(name="here", connection=Connection(timeout_s=_SLURM_TIMEOUT_S))
    return slurm_query.query_termination(site, job.job_id, started)


def query_job(job: JobContext) -> SlurmJob | None:
    """Return slurmctld's record of this job; None if it does not answer."""
    try:
        rows = Client(Transport(timeout_s=_SLURM_TIMEOUT_S)).job(job.job_id)
    except PitError:
        return None
    return next((row for row in rows if job.job_id in (row.job_id, row.raw_id)), None)


def preemption_of(record: SlurmJob | None, started: str) -> AccountingRow | None:
    """Return a row with the state PREEMPTED if Slurm has begun to preempt a job since `started`; otherwise None."""
    # Slurm keeps whole seconds.
    if record is None or not record.preempted or record.preempted[:19] < started[:19]:
        return None
    return AccountingRow(job_id=record.job_id, raw_id=record.raw_id, state="PREEMPTED")


def query_last_end(job: JobContext) -> AccountingRow | None:
    """Return the accounting row of this job's latest ended start; None if accounting has none or does not answer."""
    try:
        rows = Client(Transport(timeout_s=_SLURM_TIMEOUT_S)).accounting([job.job_id])
    except PitError:
        return None
    return next((row for row in reversed(rows) if row.end and job.job_id in (row.job_id, row.raw_id)), None)
