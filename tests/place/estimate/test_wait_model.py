"""What waits teach: quantiles of the wait, from what was foretold and what came of it."""

from __future__ import annotations

import math
import random

import pytest

from pitools.place.clusters import wait_log
from pitools.place.estimate.wait_model import MIN_WAITS, Quantiles, WaitFeatures, WaitModel, calibrate, combine

LIKE = WaitFeatures(units=8, limit_s=3600, queued_ahead=1.0)
RAW_S = 36_000.0


def teach(
    waits: WaitModel, count: int, wait_s, *, features: WaitFeatures = LIKE, raw_s: float = RAW_S
) -> list[Quantiles]:
    """Jobs one after another, each told what is known before it; returns what was said to those who were told."""
    output = []
    for number in range(count):
        now_s = 1e6 * (number + 1)
        prediction = waits.predict(now_s, raw_s, features)
        waits.add_submission(str(number), now_s, raw_s, features, prediction)
        waits.add_start(str(number), now_s + wait_s(number))
        output += [prediction] if prediction else []
    return output


def test_nothing_is_said_of_nothing() -> None:
    """Before FEW starts were seen there is no answer, and then there is."""
    waits = WaitModel()
    teach(waits, MIN_WAITS - 1, lambda _: 60.0)
    assert waits.predict(1e9, RAW_S, LIKE) is None
    teach(waits, 1, lambda _: 60.0)
    assert waits.predict(1e9, RAW_S, LIKE) is not None


