"""What follows from the end of an attempt, asked and done by the job itself: judge, decide, settle."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pitools.core import hostlist
from pitools.core.errors import PitError
from pitools.launch.job.job_context import Job
from pitools.launch.plan import Plan, load_plan
from pitools.run import attempt_records as records
from pitools.site import load
from pitools.site.schema import Reach as Reached
from pitools.site.schema import Recover, Site
from pitools.slurm.client import Client, Reach
from pitools.slurm.records import Accounting

_ASK_S = 10.0


def judged(
    job: Job,
    attempt: Path,
    *,
    told: Accounting | None = None,
    left_s: float | None = None,
    begins: bool = False,
    early: bool = False,
) -> records.Decision:
    """Judge one attempt of this run, decide what follows, and settle it, as far as a job of the run may.

    begins: it is asked at the beginning of the next attempt, whose nodes are then what counts. early: Slurm is about to
    end the job, and has not yet. Raises what judge, policy and settlement raise; whoever calls goes on without them.
    """
    from pitools.launch.diagnosis import diagnose
    from pitools.launch.recovery import apply_decision, policy, slurm_query

    plan = load_plan(job.run_dir)
    site = site_of(plan, job)
    if told and told.state == "NODE_FAIL":
        slurm_query.which_nodes(apply_decision.as_seen_here(site), attempt)
    cause = diagnose.judge_attempt(job.run_dir, attempt, told=told, in_job=True)
    history = apply_decision.history(job.run_dir, before=attempt.name)
    here = hostlist.expand(job.node_list) if begins else None
    decided = policy.decide(plan, site, cause, history, in_job=True, left_s=left_s, here=here)
    if early and decided.action == "wait" and site.recover.chain == "requeue":
        # A job that ends by itself before Slurm ends it is not put back: it has to be asked for.
        decided = msgspec.structs.replace(decided, action="resubmit")
    return apply_decision.settle(job.run_dir, plan, site, cause, decided)


def stop(job: Job, kind: records.Kind, reason: str = "") -> None:
    """Give the run its verdict. Raises TryLater where another process is at it, and what writing raises.

    reason: "" for a cancel.
    """
    from pitools.core import locks
    from pitools.launch.recovery import apply_decision

    with locks.held(job.run_dir / apply_decision.LOCK, f"run {job.run_dir.name}", wait_s=_ASK_S):
        apply_decision.conclude(job.run_dir, kind, reason, 1)


def finish(job: Job, number: int) -> None:
    """Submit the run's job of this number, which somebody began to submit. Raises what submitting raises."""
    from pitools.launch.recovery import apply_decision
    from pitools.launch.submission import next_job

    plan = load_plan(job.run_dir)
    site = site_of(plan, job)
    if site.recover.submit_from == "node" and site.recover.chain != "none":
        next_job.send(job.run_dir, plan, apply_decision.as_seen_here(site), number=number, patience_s=_ASK_S)


def site_of(plan: Plan, job: Job) -> Site:
    """The run's site as this node knows it; one that submits nothing where it does not, or for a lone ticket."""
    try:
        site = load.load(plan.site)
    except PitError:
        site = Site(name=plan.site, recover=Recover(chain="none"))
    if job.mode == "allocation":
        site = msgspec.structs.replace(site, recover=msgspec.structs.replace(site.recover, chain="none"))
    return site


def ending(job: Job, started: str) -> Accounting | None:
    """What ends this job, asked between its SIGTERM and its SIGKILL; None where Slurm does not say."""
    from pitools.launch.recovery import slurm_query

    here = Site(name="here", reach=Reached(timeout_s=_ASK_S))
    return slurm_query.ending(here, job.job_id, started)


def making_room(job: Job, started: str) -> Accounting | None:
    """That this job has been told to make room since `started`, and is to end within its grace time; None if not."""
    try:
        known = Client(Reach(timeout_s=_ASK_S)).job(job.job_id)
    except PitError:
        return None
    for one in known:
        # Slurm keeps whole seconds.
        if one.raw_id == job.job_id and one.preempted and one.preempted[:19] >= started[:19]:
            return Accounting(job_id=job.job_id, raw_id=job.job_id, state="PREEMPTED")
    return None


def told(job: Job) -> Accounting | None:
    """What accounting says of this job's last start that has ended; None where it says nothing."""
    try:
        found = Client(Reach(timeout_s=_ASK_S)).accounting([job.job_id])
    except PitError:
        return None
    return next((one for one in reversed(found) if one.end and one.raw_id == job.job_id), None)
