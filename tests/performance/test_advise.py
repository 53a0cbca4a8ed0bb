"""What is advised, how a trial of it is judged, and one trial by real local runs."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from pitools.commands import perf_advise
from pitools.commands.perf_advise import find_run_of
from pitools.core.errors import ClusterError, DataError, TryLater
from pitools.launch.api import launch, runs
from pitools.launch.timed_rerun import repeat_steps
from pitools.perf.advise import Proposal, Trial, conclude, decides, least_steps, propose
from pitools.perf.attribute.verdict import Advice, Verdict
from pitools.perf.regression.repeats import Effect, alternate, effect_of_few

Pit = Callable[..., subprocess.CompletedProcess[str]]

# A loader whose workers share the reading of batches, beside the step; times are as they would be on a quiet machine.
LOOP = """
import os, time
from pathlib import Path
from pitools.run.steps import StepLog
log = StepLog(Path(os.environ["PIT_ATTEMPT_DIR"], "steps"), 0)
input_s = max(0, 0.09 / int(os.environ["PIT_PARAM_WORKERS"]) - 0.03)
for step in range(int(os.environ["PIT_PARAM_STEPS"])):
    time.sleep(0.02)
    log.write(step=step, loss=1, wall_s=input_s + 0.03, input_s=input_s, compute_s=0.03, comm_s=0, rank_samples=1)
