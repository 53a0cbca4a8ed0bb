"""Partitions as pools: what is free, what runs until when, and what others wait for."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pitools.core import timestamps
from pitools.place.clusters.pools import estimate_start_s, pool_states, task_count, units_by_end, wait_until_free_s
from pitools.place.types import PoolState
from pitools.site.schema import Dialect
from pitools.slurm.records import Reservation
from pitools.slurm.states import is_schedulable, parse_node_state


def _in_s(seconds: float) -> str:
    return timestamps.to_rfc3339(datetime.fromtimestamp(time.time() + seconds, UTC))


def test_a_pool_is_what_its_nodes_are(made: Any) -> None:
    """GPUs in use, down or reserved are not free; others' queue is taken off, but for what waits for no node."""
    run_snapshot = made.snapshot(
        nodes=(
            made.node("n1", state="mixed", gpus_allocated=6),
            made.node("n2", state="allocated", gpus_allocated=8),
            made.node("n3"),
            made.node("n4"),
            made.node("n5", flags=("drain",)),
            made.node("n6", flags=("reserved",)),
        ),
        jobs=(
            made.job("1", node_list="n1", gres="gpu:4", end=_in_s(7200)),
            made.job("2", node_list="n1", gres="", end=""),
            made.job("3", node_list="n2", end=_in_s(3600)),
            made.job("4", state="PENDING", reason="Priority", gres="gpu:2", time_limit_s=600),
            made.job("5_[1-3%2]", state="PENDING", reason="Resources", gres="gpu:1", time_limit_s=60),
            made.job("6", state="PENDING", reason="Dependency"),
            made.job("7", state="PENDING", reason="Priority", name="ours"),
            made.job("8", state="PENDING", reason="", gres="gpu:1", time_limit_s=60),
            made.job("9", state="PENDING", reason="JobHeldUser"),
        ),
    )
    (pool,) = pool_states(run_snapshot, ["ours"], made.site())
    assert (pool.pool, pool.units, pool.others_pending, pool.free) == ("x/gpu", 40, 5, 2 + 16 - 5)
    assert pool.others_pending_s == 2 * 600 + 3 * 60
    assert [units for _, units in pool.running] == [8, 4, 2]
    assert pool.running[0][0] < pool.running[1][0]


@pytest.mark.parametrize(("gres", "units"), [("gpu:4", 4 * 3 + 1 * 2), ("", 8 * 3 + 8 * 2)])
def test_a_job_without_gpus_waits_for_none(made: Any, gres: str, units: int) -> None:
    """Where Slurm reports GPUs of any job, one without them counts as one a node; else all as whole nodes."""
    jobs = (
        made.job("1", state="PENDING", reason="Priority", gres=gres, nodes=3, time_limit_s=60),
        made.job("2", state="PENDING", reason="Priority", gres="", nodes=2, time_limit_s=60),
    )
    (pool,) = pool_states(made.snapshot(jobs=jobs), (), made.site())
    assert pool.others_pending == units
    running = tuple(msgspec.structs.replace(job, state="RUNNING", end=_in_s(60)) for job in jobs)
    freed = sum(units for _, units in units_by_end(made.snapshot(jobs=running), 8, lambda _: True))
    assert freed == (12 if gres else 40)


