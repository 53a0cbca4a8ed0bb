"""What the first node of a job makes of its nodes' checks, and what follows from it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.launch import plan as planning
from pitools.launch.diagnosis import diagnose, explain
from pitools.launch.job import preflight
from pitools.launch.monitor.wait_reason import WaitReason
from pitools.launch.request import Request
from pitools.node.bench import run as bench
from pitools.node.bench.worker import RankResult, SizeResult
from pitools.node.check.config import load_shipped
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart, NodePreflight, Preflight, PreflightFailure
from pitools.site import load
from pitools.site.schema import Defaults

NODES = ["n1", "n2", "n3", "n4"]
SHIPPED = json.dumps([check.name for check in load_shipped().check])  # which would judge this machine


def failure(node: str, check: str = "scratch") -> PreflightFailure:
    return PreflightFailure(node=node, check=check, message="/scratch: exists is False")


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    """An attempt on NODES that has begun."""
    created = tmp_path / "attempts" / "0"
    (created / "logs").mkdir(parents=True)
    start = AttemptStart(
        attempt="0",
        job_number=0,
        job_id="7",
        cluster="c",
        restart_count=0,
        node_list="n[1-4]",
        nodes=4,
        started="2026-01-01T00:00:00.000Z",
    )
    run_folder.write_record(created / "start.json", start)
    return created


def answer(attempt: Path, failed: dict[str, str], silent: tuple[str, ...] = ()) -> None:
    """Writes the nodes' lines, among others' words. failed: node → check."""
    lines = [b"Traceback of a node", b'{"schema": "pit.other/1"}', b'{"schema":"pit.node-pre']
    for node in NODES:
        failures = (failure(node, failed[node]),) if node in failed else ()
        if node not in silent:
            lines.append(msgspec.json.encode(NodePreflight(node=node, failures=failures)))
    (attempt / "preflight.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def result(attempt: Path) -> Preflight:
    record = run_folder.read_record(attempt / "preflight.json", Preflight)
    assert record is not None
    return record


@pytest.mark.parametrize(
    ("failed", "silent", "blamed", "problem"),
    [
        ({}, (), [], ""),
        ({"n2": "scratch"}, (), ["n2"], ""),
        ({"n2": "scratch", "n3": "gpus"}, ("n4",), ["n2", "n3"], "n4"),
        ({"n1": "scratch", "n3": "scratch"}, (), ["n1", "n3"], ""),
        ({"n1": "scratch", "n2": "scratch", "n3": "scratch"}, (), [], "scratch"),
        ({"n1": "scratch", "n2": "scratch", "n3": "scratch", "n4": "gpus"}, (), ["n4"], "scratch"),
        ({}, tuple(NODES), [], "n[1-4]"),
    ],
)
def test_which_nodes_are_to_blame(
    attempt: Path, failed: dict[str, str], silent: tuple[str, ...], blamed: list[str], problem: str
) -> None:
    """Those that failed a check that half of the nodes passed; a node that says nothing is reported, and not blamed."""
    answer(attempt, failed, silent)
    assert preflight.conclude(attempt, NODES, time.monotonic()) == (97 if blamed else 0)
    record = result(attempt)
    assert [failure.node for failure in record.failures] == blamed
    assert (record.nodes, record.answered) == (4, 4 - len(silent))
    assert problem in record.problem
    assert bool(problem) == bool(record.problem)


def test_the_only_node_of_a_job_is_blamed(attempt: Path) -> None:
    """It has no others to be compared with."""
    answer(attempt, {"n1": "scratch"})
    assert preflight.conclude(attempt, ["n1"], time.monotonic()) == 97


def test_srun_s_words_do_not_reach_the_job_s_log(attempt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There they would end the step, and be read as those of the ranks' srun."""
    answer(attempt, {}, ("n1",))
    text = preflight._without_srun("srun: error: n1: task 0: Exited with exit code 3")
    preflight.conclude(attempt, NODES, time.monotonic(), preflight.Tested(problem=text))
    assert "srun: error" not in capsys.readouterr().err
    assert "task 0" in result(attempt).problem


@pytest.mark.parametrize(("wrong", "blamed"), [(1, ["n1", "n2"]), (0, [])], ids=["wrong", "slow or dead"])
@pytest.mark.parametrize("nodes", [["n1", "n2"], NODES], ids=["two", "four"])
def test_a_pair_with_wrong_data_starts_no_ranks(
    monkeypatch: pytest.MonkeyPatch, nodes: list[str], wrong: int, blamed: list[str]
) -> None:
    """Both nodes are bad where no good partner tells which it is; one that fails without is reported."""

    def run_group(_: object, group: tuple[str, ...]) -> bench.GroupRun:
        is_bad = "n1" in group
        sizes = (SizeResult(bytes=1 << 20, wall_s=0.1, wrong=wrong if is_bad else 0),)
        ranks = tuple(
            RankResult(rank=rank, node=node, framework="torch", device="cpu", sizes=sizes)
            for rank, node in enumerate(group)
        )
        return bench.GroupRun(group, ranks, "" if wrong or not is_bad else "exit code 9")

    monkeypatch.setattr(bench.GroupTester, "_run_group", run_group)
    found = preflight.find_bad_nodes(nodes)
    if len(nodes) == 2:
        assert [(one.node, one.check) for one in found.failures] == [(node, preflight.WRONG_PAIR) for node in blamed]
        assert bool(found.problem) != bool(wrong)
    else:
        assert [(one.node, one.check) for one in found.failures] == [("n1", preflight.ALL_REDUCE)]


