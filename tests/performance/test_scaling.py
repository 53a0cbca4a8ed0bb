"""Step times over sizes: predictions, limits, and what is refused."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.commands.perf_scaling import _read
from pitools.core.errors import DataError
from pitools.perf.scaling import Measured, fit_scaling, read_measured
from tests.performance.test_stragglers import write_run

SIZES = (1, 2, 4, 8, 16, 32)


def step_s(n: int, serial: float, work: float, latency: float, ring: float) -> float:
    return serial + work / n + latency * float(np.log2(n)) + ring * (n - 1) / n


def measured(sizes: tuple[int, ...], *terms: float, noise: float = 0.0, work_per_gpu: float = 0.0) -> list[Measured]:
    rng = np.random.default_rng(1)
    return [
        Measured(n, step_s(n, *terms) * (1 + noise * rng.standard_normal()), work=work_per_gpu * n or 1e6)
        for n in sizes
        for _ in range(3)
    ]


TRUTHS = [(0.05, 8, 0, 0), (0.02, 4, 0.03, 0), (0.01, 4, 0, 0.2), (0.1, 2, 0.02, 0.05)]


@pytest.mark.parametrize("terms", TRUTHS)
def test_the_next_size_is_predicted(terms: tuple[float, ...]) -> None:
    """Twice the largest size, with noise of 1 %: within 3 %, within the band, and closer than no change."""
    points = {point.gpus: point for point in fit_scaling(measured(SIZES, *terms, noise=0.01), [64])}
    truth = step_s(64, *terms)
    assert points[64].step_s == pytest.approx(truth, rel=0.03)
    assert points[64].low_s <= truth <= points[64].high_s
    assert abs(points[64].step_s - truth) < abs(step_s(32, *terms) - truth)
    assert (points[1].kind, points[1].efficiency, points[64].measured_s) == ("strong", 1.0, None)
    assert sum(points[64].terms.values()) == pytest.approx(points[64].step_s)


def test_the_limit_is_named() -> None:
    """Latency where steps grow with log n, in either kind; a constant and a ring's cannot be told apart; else work."""
    latency, constant = (fit_scaling(measured(SIZES, *terms))[-1].limit for terms in (TRUTHS[1], TRUTHS[0]))
    assert (latency, constant) == ("latency", "serial|ring")
    assert fit_scaling(measured(SIZES, 0.0, 4.0, 0.0, 0.0))[-1].limit == "work"
    weak = fit_scaling(measured(SIZES, 1.0, 0.0, 0.1, 0.0, work_per_gpu=8192))
    assert {(point.kind, point.limit) for point in weak[2:]} == {("weak", "latency")}
    assert weak[-1].efficiency == pytest.approx(1 / 1.5, rel=0.03)


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 64, 512]), min_size=2, max_size=9, unique=True),
    st.tuples(*[st.floats(0, 10)] * 4).filter(lambda terms: sum(terms[:2]) > 0.1),
)
def test_any_sizes_and_terms_are_fitted(sizes: list[int], terms: tuple[float, ...]) -> None:
    """No term is below 0, the band holds the fit at the measured sizes, and what was measured is fitted to 15 %."""
    for point in fit_scaling([Measured(n, step_s(n, *terms)) for n in sizes], kind="strong"):
        assert min(point.terms.values()) >= 0
        assert point.low_s <= point.step_s * 1.05
        assert point.high_s >= point.step_s * 0.95
        assert point.step_s == pytest.approx(point.measured_s, rel=0.15)


def test_kempnerforge_is_predicted_within_3_percent() -> None:
    """32 GPUs from 8 and 16 of their layout, with fewer than half the error of "as at 16", and said to be two sizes."""
    path = Path(__file__).resolve().parents[3] / "shared/data/perf/series/kempnerforge_7b_scaling.csv"
    if not path.exists():
        pytest.skip(f"the data folder is absent: {path}")
    with path.open() as file:
        rows = [
            Measured(int(row["gpus"]), float(row["step_time_s"]), re.sub(r"\+?FSDP=\d+|none", "", row["parallelism"]),
                     float(row["tok_s"]) * float(row["step_time_s"]))
            for row in csv.DictReader(file)
        ]  # fmt: skip
    at = {row.gpus: row for row in rows}
    with pytest.raises(DataError):  # the layout changes between 4 and 8
        fit_scaling([row for row in rows if row.gpus < 32], [32])
    point = fit_scaling([at[8], at[16]], [32])[-1]
    assert (point.layout, point.kind, point.limit) == ("TP=4", "weak", "latency|ring")
    assert point.step_s == pytest.approx(at[32].step_s, rel=0.03)
    assert abs(point.step_s - at[32].step_s) < abs(at[16].step_s - at[32].step_s) / 2
    assert point.low_s <= at[32].step_s <= point.high_s
    assert point.note


@pytest.mark.parametrize(
    ("rows", "at"),
    [
        ([Measured(8, 1.0, work=1.0)], ()),
        ([Measured(8, 1.0, work=1.0), Measured(8, 1.1, work=1.0)], ()),
        ([Measured(8, 1.0, "a", 1.0), Measured(16, 0.5, "b", 1.0)], ()),
        ([Measured(8, 1.0), Measured(16, 0.5)], ()),  # neither strong nor weak is said
        ([Measured(8, 1.0, work=1.0), Measured(32, 0.5, work=2.0)], ()),  # and this is neither
        ([Measured(8, 1.0, work=1.0), Measured(16, 0.5, work=1.0)], (64,)),  # two sizes reach to 32
        ([Measured(8, 1.0, work=1.0), Measured(16, 0.0, work=1.0)], ()),
        ([Measured(8, 1.0, work=1.0), Measured(16, float("inf"), work=1.0)], ()),
        ([], ()),
    ],
)
def test_what_cannot_be_fitted_is_refused(rows: list[Measured], at: tuple[int, ...]) -> None:
    """Too few sizes, mixed layouts, unknown or mixed kinds, too far a size, and times that are none."""
    with pytest.raises(DataError):
        fit_scaling(rows, at)


def test_a_table_is_read(tmp_path: Path) -> None:
    """Columns that are not needed are left out; a wrong cell and a missing column are named."""
    path = tmp_path / "steps.csv"
    path.write_text("\ufeffgpus,step_s,layout,tokens_per_step,note\n8,1.5,TP=4,65536,x\n16,1.6,,,\n")
    assert read_measured(path) == [Measured(8, 1.5, "TP=4", 65536.0), Measured(16, 1.6)]
    path.write_text("gpus,step_s\n8,fast\n")
    with pytest.raises(DataError) as error:
        read_measured(path)
    assert error.value.where.endswith("steps.csv:2")
    for data in (
        b"gpus,step_s\n",
        b"",
        b"nodes,step_s\n8,1\n",
        b"gpus,step_s\n8," + b"1" * 200_000,
        b"gpus,step_s\n8,\xff\n",
    ):
        path.write_bytes(data)
        with pytest.raises(DataError):
            read_measured(path)


def test_the_work_of_a_run_is_that_of_most_steps(tmp_path: Path) -> None:
    """And not that of its last, which may have a partial batch."""
    log = write_run(tmp_path) / "attempts/0/steps/0.jsonl"
    head, last = log.read_text().rstrip().rsplit("\n", 1)
    log.write_text(head + "\n" + last.replace('"rank_samples":8', '"rank_samples":3') + "\n")
    assert log.read_text().count('"rank_samples":3') == 1
    assert [row.work for row in _read(str(tmp_path), "")] == [32.0]
