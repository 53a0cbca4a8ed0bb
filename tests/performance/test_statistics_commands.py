"""`pit perf stragglers|compare|watch|scaling|mfu`, as typed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pitools.core.timestamps import to_rfc3339
from pitools.launch.sweep.points import parse_point, plan_point
from pitools.perf.flops.mfu import Calibration, Mfu
from pitools.perf.regression.compare import Comparison
from pitools.perf.regression.store import Point
from pitools.perf.regression.watch import SeriesVerdict
from pitools.perf.scaling import ScalingPoint
from pitools.perf.stragglers import Straggler
from pitools.run import run_folder
from pitools.site.load import load_site
from tests.performance.test_stragglers import write_run

Pit = Callable[..., subprocess.CompletedProcess[str]]


def records(done: subprocess.CompletedProcess[str], code: int = 0) -> list[dict[str, Any]]:
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_frozen_keys() -> None:
    """Of each record: keys are only ever added."""
    assert {kind.__struct_config__.tag: kind.__struct_fields__ for kind in (
        Straggler, Comparison, Point, SeriesVerdict, ScalingPoint, Mfu, Calibration)} == {
        "pit.perf-straggler/1": ("node", "rank", "cause", "effect", "excess_s", "p", "steps", "ranks"),
        "pit.perf-compare/1": ("a", "b", "measure", "verdict", "effect", "effect_low", "effect_high", "a_median",
                               "b_median", "a_points", "b_points", "device"),
        "pit.perf-point/1": ("measure", "value", "t", "site", "partition", "device", "source", "software", "better"),
        "pit.perf-series/1": ("site", "partition", "device", "measure", "verdict", "points", "changed_at", "source",
                              "before", "after", "effect", "p", "q", "changed", "rerun_effect", "rerun_low",
                              "rerun_high"),
        "pit.perf-scaling/1": ("layout", "kind", "gpus", "measured_s", "step_s", "low_s", "high_s", "efficiency",
                               "limit", "terms", "note"),
        "pit.perf-mfu/1": ("convention", "flops_per_token", "tflops_per_device", "mfu", "device", "dtype",
                           "peak_tflops", "peak_source"),
        "pit.perf-calibration/1": ("device", "dtype", "size", "tflops", "library"),
    }  # fmt: skip


def test_a_slow_rank_is_one_line(pit: Pit, tmp_path: Path) -> None:
    """With its node, which `--format hosts` alone prints, and exit code 1; a healthy run is silent, and 0."""
    write_run(tmp_path / "slow", slow=2)
    (found,) = records(pit("perf", "stragglers", "./slow"), 1)
    assert (found["rank"], found["node"], found["cause"]) == (2, "n1", "compute")
    assert pit("perf", "stragglers", "./slow", "--format", "hosts").stdout == "n1\n"
    write_run(tmp_path / "healthy")
    healthy = pit("perf", "stragglers", "./healthy")
    assert (records(healthy), "comm_s" in healthy.stderr) == ([], False)
    for log in (tmp_path / "healthy/attempts/0/steps").iterdir():  # then all ranks wait, and none looks slow
        log.write_text(log.read_text().replace('"comm_s":0.01', '"comm_s":0.0'))
    assert "comm_s" in pit("perf", "stragglers", "./healthy").stderr


def test_runs_and_files_are_compared(pit: Pit, tmp_path: Path) -> None:
    """A slower run is a regression, exit 1; higher rates are an improvement; too few numbers give no answer."""
    write_run(tmp_path / "a", slow=3)
    write_run(tmp_path / "b", slow=0)
    (found,) = records(pit("perf", "compare", "./a", "./b"), 1)
    assert (found["verdict"], found["measure"], found["a_points"]) == ("regression", "step_s", 39)
    assert 0.1 < found["effect"] < 0.25
    rng = np.random.default_rng(1)
    for name, level in (("a.txt", 100), ("b.txt", 110)):
        (tmp_path / name).write_text("# rates\n" + "\n".join(str(x) for x in level + rng.standard_normal(30)))
    (found,) = records(pit("perf", "compare", "a.txt", "b.txt", "--higher-is-better"))
    assert found["verdict"] == "improvement"
    (tmp_path / "few.txt").write_text("100\n101\n")
    few = pit("perf", "compare", "a.txt", "few.txt")
    assert records(few)[0]["verdict"] == "inconclusive"
    assert "30 and 2 numbers are too few" in few.stderr


def test_runs_of_other_requests_are_compared_with_a_note(pit: Pit, tmp_path: Path) -> None:
    """It names what differs, but for the name: the difference need not be of the code."""
    (tmp_path / "bc.toml").write_text('name = "bc"\ncommand = "true"\nparams = {input_ms = 30, lr = 1}\n')
    site = load_site("local")
    for name, sets in (("a", []), ("b", ["name=other"]), ("c", ["input_ms=15", "command=sleep 1"])):
        write_run(tmp_path / name)
        plan = plan_point(tmp_path / "bc.toml", site, parse_point(sets), data={})
        run_folder.write_record(tmp_path / name / "plan.json", plan)
    assert "note" not in pit("perf", "compare", "./a", "./b").stderr
    done = pit("perf", "compare", "./a", "./c")
    assert "note: the requests of these runs differ: command true and sleep 1, params" in done.stderr
    assert "params.input_ms 30 and 15\n" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (("a.txt", "text"), 5, '"many" (expected a number)\n  where: text:1'),
        (("a.txt", "zero"), 5, "0 (expected positive numbers)\n  where: zero"),
        (("empty", "a.txt"), 5, "no numbers"),
        (("a.txt", "binary"), 5, "not text (expected UTF-8)\n  where: binary"),
        (("a.txt", "nothing"), 2, 'no file, folder or run "nothing"'),
        (("a.txt", "a.txt", "--min-effect", "-1"), 2, "--min-effect"),
        (("./run", "a.txt"), 2, "a run and a file"),
        (("./run", "./run", "--higher-is-better"), 2, "the times of runs"),
    ],
)
def test_what_cannot_be_compared_is_named(
    pit: Pit, tmp_path: Path, words: tuple[str, ...], code: int, problem: str
) -> None:
    """With the file and the line, and what was expected."""
    write_run(tmp_path / "run", steps=3)
    files = {"a.txt": b"1\n", "text": b"many\n", "zero": b"1\n0\n", "empty": b"", "binary": b"\x89HDF"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    done = pit("perf", "compare", *words)
    assert (done.returncode, problem in done.stderr) == (code, True), done.stderr


def test_series_are_watched(pit: Pit, tmp_path: Path) -> None:
    """Points of a file and of runs are stored once; a step of the last days is exit 1; without a store, exit 4."""
    assert pit("perf", "watch", "perf.sqlite").returncode == 4
    now = datetime.now(UTC)
    values = 1 + 0.01 * np.random.default_rng(2).standard_normal(60)
    values[-8:] *= 1.1
    times = [to_rfc3339(now - timedelta(days=60 - day)) for day in range(60)]
    lines = ["measure,value,t,site"] + [f"step_s,{x},{t},alpha" for x, t in zip(values, times, strict=True)]
    (tmp_path / "points.csv").write_text("\n".join(lines))
    write_run(tmp_path / "run")
    adding = ("--add", "points.csv", "--add", "./run")
    done = pit("perf", "watch", "perf.sqlite", *adding, "--plot", "series.svg")
    worst, short = records(done, 1)
    assert (worst["site"], worst["verdict"], worst["changed_at"]) == ("alpha", "regression", times[-8])
    assert [short[key] for key in ("measure", "device", "verdict", "points")] == ["bc/step_s", "2x2 cpu", "short", 1]
    assert (tmp_path / "series.svg").stat().st_size
    for option in (("--since", "999999999d"), ("--since", "0d"), ("--min-effect", "2")):
        assert pit("perf", "watch", "perf.sqlite", *option).returncode == 2
    again = pit("perf", "watch", "perf.sqlite", *adding, "--since", "2d")
    assert "0 new points" in again.stderr
    assert records(again)[0]["verdict"] == "steady"


def test_sizes_are_fitted(pit: Pit, tmp_path: Path) -> None:
    """Each layout of a table by itself, or one; a layout that is not there is exit 2; runs need several sizes."""
    rows = [f"{n},{1 / n + 0.02},{layout},1000" for layout in ("a", "b") for n in (1, 2, 4, 8)]
    (tmp_path / "steps.csv").write_text("\n".join(["gpus,step_s,layout,tokens_per_step", *rows]))
    assert [row["layout"] for row in records(pit("perf", "scaling", "steps.csv"))] == ["a"] * 4 + ["b"] * 4
    found = records(pit("perf", "scaling", "steps.csv", "--layout", "b", "--at", "16"))
    assert found[-1]["gpus"] == 16
    assert found[-1]["step_s"] == pytest.approx(1 / 16 + 0.02, rel=0.05)
    assert pit("perf", "scaling", "steps.csv", "--layout", "c").returncode == 2
    write_run(tmp_path / "run")
    assert pit("perf", "scaling", "./run").returncode == 5


def test_a_speed_is_related_to_a_peak(pit: Pit, tmp_path: Path) -> None:
    """In three conventions; an unknown device has no utilization; without a speed, exit 2."""
    (tmp_path / "m.toml").write_text(
        "[towers.language]\nlayers = 32\nd_model = 4096\nheads = 32\nkv_heads = 8\nd_ff = 14336\ngated = true\n"
        "vocab = 128256\nseq_lens = [8192]\n"
    )
    found = records(pit("perf", "mfu", "m.toml", "--tokens-per-s", "80000", "--devices", "8", "--device", "H100 SXM"))
    assert [row["convention"] for row in found] == ["weights", "causal", "full"]
    assert found[1]["mfu"] == pytest.approx(51.47e9 * 10000 / 989.4e12, rel=1e-3)
    assert {row["mfu"] for row in records(pit("perf", "mfu", "m.toml", "--tokens-per-s", "1"))} == {None}
    assert pit("perf", "mfu", "m.toml").returncode == 2
    assert pit("perf", "mfu", "m.toml", "--tokens-per-s", "1", "--dtype", "bf1").returncode == 2
    assert records(pit("perf", "mfu", "m.toml", "--tokens-per-s", "9", "--peak", "9"))[0]["peak_source"] == "given"
