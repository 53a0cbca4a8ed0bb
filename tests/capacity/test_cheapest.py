"""The cheapest combination is the one that trying all of them finds."""

from __future__ import annotations

from itertools import combinations

import msgspec
import pytest

from pitools.capacity.ask import Period, simulate_all
from pitools.capacity.cheapest import find_cheapest, parse_goal
from pitools.capacity.what_if import apply_changes
from pitools.capacity.workload import names_of
from pitools.core.errors import UsageError
from pitools.place.simulate.model import Scenario, SimPool
from tests.capacity.made_month import month
from tests.capacity.test_ask import daily

TRACE = month(5, days=14)
TODAY = Scenario(name="today", pools=(SimPool(pool="near", gpus=80, price=1.0),))
OPTIONS = ("gpus near +32", "rent cloud 64 3", "limit 2h")
PERIOD = Period(days=7)


@pytest.mark.parametrize("most", ["1s", "10m", "1h", "10h", "9d"])
def test_the_cheapest_of_all_combinations_is_found(most: str) -> None:
    """No combination that reaches the goal costs less; without any, there is none."""
    goal = parse_goal(f"all p95 {most}")
    chosen, outcomes = find_cheapest(TRACE, TODAY, OPTIONS, [goal], PERIOD, seeds=1)
    texts = [", ".join(each) for number in range(4) for each in combinations(OPTIONS, number)]
    every = simulate_all(TRACE, [apply_changes(text, TODAY, names_of(TRACE)) for text in texts], PERIOD, seeds=1)
    costs = [outcome.cost for outcome in every if goal.excess(outcome) <= 1]
    if chosen is None:
        assert not costs
    else:
        assert outcomes[-1].what_if == ", ".join(chosen)
        assert outcomes[-1].cost == min(costs)


def test_of_two_that_cost_the_same_the_one_with_fewer_options_is_chosen() -> None:
    """Two GPUs owned for a week cost as much as two rented pools of half the hours at twice the price."""
    jobs = daily(gpus=1, hours=12.0)
    columns = {
        key: [value for value in getattr(jobs, key) for _ in range(3)]
        for key in jobs.__struct_fields__
        if isinstance(getattr(jobs, key), list)
    }
    today = Scenario(name="today", pools=(SimPool(pool="p", gpus=1, price=1.0),))
    options, goal = ["rent q 1 2", "rent r 1 2", "gpus p +2"], parse_goal("all p95 1s")
    chosen, _ = find_cheapest(msgspec.structs.replace(jobs, **columns), today, options, [goal], PERIOD, seeds=1)
    assert chosen == ["gpus p +2"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "urgent",
        "queue a p95 30m",
        "tier a p99 30m",
        "p95 30m",
        "everybody p95 30m",
        "all p95 soon",
        "tier p95 30m",
        "all p95 30",
    ],
)
def test_a_goal_that_is_none_is_an_error(text: str) -> None:
    """A wrong group, quantile or time is an error of usage."""
    with pytest.raises(UsageError):
        parse_goal(text)


@pytest.mark.parametrize(
    ("goal", "options", "named"),
    [
        ("team visoin p95 30m", OPTIONS, "team visoin"),
        ("tier 1 p95 30m", OPTIONS, "tier 1"),
        ("all p95 30m", ("load x0.5",), "nothing to buy"),
        ("all p95 30m", ("gpus far +8",), "cost nothing"),
        ("all p95 30m", ("rent cloud 8 0",), "cost nothing"),
    ],
)
def test_what_would_be_reached_or_bought_for_nothing_is_an_error(
    goal: str, options: tuple[str, ...], named: str
) -> None:
    """Groups that the trace lacks, fewer jobs, and GPUs without a price."""
    today = Scenario(name="today", pools=(*TODAY.pools, SimPool(pool="far", gpus=8)))
    with pytest.raises(UsageError, match=named):
        find_cheapest(TRACE, today, options, [parse_goal(goal)], PERIOD, seeds=1)


@pytest.mark.parametrize("group", ["all", "tier only", "team robots"])
def test_a_group_misses_its_goal_however_few_groups_there_are(group: str) -> None:
    """Also that of the only tier or team."""
    trace = msgspec.structs.replace(TRACE, account=["robots"] * len(TRACE), queue=["only"] * len(TRACE))
    small = Scenario(name="today", pools=(SimPool(pool="near", gpus=64, price=1.0),))
    chosen, outcomes = find_cheapest(trace, small, ["gpus near +1"], [parse_goal(f"{group} p95 1s")], PERIOD, seeds=1)
    assert chosen is None
    assert [outcome.what_if for outcome in outcomes] == ["", "gpus near +1"]  # the nearest


def test_a_group_without_jobs_in_a_period_is_an_error() -> None:
    """Its goal would be neither reached nor missed."""
    trace = msgspec.structs.replace(TRACE, account=["rare", *TRACE.account[1:]], queue=["a"] * len(TRACE))
    with pytest.raises(UsageError, match="in one of the 9 periods"):
        find_cheapest(trace, TODAY, OPTIONS, [parse_goal("team rare p95 30m")], PERIOD, seeds=9)


@pytest.mark.parametrize(("made", "option", "shown"), [(2, "limit 9d", 0), (5, "gpus near +1", 3)])
def test_only_what_comes_nearer_than_today_is_shown_with_all_seeds(made: int, option: str, shown: int) -> None:
    """A limit that cuts no job changes nothing: one of its seeds is not compared with the worst of today's."""
    goal, trace = parse_goal("all p95 1s"), month(made, days=21)
    chosen, outcomes = find_cheapest(trace, TODAY, [option], [goal], PERIOD, seeds=3)
    assert chosen is None
    assert [(outcome.what_if, outcome.seed) for outcome in outcomes[3:]] == [(option, seed) for seed in range(shown)]


def test_all_goals_are_to_be_met_with_every_seed() -> None:
    """One that is met does not make up for one that is missed; options that exclude each other are not combined."""
    goals = [parse_goal("all p95 9d"), parse_goal("all p95 1s")]
    assert find_cheapest(TRACE, TODAY, [], goals, PERIOD, seeds=1)[0] is None
    chosen, outcomes = find_cheapest(TRACE, TODAY, ["gpus near +900"], goals, PERIOD, seeds=2)
    assert chosen == ["gpus near +900"]
    assert [outcome.seed for outcome in outcomes] == [0, 1] * 2
    large = Scenario(name="today", pools=(SimPool(pool="near", gpus=9999, price=1.0),))
    for options in ([], ["rent a 8 1", "rent a 16 1"]):
        assert find_cheapest(TRACE, large, options, [parse_goal("all p95 0s")], PERIOD, seeds=1)[0] == []
    with pytest.raises(UsageError):
        find_cheapest(TRACE, TODAY, [f"limit {n}h" for n in range(1, 8)], [parse_goal("all p95 9d")], PERIOD, seeds=1)
