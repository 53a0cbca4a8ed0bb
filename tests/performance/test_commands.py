"""`pit perf attribute` and `trace` as a user types them."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.commands import perf_trace
from pitools.commands.perf import without_steps
from pitools.core.errors import NoSpace, PitError, TryLater, UsageError
from pitools.launch.api import launch, runs
from pitools.perf import trace_run
from pitools.run.run_folder import RunRecord
from pitools.run.traces import TraceRequest
from pitools.site.load import load_site

Pit = Callable[..., subprocess.CompletedProcess[str]]


def test_steps_verdict_and_pictures(pit: Pit, profiles: Path, tmp_path: Path) -> None:
    """JSON Lines end with the verdict; a table has it on stderr; each kind of picture is whole in itself."""
    page = tmp_path / "a.html"
    done = pit(
        "perf", "attribute", str(profiles / "torch-slow-rank"), "--plot", str(page), "--rank", "1", "--step", "4"
    )
    step, verdict = map(json.loads, done.stdout.splitlines())
    assert (step["schema"], step["rank"], step["step"]) == ("pit.perf-step/1", 1, 4)
    parts = ("compute", "communication", "copy", "input", "host", "compile", "checkpoint", "idle")
    assert sum(step[f"{name}_ms"] for name in parts) == pytest.approx(step["wall_ms"], abs=1e-6)
    assert (verdict["verdict"], verdict["rank"], verdict["steps"]) == ("straggler", 1, 5)
    text = page.read_text()
    assert text.count("<svg") == 1
    assert "wait for rank 1" in text
    assert not [part for part in text.split('href="')[1:] if not part.startswith(("#", "data:"))]
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        path = tmp_path / f"a{suffix}"
        shown = pit("perf", "attribute", str(profiles / "jax-recompile"), "--plot", str(path), "--format", "table")
        assert path.read_bytes().startswith(magic)
        assert "verdict: compile" in shown.stderr
        assert len(shown.stdout.splitlines()) == 11


def test_a_hang_is_shown(pit: Pit, tmp_path: Path) -> None:
    """Flight Recorder dumps alone give the ranks that a hang waits for."""
    for rank, states in enumerate((["completed", "started"], ["completed"])):
        entries = [
            {"process_group": ("0", ""), "collective_seq_id": number, "state": state}
            for number, state in enumerate(states, 1)
        ]
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps({"pg_config": {}, "entries": entries}))
    done = pit("perf", "attribute", str(tmp_path / "rank_0"), str(tmp_path / "rank_1"))
    (hang,) = map(json.loads, done.stdout.splitlines())
    assert (hang["schema"], hang["sequence"], hang["missing"], hang["waiting"]) == ("pit.perf-hang/1", 2, [1], [0])


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (("torch-healthy", "--step", "99"), 2, "expected ranks 0 to 1, steps 3 to 7"),
        (("torch-healthy", "--plot", "a.pdf"), 2, "expected .png, .svg or .html"),
        (("record_jax.py",), 5, "unknown content"),
        (("nothing-here",), 2, "nothing-here"),
    ],
)
def test_what_is_wrong_is_named(pit: Pit, profiles: Path, words: tuple[str, ...], code: int, problem: str) -> None:
    """Each with what was expected, and the exit code of its kind."""
    done = pit("perf", "attribute", str(profiles / words[0]), *words[1:])
    assert (done.returncode, problem in done.stderr) == (code, True), done.stderr


LOOP = """
import os, time
from pathlib import Path
from pitools.run.steps import StepLog
log = StepLog(Path(os.environ["PIT_ATTEMPT_DIR"], "steps"), 0)
for step in range(int(os.environ["PIT_PARAM_STEPS"])):
    time.sleep(0.1)
    log.write(step=step, loss=1, wall_s=0.1, input_s=0, compute_s=0, comm_s=0, rank_samples=1)
"""


@pytest.fixture
def request_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A request of a run that only sleeps, 0.1 s a step."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "loop.toml").write_text('name = "loop"\ncommand = "python loop.py"\nparams = {steps = 1}\n')
    return tmp_path / "loop.toml"


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_withdraws_the_request(request_file: Path) -> None:
    """Of a new run, with --set as `launch run` has it: the run goes on, which is said, and another trace may be asked
    for."""
    command = [sys.executable, "-c", "from pitools.cli import main; main()", "perf", "trace", str(request_file)]
    command += ["--set", "steps=3000", "--after", "900"]
    said = ""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as trace:
        assert trace.stderr is not None
        for line in trace.stderr:
            said += line
            if "waits for steps" in line:
                trace.send_signal(signal.SIGINT)
    (run,) = runs()
    try:
        assert trace.returncode == 130
        assert "steps 901-905 are no longer asked for" in said
        assert f"the run goes on; to end it: pit launch cancel {run.dir.name}" in said
        assert run.state == "RUNNING"
        assert trace_run.pending(run.dir / "attempts" / "0") is None
    finally:
        run.cancel()


def test_a_full_disk_ends_a_wait(request_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For steps as for traces: what goes on can record nothing more."""
    run = launch(request_file, params={"steps": 3000})
    watch = perf_trace._Watch(run.dir, load_site("local"), 200.0)
    try:
        attempt = watch.wait_for_steps(0, is_new=True)
        monkeypatch.setattr(trace_run, "is_disk_full", lambda _: True)
        monkeypatch.setattr(perf_trace, "_SILENT_S", 0.0)
        request = TraceRequest(t="2026-11-26T19:00:00Z", first_step=900, last_step=901)
        (found,) = watch.wait_for_traces(attempt, request, [0])
        assert "the disk of the run is full" in found.error
        with pytest.raises(NoSpace, match="disk of the run is full"):
            watch.wait_for_steps(1, is_new=False)
    finally:
        run.cancel()


@pytest.mark.parametrize(
    ("state", "error", "hint"),
    [
        ("PENDING", TryLater, "pit launch watch"),
        ("RUNNING", TryLater, "log.write"),
        ("UNKNOWN", TryLater, "pit launch watch"),
        ("SUSPENDED", TryLater, "pit launch watch"),
        ("CANCELLED", UsageError, "pit launch why"),
    ],
)
def test_the_state_of_a_run_without_steps_is_said(tmp_path: Path, state: str, error: type[PitError], hint: str) -> None:
    """With what helps in that state, and the exit code that says whether waiting does."""
    record = RunRecord(
        run_id="bc-1", name="bc", site="local", job_id="1", run_dir=str(tmp_path), state=state, exit_code=None,
        nodes=1, created="", attempts=state == "RUNNING",
    )  # fmt: skip
    found = without_steps(record)
    assert (type(found), state.lower() in found.message, hint in found.hint) == (error, True, True)


def test_attribute_and_advise_say_how_a_run_without_steps_ended(pit: Pit, request_file: Path) -> None:
    """Not that there are no profiles in so many files."""
    run = json.loads(pit("launch", "run", str(request_file), "--set", "steps=0", "--wait").stdout)["run_id"]
    for command in ("attribute", "advise"):
        done = pit("perf", command, run)
        assert (done.returncode, "has ended: completed without a step log" in done.stderr) == (2, True), done.stderr
    done = pit("perf", "trace", run, "--set", "steps=3")
    assert (done.returncode, "expected a request" in done.stderr) == (2, True), done.stderr
