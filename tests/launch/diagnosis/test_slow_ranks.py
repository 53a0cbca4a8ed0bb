"""Slow ranks of a run: which are described, and which nodes are reported."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pitools.launch.diagnosis import slow_ranks
from pitools.launch.diagnosis.slow_ranks import describe_slow_ranks, report_stragglers
from pitools.launch.recovery.apply_decision import apply_decision
from pitools.node import blames
from pitools.perf.stragglers import Straggler
from pitools.run import run_folder
from pitools.run.attempt_records import Cause, Decision
from pitools.site.schema import NodeHealth, Site
from tests.performance.test_stragglers import write_run

LOCAL = Site(name="local", scheduler="local")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A site whose spool collects what runs find."""
    (tmp_path / "spool").mkdir()
    blames.make_folder(tmp_path / "spool")
    (tmp_path / "node.toml").write_text(f'spool = "{tmp_path}/spool"\n')
    return Site(name="s", scheduler="slurm", node=NodeHealth(config=str(tmp_path / "node.toml")))


def reported(folder: Path) -> list[tuple[str, str, str, str]]:
    """(node, kind, confidence, rule) of the records in the spool."""
    lines = [line for path in (folder / "spool" / "suspicions").iterdir() for line in path.read_text().splitlines()]
    return sorted((one["node"], one["kind"], one["confidence"], one.get("rule", "")) for one in map(json.loads, lines))


def straggler(node: str, cause: Any) -> Straggler:
    return Straggler(node=node, rank=0, cause=cause, effect=0.1, excess_s=0.01, p=0.001, steps=50, ranks=4)


def event(run: Path, rank: int, node: str, attempt: str = "0") -> None:
    run_folder.append_event(
        run, "straggler", attempt=attempt, rank=rank, node=node, step=60, own_s=0.14, others_s=0.1
    )  # fmt: skip


def test_slow_ranks_are_described_once(tmp_path: Path) -> None:
    """By the step logs, then by what the job recorded; those of an earlier attempt are not."""
    run = write_run(tmp_path / "run", slow=2)
    for rank, node, attempt in ((2, "n1", "0"), (1, "n0", "0"), (0, "n0", "9")):
        event(run, rank, node, attempt)
    with (run / "events.jsonl").open("a") as file:
        file.write(
            '{"event":"straggler"\n{"schema":"pit.event/1","t":"","event":"straggler","detail":{"attempt":"0"}}\n'
        )
    by_log, by_event = describe_slow_ranks(run, LOCAL)
    assert by_log.startswith("rank 2 on n1 is slow: its compute takes ")
    assert by_log.endswith("see: pit perf stragglers run")
    assert by_event == "rank 1 on n0 was slow at step 60: 0.14 s of its own a step, the others 0.1 s"
    assert list(describe_slow_ranks(write_run(tmp_path / "healthy"), LOCAL)) == []
    assert list(describe_slow_ranks(tmp_path, LOCAL)) == []


def test_ranks_are_compared_with_their_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `pit perf stragglers` does: a rank whose node has another kind of GPU is not slow."""
    run = write_run(tmp_path, slow=2)
    record = run_folder.RankRecord(rank=2, world_size=4, local_rank=0, node="n7", pid=1, coordinator="", data={})
    run_folder.write_record(run / "attempts/0/ranks/2.json", record)
    for gpus, count in (("h100", 1), ("a100", 0)):
        known = [
            SimpleNamespace(node=name, gpus=8, gpu_type=gpus if name == "n7" else "h100", cpus=64)
            for name in ("n0", "n1", "n7")
        ]
        monkeypatch.setattr(slow_ranks, "client", lambda _, known=known: SimpleNamespace(nodes=lambda _: known))
        assert len(list(describe_slow_ranks(run, Site(name="s", scheduler="slurm")))) == count


def test_a_trace_names_the_slow_node(repo: Path, tmp_path: Path) -> None:
    """Where there are no step logs of several ranks."""
    attempt = tmp_path / "attempts" / "0"
    (attempt / "traces").mkdir(parents=True)
    (attempt / "traces" / "10-14").symlink_to(repo / "tests/performance/profiles/torch-slow-rank")
    record = run_folder.RankRecord(rank=1, world_size=2, local_rank=0, node="n7", pid=1, coordinator="", data={})
    run_folder.write_record(attempt / "ranks" / "1.json", record)
    (line,) = describe_slow_ranks(tmp_path, LOCAL)
    assert line.startswith("rank 1 on n7 is slow: the others wait for rank 1")


def test_nodes_are_reported_as_a_guess(site: Site, tmp_path: Path) -> None:
    """By the test of `pit perf stragglers`; not the host's work of rank 0, all nodes of a run, or an old run."""
    run = write_run(tmp_path / "run")
    found = [straggler("n1", "compute"), straggler("n2", "network"), straggler("n3", "host"), straggler("", "input")]
    assert report_stragglers(site, run, found) == set()  # without a host file, it may be all nodes
    (run / "attempts" / "0" / "hostfile").write_text("n1\nn2\nn3\n")
    assert report_stragglers(site, run, found) == {"n1", "n2"}
    assert reported(tmp_path) == [
        ("n1", "node", "guess", "slow-compute"), ("n2", "network", "guess", "slow-network")
    ]  # fmt: skip
    failed = Cause(attempt="0", kind="node", confidence="certain", reason="", nodes=("n1",))
    run_folder.write_record(run / "attempts" / "0" / "cause.json", failed)
    assert report_stragglers(site, run, found) == {"n2"}  # n1's record weighs more, and stays the newest of this run
    for path in run.glob("attempts/0/steps/*"):
        os.utime(path, (1, 1))
    assert report_stragglers(site, run, found) == set()
    assert report_stragglers(site, tmp_path, found) == set()


def test_what_a_job_recorded_is_reported(site: Site, tmp_path: Path) -> None:
    """By the attempt's decision; nothing where all nodes are slow. A site without a spool is none the worse."""
    run = write_run(tmp_path / "run")
    (run / "attempts" / "0" / "hostfile").write_text("n0\nn0\nn1\nn1\n")
    event(run, 0, "n0", attempt="9")
    cause = Cause(attempt="0", kind="succeeded", confidence="certain", reason="")
    decision = Decision(attempt="0", action="done", kind="succeeded", reason="")

    def decide(at: Site) -> None:
        (run / "verdict.json").unlink(missing_ok=True)
        apply_decision(run, None, at, cause, decision, in_job=False, job=None)  # type: ignore[arg-type]

    decide(site)
    assert reported(tmp_path) == []
    event(run, 2, "n1")
    decide(site)
    decide(Site(name="other", scheduler="slurm"))
    assert reported(tmp_path) == [("n1", "node", "guess", "slow-rank")]
    event(run, 0, "n0")
    decide(site)
    assert len(reported(tmp_path)) == 1
