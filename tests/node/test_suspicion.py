"""Suspicion: what users' runs, reports, incidents and benches say of nodes, and what nobody can make it say."""

from __future__ import annotations

import itertools
import json
import math
import os
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pitools.core import trust
from pitools.core.timestamps import to_rfc3339
from pitools.node import blames, site_suspicion, spool
from pitools.node.bench.compare import BenchResult
from pitools.node.blames import NodeBlame
from pitools.node.check.config import NodeConfig
from pitools.node.control.incidents import Incident
from pitools.node.site_suspicion import report_cause
from pitools.node.suspicion import suspicions
from pitools.node.types import Finding, NodeReport
from pitools.run.attempt_records import Cause, Evidence
from pitools.site.schema import NodeHealth, Site

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
UID = os.geteuid()
NODES = ("n1", "n2", "n3")


def at(hours: float) -> str:
    return to_rfc3339(NOW + timedelta(hours=hours))


def record(node: str = "n1", user: str = "ada", run: str = "r1", hours: float = 0.0, **more: Any) -> NodeBlame:
    plain = {"kind": "gpu", "confidence": "certain", "rule": "xid-79"}
    return NodeBlame(node=node, user=user, run=run, **{"at": at(hours), **plain, **more})


def finding(action: Any = "report", **more: Any) -> dict[str, NodeReport]:
    one = {"node": "n1", "check": "c", "state": "failed", "level": "critical", "message": "m", "evidence_at": at(-1)}
    found = Finding(**{**one, "action": action, **more})
    return {"n1": NodeReport(node="n1", boot_id="b", checked_at=at(0), findings=(found,))}


def incident(**more: Any) -> Incident:
    plain: dict[str, Any] = {
        "incident": "n1-1",
        "node": "n1",
        "check": "c",
        "action": "drain",
        "evidence_at": at(-2),
        "message": "m",
    }
    return Incident(**{**plain, "opened_at": at(-2), "phase": "drained", **more})


def bench(verdict: Any, hours: float) -> BenchResult:
    return BenchResult(node="n1", measure="memory", value=1.0, verdict=verdict, measured_at=at(hours))


@pytest.mark.parametrize(
    ("given_", "is_strong"),
    [
        ({"blames": [record(), record(run="r2"), record(run="r3")]}, False),
        ({"blames": [record(), record(user="bob")]}, True),
        ({"blames": [record(confidence="guess"), record(user="bob", confidence="guess")]}, False),
        ({"blames": [record(hours=-23), record(user="bob", hours=-23)]}, False),
        ({"blames": [record(hours=-24)]}, None),
        ({"blames": [record(hours=2)]}, None),
        ({"reports": finding("drain")}, True),
        ({"reports": finding("report")}, False),
        ({"reports": finding("report"), "blames": [record()]}, False),
        ({"reports": finding("report"), "blames": [record()], "bench": [bench("slow", -2)]}, False),
        ({"reports": finding("report"), "blames": [record(confidence="likely"), record(user="bob")]}, True),
        ({"reports": finding("report", level="warning"), "blames": [record()]}, False),
        ({"reports": finding("none")}, None),
        ({"reports": finding("drain", is_shadow=True)}, None),
        ({"reports": finding("drain", state="unknown")}, None),
        ({"incidents": [incident()]}, True),
        ({"incidents": [incident(phase="over", outcome="released", over_at=at(-1))]}, None),
        ({"bench": [bench("slow", -2)]}, False),
        ({"bench": [bench("wrong", -2)]}, True),
        ({"bench": [bench("wrong", -2), bench("ok", -1)]}, None),
        ({"bench": [bench("wrong", -25)]}, None),
        (
            {
                "incidents": [incident(phase="over", outcome="returned", over_at=at(-1))],
                "blames": [record(hours=-1.5), record(user="bob", hours=-2)],
                "bench": [bench("wrong", -2)],
            },
            None,
        ),
    ],
)
def test_what_makes_a_node_suspected(given_: dict[str, Any], is_strong: bool | None) -> None:
    """What drains, or two users, suspect it strongly; one user never; None: what is old or re-tested."""
    plain: dict[str, Any] = {"reports": {}, "incidents": [], "bench": [], "blames": []}
    found = suspicions(at(0), **{**plain, **given_}).get("n1")
    assert (found and found.is_strong) is is_strong
    assert found is None or (found.score > 0 and found.reasons)


