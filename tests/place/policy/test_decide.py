"""Decisions over several pools."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pitools.place.policy import JobTableBuilder, PolicyParams, decide
from pitools.place.policy.capacity import OVERRUN_S
from pitools.place.types import PendingJob, PlacementOption, PoolState, Submit, Ticket, Withdraw

HOUR_S = 3600.0
POOLS = ("fast", "middle", "slow")
SPEED = {"fast": 2.0, "middle": 1.0, "slow": 0.5}


def job(
    job_id: str,
    *,
    units: int = 1,
    run_s: float = HOUR_S,
    submit_s: float = 0.0,
    tier: int = 0,
    pools: Sequence[str] = POOLS,
) -> PendingJob:
    options = tuple(
        PlacementOption(pool=pool, units=units, run_s=run_s / SPEED[pool], limit_s=3 * run_s / SPEED[pool])
        for pool in pools
    )
    return PendingJob(job_id=job_id, submit_s=submit_s, options=options, tier=tier)


def pool(
    name: str,
    *,
    units: int = 8,
    free: int = 8,
    running: Sequence[tuple[float, int]] = (),
    tickets: int = 4,
    is_dark: bool = False,
    closed: Sequence[tuple[float, float]] = (),
    others: tuple[int, float] = (0, 0.0),
) -> dict[str, PoolState]:
    return {
        name: PoolState(
            pool=name,
            units=units,
            free=free,
            running=running,
            speed=SPEED[name],
            max_pending=tickets,
            is_unreachable=is_dark,
            maintenance_windows=closed,
            others_pending=others[0],
            others_pending_s=others[1],
        )
    }


def placed(moves: Sequence[Submit | Withdraw]) -> list[tuple[str, str]]:
    return [(move.job_id, move.pool) for move in moves if isinstance(move, Submit)]


@st.composite
def worlds(
    draw: st.DrawFn,
) -> tuple[float, list[PendingJob], dict[str, PoolState], list[Ticket], PolicyParams]:
    """Any world: jobs with any options, pools full, empty or dark, tickets, and a policy."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    now = 100 * HOUR_S
    pools: dict[str, PoolState] = {}
    for name in POOLS[: draw(st.integers(1, 3))]:
        units = rng.choice([4, 8, 64])
        free = rng.randint(0, units)
        running, left = [], units - free
        while left:
            value = rng.randint(1, left)
            running.append((now + rng.uniform(-1, 50) * HOUR_S, value))
            left -= value
        others = rng.choice([(0, 0.0), (rng.randint(1, 4 * units), rng.uniform(0, 99) * HOUR_S)])
        pools |= pool(
            name,
            units=units,
            free=free,
            running=sorted(running),
            tickets=rng.randint(0, 4),
            is_dark=rng.random() < 0.2,
            others=others,
        )
    jobs = [
        job(
            f"j{number}",
            units=rng.choice([1, 2, 8, 64]),
            run_s=rng.uniform(10, 40 * HOUR_S),
            submit_s=now - rng.uniform(0, 90) * HOUR_S,
            tier=rng.choice([0, 0, 0, 1]),
            pools=rng.sample(POOLS, rng.randint(1, 3)),
        )
        for number in range(draw(st.integers(0, 40)))
    ]
    tickets: list[Ticket] = []
    for item in jobs:
        option = rng.choice(item.options)
        reference = pools.get(option.pool)
        if reference and rng.random() < 0.2 and sum(t.pool == option.pool for t in tickets) < reference.max_pending:
            tickets.append(Ticket(job_id=item.job_id, pool=option.pool, submitted_s=now - rng.uniform(0, 2) * HOUR_S))
    policy = PolicyParams(due_share=rng.choice([0.0, 1.0, 1e9]), patience=rng.choice([0.0, 0.3, 9.0]))
    return now, jobs, pools, tickets, policy


