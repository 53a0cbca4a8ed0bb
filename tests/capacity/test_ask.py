"""What-ifs answer what they ask."""

from __future__ import annotations

import pytest

from pitools.capacity.ask import CapacityAnswer, Period, simulate_all, summarize_outcomes
from pitools.capacity.what_if import apply_changes
from pitools.capacity.workload import names_of
from pitools.place.simulate.model import DAY_S, Scenario, SimPool
from tests.capacity.made_month import month

TRACE = month(5, days=21)
TODAY = Scenario(name="today", pools=(SimPool(pool="near", gpus=96, price=1.0),), tiers={"": 0})


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str], CapacityAnswer]:
    """Answers of four worlds, by what-if and group."""
    texts = ("", "gpus near +64", "team vision x2", "rent cloud 64 3")
    worlds = [apply_changes(text, TODAY, names_of(TRACE)) for text in texts]
    outcomes = simulate_all(TRACE, worlds, Period(days=14), seeds=2)
    return {(answer.what, answer.group): answer for answer in summarize_outcomes(outcomes)}


def test_more_gpus_shorten_waits_and_cost_what_they_cost(answers: dict[tuple[str, str], CapacityAnswer]) -> None:
    """With more GPUs the p95 wait and the use fall, and the cost is that of all of them for the period."""
    today, more = answers["", "all"], answers["gpus near +64", "all"]
    assert more.wait_p95_s < today.wait_p95_s
    assert more.use == pytest.approx(today.use * 96 / 160, rel=0.1)
    assert (today.cost, more.cost) == (96 * 24 * 14, 160 * 24 * 14)


def test_a_team_that_doubles_has_twice_the_jobs(answers: dict[tuple[str, str], CapacityAnswer]) -> None:
    """The same days are drawn for each what-if: only the team that grows has more jobs."""
    assert answers["team vision x2", "team vision"].jobs == 2 * answers["", "team vision"].jobs
    assert answers["team vision x2", "team robots"].jobs == answers["", "team robots"].jobs


def test_a_rented_pool_is_paid_by_the_hours_of_its_jobs(answers: dict[tuple[str, str], CapacityAnswer]) -> None:
    """Rent is more than nothing, and less than for the whole period."""
    rent = answers["rent cloud 64 3", "all"].cost - answers["", "all"].cost
    assert 0 < rent < 64 * 3 * 24 * 14


def test_a_longest_limit_splits_jobs_and_keeps_their_work() -> None:
    """A job of ten days under a limit of four is three submissions, of four, four and two days."""
    from pitools.place.simulate import engine

    trace = month(1, days=1, per_day=2.0)
    one = type(trace)(
        **{key: getattr(trace, key)[:1] for key in ("job_id", "gpus", "limit_s", "owner", "job_name", "queue")},
        name="one",
        submit_s=[0.0],
        run_s=[10 * DAY_S],
        rank_score=[0.0],
    )
    result = engine.simulate(one, Scenario(name="x", pools=TODAY.pools, max_limit_s=4 * DAY_S), "federation")
    lengths = [end - start for start, end in zip(result.spans.start_s, result.spans.end_s, strict=True)]
    assert lengths == pytest.approx([4 * DAY_S, 4 * DAY_S, 2 * DAY_S])
    assert result.end_s[0] == pytest.approx(10 * DAY_S)