log.close()
"""
REQUEST = 'name = "loop"\ncommand = "python loop.py"\ntime = "5m"\nparams = {workers = 1, steps = 20}\n'


def verdict(*causes: str, rank: int | None = None) -> Verdict:
    """Of 100 ms steps, of which each cause takes 20 ms and 10 can be gained."""
    advice = [Advice(cause=cause, remedy="", gain_ms=10.0, ceiling_ms=20.0) for cause in causes]
    return Verdict(
        verdict=causes[0], evidence=[], rank=rank, ranks=2, steps=9, wall_ms=100.0, shares={}, advice=advice, notes=[]
    )


def test_frozen_keys() -> None:
    """Of each record: keys are only ever added."""
    assert {kind.__struct_config__.tag: kind.__struct_fields__ for kind in (Proposal, Trial)} == {
        "pit.perf-proposal/1": ("cause", "remedy", "step_ms", "predicted_ms", "bound_ms", "gain", "ceiling", "changes",
                                "node", "note"),
        "pit.perf-trial/1": ("cause", "changes", "verdict", "predicted", "ceiling", "gain", "gain_low", "gain_high",
                             "steps", "a_step_s", "b_step_s", "a_runs", "b_runs"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cause", "request_tables", "changes"),
    [
        ("input", {"args": {"prefetch": 4}, "params": {"num_workers": 3}}, {"params.num_workers": "6"}),
        ("input", {"args": {"workers": True, "lr": 1}}, {}),
        ("checkpoint", {"args": {"checkpoint_every": 50}}, {"args.checkpoint_every": "100"}),
        ("checkpoint", {"args": {"checkpoint_every": 0}}, {}),
        ("straggler", {}, {"exclude": "n2", "nodelist": ""}),
        ("straggler", {"exclude": "n[7-8]"}, {"exclude": "n[2,7-8]", "nodelist": ""}),
        ("host", {"args": {"workers": 2}}, {}),
    ],
)
def test_a_change_is_proposed_where_a_key_is_known(
    cause: str, request_tables: dict[str, Any], changes: dict[str, str]
) -> None:
    """With the predicted step and its bound; else with what to do."""
    (found,) = propose(verdict(cause, rank=1), request_tables, {0: "n1", 1: "n2"})
    assert (found.changes, bool(found.note)) == (changes, not changes)
    assert (found.bound_ms, found.ceiling, f"--cause {cause} --set" in found.note) == (80.0, 0.2, not changes)
    assert found.node == ("n2" if cause == "straggler" else "")


@pytest.mark.parametrize(
    ("cause", "before", "change", "wait_ms", "gain"),
    [
        ("input", 1, {}, 70.0, 0.5),  # a batch every 100 ms becomes one every 50 ms
        ("input", 1, {"args.workers": "4"}, 70.0, 0.7),  # and with four the input hides behind the other 30 ms
        ("input", 1, {"args.workers": "x"}, 70.0, 0.1),  # of what is no such change, the advice's own guess
        ("input", 2, {}, 20.0, 0.2),
        ("input", 0, {}, 70.0, 0.65),  # from 70 ms in the step to 35 ms beside it
        ("input", 0, {}, 20.0, 0.2),
        ("checkpoint", 50, {}, 20.0, 0.1),
        ("checkpoint", 50, {"args.save_every": "200"}, 20.0, 0.15),
    ],
)
def test_a_gain_is_predicted_from_its_change(
    cause: str, before: int, change: dict[str, str], wait_ms: float, gain: float
) -> None:
    """Of a step of 100 ms. The ceiling is what would go if the cause were gone."""
    advice = [Advice(cause=cause, remedy="", gain_ms=10.0, ceiling_ms=wait_ms)]
    asked = msgspec.structs.replace(verdict(cause), advice=advice)
    request = {"args": {"workers": before, "save_every": before}}
    (found,) = propose(asked, request, {}, change)
    assert (found.gain, found.ceiling) == (gain, wait_ms / 100)


def test_checkpoints_are_seen_in_two_intervals() -> None:
    """Of fewer steps the change would gain all of them; other causes need no more than others."""
    input_wait, checkpoint = propose(verdict("input", "checkpoint"), {}, {})
    assert least_steps(checkpoint, {"args.save_every": "100", "name": "x", "args.batch_size": "4096"}) == 200
    assert least_steps(input_wait, {"args.workers": "100"}) == least_steps(None, {"a": "100"}) == 0


def test_the_run_of_a_trace(tmp_path: Path) -> None:
    """Is the one whose attempts it is in, and no other folder above that has a plan.json."""
    (tmp_path / "plan.json").touch()
    trace = tmp_path / "attempts/0/traces/10-14/rank0.json"
    assert find_run_of(tmp_path) == find_run_of(trace) == tmp_path
    assert find_run_of(tmp_path / "trace.json") is None


def test_a_straggler_on_the_only_node_cannot_be_left_out() -> None:
    """Nor one that is not surely known."""
    assert propose(verdict("straggler", rank=1), {}, {0: "n1", 1: "n1"})[0].changes == {}
    assert propose(verdict("straggler"), {}, {0: "n1", 1: "n2"})[0].changes == {}


@pytest.mark.parametrize("effect", [0.0, -0.1])
def test_intervals_hold_the_truth(effect: float) -> None:
    """In at least 94 of 100 trials of runs that differ by 1 %, also where more pairs are run until it is decided."""
    rng = np.random.default_rng(7)
    held, decided = 0, 0
    for _ in range(1000):
        *_, found = alternate(
            lambda is_b: float((1 + effect * is_b) * np.exp(0.01 * rng.standard_normal())), decides(0.1)
        )
        held += found.low <= effect <= found.high
        decided += decides(0.1)(found)
    assert held >= 940
    assert decided >= 950


def test_two_sides_run_in_turn_until_decided() -> None:
    """A B A B, and at most four pairs; fewer than two values, or a time of 0, are refused."""
    order: list[bool] = []
    alternate(lambda is_b: [1.0, 2.0][is_b] * (1 + 1e-4 * len(order)) * (order.append(is_b) or 1), decides(0.1))
    assert order == [False, True, False, True]
    a, b, _ = alternate(lambda is_b: 1.0 + is_b, lambda _: False)
    assert (len(a), len(b)) == (4, 4)
    for bad in ([1.0], [1.0, 0.0]):
        with pytest.raises(DataError):
            effect_of_few([1.0, 1.0], bad)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.05, 0.15, "as-predicted"),
        (0.01, 0.07, "less"),
        (0.085, 0.09, "as-predicted"),
        (0.13, 0.2, "more"),
        (-0.05, 0.05, "none"),
        (-0.2, -0.1, "none"),
        (-0.05, 0.15, "inconclusive"),
    ],
)
def test_a_trial_is_judged_by_its_interval(low: float, high: float, expected: str) -> None:
    """Whether it has 0, and whether it has the predicted gain of 10 %."""
    (proposal,) = propose(verdict("input"), {}, {})
    assert proposal.gain == 0.1
    effect = Effect(-(low + high) / 2, -high, -low)
    trial = conclude(proposal, {"a": "b"}, effect, steps=9, times=([1], [1]), runs=(["x"], ["y"]))
    assert (trial.verdict, trial.gain_low, trial.gain_high, trial.predicted) == (expected, low, high, 0.1)


@pytest.mark.parametrize(("low", "high", "code"), [(0.05, 0.15, 0), (-0.05, 0.05, 1), (-0.05, 0.15, 1)])
def test_only_a_gain_that_is_shown_is_exit_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, low: float, high: float, code: int
) -> None:
    """So a script that adopts a change by it adopts none of an inconclusive trial."""
    (proposal,) = propose(verdict("input"), {}, {})
    trial = conclude(proposal, {}, Effect(0.0, -high, -low), steps=9, times=([1], [1]), runs=(["x"], ["y"]))
    monkeypatch.setattr(perf_advise, "_propose", lambda *_: [proposal])
    monkeypatch.setattr(perf_advise, "_try", lambda *_: trial)
    (tmp_path / "plan.json").touch()
    done = CliRunner().invoke(perf_advise.advise, [str(tmp_path), "--verify", "--set", "params.a=1"])
    assert (done.exit_code, json.loads(done.stdout)["verdict"]) == (code, trial.verdict), done.output


def test_advice_is_tried_by_runs(pit: Pit, tmp_path: Path) -> None:
    """Twice the workers gain what was predicted; a change of the user's that gains nothing is exit 1; what is not
    there to try is exit 2; the repeated runs have the code of the first, and end."""
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "loop.toml").write_text(REQUEST)
    done = pit("launch", "run", "loop.toml", "--wait")
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    (tmp_path / "loop.py").write_text("raise SystemExit(1)")
    (proposal,) = map(json.loads, pit("perf", "advise", run["run_id"]).stdout.splitlines())
    assert (proposal["cause"], proposal["changes"]) == ("input", {"params.workers": "2"})
    assert proposal["gain"] == pytest.approx(1 / 2, abs=0.001)
    done = pit("perf", "advise", run["run_id"], "--verify", "--steps", "10", "--set", "params.steps=1000")
    assert done.returncode == 1, done.stderr
    done = pit("perf", "advise", run["run_id"], "--verify", "--steps", "10")
    assert done.returncode == 0, done.stderr
    trial = json.loads(done.stdout)
    assert (trial["verdict"], trial["gain"]) == ("as-predicted", pytest.approx(1 / 2, abs=0.001))
    listed = {each["run_id"]: each for each in map(json.loads, pit("launch", "list").stdout.splitlines())}
    assert {each["state"] for each in listed.values()} <= {"COMPLETED", "CANCELLED"}
    assert [listed[run]["params"]["workers"] for run in (*trial["a_runs"], *trial["b_runs"])] == [1, 1, 2, 2]
    for words, problem in (
        (("--cause", "host"), 'no advice of cause "host"'),
        (("--set", "workers=2"), "without --verify"),
        (("--verify", "--set", "nothing=2"), 'no key or parameter "nothing"'),
        (("--verify", "--set", "params.worker=2"), 'did you mean "workers"?'),
        (("--verify", "--set", "params.workers=many"), "expected int"),
        (("--verify", "--set", "params.workers=1"), "changes nothing"),
    ):
        bad = pit("perf", "advise", run["run_id"], *words, *(["--verify"] if "--cause" in words else []))
        assert (bad.returncode in (2, 3), problem in bad.stderr) == (True, True), bad.stderr
    assert len(pit("launch", "list").stdout.splitlines()) == len(listed)  # a wrong change is said before any run


@pytest.mark.usefixtures("interruptible")
def test_a_repeated_run_is_always_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C, SIGTERM or SIGHUP, or when time is up; one that fails is an error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "loop.toml").write_text(REQUEST)
    run_dir = launch(tmp_path / "loop.toml", params={"steps": 1}).dir

    def repeat(said: Callable[[str], None], timeout_s: float, **values: str) -> None:
        repeat_steps(
            run_dir, steps=10, values=values, suffix="-x", nodes_of=run_dir, timeout_s=timeout_s, report=said
        )  # fmt: skip

    def end_by(number: signal.Signals) -> None:
        assert callable(signal.getsignal(number))  # else the signal would end this process
        signal.raise_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(KeyboardInterrupt):
            repeat(lambda _, number=number: end_by(number), 60.0, steps="300")
    with pytest.raises(TryLater):
        repeat(lambda _: None, 0.0, steps="300")
    with pytest.raises(ClusterError, match="program"):
        repeat(lambda _: None, 60.0, command="python nothing.py")
    repeated = [run for run in runs() if "loop-x" in run.dir.name]
    # Sorted: runs of one second have no order.
    assert sorted(run.state for run in repeated) == ["CANCELLED"] * 4 + ["FAILED"]
