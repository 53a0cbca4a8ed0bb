"""Regressions of stored series, confirmed by repeating local runs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pitools.core.timestamps import to_rfc3339
from pitools.perf.regression.repeats import Effect, alternate
from pitools.perf.regression.sources import point_of_run
from pitools.perf.regression.store import Point, Series, add_points, add_rerun, read_rerun
from pitools.perf.regression.watch import confirms, is_other_code, judge_series, points_around, with_rerun

Pit = Callable[..., subprocess.CompletedProcess[str]]

# `slow` is a file of the node, `wall_s` of the code.
LOOP = """
import os, time
from pathlib import Path
from pitools.run.steps import StepLog
log = StepLog(Path(os.environ["PIT_ATTEMPT_DIR"], "steps"), 0)
wall_s = {wall_s} * (1.5 if os.path.exists("{slow}") else 1)
for step in range(60):
    log.write(step=step, loss=1, wall_s=wall_s + step % 3 * 1e-4, input_s=0, compute_s=0, comm_s=0, rank_samples=1)
log.close()
"""


class Nightly:
    """A store of 30 nights, of which the last eight are slower; runs of the first night of these, and of before."""

    def __init__(self, folder: Path, pit: Pit) -> None:
        self.folder, self.pit, self.store, self.slow = folder, pit, folder / "perf.sqlite", folder / "slow"

    def run(self, wall_s: float) -> Point:
        (code := self.folder / "code").mkdir(exist_ok=True)
        (code / "loop.py").write_text(LOOP.format(wall_s=wall_s, slow=self.slow))
        (code / "loop.toml").write_text('name = "loop"\ncommand = "python loop.py"\n')
        done = self.pit("launch", "run", "code/loop.toml", "--wait")
        assert done.returncode == 0, done.stderr
        return point_of_run(Path(json.loads(done.stdout)["run_dir"]))

    def fill(self, before: Point, after: Point) -> None:
        """The history of both points; only the nights around the step have runs."""
        now = datetime.now(UTC)
        noise = 1 + 0.01 * np.random.default_rng(3).standard_normal(30)
        points = []
        for night in range(30):
            one = after if night >= 22 else before
            source = one.source if night in (21, 22) else f"gone-{night}"
            t = to_rfc3339(now - timedelta(days=8, hours=22 - night))
            points.append(msgspec.structs.replace(one, t=t, source=source, value=one.value * noise[night]))
        add_points(self.store, points)

    def watch(self, *words: str) -> tuple[int, dict[str, Any], str]:
        done = self.pit("perf", "watch", "perf.sqlite", *words)
        (verdict,) = map(json.loads, done.stdout.splitlines())
        return done.returncode, verdict, done.stderr

    def runs(self) -> Sequence[str]:
        listed = map(json.loads, self.pit("launch", "list").stdout.splitlines())
        return [each["name"] for each in listed if "again" in each["name"]]


@pytest.fixture
def nightly(tmp_path: Path, pit: Pit) -> Nightly:
    return Nightly(tmp_path, pit)


def test_slower_code_is_confirmed_once(nightly: Nightly) -> None:
    """By both runs' own code in turn; the next call uses what is stored."""
    nightly.fill(nightly.run(0.01), nightly.run(0.012))
    assert nightly.watch()[0] == 1
    code, verdict, said = nightly.watch("--confirm")
    assert (code, verdict["verdict"], verdict["changed"]) == (1, "regression", "software"), said
    assert verdict["rerun_low"] > 0
    assert verdict["rerun_effect"] == pytest.approx(0.2, abs=0.02)
    assert sorted(nightly.runs()) == ["loop-again-after"] * 2 + ["loop-again-before"] * 2
    assert nightly.watch("--confirm")[1] == verdict
    assert len(nightly.runs()) == 4