@pytest.mark.parametrize("phase", ["opening", "drained", "recovered", "returning"])
def test_a_drained_node_is_told_from_one_to_be_drained(phase: Any) -> None:
    """Both are strongly suspected; only an intended drain lets jobs through."""
    one = suspicions(at(0), finding("drain"), [incident(phase=phase)], [], [])["n1"]
    assert (one.is_strong, one.is_drained) == (True, phase != "opening")


@pytest.mark.parametrize(
    ("action", "failing", "suspected"), [("report", 3, 0), ("report", 2, 2), ("drain", 3, 3), ("none", 1, 0)]
)
def test_what_most_nodes_fail_suspects_none(action: Any, failing: int, suspected: int) -> None:
    """Unless it drains them: all clocks of a site that are not synchronized tell no node from another."""
    (report,) = finding(action, level="warning" if action == "report" else "critical").values()
    reports = {f"n{number}": msgspec.structs.replace(report, node=f"n{number}") for number in range(failing)}
    reports |= {f"n{number}": msgspec.structs.replace(report, findings=()) for number in range(failing, 4)}
    found = suspicions(at(0), reports, [], [], [])
    assert len(found) == suspected
    assert all(one.summary.startswith("users: 0; c: m") for one in found.values())


RECORDS = st.builds(
    record,
    node=st.sampled_from([f"n{i}" for i in range(30)]),
    user=st.just("eve"),
    run=st.sampled_from(["a", "b", "c"]),
    hours=st.floats(-30, 30),
    confidence=st.sampled_from(["certain", "likely", "guess"]),
)


@example([record(f"n{number}", "eve", hours=-number / 10) for number in range(30)], [])
@given(st.lists(RECORDS, max_size=60), st.lists(RECORDS, max_size=5))
def test_one_user_poisons_few_nodes(of_eve: list[NodeBlame], others: list[NodeBlame]) -> None:
    """Whatever a user writes: few nodes, the newest, and none strongly; and others' records count as without."""
    alone = suspicions(at(0), {}, [], [], of_eve)
    assert len(alone) <= 8
    assert not any(one.is_strong for one in alone.values())
    recent = sorted((one.at, one.node) for one in of_eve if at(-23.9) < one.at <= at(0))
    assert {node for time, node in recent if time == recent[-1][0]} & alone.keys() or not recent
    of_ada = [record(one.node, "ada", one.run, confidence=one.confidence) for one in others]
    ours, both = (suspicions(at(0), {}, [], [], runs) for runs in (of_ada, of_eve + of_ada))
    assert all(both[node].score >= one.score for node, one in ours.items())
    assert len(both) <= len(ours) + 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    blames.make_folder(tmp_path)
    return tmp_path


def test_the_folder_is_made_with_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the tick after one that was killed on the way; the mode that a person sets is kept."""

    def be_killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "chmod", be_killed)
        with pytest.raises(KeyboardInterrupt):
            blames.make_folder(tmp_path)
    for mode in (0o1777, 0o755):
        blames.make_folder(tmp_path)
        assert [(path.name, path.stat().st_mode & 0o7777) for path in tmp_path.iterdir()] == [("suspicions", mode)]
        (tmp_path / "suspicions").chmod(0o755)


def line(**changed: object) -> bytes:
    return json.dumps({**json.loads(msgspec.json.encode(record(user="root"))), **changed}).encode()


def hostile_lines() -> st.SearchStrategy[bytes]:
    values = st.none() | st.text() | st.integers() | st.sampled_from(["n1", "n2", "../n1", "n1\x1b[31m", at(0)])
    changed = st.dictionaries(st.sampled_from(sorted(json.loads(line()))), values, max_size=3)
    return st.binary(max_size=80) | changed.map(lambda each: line(**each))


@example([line(at="2026-11-02T02:00:00.000+14:00"), line(rule="\x1b[31m" + "x" * 999), line(node="n9")])
@given(st.lists(hostile_lines(), max_size=12))
def test_hostile_files_are_read_without_harm(lines: list[bytes]) -> None:
    """Only records of known nodes remain, of the file's owner, with printable text; whatever the lines are."""
    with tempfile.TemporaryDirectory() as name:
        blames.make_folder(Path(name))
        path = Path(name, "suspicions", f"{UID}.jsonl")
        path.write_bytes(b"\n".join(lines))
        for one in blames.read_blames(Path(name), NODES):
            assert one.node in NODES
            assert one.user == trust.user_name(UID)
            assert (one.rule + one.run).isprintable()
            assert len(one.rule) <= 80
            assert one.at[-1] == "Z"
        path.write_bytes(path.read_bytes() + b"\n" + msgspec.json.encode(record()))
        assert record().run in {one.run for one in blames.read_blames(Path(name), NODES)}


