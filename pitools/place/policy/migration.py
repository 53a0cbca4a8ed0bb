"""Withdraw tickets of jobs that could start in another pool now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from pitools.place.policy.capacity import PoolCapacity
from pitools.place.policy.params import PolicyParams
from pitools.place.types import PendingJob, PlacementOption, Ticket, Withdraw


def migrations(
    now_s: float, jobs: Mapping[str, PendingJob], capacity: PoolCapacity, queued: Sequence[Ticket], policy: PolicyParams
) -> list[Withdraw]:
    """Return the withdrawals worth their cost, oldest ticket first, and take the units of the target pools.

    Tickets in unreachable pools are left alone.
    """
    import numpy as np

    moves = []
    column = {name: number for number, name in enumerate(capacity.names)}
    for ticket in queued:
        job = jobs.get(ticket.job_id)
        if not job or now_s - ticket.submitted_s < policy.min_wait_before_move_s:
            continue
        options = {option.pool: option for option in job.options if option.pool in column}
        current = options.pop(ticket.pool, None)
        if not current:
            continue
        pool = column[ticket.pool]
        opens_s = float(capacity.opens_s(pool, np.array([now_s]), np.array([current.limit_s]))[0])
        if capacity.shadow_s[pool] == inf and opens_s == now_s:
            continue  # every ticket of this pool fits: the job is about to start
        start_s = (
            opens_s
            if capacity.shadow_s[pool] == inf
            else max(opens_s, float(capacity.expected_s(capacity.shadow_s[pool])))
        )
        stays_s = start_s - now_s + current.run_s
        for option in sorted(options.values(), key=lambda option: (_turnaround_s(option), option.pool)):
            units, end_s = np.array([option.units]), np.array([now_s + option.limit_s])
            gain_s = stays_s - _turnaround_s(option) - policy.move_s
            opens = capacity.is_open(column[option.pool], option.limit_s)
            can_start = opens and capacity.admits(column[option.pool], units, end_s)[0]
            if can_start and gain_s > policy.hysteresis * policy.move_s:
                reason = f"{option.pool} can start it now and end it {gain_s / 60:.0f} min earlier"
                moves.append(Withdraw(job_id=ticket.job_id, pool=ticket.pool, reason=reason))
                capacity.start_job(column[option.pool], option.units, float(end_s[0]))
                break
    return moves


def _turnaround_s(option: PlacementOption) -> float:
    return option.copy_s + option.run_s
