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
from pitools.run.attempt_records import Cause, Decision, Kind
from pitools.site.schema import Site

Action = Literal["done", "again", "resubmit", "wait", "stop"]

_NEVER = 1 << 30
_STORAGE_WAITS_S = (10.0, 30.0, 60.0, 120.0)
_SIGNALLED = 128  # an exit code from here on is a signal's
_START_UP_S = 60.0  # staging is done, programs start, a few steps are made


class Rule(NamedTuple):
    """What a cause leads to, counted in its occurrences in a row without progress.

    exclude_from: the occurrence from which on the nodes at fault are left out. suspect_from: from which on a node is,
    that was only where it happened, each time. fresh_from: from which on other nodes are asked for.
    """

    exclude_from: int = _NEVER
    suspect_from: int = _NEVER
    fresh_from: int = _NEVER


RULES: dict[Kind, Rule] = {
    "node": Rule(exclude_from=1, suspect_from=2),
    "gpu": Rule(exclude_from=1, suspect_from=2),
    "network": Rule(exclude_from=2, fresh_from=2),
    "hang": Rule(exclude_from=2, suspect_from=2),
    "storage": Rule(exclude_from=1),  # named is only a node whose own disk is full
    "unknown": Rule(suspect_from=2),
    "user": Rule(),
    "memory": Rule(),
}


def decide(
    plan: Plan,
    site: Site,
    cause: Cause,
    history: Sequence[Cause],
    *,
    in_job: bool = False,
    left_s: float | None = None,
    here: Sequence[str] | None = None,
) -> Decision:
    """What the run does next. Pure.

    history: the causes of the attempts before, oldest first. in_job: asked inside a job. here: asked by a job that was
    started again, at its beginning: its nodes now; None at the end of the attempt itself. left_s: to the job's time
    limit, None without one.
    """
    if in_job and is_unsure(cause):
        # Preemption and scancel send the same signal; but what Slurm itself starts again was not cancelled.
        return _say(cause, "again" if here is not None else "wait", cause.reason)
    decided = _decide(plan, cause, history)
    if decided.action in ("done", "stop"):
        return decided
    if not in_job or (decided.action == "resubmit" and here is None):
        return _chained(site, decided, in_job)
    again = replace(decided, action="again")
    if _is_bound(cause, history, decided, here):
        return _chained(site, again, in_job)
    if left_s is not None and left_s < again.wait_s + enough_s(plan):
        what = f"{again.reason}; the {max(0, left_s):.0f} s that are left of this job are too few to go on in it"
        return _chained(site, replace(again, reason=what), in_job)
    return again


def _decide(plan: Plan, cause: Cause, history: Sequence[Cause]) -> Decision:
    """The decision as if an allocation lived for ever."""
    kind = cause.kind
    if kind == "finished":
        return _say(cause, "done", cause.reason or "it finished")
    if kind == "cancelled":
        return _say(cause, "stop", cause.reason or "it was cancelled")
    streak = _streak(cause, history)
    if len(streak) >= plan.request.retry.max:
        return _say(cause, "stop", f"{len(streak)} attempts in a row without progress; the last: {cause.reason}")
    if kind == "preempted":
        return _say(cause, "resubmit", cause.reason)
    if kind == "time-limit":
        return _time_limit(cause, streak)
    return _fault(plan, cause, history, streak)


def _time_limit(cause: Cause, streak: Sequence[Cause]) -> Decision:
    if sum(one.kind == "time-limit" for one in streak) < 2:
        return _say(cause, "resubmit", cause.reason)
    what = "twice in a row its time limit came before a new checkpoint: ask for more time, or save more often"
    return _say(cause, "stop", what)


