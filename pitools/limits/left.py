"""What is left of each limit that a job would share with others."""

from __future__ import annotations

from collections.abc import Iterator

from pitools.core.record import Record
from pitools.limits import rules
from pitools.limits.levels import AppliedLimit, applicable_limits, find_levels
from pitools.limits.records import JobRequest, LimitState


class LimitLeft(Record, frozen=True, kw_only=True, tag="pit.limit-left/1"):
    """A limit and its use now. value, used, left: minutes for times, MiB for memory. left: 0 if the use is over it."""

    level: str
    limit: str
    value: int
    used: int
    left: int


def limits_left(request: JobRequest, state: LimitState) -> Iterator[LimitLeft]:
    """Yield each limit that jobs of this user, account, QOS and partition share, in Slurm's order."""
    if "limits" not in state.enforced:
        return
    levels, _ = find_levels(request, state)
    for order in (rules.AT_SUBMIT, rules.BEFORE_NODES, rules.FOR_NODES):
        for limit in applicable_limits(levels.chain, order):
            rule = rules.RULES[limit.name]
            if rule.scope and (rule.asks == "submitted") == (order is rules.AT_SUBMIT):
                used = _used(limit)
                name = f"{limit.name}={limit.tres}" if limit.tres else limit.name
                level = limit.level.origin(rule.field, limit.tres)
                yield LimitLeft(level=level, limit=name, value=limit.value, used=used, left=max(0, limit.value - used))


def _used(limit: AppliedLimit) -> int:
    rule = rules.RULES[limit.name]
    usage = limit.level.usage(rule.scope)
    if rule.asks in ("jobs", "submitted"):
        return usage.jobs if rule.asks == "jobs" else usage.submitted
    if rule.asks == "wall":
        return usage.wall_s // 60
    if rule.asks == "tres":
        return usage.tres.get(limit.tres, 0)
    spent = usage.tres_mins.get(limit.tres, 0) if limit.name == "GrpTRESMins" else 0
    return spent + usage.tres_run_mins.get(limit.tres, 0)
