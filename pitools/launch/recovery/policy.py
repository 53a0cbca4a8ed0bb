"""What follows from a cause: a table, the budgets of the request, and the rule that a run has to get on.

progress            refills every budget; without it, each cause has so many attempts in a row, and all together `max`
the same again      a failure with the same fingerprint, without progress, would only fail again: that is the program
nodes               are left out by name where the evidence names them; a node that merely was there, the second time
the allocation      is used again where it can be: no queue, no waiting for Slurm's own requeue
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from pitools.launch.plan import Plan
from pitools.run.attempt_records import Cause, CauseKind, Decision
from pitools.site.schema import Site

Action = Literal["done", "retry", "resubmit", "wait", "stop"]

_NEVER_COUNT = 1 << 30
_STORAGE_WAITS_S = (10.0, 30.0, 60.0, 120.0)
_SIGNAL_BASE = 128  # an exit code from here on is a signal's
_START_UP_S = 60.0  # staging is done, programs start, a few steps are made


class CauseRule(NamedTuple):
    """What a cause leads to, counted in its occurrences in a row without progress.

    exclude_from: the occurrence from which on the nodes at fault are left out. suspect_from: from which on a node is,
    that was only where it happened, each time. resubmit_from: from which on other nodes are asked for.
    """

    exclude_from: int = _NEVER_COUNT
    suspect_from: int = _NEVER_COUNT
    resubmit_from: int = _NEVER_COUNT


RULES: dict[CauseKind, CauseRule] = {
    "node": CauseRule(exclude_from=1, suspect_from=2),
    "gpu": CauseRule(exclude_from=1, suspect_from=2),
    "network": CauseRule(exclude_from=2, resubmit_from=2),
    "hang": CauseRule(exclude_from=2, suspect_from=2),
    "storage": CauseRule(exclude_from=1),  # named is only a node whose own disk is full
    "unknown": CauseRule(suspect_from=2),
    "user": CauseRule(),
    "memory": CauseRule(),
}


def decide(
    plan: Plan,
    site: Site,
    cause: Cause,
    history: Sequence[Cause],
    *,
    in_job: bool = False,
    seconds_left: float | None = None,
    allocation_nodes: Sequence[str] | None = None,
) -> Decision:
    """What the run does next. Pure.

    history: the causes of the attempts before, oldest first. in_job: asked inside a job. allocation_nodes: asked by a
    job that was started again, at its beginning: its nodes now; None at the end of the attempt itself. seconds_left: to
    the job's time limit, None without one.
    """
    if in_job and needs_slurm_state(cause):
        # Preemption and scancel send the same signal; but what Slurm itself starts again was not cancelled.
        return _make_decision(cause, "retry" if allocation_nodes is not None else "wait", cause.reason)
    decided = _decide(plan, cause, history)
    if decided.action in ("done", "stop"):
        return decided
    if not in_job or (decided.action == "resubmit" and allocation_nodes is None):
        return _as_site_allows(site, decided, in_job)
    again = replace(decided, action="retry")
    if _must_leave_allocation(cause, history, decided, allocation_nodes):
        return _as_site_allows(site, again, in_job)
    if seconds_left is not None and seconds_left < again.wait_s + useful_attempt_s(plan):
        what = f"{again.reason}; the {max(0, seconds_left):.0f} s that are left of this job are too few to go on in it"
        return _as_site_allows(site, replace(again, reason=what), in_job)
    return again


def _decide(plan: Plan, cause: Cause, history: Sequence[Cause]) -> Decision:
    """The decision as if an allocation lived for ever."""
    kind = cause.kind
    if kind == "finished":
        return _make_decision(cause, "done", cause.reason or "it finished")
    if kind == "cancelled":
        return _make_decision(cause, "stop", cause.reason or "it was cancelled")
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


def _decide_time_limit(cause: Cause, streak: Sequence[Cause]) -> Decision:
    if sum(one.kind == "time-limit" for one in streak) < 2:
        return _make_decision(cause, "resubmit", cause.reason)
    what = "twice in a row its time limit came before a new checkpoint: ask for more time, or save more often"
    return _make_decision(cause, "stop", what)


def _decide_fault(plan: Plan, cause: Cause, history: Sequence[Cause], streak: Sequence[Cause]) -> Decision:
    kind = cause.kind
    budget = int(getattr(plan.request.retry, kind))
    spent = sum(one.kind == kind for one in streak)
    suspects = _suspects(cause, history)
    bad = bool(suspects) and plan.nodes > 1
    if kind == "unknown" and _is_repeated(cause, streak) and not (bad and spent <= 2):
        what = f"the same failure {spent} times without progress, so the program's own: {cause.reason}"
        return _make_decision(cause, "stop", what, kind="user")
    if budget == 0 or spent > budget:
        tried = f"{budget} retries without progress did not help: " if budget else ""
        return _make_decision(cause, "stop", f"{tried}{cause.reason}")
    rule = RULES[kind]
    seen = 1 + sum(one.kind == kind for one in history)
    exclude = cause.nodes if seen >= rule.exclude_from else ()
    if not exclude and seen >= rule.suspect_from:
        exclude = suspects
    wait_s = 0.0
    if kind == "storage" and not exclude:
        wait_s = _STORAGE_WAITS_S[min(max(spent, 1), len(_STORAGE_WAITS_S)) - 1]
    return _make_decision(cause, "retry", cause.reason, exclude=exclude, wait_s=wait_s)


def _must_leave_allocation(
    cause: Cause, history: Sequence[Cause], decided: Decision, here: Sequence[str] | None
) -> bool:
    """Whether the next attempt needs other nodes than it would have in this allocation."""
    if decided.exclude:
        return here is None or bool(set(here) & set(decided.exclude))
    rule = RULES.get(cause.kind, CauseRule())
    return (
        here is None
        and sum(one.kind == cause.kind for one in _attempts_without_progress(cause, history)) >= rule.resubmit_from
    )


def _as_site_allows(site: Site, decided: Decision, in_job: bool) -> Decision:
    """Another job, as the site lets jobs follow each other."""
    if site.recovery.chain == "none":
        # Slurm may put a preempted job back all the same: whoever looks once it is gone from the queue knows.
        what = f"{decided.reason}; on {site.name} no job follows another by itself: pit launch resume --force"
        return replace(decided, action="wait" if in_job else "stop", reason=what)
    if in_job and site.recovery.submit_from == "login":
        return replace(decided, action="wait", reason=f"{decided.reason}; {site.name} takes jobs from its login node")
    if in_job and site.recovery.chain == "requeue" and decided.kind == "preempted":
        return replace(decided, action="wait")  # it is in the queue already
    return replace(decided, action="resubmit")


def needs_slurm_state(cause: Cause) -> bool:
    """Whether only Slurm can tell what this was."""
    return cause.kind in ("preempted", "cancelled") and cause.confidence != "certain"


def useful_attempt_s(plan: Plan) -> float:
    """Seconds that an attempt needs to be of any use: to start, to make a few steps, and to save them in time."""
    warned = plan.job.signal.partition("@")[2]
    return min(_START_UP_S + float(warned or 0), plan.job.time_s / 2)


def _attempts_without_progress(cause: Cause, history: Sequence[Cause]) -> list[Cause]:
    """The attempts without progress up to now, this one among them; preemptions are nobody's fault but count."""
    found: list[Cause] = []
    for one in (cause, *reversed(history)):
        if one.progressed:
            break
        found.append(one)
    return found


def _is_repeated(cause: Cause, streak: Sequence[Cause]) -> bool:
    before = streak[1] if len(streak) > 1 else None
    return bool(cause.fingerprint and before and before.fingerprint == cause.fingerprint)


def _suspects(cause: Cause, history: Sequence[Cause]) -> tuple[str, ...]:
    """The node where it happened this time and the last time of its kind; () where that is not one."""
    before = next((one for one in reversed(history) if one.kind == cause.kind and not _is_program_exit_code(one)), None)
    if before is None or _is_program_exit_code(cause):
        return ()
    both = set(_failed_nodes(cause)) & set(_failed_nodes(before))
    return tuple(sorted(both)) if len(both) == 1 else ()


def _is_program_exit_code(cause: Cause) -> bool:
    """Whether a program that got on ended with a code of its own, such as 75: wherever it ran, no node chose that."""
    return cause.kind == "unknown" and cause.progressed and 0 < (cause.exit_code or 0) < _SIGNAL_BASE


def _failed_nodes(cause: Cause) -> tuple[str, ...]:
    first = next((one.node for one in cause.evidence if one.node), "")
    return cause.nodes or ((first,) if first else ())


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