def _fault(plan: Plan, cause: Cause, history: Sequence[Cause], streak: Sequence[Cause]) -> Decision:
    kind = cause.kind
    budget = int(getattr(plan.request.retry, kind))
    spent = sum(one.kind == kind for one in streak)
    suspects = _suspects(cause, history)
    bad = bool(suspects) and plan.nodes > 1
    if kind == "unknown" and _same_again(cause, streak) and not (bad and spent <= 2):
        what = f"the same failure {spent} times without progress, so the program's own: {cause.reason}"
        return _say(cause, "stop", what, kind="user")
    if budget == 0 or spent > budget:
        tried = f"{budget} retries without progress did not help: " if budget else ""
        return _say(cause, "stop", f"{tried}{cause.reason}")
    rule = RULES[kind]
    seen = 1 + sum(one.kind == kind for one in history)
    exclude = cause.nodes if seen >= rule.exclude_from else ()
    if not exclude and seen >= rule.suspect_from:
        exclude = suspects
    wait_s = 0.0
    if kind == "storage" and not exclude:
        wait_s = _STORAGE_WAITS_S[min(max(spent, 1), len(_STORAGE_WAITS_S)) - 1]
    return _say(cause, "again", cause.reason, exclude=exclude, wait_s=wait_s)


def _is_bound(cause: Cause, history: Sequence[Cause], decided: Decision, here: Sequence[str] | None) -> bool:
    """Whether the next attempt needs other nodes than it would have in this allocation."""
    if decided.exclude:
        return here is None or bool(set(here) & set(decided.exclude))
    rule = RULES.get(cause.kind, Rule())
    return here is None and sum(one.kind == cause.kind for one in _streak(cause, history)) >= rule.fresh_from


def _chained(site: Site, decided: Decision, in_job: bool) -> Decision:
    """Another job, as the site lets jobs follow each other."""
    if site.recover.chain == "none":
        # Slurm may put a preempted job back all the same: whoever looks once it is gone from the queue knows.
        what = f"{decided.reason}; on {site.name} no job follows another by itself: pit launch resume --force"
        return replace(decided, action="wait" if in_job else "stop", reason=what)
    if in_job and site.recover.submit_from == "login":
        return replace(decided, action="wait", reason=f"{decided.reason}; {site.name} takes jobs from its login node")
    if in_job and site.recover.chain == "requeue" and decided.kind == "preempted":
        return replace(decided, action="wait")  # it is in the queue already
    return replace(decided, action="resubmit")


def is_unsure(cause: Cause) -> bool:
    """Whether only Slurm can tell what this was."""
    return cause.kind in ("preempted", "cancelled") and cause.confidence != "certain"


def enough_s(plan: Plan) -> float:
    """Seconds that an attempt needs to be of any use: to start, to make a few steps, and to save them in time."""
    warned = plan.job.signal.partition("@")[2]
    return min(_START_UP_S + float(warned or 0), plan.job.time_s / 2)


def _streak(cause: Cause, history: Sequence[Cause]) -> list[Cause]:
    """The attempts without progress up to now, this one among them; preemptions are nobody's fault but count."""
    found: list[Cause] = []
    for one in (cause, *reversed(history)):
        if one.progressed:
            break
        found.append(one)
    return found


def _same_again(cause: Cause, streak: Sequence[Cause]) -> bool:
    before = streak[1] if len(streak) > 1 else None
    return bool(cause.fingerprint and before and before.fingerprint == cause.fingerprint)


def _suspects(cause: Cause, history: Sequence[Cause]) -> tuple[str, ...]:
    """The node where it happened this time and the last time of its kind; () where that is not one."""
    before = next((one for one in reversed(history) if one.kind == cause.kind and not _is_own_end(one)), None)
    if before is None or _is_own_end(cause):
        return ()
    both = set(_where(cause)) & set(_where(before))
    return tuple(sorted(both)) if len(both) == 1 else ()


def _is_own_end(cause: Cause) -> bool:
    """Whether a program that got on ended with a code of its own, such as 75: wherever it ran, no node chose that."""
    return cause.kind == "unknown" and cause.progressed and 0 < (cause.exit_code or 0) < _SIGNALLED


def _where(cause: Cause) -> tuple[str, ...]:
    first = next((one.node for one in cause.evidence if one.node), "")
    return cause.nodes or ((first,) if first else ())


def _say(
    cause: Cause,
    action: Action,
    reason: str,
    *,
    kind: Kind | None = None,
    exclude: tuple[str, ...] = (),
    wait_s: float = 0.0,
) -> Decision:
    return Decision(
        attempt=cause.attempt, action=action, kind=kind or cause.kind, reason=reason, exclude=exclude, wait_s=wait_s
    )
