"""Tickets that are taken back because the job could start elsewhere now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from pitools.place.policy.capacity import PoolCapacity
from pitools.place.policy.params import PolicyParams
from pitools.place.types import PendingJob, PlacementOption, Ticket, Withdraw


def withdrawals(
    now_s: float, jobs: Mapping[str, PendingJob], capacity: PoolCapacity, queued: Sequence[Ticket], policy: PolicyParams
) -> list[Withdraw]:
    """Withdrawals worth their cost, oldest ticket first; the room that a job is withdrawn for is kept for it.

    Only what waits in a pool that answers is withdrawn.
    """
    import numpy as np

    found = []
    column = {name: number for number, name in enumerate(capacity.names)}
    for ticket in queued:
        job = jobs.get(ticket.job_id)
        if not job or now_s - ticket.submitted_s < policy.min_wait_before_move_s:
            continue
        options = {option.pool: option for option in job.options if option.pool in column}
        here = options.pop(ticket.pool, None)
        if not here:
            continue
        at = column[ticket.pool]
        opens_s = float(capacity.opens_s(at, np.array([now_s]), np.array([here.limit_s]))[0])
        if capacity.shadow_s[at] == inf and opens_s == now_s:
            continue  # nothing waits there that does not fit: it is about to start
        waits_until_s = opens_s if capacity.shadow_s[at] == inf else max(opens_s, float(capacity.shadow_s[at]))
        stays_s = waits_until_s - now_s + here.run_s
        for option in sorted(options.values(), key=lambda option: (_turnaround_s(option), option.pool)):
            units, end_s = np.array([option.units]), np.array([now_s + option.limit_s])
            gain_s = stays_s - _turnaround_s(option) - policy.move_s
            opens = capacity.is_open(column[option.pool], option.limit_s)
            can = opens and capacity.admits(column[option.pool], units, end_s)[0]
            if can and gain_s > policy.hysteresis * policy.move_s:
                why = f"{option.pool} could start it now and end it {gain_s / 60:.0f} min earlier"
                found.append(Withdraw(job_id=ticket.job_id, pool=ticket.pool, reason=why))
                capacity.start_job(column[option.pool], option.units, float(end_s[0]))
                break
    return found


def _turnaround_s(option: PlacementOption) -> float:
    return option.stage_s + option.run_s
