"""The commands: what they print, how they end, and what they say of input that is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pitools import cli
from pitools.capacity.synthesize import as_sacct, synthesize
from pitools.core import progress
from tests.capacity.made_month import month
from tests.capacity.test_ask import daily

TOML = "[pools.near]\ngpus = 96\nprice_per_gpu_hour = 1.0\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three weeks of jobs, a day's one job, and today's pools."""
    monkeypatch.chdir(tmp_path)
    lines = list(as_sacct(month(5, days=21)))
    Path("q").write_text("\n".join(lines) + "\n")
    Path("one").write_text("\n".join(lines[:2]) + "\n")
    Path("none").write_text(lines[0] + "\n")
    Path("empty").write_text("")
    Path("today.toml").write_text(TOML)
    Path("t.toml").write_text(f"tiers = {{ b = 1 }}\n{TOML}")
    rows = [f"{job}|a|2026-06-{job:02}T09:00:00|2026-06-{job:02}|60|gres/gpu=1" for job in range(3, 26)]
    rest = [row for row in rows if int(row.split("|")[0]) % 7 not in (1, 2)]  # nothing on Mondays and Tuesdays
    Path("rest").write_text("\n".join(["JobID|QOS|Start|Submit|ElapsedRaw|AllocTRES", *rest]) + "\n")
    Path("oneday.txt").write_text("\n".join(lines[:2]) + "\n")
    Path("t").write_text("JobID|QOS|Submit|ElapsedRaw|AllocTRES\n1|a|2026-06-01|60|node=1\n2|b|2026-06-09|60|node=1\n")
    return tmp_path


def pit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, *more: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `pit capacity`."""
    monkeypatch.setattr(sys, "argv", ["pit", "capacity", *text.split(), *more])
    code = cli.run(cli.group, "pit")
    return code, *capsys.readouterr()


def test_answers_are_json_lines_and_progress_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pipe: a record per what-if and group on stdout, progress on stderr, a picture in its file."""
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    words = "ask q --scenario today.toml --days 7 --seeds 1 --png a.png --if"
    code, out, err = pit(capsys, monkeypatch, words, "gpus near +16, down near 2d 1d")
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert {record["what_if"] for record in records} == {"", "gpus near +16, down near 2d 1d"}
    assert {record["group"] for record in records} == {"all", "team robots", "team vision"}
    assert [json.loads(line)["done"] for line in err.splitlines() if line.startswith("{")] == [1, 2]
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_left_out_or_assumed_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that still run, invalid rows, limits that are drawn, and days too few for seeds that differ."""
    lines = Path("q").read_text().splitlines()[:300]
    cells = [line.split("|") for line in lines[200:210]]
    hours = sum(int(cell[7]) * int(cell[9].partition("=")[2]) for cell in cells) / 3600
    running = [line.replace("COMPLETED", "RUNNING").replace("s", "r", 1) for line in lines[200:210]]
    Path("week").write_text("\n".join([*lines, *running, "x|y"]) + "\n")
    code, _, err = pit(capsys, monkeypatch, "ask week --skip-bad --scenario today.toml --days 7 --seeds 2")
    notes = [line for line in err.splitlines() if line.startswith("pit: ")]
    assert (code, [note for note in notes if "left out" in note]) == (0, [
        f"pit: left out 10 jobs that run still ({hours:.0f} GPU hours)", "pit: left out 1 invalid rows"
    ])  # fmt: skip
    assert ["whole days in the trace: " in notes[2], "299 jobs have no time limit" in notes[3]] == [True, True]


@pytest.mark.parametrize(
    ("toml", "words", "said"),
    [
        ("[tiers]\nurgnt = 1\n", (), 'no jobs of the tier "urgnt"'),
        ("[pools.far]\ngpus = 8\n", (), "no price: far"),
        ("[pools.far]\ngpus = 8\n", (), "any pool that is large enough"),
        ("", ("--if", "rent far 8 0"), "no price: far"),
        ("", ("--if", "load x9"), "the queue grows"),
        ("", (), "55% of the jobs' GPU time is more than 91 days"),
    ],
)
def test_what_a_scenario_lacks_is_told(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    toml: str,
    words: tuple[str, ...],
    said: str,
) -> None:
    """A tier that the jobs lack, pools that cost nothing beside others, and more work than the pools can do."""
    if "days" in said:
        Path("q").write_text("\n".join(as_sacct(daily(hours=200 * 24.0))) + "\n")
    Path("s.toml").write_text(toml + TOML.replace("96", "16" if "load" in str(words) else "96"))
    code, _, err = pit(capsys, monkeypatch, "ask q --scenario s.toml --days 1 --seeds 1", *words)
    assert (code, said in err) == (0, True)


def test_a_seed_without_jobs_is_told_and_the_others_are_answered(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a log with a gap of weeks, where most have none."""
    lines = list(as_sacct(daily(days=7)))
    later = [f"9{line}".replace("1970-01", "1970-03") for line in lines[1:]]
    Path("gap").write_text("\n".join([*lines, *later]) + "\n")
    code, out, err = pit(capsys, monkeypatch, "ask gap --scenario today.toml --days 1 --seeds 9")
    assert (code, "today: no jobs in the period of" in err, json.loads(out)["jobs"]) == (0, True, 0)


