"""Stored series: what is kept, by whom, and which steps are alarms."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from pitools.core.errors import ClusterError, DataError, TryLater
from pitools.core.timestamps import to_rfc3339
from pitools.perf.regression import store as store_module
from pitools.perf.regression.compare import compare
from pitools.perf.regression.sources import read_points
from pitools.perf.regression.store import Point, Series, add_points, read_series
from pitools.perf.regression.watch import judge_series, plot_series
from pitools.perf.statistics import false_discovery_rates
from tests.performance.test_stragglers import write_run

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def points(measure: str, values: np.ndarray, software: str = "", better: str = "lower", site: str = "a") -> list[Point]:
    return [
        Point(measure=measure, value=float(value), t=to_rfc3339(BEGIN + timedelta(days=day)), site=site,
              source=f"run-{day}", software=software or ("new" if day >= 60 else "old"), better=better)
        for day, value in enumerate(values)
    ]  # fmt: skip


def noise(rng: np.random.Generator, factor: float = 1.0, after: int = 10) -> np.ndarray:
    values = 1 + 0.01 * rng.standard_normal(60 + after)
    values[60:] *= factor
    return values


def test_points_come_back_as_series_once(tmp_path: Path) -> None:
    """By site and measure, in the order of time however they came; a point that is there is not added again."""
    path = tmp_path / "perf.sqlite"
    some = points("step_s", np.arange(5.0)) + points("step_s", np.arange(3.0), site="b")
    assert add_points(path, some[::-1]) == 8
    assert add_points(path, some) == 0
    assert [series.points for series in read_series(path)] == [tuple(some[:5]), tuple(some[5:])]


def test_nothing_is_changed_or_removed(tmp_path: Path) -> None:
    """Also not by SQL: the file refuses it."""
    path = tmp_path / "perf.sqlite"
    add_points(path, points("step_s", np.arange(2.0)))
    with sqlite3.connect(path) as connection:
        for statement in ("UPDATE points SET value = 9", "DELETE FROM points"):
            with pytest.raises(sqlite3.IntegrityError):
                connection.execute(statement)
        connection.execute("INSERT OR REPLACE INTO points SELECT site, partition, device, measure, t, source, software,"
                           " better, 9 FROM points")  # fmt: skip
    connection.close()
    assert [point.value for point in read_series(path)[0].points] == [0.0, 1.0]


def test_several_processes_add_at_once(tmp_path: Path) -> None:
    """Four writers of 25 transactions each lose no point."""
    path = tmp_path / "perf.sqlite"
    code = (
        "import sys; from pathlib import Path; from pitools.perf.regression.store import Point, add_points\n"
        "for n in range(25): add_points(Path(sys.argv[1]),"
        " [Point(measure='m', value=1.0, t=f'2026-01-01T00:00:{n:02}.000Z', source=sys.argv[2])])"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), str(number)]) for number in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert [len(series.points) for series in read_series(path)] == [100]


def test_files_that_are_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing one, another kind of file, and one that is locked have different errors."""
    with pytest.raises(ClusterError):
        read_series(tmp_path / "absent")
    (tmp_path / "text").write_text("no database, but long enough to be told from an empty file" * 20)
    with pytest.raises(DataError):
        read_series(tmp_path / "text")
    path = tmp_path / "perf.sqlite"
    add_points(path, points("m", np.arange(2.0)))
    monkeypatch.setattr(store_module, "_LOCK_TIMEOUT_S", 0.0)
    other = sqlite3.connect(path)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(TryLater):
        add_points(path, points("m", np.arange(3.0)))
    other.close()


def test_verdicts_by_direction_and_software() -> None:
    """Slower and faster, times and rates; the software that changed with the step, or did not, is said."""
    rng = np.random.default_rng(1)
    series = [
        Series(tuple(points("slower_s", noise(rng, 1.06)))),
        Series(tuple(points("tokens_per_s", noise(rng, 0.9), software="same", better="higher"))),
        Series(tuple(points("faster_s", noise(rng, 0.9)))),
        Series(tuple(points("steady_s", noise(rng)))),
        Series(tuple(points("short_s", noise(rng)[:8]))),
    ]
    verdicts = {verdict.measure: verdict for verdict in judge_series(series)}
    assert {name: (verdict.verdict, verdict.changed) for name, verdict in verdicts.items()} == {
        "slower_s": ("regression", "software"),
        "tokens_per_s": ("regression", "cluster"),
        "faster_s": ("improvement", "software"),
        "steady_s": ("steady", ""),
        "short_s": ("short", ""),
    }
    assert verdicts["slower_s"].source == "run-60"
    assert list(verdicts)[:2] == ["tokens_per_s", "slower_s"]  # the worst first


def test_history_is_no_alarm() -> None:
    """A step before `since` is not reported again, and a new one after it is."""
    old = Series(tuple(points("old_s", noise(np.random.default_rng(2), 1.2, after=60))))
    assert judge_series([old], since=to_rfc3339(BEGIN + timedelta(days=59)))[0].verdict == "regression"
    assert judge_series([old], since=to_rfc3339(BEGIN + timedelta(days=62)))[0].q == 1.0
    values = np.array([point.value for point in old.points])
    values[100:] *= 1.1
    both = judge_series([Series(tuple(points("old_s", values)))], since=to_rfc3339(BEGIN + timedelta(days=62)))
    assert (both[0].verdict, both[0].source) == ("regression", "run-100")


