"""Hooks: each gets each of its events in order, whatever fails or is killed; none changes what becomes of the run."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.launch import hooks
from pitools.launch.plan import Plan
from pitools.launch.recovery import apply_decision
from pitools.launch.request import Request
from pitools.run import run_folder
from pitools.site import dialect
from pitools.site.schema import Hook

Pit = Callable[..., subprocess.CompletedProcess[str]]
# Appends what it gets, unless it is to fail first: then it counts that down.
COLLECT = """n=$(cat "$1.fail" 2> /dev/null || echo 0)
[ "$n" = 0 ] || { echo $((n - 1)) > "$1.fail"; echo no >&2; exit 1; }
cat >> "$1"
"""
EVENTS: dict[str, tuple[str, dict[str, object]]] = {
    "retry": ("decided", {"attempt": "0", "kind": "node", "action": "retry", "reason": "n1 is down"}),
    "verdict": ("succeeded", {"kind": "succeeded", "code": "succeeded", "reason": ""}),
    "nan": ("loss-nan", {"attempt": "1", "step": 7}),
    "stop": ("decided", {"attempt": "0", "kind": "program", "action": "stop", "reason": "a bug"}),
    "moving": ("stopped", {"kind": "moved", "code": "moving", "reason": ""}),
    "submitted": ("submitted", {"job_id": "1"}),
}


def make_run(root: Path, *run_hooks: Hook) -> Path:
    run_dir = root / "t-1"
    run_dir.mkdir()
    request = Request(name="t", command="true", workdir=str(root), params={"lr": 0.1})
    job = dialect.JobSpec(name="t", nodes=1, partition="p")
    plan = Plan(
        name="t", site="s", request=request, job=job, data=(), runs_dir=str(root), nvme="", python="p", hooks=run_hooks
    )
    (run_dir / "plan.json").write_bytes(msgspec.json.encode(plan))
    run_folder.append_event(run_dir, "created", site="s")
    hooks.mark_pending(run_dir)
    return run_dir


def received(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@settings(deadline=None, max_examples=25)
@given(
    events=st.lists(st.sampled_from(sorted(EVENTS)), max_size=5),
    listens=st.lists(st.sets(st.sampled_from(["verdict", "retry", "nan"]), min_size=1), min_size=1, max_size=2),
    fails=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    delivered_after=st.sets(st.integers(0, 4)),
)
def test_each_hook_gets_its_events_in_order(
    events: list[str],
    listens: list[set[str]],
    fails: list[int],
    delivered_after: set[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A hook that fails at most twice misses nothing, one that fails longer misses one event; nothing comes twice."""
    root = tmp_path_factory.mktemp("runs")
    outs = [root / f"out{number}" for number in range(len(listens))]
    for out, count in zip(outs, fails, strict=False):
        Path(f"{out}.fail").write_text(str(count))
    run_hooks = [
        Hook(command=("sh", "-c", COLLECT, "sh", str(out)), on=tuple(sorted(on)))  # type: ignore[arg-type]
        for out, on in zip(outs, listens, strict=True)
    ]
    run_dir = make_run(root, *run_hooks)
    for index, name in enumerate(events):
        run_folder.append_event(run_dir, EVENTS[name][0], **EVENTS[name][1])
        if index in delivered_after:
            hooks.deliver(run_dir)
    (run_dir / "verdict.json").write_text("{}")
    for _ in range(8):
        hooks.deliver(run_dir)
    for out, on, count in zip(outs, listens, fails, strict=False):
        expected = [name for name in events if name in on]
        assert [record["event"] for record in received(out)] == expected[count >= 3 :]
    assert not hooks.is_pending(run_dir)


def test_a_notice_says_what_happened_to_which_run(tmp_path: Path) -> None:
    """The record has the run, its parameters, the cause and the reason; a damaged line hides no later one."""
    run_dir = make_run(tmp_path, Hook(command=("sh", "-c", COLLECT, "sh", str(tmp_path / "out"))))
    with (run_dir / "events.jsonl").open("a") as file:
        file.write("{damaged\n")
    for name in ("retry", "nan"):
        run_folder.append_event(run_dir, EVENTS[name][0], **EVENTS[name][1])
    hooks.deliver(run_dir)
    retry, nan = received(tmp_path / "out")
    common = {"run_id": "t-1", "name": "t", "site": "s", "run_dir": str(run_dir), "params": {"lr": 0.1}}
    assert retry.items() >= {**common, "event": "retry", "cause": "node", "action": "retry", "attempt": "0"}.items()
    assert nan.items() >= {**common, "event": "nan", "step": 7, "attempt": "1"}.items()
    assert hooks.is_pending(run_dir)  # the run goes on


