"""Steps in series of measurements: found where there are some, and hardly ever where there are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.performance import noise
from perf.performance.null_table import null_row, simulate
from pitools.perf.regression.change_points import (
    ALPHA,
    _null_table,
    find_changes,
    find_changes_of_each,
    p_value,
    scan,
)

Noise = Callable[[np.random.Generator, int, int], np.ndarray]
NOISE: dict[str, Noise] = {
    "gauss": lambda rng, count, n: 1 + 0.02 * rng.standard_normal((count, n)),
    "lognormal": lambda rng, count, n: np.exp(0.3 * rng.standard_normal((count, n))),
    "correlated": lambda rng, count, n: 1 + 0.02 * simulate(rng, count, n, 0.5),
    "spikes": lambda rng, count, n: 1 + 0.02 * rng.standard_normal((count, n)) + 0.3 * (rng.random((count, n)) < 0.05),
    "heavy tails": lambda rng, count, n: 1 + 0.02 * rng.standard_t(3, (count, n)),
    "drops": lambda rng, count, n: np.where(rng.random((count, n)) < 0.05, 0.7, 1 + 0.02 * rng.random((count, n))),
}


@pytest.mark.parametrize("n", [30, 100])
@pytest.mark.parametrize("family", NOISE)
def test_healthy_series_have_no_step(family: str, n: int) -> None:
    """Of 3,000 series of each kind of noise, at most 1 in 100 and the binomial error have one."""
    values = NOISE[family](np.random.default_rng([n, 7]), 3000, n)
    assert (p_value(scan(values), n) <= ALPHA).mean() <= 0.01 + 2 * np.sqrt(0.01 / 3000)


@pytest.mark.parametrize(
    ("slow", "limit"),
    [(noise.garch, 0.01), (noise.growing, 0.015), (lambda *args: noise.drift(*args, 1.0), 0.01),
     (lambda *args: noise.regimes(*args, 0.1, 1.5), 0.04), (noise.long_memory, 0.05)],
)  # fmt: skip
def test_slow_changes_are_no_certain_step(slow: Noise, limit: float) -> None:
    """Of 3,000 series of 100 points whose mean or noise changes slowly, at most this share has one."""
    values = 1 + 0.02 * slow(np.random.default_rng(9), 3000, 100)
    found = [any(change.is_certain for change in changes) for changes, _ in find_changes_of_each(values.tolist())]
    assert np.mean(found) <= limit


def test_a_step_of_5_percent_is_found_after_five_points() -> None:
    """With noise of 2 %, certainly in 85 of 100 series less the error of 3,000, and near its place in most."""
    values = 1 + 0.02 * np.random.default_rng(7).standard_normal((3000, 65))
    values[:, 60:] *= 1.05
    found = [
        [change.at for change in changes if change.is_certain] for changes, _ in find_changes_of_each(values.tolist())
    ]
    assert np.mean([bool(steps) for steps in found]) >= 0.85 - 2 * np.sqrt(0.85 * 0.15 / 3000)
    assert np.mean([abs(steps[-1] - 60) <= 1 for steps in found if steps]) > 0.9


def test_a_step_is_measured_by_the_noise_near_it() -> None:
    """A step of 4 deviations is one of about 2 where the noise becomes three times as large with it."""
    values = 100 + np.random.default_rng(3).standard_normal(100)
    values[90:] += 4
    (change,), _ = find_changes(values)
    assert (change.is_certain, change.deviations) == (True, pytest.approx(4, rel=0.2))
    values[90:] += 2 * (values[90:] - values[90:].mean())
    (change,), _ = find_changes(values)
    assert change.deviations < 2.2


def test_all_steps_are_found_in_their_order() -> None:
    """A dip that has passed hides neither of its ends, nor the step after it, and an outlier is none."""
    level = np.repeat([100.0, 80.0, 100.0, 106.0], 40)
    values = level + np.random.default_rng(3).standard_normal(160)
    values[20] = 300.0
    changes, p = find_changes(values)
    assert [change.at for change in changes] == pytest.approx([40, 80, 120], abs=1)
    assert [change.effect for change in changes] == pytest.approx([-0.2, 0.25, 0.06], abs=0.01)
    assert p == changes[-1].p <= ALPHA


def test_many_steps_do_not_look_like_correlated_noise() -> None:
    """Slower by 4 % for a while, with noise of 1 %: not taken for noise that is correlated from point to point."""
    values = np.repeat([100.0, 104.0, 100.0], 40) + np.random.default_rng(3).standard_normal(120)
    assert [change.at for change in find_changes(values)[0]] == pytest.approx([40, 80], abs=1)


def test_an_old_small_step_hides_no_new_one() -> None:
    """A certain step of 1.5 % is left out, and what follows is compared with the points on both of its sides."""
    values = np.repeat([100.0, 101.5, 107.0], [60, 60, 6]) + 0.5 * np.random.default_rng(3).standard_normal(126)
    (change,), _ = find_changes(values)
    assert (change.at, change.before) == (120, pytest.approx(100.7, abs=0.5))


def test_the_least_effect_counts() -> None:
    """A certain step of 5 % is none where 6 % is the least, and its p-value is still known."""
    values = 100 + 0.1 * np.random.default_rng(3).standard_normal(60)
    values[30:] *= 1.05
    assert [change.at for change in find_changes(values)[0]] == [30]
    changes, p = find_changes(values, min_effect=0.06)
    assert not changes
    assert p < 1e-6


@given(st.integers(0, 2**32 - 1), st.floats(1e-9, 1e9), st.integers(12, 600))
def test_the_unit_does_not_matter(seed: int, unit: float, n: int) -> None:
    """Seconds or milliseconds give the same steps, and every index lies four points or more inside what was judged."""
    rng = np.random.default_rng(seed)
    values = np.exp(0.02 * rng.standard_normal(n) + 0.1 * (np.arange(n) > rng.integers(n)))
    changes, p = find_changes(values)
    again, same_p = find_changes(values * unit)
    assert [change.at for change in changes] == [change.at for change in again]
    assert p == pytest.approx(same_p, rel=1e-6)
    assert all(max(0, n - 500) + 4 <= change.at <= n - 4 for change in changes)
    assert 0 <= p <= 1


@pytest.mark.parametrize(
    ("values", "at"),
    [([5.0] * 40, []), ([0.0] * 40, []), ([5.0] * 20 + [6.0] * 20, [20]), ([0.0] * 20 + [3.0] * 20, [20]),
     ([-5.0] * 20 + [-6.0] * 20, [20]), ([1.0, 2.0] * 3, [])],
)  # fmt: skip
def test_odd_series(values: list[float], at: list[int]) -> None:
    """Equal values, zeros, negative values and too few points are judged without an error or a warning."""
    assert [change.at for change in find_changes(values)[0]] == at


@pytest.mark.parametrize(("n", "phi"), [(30, 0.0), (60, 0.5)])
def test_the_table_is_what_the_simulation_gives(n: int, phi: float) -> None:
    """A row of null.csv, with a fresh seed, to within its sampling error."""
    sizes, phis, table = _null_table()
    shipped = table[list(sizes).index(n), list(phis).index(phi)]
    assert null_row(n, phi, count=20_000, seed=2) == pytest.approx(list(shipped), rel=0.2)


def test_the_steps_of_a_real_history() -> None:
    """TigerBeetle's benchmark has the two steps that Otava's authors expect of it, and fewer alarms than Otava's 8."""
    path = Path(__file__).resolve().parents[3] / "shared/data/perf/series/otava/tigerbeetle.csv"
    if not path.exists():
        pytest.skip(f"the data folder is absent: {path}")
    found = [change.at for change in find_changes(np.loadtxt(path, delimiter=",", skiprows=1)[:, 1])[0]]
    assert {15, 71} <= set(found)
    assert len(found) < 8
