"""Run times learnt from what ended."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.place.policy.runtime_predictor import JobFeatures, RuntimePredictor

HOUR_S = 3600.0


def taught(*runs: tuple[JobFeatures, float]) -> RuntimePredictor:
    predictor = RuntimePredictor()
    for reference, run_s in runs:
        predictor.add_run(reference, run_s)
    return predictor


def test_jobs_of_one_kind_are_told_apart() -> None:
    """Of two kinds with the same limit and size, each gets its own mean, and an unseen kind one between."""
    short, long = JobFeatures(limit_s=HOUR_S, kind="a eval"), JobFeatures(limit_s=HOUR_S, kind="a train")
    predictor = taught(*[(short, 60.0), (long, 3000.0)] * 200)
    assert predictor.mean_s(short) < 180
    assert 2000 < predictor.mean_s(long) <= HOUR_S
    assert predictor.mean_s(short) < predictor.mean_s(JobFeatures(limit_s=HOUR_S, kind="new")) < predictor.mean_s(long)


def test_what_was_never_seen_is_taken_from_the_limit() -> None:
    """With nothing learnt, and for a new limit, the guess scales with the limit by the ratio usual so far."""
    assert 0.2 < RuntimePredictor().mean_s(JobFeatures(limit_s=HOUR_S)) / HOUR_S < 0.8
    predictor = taught(*[(JobFeatures(limit_s=HOUR_S), 36.0)] * 500)
    assert predictor.mean_s(JobFeatures(limit_s=100 * HOUR_S)) / (100 * HOUR_S) == pytest.approx(0.02, rel=0.5)


def test_what_is_old_fades() -> None:
    """A kind whose jobs became longer is soon expected to be."""
    job_features = JobFeatures(limit_s=HOUR_S, kind="k")
    predictor = RuntimePredictor()
    for run_s in [30.0] * 3000 + [3000.0] * 3000:
        predictor.add_run(job_features, run_s)
    assert predictor.mean_s(job_features) > 1800


def test_the_mean_is_right_on_average() -> None:
    """Over log-uniform run times the mean of predictions is the mean of what happened, within a tenth."""
    rng = random.Random(1)
    runs = [HOUR_S * 2 ** -rng.uniform(0, 10) for _ in range(4000)]
    predictor = taught(*((JobFeatures(limit_s=HOUR_S), run_s) for run_s in runs))
    assert predictor.mean_s(JobFeatures(limit_s=HOUR_S)) == pytest.approx(sum(runs) / len(runs), rel=0.1)


@given(st.lists(st.tuples(st.sampled_from([60.0, HOUR_S, 100 * HOUR_S]), st.floats(0.0, 1e6), st.integers(0, 512))))
def test_answers_stay_within_the_limit(runs: list[tuple[float, float, int]]) -> None:
    """Whatever was learnt, means lie in (0, limit]."""
    predictor = taught(*((JobFeatures(limit_s=limit_s, units=units), run_s) for limit_s, run_s, units in runs))
    for limit_s in (60.0, HOUR_S, 5 * HOUR_S):
        assert 0 < predictor.mean_s(JobFeatures(limit_s=limit_s, units=3, kind="x")) <= limit_s
