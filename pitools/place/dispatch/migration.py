"""Short jobs that were put into a site's queue ahead of time, and would start sooner in another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pitools.place.types import Job, Place, Pool, Ticket, Withdraw

SETTLE_S = 3.0  # a ticket that was just placed may be about to start


def seated(pool: Pool, jobs: Mapping[str, Job], ours: Sequence[Ticket | Place]) -> tuple[int, int]:
    """Units of a pool that stay free once those of ours that fit have started, and how many of ours wait then."""
    free, waiting = pool.free, 0
    for one in ours:
        if one.pool == pool.pool:
            need = next((option.units for option in jobs[one.job_id].options if option.pool == pool.pool), 0)
            if need <= free:
                free -= need
            else:
                waiting += 1
    return free, waiting


def moves(
    now_s: float, jobs: Mapping[str, Job], pools: Mapping[str, Pool], tickets: Sequence[Ticket], lead_s: float
) -> list[Withdraw]:
    """The tickets to take back, for when no job of ours is left that has none.

    One moves where there is room for it now, or where fewer wait, and not for as long as in its own queue: a queue
    whose oldest ticket is old does not move.
    """
    free, waiting, oldest_s = {}, {}, {}
    for name, pool in pools.items():
        free[name], waiting[name] = seated(pool, jobs, tickets)
        oldest_s[name] = max((now_s - one.placed_s for one in tickets if one.pool == name), default=0.0)
    back = []
    for ticket in sorted(tickets, key=lambda one: -one.placed_s):
        here = ticket.pool
        if here not in pools or free[here] or now_s - ticket.placed_s < SETTLE_S:
            continue
        for option in jobs[ticket.job_id].options:
            to = option.pool
            if to == here or to not in pools or option.run_s > lead_s:
                continue
            has_room = free[to] >= option.units
            is_faster = waiting[to] + 1 < waiting[here] and 2 * oldest_s[to] + SETTLE_S < oldest_s[here]
            if has_room or is_faster:
                free[to] -= option.units if has_room else 0
                waiting[to] += 0 if has_room else 1
                waiting[here] -= 1
                back.append(Withdraw(job_id=ticket.job_id, pool=here, why=f"sooner in {to}"))
                break
    return back
