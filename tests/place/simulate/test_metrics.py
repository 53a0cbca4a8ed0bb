"""Figures of a replay, against arithmetic by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pitools.place.simulate import engine, metrics, plots
from pitools.place.simulate.model import Trace
from tests.place.simulate.small_scenario import scenario, trace


def test_figures_by_hand() -> None:
    """Two pools, one twice as fast; three jobs, one of which waits."""
    world = scenario(4, 4)
    fast = msgspec.structs.replace(world.pools[0], speed=2.0)
    world = msgspec.structs.replace(world, pools=(fast, world.pools[1]))
    jobs = trace((0, 4, 100, 100), (0, 2, 20, 20), (10, 4, 40, 40))
    result = engine.simulate(jobs, world, "federation")
    # j0 in the fast pool until 50; j1 in the other until 20; j2 from 20 to 60 there.
    assert [list(result.start_s), list(result.end_s)] == [[0, 0, 20], [50, 20, 60]]
    summary = metrics.summarize(result, jobs)
    assert summary.utilisation == pytest.approx((4 * 50 + 2 * 20 + 4 * 40) / (8 * 60))
    assert summary.goodput == pytest.approx(summary.utilisation)  # nothing was lost
    assert summary.slowdown == pytest.approx((1 + 1 + 50 / 40) / 3)
    assert summary.jain == pytest.approx((3.25**2) / (3 * (1 + 1 + 1.25**2)))
    # Idle: 0 and 2 until 20, none until 50, then 4 and 0: never apart.
    assert summary.fragmentation == 0.0
    assert summary.wait_by_gpus_s == {"1": 0, "2-7": pytest.approx(10 / 3), "8": 0, "9-31": 0, "32+": 0}
    assert (summary.max_wait_s, summary.makespan_s, summary.jobs) == (10, 60, 3)


def test_idle_gpus_in_two_pools_are_apart() -> None:
    """Half of the time a third of what is idle is not in the pool with the most."""
    jobs = trace((0, 2, 50, 50), (50, 6, 50, 50))
    result = engine.simulate(jobs, scenario(4, 6), "federation")
    # Until 50: 2 and 6 idle, 2/8 apart; then j1 fills the second pool: 4 and 0.
    assert metrics.summarize(result, jobs).fragmentation == pytest.approx(0.5 * 0.25)


def halves() -> Trace:
    return trace((0, 4, 10, 10), (10, 4, 40, 40), (60, 4, 10, 10), (100, 4, 30, 30))


def test_a_half_counts_its_own_jobs_and_time() -> None:
    """Jobs by their submission; use of GPUs while the half lasts, whoever uses them."""
    jobs = halves()
    result = engine.simulate(jobs, scenario(8), "federation")
    first, second = (metrics.summarize(result, jobs, window) for window in ("first-half", "second-half"))
    assert (first.jobs, second.jobs) == (2, 2)
    assert (first.mean_jct_s, second.mean_jct_s) == (25, 20)
    assert first.utilisation == pytest.approx(4 * 50 / (8 * 50))
    assert second.utilisation == pytest.approx(4 * 10 / (8 * 50))  # the last runs when the half is over
    assert metrics.summarize(result, jobs).utilisation == pytest.approx(4 * 90 / (8 * 130))


def test_the_job_in_the_middle_is_of_one_half() -> None:
    """The halves are all jobs, none of them twice."""
    jobs = trace((0, 4, 10, 10), (50, 4, 10, 10), (100, 4, 10, 10))
    result = engine.simulate(jobs, scenario(8), "federation")
    assert [metrics.summarize(result, jobs, window).jobs for window in ("first-half", "second-half")] == [1, 2]


def test_owners_are_judged_by_their_means() -> None:
    """Jain's index is 1 where owners fare alike, though their jobs do not."""
    jobs = msgspec.structs.replace(halves(), owner=["ann", "bob", "ann", "bob"])
    result = engine.simulate(jobs, scenario(8), "federation")
    assert metrics.summarize(result, jobs).jain == 1.0


def test_a_trace_that_fits_nowhere_has_figures() -> None:
    """Nothing ran: noughts, not errors."""
    jobs = trace((0, 64, 10, 10))
    summary = metrics.summarize(engine.simulate(jobs, scenario(8), "federation"), jobs)
    assert (summary.jobs, summary.unplaced, summary.mean_jct_s, summary.utilisation) == (0, 1, 0, 0)


def test_tiers_are_served_in_order() -> None:
    """A higher tier passes a lower one that came before; waits are told by tier."""
    jobs = trace((0, 8, 100, 100), (1, 8, 10, 10), (2, 8, 10, 10), queues=("low", "low", "high"))
    world = scenario(8, tiers={"high": 2})
    result = engine.simulate(jobs, world, "federation")
    assert list(result.start_s) == [0, 110, 100]
    assert metrics.summarize(result, jobs).wait_by_tier_s == {"0": 54.5, "2": 98}


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    """Two policies in one PNG."""
    jobs = halves()
    results = [engine.simulate(jobs, scenario(4, 4), name) for name in ("federation", "random")]
    plots.draw_results(results, [metrics.summarize(result, jobs) for result in results], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