@given(worlds())
@settings(max_examples=300, deadline=None)
def test_rules_hold_in_any_world(
    world: tuple[float, list[PendingJob], dict[str, PoolState], list[Ticket], PolicyParams],
) -> None:
    """Same answer twice, with or without a memory; nothing of a dark pool; no more tickets than allowed, and one of a
    job; no more units started than are free."""
    now, jobs, pools, tickets, policy = world
    moves = decide(now, jobs, pools, tickets, policy)
    columns = JobTableBuilder()
    assert decide(now, jobs, pools, tickets, policy, columns) == moves
    assert decide(now, jobs, dict(reversed(pools.items())), tickets, policy, columns) == moves
    bound = {ticket.job_id for ticket in tickets}
    reference = {item.job_id: {option.pool: option for option in item.options} for item in jobs}
    assert not any(pools[move.pool].is_unreachable for move in moves)
    for move in moves:
        if isinstance(move, Withdraw):
            assert (move.job_id, move.pool) in {(ticket.job_id, ticket.pool) for ticket in tickets}
        else:
            assert move.job_id not in bound
            assert reference[move.job_id][move.pool].units <= pools[move.pool].units
    counts = [sum(job_id == item.job_id for job_id, _ in placed(moves)) for item in jobs]
    assert max(counts, default=0) <= 1
    for name, seen in pools.items():
        here = [move for move in moves if isinstance(move, Submit) and move.pool == name]
        started = [reference[move.job_id][name].units for move in here if move.reason == "starts now"]
        assert sum(started) <= seen.free
        waits = sum(ticket.pool == name for ticket in tickets) + len(here) - len(started)
        assert len(here) == len(started) or waits <= seen.max_pending


@given(worlds())
@settings(max_examples=200, deadline=None)
def test_a_higher_tier_is_served_first(
    world: tuple[float, list[PendingJob], dict[str, PoolState], list[Ticket], PolicyParams],
) -> None:
    """What the highest tier gets does not change when the lower ones are taken out of the queue."""
    now, jobs, pools, _, policy = world
    above = {item.job_id for item in jobs if item.tier == 1}
    both = [move for move in placed(decide(now, jobs, pools, [], policy)) if move[0] in above]
    alone = placed(decide(now, [item for item in jobs if item.tier == 1], pools, [], policy))
    assert both == alone


@given(worlds())
@settings(max_examples=200, deadline=None)
def test_the_first_in_order_is_delayed_by_nobody_after_it(
    world: tuple[float, list[PendingJob], dict[str, PoolState], list[Ticket], PolicyParams],
) -> None:
    """Whatever passes the oldest job that cannot start: each pool has its units as soon as without, by all limits."""
    now, jobs, pools, _, _ = world
    jobs = sorted((replace(item, tier=0) for item in jobs), key=lambda item: item.submit_s)
    pools = {name: replace(one, others_pending=0, others_pending_s=0.0) for name, one in pools.items()}
    starts = dict(placed(decide(now, jobs, pools, [], PolicyParams(due_share=0.0))))
    for first in jobs:
        if first.job_id not in starts:
            break
    else:
        return
    older = [item for item in jobs if item.submit_s < first.submit_s]
    for option in first.options:
        if option.pool in pools and not pools[option.pool].is_unreachable:
            before = latest_start_s(now, option, pools[option.pool], older, starts)
            assert latest_start_s(now, option, pools[option.pool], jobs, starts) <= before


def latest_start_s(
    now: float, option: PlacementOption, reached: PoolState, jobs: list[PendingJob], starts: dict[str, str]
) -> float:
    """Return when a pool has the option's units, if these of the jobs start where decided, and all use their limits."""
    begun = [
        (now + one.limit_s, one.units)
        for item in jobs
        for one in item.options
        if one.pool == reached.pool == starts.get(item.job_id)
    ]
    free = reached.free - sum(units for _, units in begun)
    for end_s, units in sorted([*((max(end_s, now + OVERRUN_S), units) for end_s, units in reached.running), *begun]):
        if free >= option.units:
            return now
        free += units
        if free >= option.units:
            return end_s
    return now if free >= option.units else inf