@pytest.mark.parametrize("how", ["link", "hard link", "fifo", "folder", "others may write", "large", "old"])
def test_a_file_of_another_kind_is_not_believed(folder: Path, how: str) -> None:
    """A link of either kind, a FIFO, a folder, what others may write, too large or old: suspects nothing, and goes."""
    blames.write_blames(folder, [record()])
    assert len(blames.read_blames(folder, NODES)) == 1
    (path,) = (folder / "suspicions").iterdir()
    content = path.read_bytes()
    path.unlink()
    if how == "link":
        (folder / "elsewhere").write_bytes(content)
        path.symlink_to(folder / "elsewhere")
    elif how == "hard link":
        (folder / "elsewhere").write_bytes(content)
        path.hardlink_to(folder / "elsewhere")
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    else:
        path.write_bytes(content + b"\n" * (1 << 14 if how == "large" else 0))
        path.chmod(0o666 if how == "others may write" else 0o644)
        os.utime(path, (0, 0) if how == "old" else None)
    assert blames.read_blames(folder, NODES) == []
    blames.make_folder(folder)
    assert list((folder / "suspicions").iterdir()) == ([path] if how == "others may write" else [])


@pytest.mark.usefixtures("as_root")
def test_nobody_silences_others(folder: Path) -> None:
    """Whatever names another user takes, and however many files it makes; the newest of each are kept, for all to read.

    Nor does a run that blames many nodes lose the others of its user.
    """
    for name in ("", *(f"{number}." for number in range(300))):
        taken = folder / "suspicions" / f"{UID}.{name}jsonl"
        taken.write_bytes(line())
        os.chown(taken, 1005, 1005)
    before = os.umask(0o077)
    try:
        for number in range(100):
            blames.write_blames(folder, [record(f"n{each}", run=f"r{number}") for each in range(300)])
    finally:
        os.umask(before)
    for _ in range(2):
        users = Counter(one.user for one in blames.read_blames(folder, NODES))
        assert users == {"root": len(NODES) * 64, trust.user_name(1005): 64}
        blames.make_folder(folder)
    files = list((folder / "suspicions").iterdir())
    assert len(files) == 2 * 64
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in files)