def test_a_constant_factor_is_learnt() -> None:
    """Where every job waits a tenth of what was foretold, so will the next, for another forecast too."""
    waits = WaitModel()
    teach(waits, 200, lambda _: RAW_S / 10)
    _, middle, high = waits.predict(1e9, RAW_S, LIKE) or pytest.fail("nothing was learnt")
    assert middle == pytest.approx(RAW_S / 10, rel=0.05)
    assert high <= RAW_S
    _, middle, _ = waits.predict(1e9, RAW_S * 1.2, LIKE) or pytest.fail("nothing was learnt")
    assert middle == pytest.approx(RAW_S * 1.2 / 10, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_nine_in_ten(seed: int) -> None:
    """Of waits drawn from one distribution 80 ± 5 % fall between q10 and q90, and the quantiles never cross."""
    draw = random.Random(seed)
    drawn = [min(RAW_S, draw.lognormvariate(7, 1.2)) for _ in range(1500)]
    output = teach(WaitModel(), len(drawn), lambda number: drawn[number])
    assert all(0 <= item.q10 <= item.q50 <= item.q90 for item in output)
    inside = sum(item.q10 <= actual <= item.q90 for item, actual in zip(output, drawn[-len(output) :], strict=True))
    assert 0.75 <= inside / len(output) <= 0.85


def test_coverage_comes_back_after_a_change() -> None:
    """When waits grow tenfold overnight, the band holds them again before long."""
    draw = random.Random(5)
    drawn = [draw.lognormvariate(5, 0.5) * (10 if number >= 600 else 1) for number in range(1200)]
    output = teach(WaitModel(), len(drawn), lambda number: drawn[number])
    last = list(zip(output, drawn[-len(output) :], strict=True))[-200:]
    assert sum(item.q10 <= actual <= item.q90 for item, actual in last) / len(last) > 0.7


def test_who_still_waits_counts() -> None:
    """A queue that stands still raises the forecast before anyone in it has started."""
    waits = WaitModel()
    teach(waits, 100, lambda _: 60.0)
    prediction = waits.predict(2e9, RAW_S, LIKE)
    for number in range(100):
        waits.add_submission(f"stuck{number}", 2e9, RAW_S, LIKE, None)
    after = waits.predict(2e9 + 20_000, RAW_S, LIKE)
    assert prediction
    assert after
    assert prediction.q90 < 1000 < after.q90


def taught(*waits_s: float) -> WaitModel:
    """One job after another, of which nothing was said before."""
    waits = WaitModel()
    for number, wait_s in enumerate(waits_s):
        waits.add_submission(str(number), 1e5 * number, RAW_S, LIKE, None)
        waits.add_start(str(number), 1e5 * number + wait_s)
    return waits


def test_who_has_only_just_come_lowers_nothing() -> None:
    """That a job has waited no time yet does not say that it will wait no longer."""
    waits = taught(*[1000.0] * 100)
    for number in range(100):
        waits.add_submission(f"new{number}", 1e9, RAW_S, LIKE, None)
    prediction = waits.predict(1e9 + 1, RAW_S, LIKE)
    assert prediction
    assert (prediction.q50, prediction.q90) == (pytest.approx(1000), pytest.approx(1000))


def test_the_recent_weigh_most() -> None:
    """Of two seasons the later counts, though the earlier had more jobs; the other way round likewise."""
    for first_s, then_s in ((10_000.0, 100.0), (100.0, 10_000.0)):
        prediction = taught(*[first_s] * 500, *[then_s] * 400).predict(1e9, RAW_S, LIKE)
        assert prediction
        assert prediction.q50 == pytest.approx(then_s)


def test_a_band_that_missed_goes_lower_too() -> None:
    """Eight starts before what was said of nine in ten: the next is told less, and the middle hardly moves."""
    draw = random.Random(7)
    drawn = [draw.lognormvariate(7, 1.0) for _ in range(300)]
    missed, silent = taught(*drawn), taught(*drawn)
    for waits, told in ((missed, Quantiles(2000, 3000, 4000)), (silent, None)):
        for number in range(8):
            waits.add_submission(f"low{number}", 1e8 + number, RAW_S, LIKE, told)
            waits.add_start(f"low{number}", 1e8 + number + 900)
    low, plain = (waits.predict(1e9, RAW_S, LIKE) for waits in (missed, silent))
    assert low
    assert plain
    assert low.q10 < 0.6 * plain.q10
    assert low.q50 > 0.8 * plain.q50


def test_who_is_withdrawn_teaches_nothing() -> None:
    """A job that left the queue unstarted is forgotten, and its later start is nobody's."""
    waits, other = WaitModel(), WaitModel()
    for item in (waits, other):
        teach(item, 50, lambda _: 600.0)
    waits.add_submission("gone", 2e9, RAW_S, LIKE, None)
    waits.remove("gone")
    waits.add_start("gone", 2e9 + 5)
    assert waits.predict(3e9, RAW_S, LIKE) == other.predict(3e9, RAW_S, LIKE)


def test_similar_jobs_weigh_most() -> None:
    """Small jobs that start at once do not make the forecast of a large one that never does."""
    waits = WaitModel()
    for number in range(400):
        now_s, is_large = 1e5 * (number + 1), number % 2
        features = WaitFeatures(units=256 if is_large else 1, limit_s=604_800 if is_large else 3600)
        waits.add_submission(str(number), now_s, RAW_S, features, None)
        waits.add_start(str(number), now_s + (30_000 if is_large else 30))
    large = waits.predict(1e9, RAW_S, WaitFeatures(units=256, limit_s=604_800))
    small = waits.predict(1e9, RAW_S, WaitFeatures(units=1, limit_s=3600))
    assert large
    assert small
    assert small.q50 < 100
    assert large.q50 > 20_000


def test_what_others_waited_counts_too() -> None:
    """Half-way between both, as factors; whoever is among those that never waited keeps the lower quantile."""
    learnt = Quantiles(10.0, 100.0, 40_000.0)
    output = combine(learnt, (200.0, 100.0, 400.0))
    assert output == pytest.approx((10, 100, math.sqrt(40_060 * 460) - 60))
    assert combine(learnt, learnt) == pytest.approx(learnt)
    lower = combine(learnt, (0.0, 0.0, 0.0))
    assert lower.q10 < 10
    assert lower.q10 <= lower.q50 <= lower.q90


def test_what_a_log_has_kept_is_read() -> None:
    """Features survive a log that lacks some of them."""
    assert WaitFeatures.from_log({"units": 4.0, "limit_s": 60.0, "more": 1.0}) == WaitFeatures(4, 60.0, 0.0)
    assert WaitFeatures.from_log({}) == WaitFeatures(1, 3600.0, 0.0)


def test_a_log_teaches_what_was_seen() -> None:
    """Read back from notes of one pool, it says the same as where it was learnt; a withdrawal teaches nothing."""
    waits, noted = WaitModel(), list[wait_log.WaitLine]()
    features = {"units": 8.0, "limit_s": 3600.0, "queued_ahead": 1.0}
    for number in range(60):
        now_s = 1e6 * (number + 1)
        prediction = waits.predict(now_s, RAW_S, LIKE)
        waits.add_submission(str(number), now_s, RAW_S, LIKE, prediction)
        waits.add_start(str(number), now_s + 100 * number)
        noted.append(
            wait_log.WaitPredicted(
                t_s=now_s, ticket=str(number), pool="p", estimate_s=RAW_S, quantiles=prediction, features=features
            )
        )
        noted.append(wait_log.WaitEnded(t_s=now_s + 100 * number, ticket=str(number), pool="p", started=True))
    noted.append(wait_log.WaitPredicted(t_s=2e9, ticket="back", pool="p", estimate_s=RAW_S, features=features))
    noted.append(wait_log.WaitEnded(t_s=2e9 + 9, ticket="back", pool="p", started=False))
    assert calibrate(RAW_S, features, noted, 3e9) == waits.predict(3e9, RAW_S, LIKE)
    assert calibrate(RAW_S, features, noted[:20], 3e9) is None


def _noted(count: int, raw_s: float, wait_s: float, *, open_jobs: int = 0) -> list[wait_log.WaitLine]:
    """Jobs of one pool from 0 s on, and others of which nobody noted the end."""
    lines: list[wait_log.WaitLine] = []
    for number in range(count):
        t_s = 100.0 * number
        lines.append(wait_log.WaitPredicted(t_s=t_s, ticket=str(number), pool="p", estimate_s=raw_s, features=KEPT))
        lines.append(wait_log.WaitEnded(t_s=t_s + wait_s, ticket=str(number), pool="p", started=True))
    return lines + [
        wait_log.WaitPredicted(t_s=1e5 + number, ticket=f"open{number}", pool="p", estimate_s=raw_s, features=KEPT)
        for number in range(open_jobs)
    ]


KEPT = {"units": 8.0, "limit_s": 3600.0, "queued_ahead": 1.0}


@pytest.mark.parametrize("raw_s", [-1e9, 0.0, RAW_S, 1e300])
@pytest.mark.parametrize(("past_s", "wait_s"), [(0.0, 0.0), (-1e9, 60.0), (RAW_S, -1e9), (1e300, 1e300), (0.0, 1e12)])
@pytest.mark.parametrize("now_s", [-1e12, 1e6])
def test_no_history_breaks_it(raw_s: float, past_s: float, wait_s: float, now_s: float) -> None:
    """All alike, huge, less than nothing, a clock that runs backwards: numbers, in order, and none below 0."""
    output = calibrate(raw_s, KEPT | {"queued_ahead": -5.0}, _noted(60, past_s, wait_s, open_jobs=5), now_s)
    assert output
    assert 0 <= output.q10 <= output.q50 <= output.q90


def test_jobs_whose_end_nobody_noted_are_forgotten() -> None:
    """Thousands of them neither raise the forecast for ever nor cost time; for two weeks they are waited for."""
    lines = _noted(200, 1000.0, 100.0, open_jobs=3000)
    reference = calibrate(1000.0, KEPT, lines, 16 * 86400.0)
    assert reference == calibrate(1000.0, KEPT, _noted(200, 1000.0, 100.0), 16 * 86400.0)
    assert reference
    assert reference.q90 < 1000
    waiting = calibrate(1000.0, KEPT, lines, 13 * 86400.0)
    assert waiting
    assert waiting.q90 > 86400