@pytest.mark.parametrize("command", [("sleep", "600"), ("/nonexistent",), ("sh", "-c", "exit 3")])
def test_a_hook_that_hangs_or_fails_holds_up_nothing(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up after three deliveries, and then the next hook gets the event."""
    monkeypatch.setattr(hooks, "TIMEOUT_S", 0.2)
    run_dir = make_run(tmp_path, Hook(command=command), Hook(command=("sh", "-c", COLLECT, "sh", f"{tmp_path}/out")))
    run_folder.append_event(run_dir, EVENTS["retry"][0], **EVENTS["retry"][1])
    for _ in range(2):
        hooks.deliver(run_dir)
        assert received(tmp_path / "out") == []
    hooks.deliver(run_dir)
    assert [record["event"] for record in received(tmp_path / "out")] == ["retry"]
    assert hooks.last_error(run_dir).startswith(command[0])


@pytest.mark.parametrize(("mode", "owner"), [(0o777, -1), (0o755, 54321)])
def test_a_program_that_others_could_change_is_not_started(
    tmp_path: Path, mode: int, owner: int, as_root: None
) -> None:
    """It would run as this user; a relative path is in the workdir."""
    program = tmp_path / "h.sh"
    program.write_text(f"#!/bin/sh\necho x >> {tmp_path}/out\n")
    program.chmod(mode)
    os.chown(program, owner, -1)
    run_dir = make_run(tmp_path, Hook(command=("./h.sh",)))
    run_folder.append_event(run_dir, "stopped", kind="program", code="failed", reason="x")
    hooks.deliver(run_dir)
    assert not (tmp_path / "out").exists()
    assert "h.sh" in hooks.last_error(run_dir)
    program.chmod(0o755)
    os.chown(program, 0, -1)
    hooks.deliver(run_dir)
    assert (tmp_path / "out").read_text() == "x\n"


@pytest.mark.parametrize("program", ["nosuchprogram", "./nosuch.sh", "hk/h.sh", "/nosuch/prog", "~/nosuch"])
def test_a_missing_program_is_noted_before_the_launch(pit: Pit, tmp_path: Path, program: str) -> None:
    """The run is launched, because the program may be there by then, or at the site."""
    (tmp_path / "t.toml").write_text(
        f'name = "t"\ncommand = "true"\nsnapshot = false\n[[hooks]]\ncommand = ["{program}"]\n'
    )
    done = pit("launch", "plan", "t.toml")
    assert (done.returncode, f"hook {program}: " in done.stderr) == (0, True)


def test_a_run_that_goes_on_after_its_verdict_has_its_hooks(tmp_path: Path) -> None:
    """The verdict is withdrawn by a resume: the next verdict is delivered too."""
    out = tmp_path / "out"
    run_dir = make_run(tmp_path, Hook(command=("sh", "-c", COLLECT, "sh", str(out))))
    for number in range(2):
        apply_decision.write_verdict(run_dir, "program", "it failed", 1)
        hooks.deliver(run_dir)
        assert len(received(out)) == number + 1
        assert not hooks.is_pending(run_dir)
        apply_decision.reopen(run_dir)


def test_a_run_whose_move_failed_has_its_hooks(tmp_path: Path) -> None:
    """What is delivered while it is being moved is not the last: its verdict here is delivered too."""
    out = tmp_path / "out"
    run_dir = make_run(tmp_path, Hook(command=("sh", "-c", COLLECT, "sh", str(out))))
    apply_decision.write_verdict(run_dir, "moved", "", moved_to="t-2")
    hooks.deliver(run_dir)
    (run_dir / "verdict.json").unlink()  # as the move that fails does
    apply_decision.write_verdict(run_dir, "program", "it failed", 1)
    hooks.deliver(run_dir)
    assert [record["cause"] for record in received(out)] == ["program"]
    assert not hooks.is_pending(run_dir)


TRAIN = """
import os, sys, time
from pathlib import Path
from pitools.run.steps import StepLog
attempt = Path(os.environ["PIT_ATTEMPT_DIR"])
log = StepLog(attempt / "steps", 0)
for step in range(3):
    loss = float("nan") if step == 1 else 1.0
    log.write(step=step, loss=loss, wall_s=0, input_s=0, compute_s=0, comm_s=0, rank_samples=1)
while not Path("{out}").exists() or '"nan"' not in Path("{out}").read_text():
    time.sleep(0.05)
sys.exit(attempt.name == "0")
"""


def test_a_run_from_start_to_end(pit: Pit, tmp_path: Path) -> None:
    """NaN is told while the run runs, then the retry, then the verdict; the user's own hook gets the verdict too."""
    out, own = tmp_path / "out", tmp_path / "own"
    (tmp_path / "train.py").write_text(TRAIN.replace("{out}", str(out)))
    config = tmp_path / "home" / ".config" / "pitools"
    collect = json.dumps(["sh", "-c", COLLECT, "sh", str(out)])
    (config / "hooks.toml").write_text(f'[[hooks]]\non = ["verdict"]\ncommand = ["cp", "/dev/stdin", "{own}"]\n')
    (tmp_path / "t.toml").write_text(
        f'name = "t"\ncommand = "python train.py"\n[retry]\nprogram = 1\n[watch]\nmin_stall = "3s"\n'
        f"[[hooks]]\ncommand = {collect}\n"
    )
    done = pit("launch", "run", "t.toml", "--wait", PIT_RUNS=str(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    events = [record["event"] for record in received(out)]
    assert [name for name in events if name != "nan"] == ["retry", "verdict"]
    assert events[0] == "nan"
    assert [(record["event"], record["action"]) for record in received(own)] == [("verdict", "succeeded")]


def test_tick_delivers_what_a_killed_job_did_not(pit: Pit, tmp_path: Path) -> None:
    """The verdict was written, and the job was killed before its hooks: the next tick starts them, once."""
    (tmp_path / "t.toml").write_text(
        'name = "t"\ncommand = "true"\nsnapshot = false\n'
        f"[[hooks]]\ncommand = {json.dumps(['sh', '-c', COLLECT, 'sh', str(tmp_path / 'out')])}\n"
    )
    runs = tmp_path / "runs"
    (tmp_path / "out.fail").write_text("1")
    assert pit("launch", "run", "t.toml", "--wait", PIT_RUNS=str(runs)).returncode == 0
    for _ in range(2):
        assert pit("launch", "tick", PIT_RUNS=str(runs)).returncode == 0
    assert [record["event"] for record in received(tmp_path / "out")] == ["verdict"]


def test_tick_starts_no_hook_of_a_run_that_others_could_have_changed(pit: Pit, tmp_path: Path) -> None:
    """Its plan names the programs: the error names what to change, and other runs have their hooks."""
    (tmp_path / "t.toml").write_text(
        'name = "t"\ncommand = "true"\nsnapshot = false\n'
        f"[[hooks]]\ncommand = {json.dumps(['sh', '-c', COLLECT, 'sh', str(tmp_path / 'out')])}\n"
    )
    runs = tmp_path / "runs"
    (tmp_path / "out.fail").write_text("1")
    run = json.loads(pit("launch", "run", "t.toml", "--wait", PIT_RUNS=str(runs)).stdout)
    plan_path = Path(run["run_dir"]) / "plan.json"
    plan_path.chmod(0o666)
    done = pit("launch", "tick", PIT_RUNS=str(runs))
    assert done.returncode == 3
    assert str(plan_path) in done.stderr
    assert received(tmp_path / "out") == []
    plan_path.chmod(0o644)
    assert pit("launch", "tick", PIT_RUNS=str(runs)).returncode == 0
    assert [record["event"] for record in received(tmp_path / "out")] == ["verdict"]


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ('[[hooks]]\ncommand = ["true"]\n', 0o666),
        ('[[hooks]]\non = ["verdct"]\ncommand = ["true"]\n', 0o600),
        ("[[hooks]]\ncommand = []\n", 0o600),
        ('[[hook]]\ncommand = ["true"]\n', 0o600),
    ],
)
def test_a_wrong_file_of_hooks_is_refused(text: str, mode: int, pit: Pit, tmp_path: Path) -> None:
    """A file that others can write, an unknown event, and a hook without a program: exit 3, and nothing is launched."""
    path = tmp_path / "home" / ".config" / "pitools" / "hooks.toml"
    path.write_text(text)
    path.chmod(mode)
    (tmp_path / "t.toml").write_text('name = "t"\ncommand = "true"\n')
    done = pit("launch", "run", "t.toml", PIT_RUNS=str(tmp_path / "runs"))
    assert done.returncode == 3
    assert str(path) in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[bytes]]]:
    """A server of webhooks: its URL, and what it got."""
    got: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/T0/secret", got
        server.shutdown()
        thread.join()