def test_the_cluster_s_clock_is_not_ours(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends are on our clock, by however much the cluster's is ahead; nothing ended before it was seen to run."""
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    jobs = (made.job("1", node_list="n1", end=_in_s(7200)), made.job("2", node_list="n2"))
    run_snapshot = made.snapshot(skew_s=3600.0, jobs=jobs)
    (pool,) = pool_states(run_snapshot, (), made.site())
    assert pool.running[0][0] == pytest.approx(now_s + 3600, abs=1)
    assert pool.running[1][0] > now_s + 86400 * 300
    assert [units for _, units in units_by_end(run_snapshot, 8, lambda job: job.account == "lab")] == [8, 8]
    assert units_by_end(run_snapshot, 8, lambda job: job.user == "me") == []


def test_partitions_that_share_nodes_are_equally_full(made: Any) -> None:
    """What runs on a node is in every pool that has the node; without GPUs a unit is a node."""
    nodes = tuple(made.node(f"n{i}", gres="", gpus=0, gpu_type="") for i in range(1, 5))
    run_snapshot = made.snapshot(
        nodes=nodes, jobs=(made.job("1", partition="other", nodes=2, node_list="n[3-4]", gres=""),)
    )
    (pool,) = pool_states(run_snapshot, (), made.site(gpu={"gpus_per_node": 0}))
    assert [units for _, units in pool.running] == [2]
    assert pool.units == 4


@pytest.mark.parametrize(
    ("job_id", "count"), [("7", 1), ("6_0", 1), ("6_[3-9]", 7), ("6_[1-9:4]", 3), ("6_[0,5-6%2]", 2), ("6_[odd]", 1)]
)
def test_an_array_is_as_many_jobs_as_could_run(job_id: str, count: int) -> None:
    """A line of squeue for the pending tasks of an array counts each, up to the array's own limit."""
    assert task_count(job_id) == count


def test_units_are_freed_in_order() -> None:
    """By whoever ends first; at once where there is room, and never where all of it is not enough."""
    held = [(100.0, 8), (200.0, 16)]
    assert [wait_until_free_s(held, need, 50.0) for need in (0, 8, 9, 24, 25)] == [0, 50, 150, 150, float("inf")]
    assert wait_until_free_s(held, 1, 150.0) == 0


def test_the_estimated_start_is_behind_the_work_of_others() -> None:
    """As Slurm estimates it: after running jobs, by limits, and after the work of who waits; outside of maintenance."""
    pool = PoolState(pool="x", units=16, free=2, running=[(100.0, 8)], others_pending=4, others_pending_s=16 * 60.0)
    assert [estimate_start_s(pool, units, 10.0, 0.0) for units in (2, 8, 9, 16, 17)] == [0, 60, 160, 160, float("inf")]
    closed = msgspec.structs.replace(pool, maintenance_windows=[(65.0, 500.0)])
    assert [estimate_start_s(closed, 8, limit_s, 0.0) for limit_s in (5.0, 6.0)] == [60, 500]


@pytest.mark.parametrize(
    ("node", "free"),
    [
        ({}, 8),
        ({"gpus_allocated": 3, "state": "mixed"}, 5),
        ({"gpus_allocated": 0, "state": "allocated"}, 0),
        ({"flags": ("planned",)}, 8),
        ({"flags": ("powered_down", "cloud")}, 8),
        ({"state": "reserved"}, 0),
        ({"flags": ("maintenance",)}, 0),
        ({"flags": ("blocked",)}, 0),
        ({"state": "down"}, 0),
        ({"gpus_allocated": None, "state": "mixed"}, 0),
    ],
)
def test_what_of_a_node_is_free(made: Any, node: dict[str, Any], free: int) -> None:
    """What could start now: not where all CPUs are taken, nor what is reserved, away, or may be in use."""
    run_snapshot = made.snapshot(nodes=(made.node("n1", **node),))
    assert pool_states(run_snapshot, (), made.site())[0].free == free


# As scontrol and sinfo print nodes that run nothing new.
GONE = ("{}+DRAIN", "{}+DRAIN+NOT_RESPONDING", "{}+FAIL", "{}+MAINTENANCE", "{}*", "{}+REBOOT_ISSUED", "{}+INVALID_REG")
GONE_BASES = ("DOWN", "DOWN*+DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "MAINT", "ERROR", "UNKNOWN", "FUTURE")
STATES = ("IDLE", "ALLOCATED", "MIXED", "IDLE+PLANNED", "IDLE+RESERVED", "ALLOCATED+COMPLETING")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_node_that_is_gone_is_no_capacity(made: Any, data: st.DataObject) -> None:
    """A pool is as if nodes that are drained, down or the like did not exist, and whatever runs there frees nothing."""
    gone = [form.format(base) for form in GONE for base in ("IDLE", "ALLOCATED", "MIXED")] + list(GONE_BASES)
    states = data.draw(st.lists(st.sampled_from(STATES) | st.sampled_from(gone), min_size=2, max_size=6))
    nodes = []
    for index, text in enumerate(states):
        state, flags = parse_node_state(text)
        used = data.draw(st.sampled_from([8, None])) if "ALLOCATED" in text else 0
        nodes.append(made.node(f"n{index}", state=state, flags=flags, gpus_allocated=used))
        assert is_schedulable(state, flags) is (text in STATES)
    busy = data.draw(st.lists(st.integers(0, len(states) - 1), unique=True))
    jobs = [made.job(str(index), node_list=f"n{index}", end=_in_s(60)) for index in busy]
    jobs.append(made.job("all", node_list=f"n[0-{len(states) - 1}]", end=_in_s(90)))
    left = tuple(node for node, text in zip(nodes, states, strict=True) if text in STATES)
    kept = tuple(job for job in jobs if job.job_id == "all" or states[int(job.job_id)] in STATES)
    seen_s = time.time()
    pools = pool_states(made.snapshot(nodes=tuple(nodes), jobs=tuple(jobs), seen_s=seen_s), (), made.site())
    alone = pool_states(made.snapshot(nodes=left, jobs=kept, seen_s=seen_s), (), made.site())
    seen = [(pool.units, pool.free, pool.running, pool.units_held_for_others) for pool in pools]
    wanted = [(pool.units, pool.free, pool.running, pool.units_held_for_others) for pool in alone]
    assert seen == (wanted or [(0, 0, [], 0)])


def test_a_partition_that_is_closed_is_no_pool(made: Any) -> None:
    """Nor is one of which the site file says nothing."""
    assert pool_states(made.snapshot(partition={"state": "down"}), (), made.site()) == []
    assert pool_states(made.snapshot(), (), made.site(partitions={})) == []


NOW_S = 1_800_000_000.0


def _kept(nodes: str, from_h: float, to_h: float, **values: Any) -> Reservation:
    """A reservation from so many hours after NOW_S on."""
    start, end = (timestamps.to_rfc3339(datetime.fromtimestamp(NOW_S + 3600 * hours, UTC)) for hours in (from_h, to_h))
    return Reservation(reservation=nodes, start=start, end=end, node_list=nodes, **values)


@pytest.mark.parametrize(
    ("kept", "windows"),
    [
        ([_kept("n[1-4]", 1, 3, flags=("maint",))], [(1, 3)]),
        ([_kept("n[1-3]", 1, 3)], []),
        ([_kept("n[1-2]", 1, 3), _kept("n[3-4]", 2, 4)], [(2, 3)]),
        ([_kept("n[1-4]", 1, 2), _kept("n[1-4]", 2, 3), _kept("m[1-9],n[1-4]", 5, 6)], [(1, 3), (5, 6)]),
        ([_kept("n[1-4]", -1, 1)], [(-1, 1)]),
        ([_kept("n[1-4]", -2, -1)], []),
        ([_kept("n[1-4]", 1, 3, cpus=4 * 64)], [(1, 3)]),
        ([_kept("n[1-4]", 1, 3, cpus=4)], []),
        ([_kept("n[1-4]", 1, 3, flags=("magnetic",))], []),
        ([_kept("", 1, 3)], []),
    ],
)
def test_reservations_of_every_node_close_a_pool(
    made: Any, kept: list[Reservation], windows: list[tuple[float, float]]
) -> None:
    """Together or each alone, while they last; not one that leaves nodes, or cores, or takes whatever job comes."""
    (pool,) = pool_states(made.snapshot(seen_s=NOW_S, reservations=tuple(kept)), (), made.site())
    assert pool.maintenance_windows == [(NOW_S + 3600 * first, NOW_S + 3600 * last) for first, last in windows]


@pytest.mark.parametrize(("flag", "is_closed"), [("drain", True), ("maintenance", False)])
def test_nodes_that_are_down_need_not_be_reserved(made: Any, flag: str, is_closed: bool) -> None:
    """A pool is closed when all that will run jobs is kept: nodes in maintenance will, too. Times are on our clock."""
    nodes = (*(made.node(f"n{i}") for i in (1, 2, 3)), made.node("n4", flags=(flag,)))
    run_snapshot = made.snapshot(seen_s=NOW_S, skew_s=600.0, nodes=nodes, reservations=(_kept("n[1-3]", 1, 3),))
    (pool,) = pool_states(run_snapshot, (), made.site())
    assert pool.maintenance_windows == ([(NOW_S + 3000, NOW_S + 3 * 3600 - 600)] if is_closed else [])


def test_a_reservation_of_our_own_closes_nothing(made: Any) -> None:
    """The site's flags name it: our jobs run in it."""
    run_snapshot = made.snapshot(seen_s=NOW_S, reservations=(_kept("n[1-4]", 1, 3),))
    for flag, closed in (("--reservation=a,n[1-4]", 0), ("--reservation=b", 1)):
        (pool,) = pool_states(run_snapshot, (), made.site(dialect=Dialect(extra=(flag,))))
        assert len(pool.maintenance_windows) == closed