def test_a_small_step_in_noise_is_inconclusive() -> None:
    """A step of 1.2 deviations of the noise is no certain one; a certain one counts unless it is history."""
    values = np.repeat([1.3, 1.0, 1.025], 50) + 0.02 * np.random.default_rng(7).standard_normal(150)
    series = [Series(tuple(points("noisy_s", values)))]
    assert judge_series(series)[0].verdict == "improvement"
    (verdict,) = judge_series(series, since=to_rfc3339(BEGIN + timedelta(days=60)))
    assert (verdict.verdict, verdict.effect) == ("inconclusive", pytest.approx(0.025, abs=0.01))


def test_of_many_healthy_series_none_is_an_alarm() -> None:
    """2,000 series have no alarm, and ten slower ones among them are found."""
    values = 1 + 0.02 * np.random.default_rng(3).standard_normal((2000, 70))
    values[:10, 60:] *= 1.08
    verdicts = judge_series([Series(tuple(points(f"m{number}", row))) for number, row in enumerate(values)])
    alarms = {verdict.measure for verdict in verdicts if verdict.verdict in ("regression", "improvement")}
    assert len(alarms & {f"m{number}" for number in range(10)}) >= 9
    assert len(alarms) <= 11


def test_false_discovery_rates_are_those_of_scipy() -> None:
    """For p-values in any order, with ties."""
    stats = pytest.importorskip("scipy.stats")
    p = np.round(np.random.default_rng(4).random(50) ** 3, 2)
    assert false_discovery_rates(p) == pytest.approx(stats.false_discovery_control(p))


def test_a_picture(tmp_path: Path) -> None:
    """Of series with and without a step, in each format."""
    pytest.importorskip("matplotlib")
    rng = np.random.default_rng(5)
    series = [Series(tuple(points(f"a$\\foo{{$/{n}", noise(rng, 1 + 0.1 * n)))) for n in range(4)]
    for name in ("a.png", "a.svg"):
        plot_series(series, judge_series(series), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_points_of_files(tmp_path: Path) -> None:
    """CSV of Excel and JSON Lines give the same points, times in UTC; a bad line is named, an empty one left out."""
    (tmp_path / "a.csv").write_text("\ufeffmeasure,value,t,better\nrate,2.5,2026-01-01T02:00:00+02:00,higher\n")
    (tmp_path / "a.jsonl").write_text(
        '{"schema":"pit.perf-point/1","measure":"rate","value":2.5,"t":"2026-01-01T00:00:00Z","better":"higher"}\n\n'
    )
    expected = [Point(measure="rate", value=2.5, t="2026-01-01T00:00:00.000Z", better="higher")]
    assert read_points(tmp_path / "a.csv") == read_points(tmp_path / "a.jsonl") == expected
    for row in ("rate,x,2026-01-01T00:00:00Z", "rate,1,2026-01-01T00:00:00", "rate,nan,2026-01-01T00:00:00Z", "rate"):
        (tmp_path / "b.csv").write_text(f"measure,value,t\n{row}\n")
        with pytest.raises(DataError) as error:
            read_points(tmp_path / "b.csv")
        assert error.value.where.endswith("b.csv:2")
    (tmp_path / "b.csv").write_text("1.0\n2.0\n")
    with pytest.raises(DataError) as error:
        read_points(tmp_path / "b.csv")
    assert error.value.where.endswith("b.csv:1")
    for row in ("rate,1,0001-01-01T00:00:00+14:00", f"{'x' * 200_000},1,2026-01-01T00:00:00Z"):
        (tmp_path / "b.csv").write_text(f"measure,value,t\n{row}\n")
        with pytest.raises(DataError):
            read_points(tmp_path / "b.csv")


def test_a_run_that_goes_on_is_one_point(tmp_path: Path) -> None:
    """Added again later, it is not new."""
    path, run = tmp_path / "perf.sqlite", tmp_path / "run"
    for steps, count in ((5, 1), (40, 0)):
        assert add_points(path, read_points(write_run(run, steps=steps))) == count


@pytest.mark.parametrize(
    ("factor", "better", "verdict"),
    [
        (1.05, "lower", "regression"),
        (0.95, "lower", "improvement"),
        (0.95, "higher", "regression"),
        (1.0, "lower", "same"),
        (1.01, "lower", "same"),
    ],
)
def test_two_runs_compared(factor: float, better: str, verdict: str) -> None:
    """A difference of 5 % is told from none, in the direction that is worse, with an interval that holds it."""
    a, b = 1 + 0.02 * np.random.default_rng(6).standard_normal((2, 2000))
    result = compare(a, factor * b, better=better)  # type: ignore[arg-type]
    assert result.verdict == verdict
    assert result.effect_low is not None
    assert result.effect_high is not None
    assert result.effect_low < factor - 1 < result.effect_high


def test_too_few_to_compare() -> None:
    """Fewer than 20 in a row decide nothing, of runs four; numbers that are not positive are refused."""
    a = 1 + 0.01 * np.random.default_rng(9).standard_normal(20)
    assert compare(a[:19], 2 * a).verdict == "inconclusive"
    assert compare(a, 2 * a).verdict == "regression"
    assert compare(a[:6], 2 * a[:6], of_runs=True).verdict == "regression"
    for bad in ([], [0.0], [float("nan")]):
        with pytest.raises(DataError):
            compare([1.0], bad)


@pytest.mark.parametrize("n", [20, 100])
@pytest.mark.parametrize("phi", [0.0, 0.5])
def test_equal_runs_hardly_ever_differ(n: int, phi: float) -> None:
    """Of 400 pairs of equal runs at most 1 in 100 and the binomial error differ, also with correlated steps."""
    from perf.performance.null_table import simulate

    a, b = (1 + 0.05 * simulate(np.random.default_rng([n, side]), 400, n, phi) for side in (1, 2))
    found = [compare(x, y, min_effect=0.0).verdict for x, y in zip(a, b, strict=True)]
    assert sum(verdict in ("regression", "improvement") for verdict in found) <= 8
