"""What-ifs answer what they ask."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from pitools.capacity.ask import (
    CapacityAnswer,
    Period,
    replay_queue,
    simulate_all,
    summarize_outcomes,
    summarize_replay,
    warm_up,
)
from pitools.capacity.what_if import apply_changes
from pitools.capacity.workload import names_of
from pitools.place.simulate import engine
from pitools.place.simulate.model import DAY_S, HOUR_S, Scenario, SimPool, Trace
from tests.capacity.made_month import month

TRACE = month(5, days=21)
TODAY = Scenario(name="today", pools=(SimPool(pool="near", gpus=96, price=1.0),), tiers={"": 0})


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str], CapacityAnswer]:
    """Answers of four worlds, by what-if and group."""
    texts = ("", "gpus near +64", "team vision x2", "rent cloud 64 3")
    worlds = [apply_changes(text, TODAY, names_of(TRACE)) for text in texts]
    outcomes = simulate_all(TRACE, worlds, Period(days=14), seeds=2)
    return {(answer.what_if, answer.group): answer for answer in summarize_outcomes(outcomes)}


def test_more_gpus_shorten_waits_and_cost_what_they_cost(answers: dict[tuple[str, str], CapacityAnswer]) -> None:
    """With more GPUs the p95 wait and the use fall, and the cost is that of all of them for the period."""
    today, more = answers["", "all"], answers["gpus near +64", "all"]
    assert more.wait_p95_s < today.wait_p95_s
    assert more.utilisation == pytest.approx(today.utilisation * 96 / 160, rel=0.1)
    assert (today.cost, more.cost) == (96 * 24 * 14, 160 * 24 * 14)


def test_a_team_that_doubles_has_twice_the_jobs(answers: dict[tuple[str, str], CapacityAnswer]) -> None:
    """The same days are drawn for each what-if, and others of the same weekday: only the team that grows has more."""
    assert answers["team vision x2", "team vision"].jobs == pytest.approx(2 * answers["", "team vision"].jobs, rel=0.3)
    assert answers["team vision x2", "team robots"].jobs == answers["", "team robots"].jobs


def test_a_rented_pool_is_paid_by_the_hours_of_its_jobs(answers: dict[tuple[str, str], CapacityAnswer]) -> None:
    """Rent is more than nothing, and less than for the whole period."""
    rent = answers["rent cloud 64 3", "all"].cost - answers["", "all"].cost
    assert 0 < rent < 64 * 3 * 24 * 14


def daily(gpus: int = 2, hours: float = 10.0, days: int = 14, weekday: int = 7) -> Trace:
    """A job at ten o'clock of each day of a week before `weekday`; the last a minute before midnight ends the days."""
    at_s = [day * DAY_S + 10 * HOUR_S for day in range(days) if day % 7 < weekday]
    blank, number = [""] * len(at_s), len(at_s)
    columns = {
        "owner": blank,
        "job_name": blank,
        "queue": blank,
        "limit_s": [0.0] * number,
        "rank_score": [0.0] * number,
    }
    return Trace(
        name="daily",
        job_id=[str(job) for job in range(number)],
        submit_s=[moment - at_s[0] for moment in at_s],
        gpus=[gpus] * number,
        run_s=[hours * HOUR_S] * number,
        began_s=4 * DAY_S + at_s[0],
        **columns,
    )


def answer_all(trace: Trace, text: str, gpus: int = 2, days: int = 7) -> CapacityAnswer:
    """The answer for all jobs to one what-if, on a pool of so many GPUs at 1 an hour."""
    today = Scenario(name="today", pools=(SimPool(pool="p", gpus=gpus, price=1.0),))
    outcomes = simulate_all(trace, [apply_changes(text, today, names_of(trace))], Period(days=days), seeds=1)
    return next(answer for answer in summarize_outcomes(outcomes) if answer.group == "all")


def test_the_pools_are_full_when_the_period_begins() -> None:
    """Of a daily job that runs for twenty days there are twenty, from the first hour of a week on."""
    long = daily(gpus=1, hours=480.0)
    assert answer_all(long, "", gpus=20, days=7).utilisation == pytest.approx(1.0)
    assert warm_up(daily()) == (7, 0.0)
    assert warm_up(msgspec.structs.replace(daily(), wait_s=[13.8 * DAY_S] * 14)) == (21, 0.0)
    assert warm_up(daily(hours=200 * 24.0)) == (91, pytest.approx(109 / 200))


def test_a_wait_is_all_the_time_that_a_job_does_not_run() -> None:
    """Of a job that an outage or a limit cuts, also the time between its attempts: cutting jobs saves no wait."""
    down = answer_all(daily(), "down p 3d12h 4h", days=15)
    # Of the day's ten hours two are done; a checkpoint each hour. The p95 lies between the longest two of 15 waits.
    assert down.wait_p95_s == pytest.approx(0.3 * 4 * HOUR_S)
    crowded = daily(hours=30.0)
    whole, cut = (answer_all(crowded, text) for text in ("", "limit 2h"))
    assert cut.wait_p50_s > whole.wait_p50_s / 2 > 0


