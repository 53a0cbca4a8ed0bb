"""What-ifs as text become worlds, and a wrong word names itself."""

from __future__ import annotations

import msgspec
import pytest

from pitools.capacity.cheapest import parse_goal
from pitools.capacity.what_if import apply_changes, owned_cost, shift_windows
from pitools.capacity.workload import TraceNames
from pitools.core.errors import UsageError
from pitools.place.simulate.model import DAY_S, HOUR_S, Scenario, SimPool

NAMES = TraceNames(["robots", "vision"], ["idle", "slow", "urgent"])
TODAY = Scenario(
    name="today", pools=(SimPool(pool="near", gpus=64, price=2.0), SimPool(pool="far", gpus=32)), tiers={"urgent": 2}
)


def test_every_change_changes_what_it_names_and_nothing_else() -> None:
    """Each change of the grammar is in the world, several add up, and today's scenario is untouched."""
    text = (
        "gpus near +64, away far 10d 2d, down near 3d 6h, tier idle -1, preempt urgent idle, preempt urgent slow, "
        "team vision x2, load x1.5, limit 12h, rent cloud 128 2.5"
    )
    world = apply_changes(text, TODAY, NAMES)
    near, far, cloud = world.scenario.pools
    assert (near.gpus, far.gpus, cloud.gpus, cloud.price) == (128, 32, 128, 2.5)
    assert far.maintenance_windows == ((10 * DAY_S, 12 * DAY_S),)
    assert near.outage_windows == ((3 * DAY_S, 3.25 * DAY_S),)
    assert world.scenario.preempts == {"urgent": {"idle", "slow"}}
    assert world.scenario.tiers == {"urgent": 2, "idle": -1}
    assert world.team_factors == {"vision": 3.0, "": 1.5}
    assert world.scenario.max_limit_s == 12 * HOUR_S
    assert world.rented == {"cloud"}
    assert owned_cost(world, 1) == 128 * 2.0 * 24
    assert apply_changes("", TODAY, NAMES).scenario == TODAY
    shifted = shift_windows(world.scenario, DAY_S).pools
    assert (shifted[0].outage_windows, shifted[1].maintenance_windows) == (
        ((4 * DAY_S, 4.25 * DAY_S),),
        ((11 * DAY_S, 13 * DAY_S),),
    )


def test_the_order_of_a_load_and_a_team_does_not_matter() -> None:
    """A team that doubles under 1.5 times the load has three times its jobs, whichever is written first."""
    worlds = [
        apply_changes(text, TODAY, TraceNames(["a"], [])) for text in ("team a x2, load x1.5", "load x1.5, team a x2")
    ]
    assert worlds[0].team_factors == worlds[1].team_factors


def test_a_name_of_several_words_is_quoted() -> None:
    """Also one with a comma, in what-ifs and goals."""
    world = apply_changes('team "ro,bots" x2,team "big lab" x3', TODAY, TraceNames(["big lab", "ro,bots"], []))
    assert world.team_factors == {"ro,bots": 2.0, "big lab": 3.0, "": 1.0}
    assert parse_goal('team "big lab" p95 30m').group == "team big lab"


def test_the_load_of_a_scenario_is_a_factor_of_the_jobs() -> None:
    """Jobs that arrive faster would leave the end of the period empty: there are more of them instead."""
    world = apply_changes("load x2", msgspec.structs.replace(TODAY, load=1.5), NAMES)
    assert (world.scenario.load, world.team_factors) == (1.0, {"": 3.0})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("gpu near +64", 'no change "gpu"'),
        ("gpus nera +64", 'no pool "nera"'),
        ("gpus near -64", "at least one left"),
        ("gpus near many", "a whole number"),
        ("gpus near +1.5", "a whole number"),
        ("load x0", "above 0"),
        ("rent cloud 8 nan", "a price"),
        ("gpus near", "expected 2"),
        ("team visoin x2", 'no team "visoin"'),
        ("team vision 2", "a factor"),
        ("tier urgnet 3", 'no tier "urgnet"'),
        ("preempt idle urgent", "expected one below 0"),
        ("preempt urgent idle, tier idle 2", "expected one below 2"),
        ("down near 1d 0h", "above 0"),
        ("limit 5s", "a minute"),
        ("limit 12", "no unit"),
        ("down near 3 1d", "no unit"),
        ("gpus near 64", "its sign"),
        ("rent cloud 8 $2.5", "a price"),
        ("team robots x0, team vision x0", "no jobs are left"),
        ("limit soon", "soon"),
        ("rent near 8 1", "a new name"),
        ("gpus near +16, gpus near +16", "gpus: twice"),
        ("limit 1d, team vision x2, limit 2d", "limit: twice"),
        ("rent cloud 0 1", "above 0"),
    ],
)
def test_a_wrong_change_is_named(text: str, named: str) -> None:
    """A change that is not understood is an error of usage that says what was wrong, and in which change."""
    with pytest.raises(UsageError, match=named) as caught:
        apply_changes(text, TODAY, NAMES)
    assert caught.value.where.strip('"') in text != ""
    assert caught.value.hint


def test_a_pool_is_closed_by_a_window() -> None:
    """The hint of the change that leaves no GPU works."""
    with pytest.raises(UsageError) as caught:
        apply_changes("gpus far -32", TODAY, NAMES)
    assert apply_changes(caught.value.hint.partition("write ")[2], TODAY, NAMES).scenario.pools[1].maintenance_windows
