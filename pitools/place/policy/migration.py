"""Tickets that are taken back because the job could start elsewhere now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from pitools.place.policy.capacity import Rooms
from pitools.place.policy.params import Policy
from pitools.place.types import Job, Option, Ticket, Withdraw


def moves(
    now_s: float, jobs: Mapping[str, Job], rooms: Rooms, queued: Sequence[Ticket], policy: Policy
) -> list[Withdraw]:
    """Withdrawals worth their cost, oldest ticket first; the room that a job is withdrawn for is kept for it.

    Only what waits in a pool that answers is withdrawn.
    """
    import numpy as np

    found = []
    column = {name: number for number, name in enumerate(rooms.names)}
    for ticket in queued:
        job = jobs.get(ticket.job_id)
        if not job or now_s - ticket.placed_s < policy.settle_s:
            continue
        options = {option.pool: option for option in job.options if option.pool in column}
        here = options.pop(ticket.pool, None)
        if not here:
            continue
        at = column[ticket.pool]
        opens_s = float(rooms.opens_s(at, np.array([now_s]), np.array([here.limit_s]))[0])
        if rooms.shadow_s[at] == inf and opens_s == now_s:
            continue  # nothing waits there that does not fit: it is about to start
        waits_until_s = opens_s if rooms.shadow_s[at] == inf else max(opens_s, float(rooms.shadow_s[at]))
        stays_s = waits_until_s - now_s + here.run_s
        for option in sorted(options.values(), key=lambda option: (_takes_s(option), option.pool)):
            units, end_s = np.array([option.units]), np.array([now_s + option.limit_s])
            gain_s = stays_s - _takes_s(option) - policy.move_s
            opens = rooms.is_open(column[option.pool], option.limit_s)
            can = opens and rooms.admits(column[option.pool], units, end_s)[0]
            if can and gain_s > policy.hysteresis * policy.move_s:
                why = f"{option.pool} could start it now and end it {gain_s / 60:.0f} min earlier"
                found.append(Withdraw(job_id=ticket.job_id, pool=ticket.pool, why=why))
                rooms.take(column[option.pool], option.units, float(end_s[0]))
                break
    return found


def _takes_s(option: Option) -> float:
    return option.stage_s + option.run_s
