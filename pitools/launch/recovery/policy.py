"""Decide what follows a cause: a table, the retry budgets of the request, and the progress of the run.

progress            resets every budget; without progress each kind of cause has a budget, and all together `retry.max`
repeated failure    of kind unknown, the same fingerprint without progress: the program's own fault, which stops the run
preflight           spends no budget, and hides no earlier failure; a few in a row stop the run
nodes               excluded if the evidence blames them; a node that was only the place of the failure, at the second
allocation          used again if possible: that avoids the queue and Slurm's delay after a requeue
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

from msgspec.structs import replace

from pitools.launch.plan import Plan
from pitools.run.attempt_records import Cause, CauseKind, Decision
from pitools.site.schema import Site

Action = Literal["done", "retry", "resubmit", "defer", "stop"]

_NEVER_COUNT = 1 << 30
_STORAGE_WAITS_S = (10.0, 30.0, 60.0, 120.0)
_MAX_PREFLIGHTS = 5  # in a row, each with another job
_SIGNAL_BASE = 128  # exit codes from here on are signals
_START_UP_S = 60.0  # to start programs and run a few steps, after staging


class CauseRule(NamedTuple):
    """What follows from a kind of cause, by its number of occurrences.

    exclude_from: the occurrence from which the nodes at fault are excluded. suspect_from: from which a node is excluded
    that was the place of this failure and of the previous one. resubmit_from: from which a fresh job is submitted,
    counted without progress in between.
    """

    exclude_from: int = _NEVER_COUNT
    suspect_from: int = _NEVER_COUNT
    resubmit_from: int = _NEVER_COUNT


RULES: dict[CauseKind, CauseRule] = {
    "node": CauseRule(exclude_from=1, suspect_from=2),
    "gpu": CauseRule(exclude_from=1, suspect_from=2),
    "preflight": CauseRule(exclude_from=1),
    "network": CauseRule(exclude_from=2, resubmit_from=2),
    "hang": CauseRule(exclude_from=2, suspect_from=2),
    "storage": CauseRule(exclude_from=1),  # such a cause names only nodes whose own disk is full
    "unknown": CauseRule(suspect_from=2),
    "program": CauseRule(),
    "memory": CauseRule(),
}


def decide(
    plan: Plan,
    site: Site,
    cause: Cause,
    history: Sequence[Cause],
    *,
    in_job: bool = False,
    is_ticket: bool = False,
    seconds_left: float | None = None,
    allocation_nodes: Sequence[str] | None = None,
) -> Decision:
    """Decide what the run does next. Pure.

    history: the causes of earlier attempts, oldest first. in_job: called inside a job. is_ticket: see
    `run_folder.is_ticket`: no decision is "resubmit".
    seconds_left: to the job's time limit, None without one. allocation_nodes: the nodes of a restarted job that decides
    at its beginning; None at the end of an attempt.
    """
    if in_job and needs_slurm_state(cause):
        # Preemption and scancel send the same signal; but a job that Slurm has restarted was not cancelled.
        return _make_decision(cause, "retry" if allocation_nodes is not None else "defer", cause.reason)
    decision = _decide(plan, site, cause, history)
    if decision.action in ("done", "stop"):
        return decision
    if not in_job or (decision.action == "resubmit" and allocation_nodes is None):
        return _as_site_allows(site, decision, in_job, is_ticket)
    retry = replace(decision, action="retry")
    if _must_leave_allocation(cause, history, decision, allocation_nodes):
        return _as_site_allows(site, retry, in_job, is_ticket)
    if seconds_left is not None and seconds_left < retry.wait_s + useful_attempt_s(plan):
        reason = f"{retry.reason}; too little time left in this job for another attempt: {max(0, seconds_left):.0f} s"
        return _as_site_allows(site, replace(retry, reason=reason), in_job, is_ticket)
    return retry


def _decide(plan: Plan, site: Site, cause: Cause, history: Sequence[Cause]) -> Decision:
    """Decide as if the allocation had no time limit."""
    kind = cause.kind
    if kind == "succeeded":
        return _make_decision(cause, "done", cause.reason or "succeeded")
    if kind == "cancelled":
        return _make_decision(cause, "stop", cause.reason or "cancelled")
    if kind == "preflight":
        return _decide_preflight(site, cause, history)
    history = [past for past in history if past.kind != "preflight"]
    streak = _attempts_without_progress(cause, history)
    if len(streak) >= plan.request.retry.max:
        return _make_decision(
            cause, "stop", f"{len(streak)} attempts in a row without progress; the last: {cause.reason}"
        )
    if kind == "preempted":
        return _make_decision(cause, "resubmit", cause.reason)
    if kind == "time-limit":
        return _decide_time_limit(cause, streak)
    return _decide_fault(plan, cause, history, streak)


def _decide_preflight(site: Site, cause: Cause, history: Sequence[Cause]) -> Decision:
    """Replace the nodes at fault. A site without Slurm has no others."""
    in_a_row = 1 + sum(1 for _ in takewhile(lambda past: past.kind == "preflight", reversed(history)))
    hint = 'see: pit node check; to run all the same: preflight = "none"'
    if site.scheduler == "none":
        return _make_decision(cause, "stop", f"{cause.reason}; {hint}")
    if in_a_row >= _MAX_PREFLIGHTS:
        return _make_decision(cause, "stop", f"{in_a_row} preflights in a row failed; the last: {cause.reason}; {hint}")
    return _make_decision(cause, "retry", cause.reason, exclude=cause.nodes)


def _decide_time_limit(cause: Cause, streak: Sequence[Cause]) -> Decision:
    if sum(past.kind == "time-limit" for past in streak) < 2:
        return _make_decision(cause, "resubmit", cause.reason)
    reason = "two time limits without a new checkpoint: request more time, or save more often"
    if not cause.steps:  # the hang watch does not cover staging
        reason += "; if staging hung: pit launch logs --of stage"
    return _make_decision(cause, "stop", reason)


def _decide_fault(plan: Plan, cause: Cause, history: Sequence[Cause], streak: Sequence[Cause]) -> Decision:
    kind = cause.kind
    budget = int(getattr(plan.request.retry, kind))
    spent = sum(past.kind == kind for past in streak)
    suspects = _suspects(cause, history) if plan.nodes > 1 else ()  # one node is the place of every failure
    if kind == "unknown" and _is_repeated(cause, streak) and not (suspects and spent <= 2):
        reason = f"the same failure {spent} times without progress, thus the program's own: {cause.reason}"
        return _make_decision(cause, "stop", reason, kind="program")
    if budget == 0 or spent > budget:
        prefix = f"{budget} retries without progress: " if budget else ""
        return _make_decision(cause, "stop", f"{prefix}{cause.reason}")
    rule = RULES[kind]
    occurrences = 1 + sum(past.kind == kind for past in history)
    exclude = cause.nodes if occurrences >= rule.exclude_from else ()
    if not exclude and occurrences >= rule.suspect_from:
        exclude = suspects
    wait_s = 0.0
    if kind == "storage" and not exclude:
        wait_s = _STORAGE_WAITS_S[min(max(spent, 1), len(_STORAGE_WAITS_S)) - 1]
    return _make_decision(cause, "retry", cause.reason, exclude=exclude, wait_s=wait_s)


def _must_leave_allocation(
    cause: Cause, history: Sequence[Cause], decision: Decision, allocation_nodes: Sequence[str] | None
) -> bool:
    """Whether the next attempt needs other nodes than those of this allocation."""
    if decision.exclude:
        return allocation_nodes is None or bool(set(allocation_nodes) & set(decision.exclude))
    rule = RULES.get(cause.kind, CauseRule())
    return (
        allocation_nodes is None
        and sum(past.kind == cause.kind for past in _attempts_without_progress(cause, history)) >= rule.resubmit_from
    )


def _as_site_allows(site: Site, decision: Decision, in_job: bool, is_ticket: bool) -> Decision:
    """Return the decision with the action by which this site continues a run in another job."""
    if is_ticket:
        # The queue continues a preempted job, or one that saved before its time limit, and fails the others.
        is_continued = in_job or decision.kind in ("preempted", "time-limit")
        reason = f"{decision.reason}; this run has one job, and its queue decides on the next: pit place list"
        return replace(decision, action="defer" if is_continued else "stop", reason=reason)
    if site.recovery.chain == "none":
        # Slurm may still requeue a preempted job: a later call decides, once the job has left the queue.
        reason = f"{decision.reason}; {site.name} has recovery.chain = none: pit launch resume --force"
        return replace(decision, action="defer" if in_job else "stop", reason=reason)
    if in_job and site.recovery.submit_from == "login":
        return replace(decision, action="defer", reason=f"{decision.reason}; {site.name} takes jobs from login only")
    if in_job and site.recovery.chain == "requeue" and decision.kind == "preempted":
        return replace(decision, action="defer")  # Slurm has requeued the job
    return replace(decision, action="resubmit")


def needs_slurm_state(cause: Cause) -> bool:
    """Whether only Slurm's state of the job tells a preemption from a cancel."""
    return cause.kind in ("preempted", "cancelled") and cause.confidence != "certain"