def test_no_heap_of_files_holds_up_the_controller(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at so many, and removes for so long, first what can be removed."""
    for number in range(4):
        (folder / f"suspicions/{number}/full").mkdir(parents=True)
        (folder / f"suspicions/{number}.jsonl").symlink_to("none")
    clock, tried = [0.0], []

    def fail_late(path: Path) -> None:
        clock[0] += 12.0
        tried.append(path)

    monkeypatch.setattr(blames, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", fail_late)
        blames.make_folder(folder)
    assert [path.is_dir() for path in (folder / "suspicions").iterdir()] == [True] * 4
    assert len(tried) == 1
    monkeypatch.setattr(blames, "_MAX_ENTRIES", 6)
    for number in range(4):
        blames.write_blames(folder, [record(run=f"r{number}")])
    assert 2 <= len(blames.read_blames(folder, NODES)) <= 4
    monkeypatch.setattr(blames, "_MAX_ENTRIES", 0)
    assert blames.read_blames(folder, NODES) == []


@pytest.mark.usefixtures("as_root")
def test_no_heap_of_a_user_hides_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither full folders nor files, though there is time for some files alone: which ones is drawn by lot."""
    blames.write_blames(folder, [record()])
    for number in range(50):
        (folder / f"suspicions/{number}/full").mkdir(parents=True)
        (folder / f"suspicions/1005.{number}.jsonl").write_bytes(line())
        os.chown(folder / f"suspicions/1005.{number}.jsonl", 1005, 1005)
    steps = itertools.count()
    monkeypatch.setattr(blames, "time", SimpleNamespace(monotonic=lambda: next(steps) / 20, time=time.time))
    users = {one.user for _ in range(100) for one in blames.read_blames(folder, NODES)}
    assert users == {"root", trust.user_name(1005)}


@pytest.mark.usefixtures("as_root")
def test_the_newest_file_of_each_user_is_read_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has more: when the time is over, users with few files have been read."""
    for uid, count in ((1005, 60), (1006, 2), (1007, 1)):
        for number in range(count):
            path = folder / f"suspicions/{uid}.{number}.jsonl"
            path.write_bytes(line())
            os.chown(path, uid, uid)
    for _ in range(5):  # in whichever order they are found
        reads = iter([*[0.0] * 67, *[9.0] * 99])  # the list of 63 files, then three of them
        monkeypatch.setattr(blames, "time", SimpleNamespace(monotonic=lambda reads=reads: next(reads), time=time.time))
        assert sorted(one.user for one in blames.read_blames(folder, NODES)) == [
            trust.user_name(uid) for uid in (1005, 1006, 1007)
        ]


def site_with_spool(folder: Path) -> Site:
    config = folder / "node.toml"
    config.write_text(f'spool = "{folder}"\n')
    return Site(name="s", scheduler="slurm", node=NodeHealth(config=str(config)))


def test_a_cause_reaches_the_site(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rule is in it, and no line of a log; a node that never reported does not exist."""
    line = Evidence(t="", source="log", text="password=1", kind="gpu", node="n1", rule="xid-79")
    cause = Cause(attempt="1", kind="gpu", confidence="certain", reason="it said password=1", evidence=(line,))
    site = site_with_spool(folder)
    report_cause(site, ["n1", "n9", "-x"], cause, "run-1")
    spool.write_report(folder, NodeReport(node="n1", boot_id="b", checked_at=at(0)))
    (one,) = site_suspicion.suspicions_of_site(site).values()
    assert (one.node, one.users, one.is_strong) == ("n1", 1, False)
    assert "xid-79" in one.summary
    assert "password" not in next((folder / "suspicions").iterdir()).read_text()
    assert site_suspicion.costs_at_site(site, ["n1"]) == {"n1": pytest.approx(5.0, abs=0.01)}
    assert site_suspicion.costs_at_site(site, ["n2"]) == {}
    report_cause(Site(name="s", scheduler="slurm"), ["n1"], cause, "run-2")  # a site without a spool
    assert capsys.readouterr().err == ""


def test_what_is_strong_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cost is infinite, as of a node whose drain a limit holds back; also without time for what users wrote."""
    blames.write_blames(folder, [record("n2", at=to_rfc3339(datetime.now(UTC)))])
    monkeypatch.setattr(blames, "_READ_S", -1.0)
    (report,) = finding("drain").values()
    spool.write_report(folder, msgspec.structs.replace(report, checked_at=to_rfc3339(datetime.now(UTC))))
    assert site_suspicion.costs_at_site(site_with_spool(folder), NODES) == {"n1": math.inf}
    spool.write_report(folder, report)  # which is old
    assert site_suspicion.costs_at_site(site_with_spool(folder), NODES) == {}


@pytest.mark.parametrize("fault", ["no folder", "no spool", "hangs", "not ours", "no file"])
def test_a_run_never_fails_by_it(
    folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is wrong with the spool: nothing is suspected, and nothing is raised, soon."""
    site = site_with_spool(folder)
    if fault == "no folder":
        (folder / "suspicions").rmdir()
    elif fault == "no spool":
        (folder / "node.toml").write_text("")
    elif fault == "not ours":
        folder.chmod(0o777)
    elif fault == "no file":
        (folder / "node.toml").unlink()
    else:
        os.mkfifo(folder / "fifo")  # opening it for reading waits for a writer
        monkeypatch.setattr(site_suspicion, "_TIMEOUT_S", 0.05)
        monkeypatch.setattr(
            site_suspicion, "_config_of_site", lambda _: NodeConfig(spool=(folder / "fifo").read_text())
        )
    report_cause(site, ["n1"], Cause(attempt="1", kind="node", confidence="likely", reason=""), "run-1")
    assert site_suspicion.suspicions_of_site(site) == {}
    assert not capsys.readouterr().err.rstrip().endswith(":")  # a time-out has no text of its own
