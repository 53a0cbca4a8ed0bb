"""What is left of each limit that a job would share with others."""

from __future__ import annotations

from collections.abc import Iterator

from pitools.core.record import Record
from pitools.limits import rules
from pitools.limits.levels import find_levels
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
    levels, _ = find_levels(request, state)
    for order in (rules.AT_SUBMIT, rules.BEFORE_NODES, rules.FOR_NODES):
        for limit in levels.applicable_limits(order):
            if limit.rule.scope and (limit.rule.asks == "submitted") == (order is rules.AT_SUBMIT):
                left = max(0, limit.value - limit.used)
                yield LimitLeft(level=limit.origin, limit=limit.label, value=limit.value, used=limit.used, left=left)