def useful_attempt_s(plan: Plan) -> float:
    """Return the seconds that an attempt needs to start, run a few steps and save them."""
    notice_s = plan.job.signal.partition("@")[2]
    return min(_START_UP_S + float(notice_s or 0), plan.job.time_s / 2)


def _attempts_without_progress(cause: Cause, history: Sequence[Cause]) -> list[Cause]:
    """Return the causes since the last progress, this one first; preemptions count as well."""
    causes: list[Cause] = []
    for past in (cause, *reversed(history)):
        if past.progressed:
            break
        causes.append(past)
    return causes


def _is_repeated(cause: Cause, streak: Sequence[Cause]) -> bool:
    previous = streak[1] if len(streak) > 1 else None
    return bool(cause.fingerprint and previous and previous.fingerprint == cause.fingerprint)


def _suspects(cause: Cause, history: Sequence[Cause]) -> tuple[str, ...]:
    """Return the only node common to this failure and the previous one of its kind; () without exactly one.

    () also if `node` is a guess, from a rank that was killed: its program may have killed itself, on any node.
    """
    if cause.kind == "node" and cause.confidence == "guess":
        return ()
    previous = next(
        (past for past in reversed(history) if past.kind == cause.kind and not _is_program_exit_code(past)), None
    )
    if previous is None or _is_program_exit_code(cause):
        return ()
    common = set(_failed_nodes(cause)) & set(_failed_nodes(previous))
    return tuple(sorted(common)) if len(common) == 1 else ()


def _is_program_exit_code(cause: Cause) -> bool:
    """Whether a program exited with its own code, such as 75, after progress: that does not depend on the node."""
    return cause.kind == "unknown" and cause.progressed and 0 < (cause.exit_code or 0) < _SIGNAL_BASE


def _failed_nodes(cause: Cause) -> tuple[str, ...]:
    first_node = next((piece.node for piece in cause.evidence if piece.node), "")
    return cause.nodes or ((first_node,) if first_node else ())


def _make_decision(
    cause: Cause,
    action: Action,
    reason: str,
    *,
    kind: CauseKind | None = None,
    exclude: tuple[str, ...] = (),
    wait_s: float = 0.0,
) -> Decision:
    return Decision(
        attempt=cause.attempt, action=action, kind=kind or cause.kind, reason=reason, exclude=exclude, wait_s=wait_s
    )
