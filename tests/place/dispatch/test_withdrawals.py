"""Tickets that wait in the wrong queue."""

from __future__ import annotations

from pitools.place.dispatch.withdrawals import free_after_ours, leave_full_queues
from pitools.place.types import PendingJob, PlacementOption, PoolState, Ticket


def pool(name: str, free: int) -> PoolState:
    return PoolState(pool=name, units=8, free=free)


def job(name: str, run_s: float = 9.0) -> PendingJob:
    options = tuple(PlacementOption(pool=where, units=1, run_s=run_s, limit_s=run_s) for where in ("a", "b"))
    return PendingJob(job_id=name, submit_s=0.0, options=options)


def moved(free: int, waits: dict[str, tuple[str, float]], run_s: float = 9.0) -> list[str]:
    """Jobs that leave queue `a`, which is full, for `b` with `free` units. waits: job → queue, seconds in it."""
    jobs = {name: job(name, run_s) for name in waits}
    tickets = [Ticket(job_id=name, pool=where, submitted_s=100 - age_s) for name, (where, age_s) in waits.items()]
    pools = {"a": pool("a", 0), "b": pool("b", free)}
    return [withdrawal.job_id for withdrawal in leave_full_queues(100.0, jobs, pools, tickets, 60.0)]


def test_jobs_go_where_there_is_room() -> None:
    """As many as there is room for, and of these who waits at the end of the queue."""
    waits = {"x": ("a", 30.0), "y": ("a", 20.0), "z": ("a", 10.0)}
    assert moved(2, waits) == ["z", "y"]


def test_jobs_leave_a_queue_that_stands_still() -> None:
    """Where both are full, the queue whose oldest ticket is much older gives to the other until as many wait there."""
    waits = dict.fromkeys("pqrst", ("a", 40.0)) | {"u": ("b", 2.0)}
    assert len(moved(0, waits)) == 2
    assert moved(0, dict.fromkeys("pqrst", ("a", 6.0)) | {"u": ("b", 5.0)}) == []


def test_who_has_just_come_or_runs_for_long_stays() -> None:
    """A ticket that may be about to start, and one of a long job, is left where it is."""
    assert moved(4, {"x": ("a", 1.0)}) == []
    assert moved(4, {"x": ("a", 30.0)}, run_s=3600.0) == []


def test_seats_are_given_in_order() -> None:
    """What fits now starts, what does not waits."""
    jobs = {name: job(name) for name in "xyz"}
    ours = [Ticket(job_id=name, pool="a", submitted_s=0.0) for name in "xyz"]
    assert free_after_ours(pool("a", 2), jobs, ours) == (0, 1)
    assert free_after_ours(pool("b", 2), jobs, ours) == (2, 0)