def test_the_least_work_goes_first_and_to_the_fastest() -> None:
    """With room for one, the job with the least work is placed, where it ends soonest; a wide job has more of it."""
    jobs = [job("long", run_s=10 * HOUR_S), job("wide", units=2, run_s=0.75 * HOUR_S), job("short", run_s=HOUR_S)]
    crowd = [job(f"o{number}", units=8, run_s=99 * HOUR_S) for number in range(9)]  # nobody is due
    moves = decide(0.0, [*jobs, *crowd], pool("slow", free=0) | pool("fast", free=1), [], PolicyParams())
    assert placed(moves) == [("short", "fast")]


def test_a_job_waits_for_a_fast_pool_only_as_long_as_others_must() -> None:
    """It leaves a slow pool, for a part of what it would save, while an older job waits that has no choice."""
    half = pool("fast", units=16, free=0, running=[(9 * HOUR_S, 16)]) | pool("slow", free=4)
    wide = [job(f"wide{number}", units=8, run_s=40 * HOUR_S, submit_s=-HOUR_S) for number in range(9)]
    one, policy = job("j", run_s=10 * HOUR_S, submit_s=-60.0), PolicyParams(patience=0.1)
    assert placed(decide(0.0, [one], half, [], policy)) == [("j", "slow")]
    assert placed(decide(0.0, [one, *wide], half, [], policy)) == []
    assert placed(decide(0.0, [one, *wide], half, [], PolicyParams(patience=0.001))) == [("j", "slow")]
    newer = [replace(item, submit_s=-61.0) for item in wide]
    assert placed(decide(0.0, [one, *newer], half, [], policy)) == [("j", "slow")]


def test_a_wide_job_leaves_the_last_units_of_a_fast_pool_to_small_ones() -> None:
    """Where the small ones alone would fill the fast pool; in an almost empty one it takes the best."""
    wide, one = job("wide", units=8), job("one")
    slow = pool("slow", units=64, free=16, running=[(HOUR_S, 2)] * 24)
    full = pool("fast", units=64, free=8, running=[(HOUR_S, 1)] * 56)
    assert placed(decide(0.0, [wide], full | slow, [], PolicyParams())) == [("wide", "slow")]
    assert placed(decide(0.0, [one], full | slow, [], PolicyParams())) == [("one", "fast")]
    empty = pool("fast", units=64, free=56, running=[(HOUR_S, 1)] * 8)
    assert placed(decide(0.0, [wide], empty | slow, [], PolicyParams())) == [("wide", "fast")]


@given(worlds())
@settings(max_examples=300, deadline=None)
def test_a_job_as_large_as_any_finds_room_as_in_a_federation(
    world: tuple[float, list[PendingJob], dict[str, PoolState], list[Ticket], PolicyParams],
) -> None:
    """A job starts elsewhere than a federation would only if that leaves as large a free block, or a large one."""
    now, jobs, pools, _, _ = world
    pools = {name: replace(one, is_unreachable=False) for name, one in pools.items()}
    largest = max((units for one in pools.values() for _, units in one.running), default=0)
    for item in jobs:
        rooms = [one for one in item.options if one.pool in pools and one.units <= pools[one.pool].free]
        starts = placed(decide(now, [item], pools, [], PolicyParams(patience=0.0, last_unit=9.0)))
        if rooms and starts:
            fastest = min(rooms, key=lambda one: one.run_s)
            assert _block(pools, starts[0][1], fastest.units) >= min(
                largest, _block(pools, fastest.pool, fastest.units)
            )


def _block(pools: dict[str, PoolState], start: str, units: int) -> int:
    return max(one.free - units * (name == start) for name, one in pools.items())


def test_small_jobs_do_not_fill_a_pool_before_the_first_who_is_too_wide() -> None:
    """The wide job that is first keeps what comes free; only what ends before it starts, or fits beside it, passes."""
    running = [(20 * HOUR_S, 4)]
    wide = job("wide", units=6, run_s=0.1 * HOUR_S, pools=["middle"])
    long = [job(f"long{n}", run_s=50 * HOUR_S, pools=["middle"]) for n in range(4)]
    quick = job("quick", run_s=0.5 * HOUR_S, pools=["middle"])
    room = pool("middle", free=4, running=running)
    assert {name for name, _ in placed(decide(0.0, [wide, quick, *long], room, [], PolicyParams()))} == {
        "quick",
        "long0",
        "long1",
    }