@pytest.mark.parametrize(
    ("check", "confidence"),
    [("scratch", "certain"), (preflight.ALL_REDUCE, "likely"), (preflight.WRONG_PAIR, "guess")],
)
def test_the_cause_names_node_and_check(attempt: Path, check: str, confidence: str) -> None:
    """Of each node, as evidence; whatever else the folder holds of an attempt without ranks."""
    failures = (failure("n2", check), failure("n3"))
    record = Preflight(t="2026-01-01T00:00:09.000Z", wall_s=9.0, nodes=4, answered=4, failures=failures)
    run_folder.write_record(attempt / "preflight.json", record)
    ended = run_folder.AttemptExit(job_id="7", exit_code=97, ended="2026-01-01T00:00:10.000Z")
    run_folder.write_record(attempt / "exit.json", ended)
    (attempt / "logs" / "srun.err").write_text("srun: error: n4: task 3: Exited with exit code 1\n")
    cause = diagnose.diagnose_attempt(attempt.parent.parent, attempt)
    assert (cause.kind, cause.confidence, cause.nodes) == ("preflight", confidence, ("n2", "n3"))
    assert {piece.node for piece in cause.evidence if piece.kind == "preflight"} == {"n2", "n3"}
    line = next(iter(explain.explain_cause(cause)))
    assert {"preflight", "n2:", f"{check}:"} <= set(line.split())
    assert list(explain.explain_cause(cause))


def test_a_preflight_that_passed_is_no_cause(attempt: Path) -> None:
    """The ranks ended the attempt."""
    run_folder.write_record(attempt / "preflight.json", Preflight(t="", wall_s=9.0, nodes=4, answered=0, problem="no"))
    run_folder.write_record(attempt / "exit.json", run_folder.AttemptExit(job_id="7", exit_code=97, ended=""))
    assert diagnose.diagnose_attempt(attempt.parent.parent, attempt).kind == "unknown"


def test_what_is_waited_for(make_plan: Callable[..., planning.Plan], attempt: Path) -> None:
    """How many nodes have made their checks, until there is a result."""
    run_dir = attempt.parent.parent
    (run_dir / "plan.json").write_bytes(msgspec.json.encode(make_plan("alpha", nodes=4, preflight="quick")))
    run = run_folder.RunRecord(
        run_id="r", name="t", site="s", job_id="7", run_dir="", state="RUNNING", exit_code=None, nodes=4, created=""
    )
    waits = WaitReason(run_dir)
    assert waits.changed_line(run) == ""
    (attempt / "preflight.jsonl").write_text("{}\n{}\n")
    assert "2 of 4 nodes" in waits.changed_line(run)
    assert waits.changed_line(run) == ""
    (attempt / "preflight.jsonl").write_text("{}\n{}\n{}\n")
    assert "3 of 4 nodes" in waits.changed_line(run)
    (attempt / "preflight.json").write_text("{}")
    (attempt / "preflight.jsonl").write_text("{}\n{}\n{}\n{}\n")
    assert waits.changed_line(run) == ""


@pytest.mark.parametrize(
    ("of_site", "of_request", "expected"),
    [("none", "", "none"), ("none", "quick", "quick"), ("quick", "", "quick"), ("quick", "none", "none")],
)
def test_the_request_overrides_the_site(of_site: Any, of_request: Any, expected: str) -> None:
    """In the plan and in the script; a ticket of a queue and an array of callables have none."""
    site = load.load_site("alpha")
    site = msgspec.structs.replace(site, defaults=msgspec.structs.replace(site.defaults, preflight=of_site))
    plan = planning.make_plan(Request(name="t", command="true", preflight=of_request), site, "test")
    assert plan.preflight == expected

    def has_preflight(plan: planning.Plan, array: str = "") -> bool:
        text = planning.render_script(plan, site, run_dir="/r/t", array=array)
        assert text.index("topology order") < text.index("srun --distribution")
        return "step preflight" in text[: text.index("topology order")]

    assert has_preflight(plan) == (expected == "quick")
    assert not has_preflight(planning.plan_of_ticket(plan))
    assert not has_preflight(plan, array="0-3")
    assert Defaults().preflight == "none"


@pytest.mark.parametrize(
    ("equals", "fails"), [("true", True), ("false", False), ('"not a key of this type', False)], ids=["bad", "ok", "no"]
)
def test_without_slurm_this_machine_makes_its_checks(
    pit: Callable[..., Any], tmp_path: Path, equals: str, fails: bool
) -> None:
    """One that fails stops the run, before any rank and with the check's name; a broken file of checks does not."""
    check = 'name = "scratch"\ntable = "files"\nwhere.path = "/nosuch"\nkey = "exists"\nequals = '
    (tmp_path / "node.toml").write_text(f"disable = {SHIPPED}\n[[check]]\n{check}{equals}\n")
    (tmp_path / "local.toml").write_text('[node]\nconfig = "node.toml"\n[defaults]\npreflight = "quick"\n')
    (tmp_path / "hello.toml").write_text('name = "hello"\ncommand = "true"\ntime = "1m"\nsnapshot = false\n')
    env = {"PIT_SITE_PATH": str(tmp_path), "PIT_RUNS": str(tmp_path / "runs")}
    done = pit("launch", "run", "hello.toml", "--wait", **env)
    run = json.loads(done.stdout)
    folder = Path(run["run_dir"]) / "attempts" / "0"
    if fails:
        assert (done.returncode, run["cause"], run["attempts"], run["exit_code"]) == (1, "preflight", 1, 97)
        assert "scratch" in run["reason"]
    else:
        assert (done.returncode, run["cause"]) == (0, "succeeded"), done.stderr
    assert bool(list(folder.glob("ranks/*"))) != fails
    assert result(folder).answered == (not equals.startswith('"'))