def test_growth_that_is_not_counted_on_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where the log grows, and no --growth is given."""
    Path("g").write_text("\n".join(as_sacct(synthesize(month(5, days=28), days=28, growth_per_week=0.5))) + "\n")
    for words, is_said in (("g", True), ("g --growth 0", False), ("q", False)):
        code, _, err = pit(capsys, monkeypatch, f"model {words} --days 1")
        assert (code, "a week" in err) == (0, is_said)


def test_preemption_that_is_not_simulated_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of today's QOS, under a policy whose jobs wait outside of the pools."""
    Path("p.toml").write_text(f'tiers = {{ b = 1 }}\npreempts = {{ b = ["a"] }}\n{TOML}')
    code, _, err = pit(capsys, monkeypatch, "ask q --scenario p.toml --policy ours --days 1 --seeds 1")
    assert (code, "does nothing under this policy" in err) == (0, True)


def test_a_goal_that_nothing_reaches_is_exit_1(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, and today is answered all the same; a goal that today reaches names today."""
    words = "ask q --scenario today.toml --days 7 --seeds 1 --if"
    code, out, err = pit(capsys, monkeypatch, words, "gpus near -31", "--reach", "all p95 1s")
    assert (code, "neither today nor" in err) == (1, True)
    assert {json.loads(line)["what_if"] for line in out.splitlines()} == {""}
    code, _, err = pit(capsys, monkeypatch, words, "gpus near +8", "--reach", "all p95 99d")
    assert (code, err.splitlines()[-1]) == (0, "pit: the cheapest that reaches every goal: today")


def test_a_forecast_no_better_than_naive_is_exit_1(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all jobs and tiers there is one record, or one for each period."""
    header, *lines = Path("q").read_text().splitlines()
    with_start = [f"{header}|Start", *(f"{line}|{line.split('|')[5]}" for line in lines)]  # nobody waited
    Path("real").write_text("\n".join(with_start) + "\n")
    code, out, _ = pit(capsys, monkeypatch, "backtest real --days 7")
    assert code == 1
    assert [json.loads(line)["forecast_error"] for line in out.splitlines()] == [0.0]
    code, out, _ = pit(capsys, monkeypatch, "backtest real --periods --format csv")
    assert (code, [line.split(",")[0] for line in out.splitlines()]) == (1, ["period", "2", "3"])


def test_synthetic_jobs_are_a_trace(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `model` writes, `workload` reads: the same classes."""
    _, before, _ = pit(capsys, monkeypatch, "workload q")
    _, made, _ = pit(capsys, monkeypatch, "model q --days 21 --seed 3")
    Path("made").write_text(made)
    code, after, _ = pit(capsys, monkeypatch, "workload made")
    classes = [
        {(each["team"], each["gpus"]) for each in map(json.loads, text.splitlines())} for text in (before, after)
    ]
    assert (code, classes[0]) == (0, classes[1])


@pytest.mark.parametrize(
    ("text", "more", "code", "said"),
    [
        ("workload nowhere", (), 5, "no such file"),
        ("workload empty", (), 5, "empty (expected"),
        ("workload none", (), 5, "no job that ran"),
        ("model one", (), 5, "no whole day"),
        ("ask one --scenario today.toml", (), 5, "no whole day"),
        ("backtest q", (), 5, "no real waits"),
        ("ask q", (), 2, "--scenario or --site"),
        ("ask q --site nowhere", (), 2, "nowhere"),
        ("ask q --scenario today.toml --policy fedration", (), 2, 'did you mean "federation"'),
        ("ask q --scenario today.toml --png a.jpg", (), 2, ".png"),
        ("ask q --scenario today.toml --if", ("team visoin x2",), 2, 'did you mean "vision"'),
        ("ask t --scenario t.toml --policy ours --if", ("preempt b a",), 2, "does nothing under this policy"),
        ("ask q --scenario today.toml --days 7 --if", ("away near 8d 1d",), 2, "before day 7"),
        ("ask q --scenario today.toml --if", ("",), 2, "no change"),
        ("ask rest --scenario today.toml --days 2 --seeds 2 --png a.png", (), 5, "no jobs in the period of 2 of 2"),
        ("backtest rest --days 10", (), 5, "expected three"),
        ("ask oneday.txt --scenario today.toml", (), 5, "oneday.txt"),
        ("ask q --scenario today.toml --growth nan", (), 2, "not above -1"),
        ("model q --growth -1", (), 2, "not above -1"),
        ("model q --growth 2%", (), 2, "as 0.02 for 2 %"),
        ("model q --days 1 --growth -0.999999", (), 5, "no jobs in 1 days"),
        ("ask q --scenario today.toml --if", ("limit 2h", "--reach", "tier 4 p95 30m"), 2, "no jobs of"),
        ("ask q --scenario today.toml --reach", ("all p95 30m",), 2, "nothing to combine"),
    ],
)
def test_input_that_is_none_is_named(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    more: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    """Nothing is printed, the exit code is that of its kind, and the error says what is wrong."""
    ended, out, err = pit(capsys, monkeypatch, text, *more)
    assert (ended, out) == (code, "")
    assert said in err
    assert "Traceback" not in err