def test_a_due_job_goes_before_shorter_ones() -> None:
    """Once it has waited as long as all pools together need for what is pending, the longest job goes first."""
    jobs = [job("short", run_s=HOUR_S, units=8, pools=["slow"])]
    for age_s, first in ((40 * HOUR_S, "short"), (70 * HOUR_S, "old")):
        old = job("old", run_s=30 * HOUR_S, units=8, submit_s=-age_s, pools=["slow"])
        moves = decide(0.0, [*jobs, old], pool("slow"), [], PolicyParams(due_share=1.0))
        assert placed(moves) == [(first, "slow")]


def test_a_job_that_must_wait_for_units_is_due_sooner() -> None:
    """Of two of one age the wide one, whose units are free only hours later: what would delay it is not started."""
    old = -8 * HOUR_S
    wide = job("wide", units=8, run_s=6 * HOUR_S, submit_s=old, pools=["middle"])
    long = job("long", units=4, run_s=9 * HOUR_S, submit_s=old, pools=["middle"])
    last = job("last", units=8, run_s=5 * HOUR_S, pools=["middle"])
    half = pool("middle", free=4, running=[(20 * HOUR_S, 4)])
    assert placed(decide(0.0, [wide, long, last], half, [], PolicyParams())) == []
    assert placed(decide(0.0, [wide, long, last], half, [], PolicyParams(limit_usage=0.0))) == [("long", "middle")]


def test_a_job_queues_behind_others_where_they_take_every_free_unit() -> None:
    """Up to our share of the queue, shortest first, however large the backlog; never more."""
    full = pool("middle", free=0, running=[(HOUR_S, 8)], tickets=2, others=(999, 999 * HOUR_S))
    jobs = [job(f"j{hours}", run_s=hours * HOUR_S, units=8, pools=["middle"]) for hours in (3, 1, 2)]
    moves = decide(0.0, jobs, full, [], PolicyParams())
    assert placed(moves) == [("j1", "middle"), ("j2", "middle")]
    tickets = [Ticket(job_id=move.job_id, pool=move.pool, submitted_s=0.0) for move in moves]
    assert decide(0.0, jobs, full, tickets, PolicyParams()) == []


def test_the_work_of_others_who_wait_lengthens_the_wait() -> None:
    """A job queues behind the smaller backlog, and behind none where a pool without others is free sooner."""
    one = [job("j", units=8, run_s=HOUR_S, pools=["fast", "middle", "slow"])]

    def full(name: str, hours: float) -> dict[str, PoolState]:
        return pool(name, free=0, running=[(HOUR_S, 4)], others=(64, 64 * hours * HOUR_S))

    assert placed(decide(0.0, one, full("fast", 9.0) | full("middle", 1.0), [], PolicyParams())) == [("j", "middle")]
    assert placed(decide(0.0, one, full("fast", 1.0) | full("middle", 9.0), [], PolicyParams())) == [("j", "fast")]
    ours_alone = pool("slow", free=0, running=[(HOUR_S, 8)])
    assert placed(decide(0.0, one, full("middle", 9.0) | ours_alone, [], PolicyParams())) == []