def test_goodput_is_what_no_outage_undid_in_the_period() -> None:
    """Half an hour is done twice: it is in the time held, and not in the work of 140 GPU hours."""
    answer = answer_all(daily(), "down p 3d12h30m 1h", days=7)
    assert answer.utilisation == pytest.approx(7 * 20 / 336 + 2 * 0.5 / 336)
    assert answer.goodput == pytest.approx(7 * 20 / 336)
    elsewhere = answer_all(daily(), "down p 3d12h30m 1h, rent c 2 1", days=7)  # the rest of the job is done there
    assert elsewhere.utilisation == pytest.approx((6 * 20 + 2 * 2.5) / 336)
    assert elsewhere.goodput == pytest.approx((6 * 20 + 2 * 2) / 336)


def test_a_trace_without_accounts_has_tiers_and_no_teams() -> None:
    """A queue is no team; a job without either is counted with all."""
    queues = [("", "low", "high")[job % 3] for job in range(len(TRACE))]
    trace = msgspec.structs.replace(TRACE, account=[""] * len(TRACE), queue=queues)
    outcomes = simulate_all(trace, [apply_changes("", TODAY, names_of(trace))], Period(days=7), seeds=1)
    assert [answer.group for answer in summarize_outcomes(outcomes)] == ["all", "tier high", "tier low"]


def test_the_period_ends_after_its_days() -> None:
    """Not with the last job: who rests at weekends owns the GPUs all week; rented ones without jobs are not idle."""
    answer = answer_all(daily(weekday=5), "rent cloud 6 1")
    assert (answer.cost, answer.utilisation) == (336.0, pytest.approx(5 * 20 / 336))
    # Ten hours started by each of seven jobs; none of the week before.
    assert answer_all(daily(gpus=4, hours=9.5), "rent cloud 4 1").cost == 336 + 4 * 10 * 7


def test_a_rented_pool_that_is_always_full_costs_its_period() -> None:
    """Of attempts that began before it or go on after it, the hours within."""
    assert answer_all(daily(gpus=4, hours=72.0), "rent cloud 4 1").cost == 336 + 4 * 168


def test_answers_are_medians_between_the_lowest_and_the_highest_seed() -> None:
    """As of the p95 wait."""
    (one,) = simulate_all(TRACE, [apply_changes("", TODAY, names_of(TRACE))], Period(days=1), seeds=1)
    waits = [msgspec.structs.replace(one.waits["all"], p95=wait_s) for wait_s in (9.0, 1.0, 2.0)]
    outcomes = [msgspec.structs.replace(one, waits={"all": each}) for each in waits]
    (answer,) = summarize_outcomes(outcomes)
    assert (answer.wait_p95_low_s, answer.wait_p95_s, answer.wait_p95_high_s) == (1, 2, 9)


def test_each_seed_is_a_period_of_its_own_and_always_the_same() -> None:
    """The last of several is what it is alone; and a period of growth has more jobs."""
    world = apply_changes("", TODAY, names_of(TRACE))
    *_, last = every = simulate_all(TRACE, [world], Period(days=2), seeds=6)
    assert [outcome.seed for outcome in every] == list(range(6))
    assert [last] == list(replay_queue(TRACE, Period(days=2), [(world, 5)]))
    (grown,) = simulate_all(TRACE, [world], Period(days=2, growth_per_week=1.0), seeds=1)
    assert grown.waits["all"].jobs > 2 * every[0].waits["all"].jobs


def test_jobs_that_fit_nowhere_wait_for_ever() -> None:
    """They are a record, and no goal is reached with them; a few of them leave the p95 of the others."""
    answer = answer_all(daily(gpus=8), "")
    assert (answer.jobs, answer.unfinished, answer.wait_p50_s) == (7, 7, inf)
    trace = msgspec.structs.replace(TRACE, gpus=[8 if job % 50 else 999 for job in range(len(TRACE))])
    few = answer_all(trace, "", gpus=96)
    assert 0 < few.unfinished < few.jobs / 20
    assert few.wait_p95_s < inf


def test_a_median_lies_between_two_waits() -> None:
    """As of `pit capacity workload` and `pit place simulate`; next to one that never ends it does not end."""
    blank = msgspec.structs.replace(daily(gpus=2), submit_s=[0.0] * 14)
    for hours, p50_s in (([9.0] * 14, 6.5 * 9 * HOUR_S), ([9.0] * 7 + [inf] * 7, inf)):
        gpus = [99 if each == inf else 2 for each in hours]
        trace = msgspec.structs.replace(blank, gpus=gpus, run_s=[9 * HOUR_S] * 14)
        result = engine.simulate(trace, Scenario(name="x", pools=(SimPool(pool="p", gpus=2),)), "federation")
        world = apply_changes("", result.scenario, names_of(trace))
        assert summarize_replay(result, trace, world, 0, (0.0, 14 * DAY_S)).waits["all"].p50 == p50_s


def test_a_longest_limit_splits_jobs_and_keeps_their_work() -> None:
    """A job of ten days under a limit of four is three submissions, of four, four and two days."""
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


def test_a_run_time_of_whole_limits_leaves_no_rest() -> None:
    """Rounding makes no attempt of 0 s, which would wait in the queue, and no started hour that is paid."""
    trace = msgspec.structs.replace(daily(hours=6.0), submit_s=[day * DAY_S + 0.1 * day for day in range(14)])
    world = apply_changes(
        "limit 2h, rent q 2 1", Scenario(name="x", pools=(SimPool(pool="p", gpus=1),)), names_of(trace)
    )
    result = engine.simulate(trace, world.scenario, "federation")
    assert len(result.spans.job) == 14 * 3
    assert summarize_replay(result, trace, world, 0, (0.0, 14 * DAY_S)).cost == 14 * 6 * 2