def test_the_recipe_for_a_webhook(webhook: tuple[str, list[bytes]], repo: Path, tmp_path: Path) -> None:
    """The text and the record are posted; the URL is in no argument and no message, and its file must be private."""
    url, got = webhook
    secret = tmp_path / "url"
    secret.write_text(url)
    secret.chmod(0o600)
    run_dir = make_run(tmp_path, Hook(command=(str(repo / "scripts/hooks/webhook"), str(secret))))
    run_folder.append_event(run_dir, EVENTS["retry"][0], **EVENTS["retry"][1])
    hooks.deliver(run_dir)
    (body,) = map(json.loads, got)
    assert body["record"]["run_id"] == "t-1"
    assert {"t-1", "retry", "down"} <= set(body["text"].replace(":", "").split())
    slo = {"event": "slo", "slo": "goodput", "site": "alpha", "severity": "page", "reason": "90 % lost"}
    argv = [repo / "scripts/hooks/webhook", secret]
    subprocess.run(argv, input=json.dumps(slo), text=True, check=True)
    assert json.loads(got.pop())["text"] == "goodput (alpha): slo page 90 % lost"
    command = [str(repo / "scripts/hooks/webhook"), str(secret)]
    secret.write_text("http://127.0.0.1:1/secret")
    record = json.dumps(body["record"])
    failed = subprocess.run(command, input=record, text=True, capture_output=True, check=False)
    assert failed.returncode == 1
    assert "secret" not in failed.stderr
    for wrong in ("127.0.0.1/secret", "http://127.0.0.1:1/a secret"):
        secret.write_text(wrong)
        failed = subprocess.run(command, input=record, text=True, capture_output=True, check=False)
        assert (failed.returncode, "secret" in failed.stderr.replace(str(secret), "")) == (1, False)
    secret.chmod(0o644)
    assert subprocess.run(command, input=record, text=True, capture_output=True, check=False).returncode == 1
