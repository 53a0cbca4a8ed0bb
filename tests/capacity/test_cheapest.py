"""The cheapest combination is the one that trying all of them finds."""

from __future__ import annotations

from itertools import combinations

import pytest

from pitools.capacity.ask import Period, simulate_all
from pitools.capacity.what_if import apply_changes
from pitools.capacity.cheapest import find_cheapest, parse_goal
from pitools.capacity.workload import names_of
from pitools.core.errors import UsageError
from pitools.place.simulate.model import Scenario, SimPool
from tests.capacity.made_month import month

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
    costs = [outcome.cost for outcome in every if goal.is_met(outcome)]
    if chosen is None:
        assert not costs
    else:
        assert outcomes[-1].what == ", ".join(chosen)
        assert outcomes[-1].cost == min(costs)


@pytest.mark.parametrize("text", ["", "urgent", "tier 1 p99 30m", "p95 30m", "everybody p95 30m", "all p95 soon"])
def test_a_goal_that_is_none_is_an_error(text: str) -> None:
    """A wrong group, quantile or time is an error of usage."""
    with pytest.raises(UsageError):
        parse_goal(text)


def test_a_goal_for_a_team_without_jobs_is_an_error() -> None:
    """A goal that nothing could miss would look reached."""
    with pytest.raises(UsageError, match="team visoin"):
        find_cheapest(TRACE, TODAY, OPTIONS, [parse_goal("team visoin p95 30m")], PERIOD, seeds=1)