def test_what_runs_do_not_show_is_unconfirmed(nightly: Nightly) -> None:
    """A cluster that was slow for some nights, with the same code: compared with the points before; exit 0."""
    before = nightly.run(0.01)
    nightly.slow.touch()
    after = nightly.run(0.01)
    nightly.slow.unlink()
    nightly.fill(before, after)
    code, verdict, said = nightly.watch("--confirm")
    assert (code, verdict["verdict"], verdict["changed"]) == (0, "unconfirmed", "cluster"), said
    assert "unconfirmed: repeated runs show" in said
    assert set(nightly.runs()) == {"loop-again-after"}


def test_what_cannot_be_repeated_is_a_regression(nightly: Nightly) -> None:
    """As its run is gone, which is said."""
    before = Point(measure="loop/step_s", value=0.01, t="", site="local", source="gone", software="a+b")
    nightly.fill(before, msgspec.structs.replace(before, value=0.012))
    code, verdict, said = nightly.watch("--confirm")
    assert (code, verdict["verdict"], verdict["rerun_effect"]) == (1, "regression", None)
    assert "not confirmed by runs" in said
    assert 'no run "gone"' in said


@pytest.mark.parametrize(
    ("effect", "decided", "verdict"),
    [
        (Effect(0.10, 0.05, 0.15), True, "regression"),
        (Effect(0.01, 0.005, 0.015), True, "unconfirmed"),
        (Effect(0.00, -0.01, 0.01), True, "unconfirmed"),
        (Effect(0.05, -0.01, 0.11), False, "unconfirmed"),
    ],
)
def test_repeated_runs_decide(effect: Effect, decided: bool, verdict: str) -> None:
    """By an interval above 0 and an effect that counts."""
    rng = np.random.default_rng(1)
    values = 1 + 0.01 * rng.standard_normal(30)
    values[22:] *= 1.2
    points = [Point(measure="m", value=value, t=f"2026-01-{i + 1:02}") for i, value in enumerate(values)]
    (found,) = judge_series([Series(tuple(points))])
    before, after = points_around(Series(tuple(points)), found)
    assert (before, after) == (points[2:22], points[22])
    twice = [
        msgspec.structs.replace(point, t=points[(i + 1) // 2].t, source=f"{i:02}") for i, point in enumerate(points)
    ]
    (shared,) = judge_series([Series(tuple(twice))])
    assert points_around(Series(tuple(twice)), shared) == (twice[2:22], twice[22])
    assert confirms(0.02)(effect) is decided
    assert with_rerun(found, effect, 0.02).verdict == verdict


@pytest.mark.parametrize("spread", [0.01, 0.03])
def test_one_night_is_no_regression(spread: float) -> None:
    """Repeated runs share it and its nodes: 95 of 100 intervals hold 0, and at most 3 of 100 confirm what is none."""
    rng = np.random.default_rng(8)
    held = confirmed = 0
    for _ in range(400):
        night = spread * rng.standard_normal()
        known = 1 + spread * rng.standard_normal(20)
        runs = iter(1 + night + 0.003 * rng.standard_normal(4))
        *_, effect = alternate(lambda _, runs=runs: next(runs), confirms(0.02), known.tolist())  # type: ignore[misc]
        held += effect.low <= 0 <= effect.high
        confirmed += effect.low > 0 and effect.effect >= 0.02
    assert held >= 380
    assert confirmed <= 12


def test_code_alone_can_be_repeated(tmp_path: Path) -> None:
    """Not packages, of which today's are all that is there; results are stored by series and run."""
    texts = ("", "a", "b", "a+p", "b+p+commit", "b+q")
    points = {text: Point(measure="m", value=1, t="t", software=text) for text in texts}
    pairs = [(a, b) for a in points for b in points if is_other_code(points[a], points[b])]
    assert pairs == [("a", "b"), ("b", "a"), ("a+p", "b+p+commit"), ("b+p+commit", "a+p")]
    key, store = ("s", "p", "d", "m"), tmp_path / "perf.sqlite"
    add_points(store, [points["a"]])
    add_rerun(store, key, "run", Effect(0.1, 0.0, 0.2))
    assert (read_rerun(store, key, "run"), read_rerun(store, key, "other")) == (Effect(0.1, 0.0, 0.2), None)