def test_a_ticket_moves_only_when_that_pays_and_not_at_once() -> None:
    """It is withdrawn for a pool that could start it now, unless the gain is small or it was only just placed."""
    one = job("j", units=8, run_s=HOUR_S)
    ticket = [Ticket(job_id="j", pool="slow", submitted_s=-HOUR_S)]
    target = pool("slow", free=0, running=[(10 * HOUR_S, 8)])
    moves = decide(0.0, [one], target | pool("fast"), ticket, PolicyParams())
    assert [(move.job_id, move.pool) for move in moves if isinstance(move, Withdraw)] == [("j", "slow")]
    assert not placed(moves)
    assert decide(0.0, [one], target | pool("fast", free=4), ticket, PolicyParams()) == []
    assert decide(0.0, [one], target | pool("fast", is_dark=True), ticket, PolicyParams()) == []
    assert decide(0.0, [one], target | pool("fast"), ticket, PolicyParams(hysteresis=1000.0)) == []
    fresh = [Ticket(job_id="j", pool="slow", submitted_s=-60.0)]
    assert decide(0.0, [one], target | pool("fast"), fresh, PolicyParams()) == []


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_no_ticket_goes_to_and_fro(seed: int) -> None:
    """However pools fill and empty, a job is withdrawn at most once in min_wait_before_move_s."""
    rng = random.Random(seed)
    one, policy, now = (
        job("j", units=8, run_s=5 * HOUR_S, submit_s=-HOUR_S),
        PolicyParams(),
        0.0,
    )
    tickets: list[Ticket] = []
    withdrawn: list[float] = []
    for _ in range(100):
        now += 60.0
        free = rng.choice([0, 0, 8])
        pools: dict[str, PoolState] = {}
        for name in POOLS:
            full = [(now + rng.uniform(0, 100) * HOUR_S, 8 - free)] if free < 8 else []
            pools |= pool(name, free=free, running=full)
            free = rng.choice([0, 0, 0, 4])
        for move in decide(now, [one], pools, tickets, policy):
            if isinstance(move, Withdraw):
                tickets = [ticket for ticket in tickets if ticket.pool != move.pool]
                withdrawn.append(now)
            else:
                tickets.append(Ticket(job_id=move.job_id, pool=move.pool, submitted_s=now))
        assert len(tickets) <= 1
    assert all(later - sooner >= policy.min_wait_before_move_s for sooner, later in pairwise(withdrawn))


def test_staging_counts_as_time_to_the_end() -> None:
    """A fast pool that has the data wins over a faster one that must copy it for hours."""
    options = (
        PlacementOption(pool="fast", units=1, run_s=HOUR_S, limit_s=HOUR_S, copy_s=5 * HOUR_S),
        PlacementOption(pool="middle", units=1, run_s=2 * HOUR_S, limit_s=3 * HOUR_S),
    )
    moves = decide(
        0.0, [PendingJob(job_id="j", submit_s=0.0, options=options)], pool("fast") | pool("middle"), [], PolicyParams()
    )
    assert placed(moves) == [("j", "middle")]


def test_nothing_starts_that_would_reach_into_a_closed_window() -> None:
    """Before maintenance only what ends in time is placed there; the others go where nothing is closed."""
    closed = pool("fast", closed=[(2 * HOUR_S, 9 * HOUR_S)])
    brief, long_ = job("brief", run_s=HOUR_S), job("long", run_s=2 * HOUR_S)
    assert placed(decide(0.0, [long_, brief], closed, [], PolicyParams())) == [("brief", "fast")]
    both = decide(0.0, [long_, brief], closed | pool("middle"), [], PolicyParams())
    assert sorted(placed(both)) == [("brief", "fast"), ("long", "middle")]
    assert sorted(placed(decide(9 * HOUR_S, [long_, brief], closed, [], PolicyParams()))) == [
        ("brief", "fast"),
        ("long", "fast"),
    ]


def test_a_ticket_that_waits_for_a_window_keeps_nobody_out() -> None:
    """It cannot start before the maintenance is over: until then its units are for those who can."""
    closed = pool("fast", closed=[(2 * HOUR_S, 9 * HOUR_S)])
    jobs = [job("long", units=8, run_s=20 * HOUR_S), *(job(f"brief{number}", run_s=HOUR_S) for number in range(8))]
    moves = decide(0.0, jobs, closed, [Ticket(job_id="long", pool="fast", submitted_s=0.0)], PolicyParams())
    assert len(placed(moves)) == 8


def test_a_ticket_that_waits_for_a_window_moves() -> None:
    """Where another pool could start it now, and end it long before this one opens."""
    pools = pool("fast", closed=[(HOUR_S, 90 * HOUR_S)]) | pool("slow")
    waits = Ticket(job_id="long", pool="fast", submitted_s=-HOUR_S)
    moves = decide(0.0, [job("long", run_s=2 * HOUR_S)], pools, [waits], PolicyParams())
    assert [(move.job_id, move.pool) for move in moves if isinstance(move, Withdraw)] == [("long", "fast")]
