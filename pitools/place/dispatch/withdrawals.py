"""Short jobs that were put into a site's queue ahead of time, and would start sooner in another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pitools.place.types import PendingJob, PoolState, Submit, Ticket, Withdraw

MIN_GAIN_S = 3.0  # a ticket that was just placed may be about to start


def free_after_ours(
    pool: PoolState, jobs: Mapping[str, PendingJob], own_tickets: Sequence[Ticket | Submit]
) -> tuple[int, int]:
    """Units of a pool that stay free once those of ours that fit have started, and how many of ours wait then."""
    free, waiting = pool.free, 0
    for ticket in own_tickets:
        if ticket.pool == pool.pool:
            need = next((option.units for option in jobs[ticket.job_id].options if option.pool == pool.pool), 0)
            if need <= free:
                free -= need
            else:
                waiting += 1
    return free, waiting


def leave_full_queues(
    now_s: float,
    jobs: Mapping[str, PendingJob],
    pools: Mapping[str, PoolState],
    tickets: Sequence[Ticket],
    lead_s: float,
) -> list[Withdraw]:
    """Return the pending tickets to withdraw and submit elsewhere, if every open job has a ticket.

    A ticket moves to a pool that has room for it now, or a shorter queue, if the job has not waited as long in its own:
    a queue with an old first ticket does not progress.
    """
    free, waiting, oldest_s = {}, {}, {}
    for name, pool in pools.items():
        free[name], waiting[name] = free_after_ours(pool, jobs, tickets)
        oldest_s[name] = max((now_s - pending.submitted_s for pending in tickets if pending.pool == name), default=0.0)
    withdrawn = []
    for ticket in sorted(tickets, key=lambda one: -one.submitted_s):
        current = ticket.pool
        if current not in pools or free[current] or now_s - ticket.submitted_s < MIN_GAIN_S:
            continue
        for option in jobs[ticket.job_id].options:
            target = option.pool
            if target == current or target not in pools or option.run_s > lead_s:
                continue
            has_room = free[target] >= option.units
            is_faster = waiting[target] + 1 < waiting[current] and 2 * oldest_s[target] + MIN_GAIN_S < oldest_s[current]
            if has_room or is_faster:
                free[target] -= option.units if has_room else 0
                waiting[target] += 0 if has_room else 1
                waiting[current] -= 1
                withdrawn.append(Withdraw(job_id=ticket.job_id, pool=current, reason=f"sooner in {target}"))
                break
    return withdrawn
