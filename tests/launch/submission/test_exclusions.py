"""Nodes that runs keep away from: kept with evidence, for a time, and never too many."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core import hostlist
from pitools.core.errors import ClusterError, UsageError
from pitools.launch.plan import Plan
from pitools.launch.request import Request
from pitools.launch.submission import exclusions
from pitools.node.suspicion import Suspicion
from pitools.run.attempt_records import Cause, Evidence
from pitools.site import dialect
from pitools.site.schema import Recovery, Site, SitePartition


def site(nodes: int = 40, **recover: object) -> Site:
    return Site(name="s", partitions={"p": SitePartition(nodes=nodes)}, recovery=Recovery(**recover))  # type: ignore[arg-type]


def plan(nodes: int = 2, **job: str) -> Plan:
    job_spec = dialect.JobSpec(name="t", nodes=nodes, partition="p", **job)  # type: ignore[arg-type]
    request = Request(name="t", command="true", nodes=nodes)
    return Plan(name="t", site="s", request=request, job=job_spec, data=(), runs_dir="/r", nvme="", python="python")


def cause(confidence: str = "certain") -> Cause:
    evidence = Evidence(t="2026-01-01T00:00:00Z", source="slurm-1.out", text="NVRM: Xid 79", kind="gpu", node="n1")
    return Cause(attempt="3", kind="gpu", confidence=confidence, reason="Xid 79", evidence=(evidence,))  # type: ignore[arg-type]


def test_a_node_is_left_out_with_the_evidence(tmp_path: Path) -> None:
    """The flag names it together with the request's own, and the record says which run saw what."""
    exclusions.exclude_nodes(tmp_path, site(), ["n1"], cause(), "run-1")
    (flag,) = exclusions.sbatch_exclude_args(tmp_path, site(), plan(exclude="n[8-9]"))
    assert hostlist.expand(flag.removeprefix("--exclude=")) == ["n1", "n8", "n9"]
    (one,) = exclusions.active_exclusions(tmp_path, site())
    assert (one.run, one.attempt, one.reason) == ("run-1", "3", "Xid 79")
    assert "NVRM: Xid 79" in one.evidence[0]
    assert exclusions.active_exclusions(tmp_path, Site(name="other")) == []


def test_it_expires(tmp_path: Path) -> None:
    """After the site's time the node may be had again, and what was said of it is still there to read."""
    exclusions.exclude_nodes(tmp_path, site(exclude_for="0s"), ["n1"], cause(), "run-1")
    assert exclusions.sbatch_exclude_args(tmp_path, site(), plan()) == ()
    assert [exclusion.node for exclusion in exclusions.read_exclusions(tmp_path, "s")] == ["n1"]


def test_a_node_can_be_allowed_again(tmp_path: Path) -> None:
    """A node that is included is free at once; one that is not excluded cannot be included."""
    exclusions.exclude_nodes(tmp_path, site(), ["n1"], cause(), "run-1")
    exclusions.include_node(tmp_path, site(), "n1")
    assert exclusions.exclusions_for_next_job(tmp_path, site(), plan()) == ()
    with pytest.raises(UsageError, match="n1"):
        exclusions.include_node(tmp_path, site(), "n1")


def test_the_least_certain_and_the_oldest_give_way(tmp_path: Path) -> None:
    """Of more nodes than the share allows, those stay out that are surest and newest."""
    for node, confidence in (("n1", "certain"), ("n2", "guess"), ("n3", "certain"), ("n4", "certain")):
        exclusions.exclude_nodes(tmp_path, site(), [node], cause(confidence), "r")
    assert exclusions.exclusions_for_next_job(tmp_path, site(20), plan()) == ("n4", "n3")
    assert exclusions.exclusions_for_next_job(tmp_path, site(20, exclude_share=1.0), plan()) == ("n4", "n3", "n1", "n2")


def test_a_node_that_fails_with_each_of_its_partners_stays_out(tmp_path: Path) -> None:
    """Also where only one node may: of pairs that are to blame together, the common node is the surest."""
    small = site(8)
    for pair in (("n1", "n2"), ("n1", "n3")):
        exclusions.exclude_nodes(tmp_path, small, pair, cause("guess"), "run-1")
    assert exclusions.exclusions_for_next_job(tmp_path, small, plan()) == ("n1",)


def test_what_the_site_suspects_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the user's own, the most suspected first, within the same share; a weak suspicion excludes nothing."""
    scores = {"n2": 0.9, "n3": 1.5, "n4": 0.5, "n1": 1.0, "n9": 2.0}
    found = {node: Suspicion(node=node, score=score, users=2, reasons=()) for node, score in scores.items()}
    monkeypatch.setattr(exclusions, "suspicions_of_site", lambda *_: found)
    exclusions.exclude_nodes(tmp_path, site(), ["n1"], cause(), "r")
    assert exclusions.exclusions_for_next_job(tmp_path, site(), plan(nodelist="n9")) == ("n1", "n3", "n2")
    assert exclusions.exclusions_for_next_job(tmp_path, site(20), plan()) == ("n1", "n9")
    assert exclusions.exclusions_for_next_job(tmp_path, site(exclude_share=0.0), plan()) == ()


def test_drained_nodes_take_nothing_of_the_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No job gets one: a node whose drain is held back stays out instead; the user's own drained one comes last."""
    drained = [Suspicion(node=f"n{each}", score=2.0, users=0, reasons=(), is_drained=True) for each in (1, 2, 3, 4)]
    found = {one.node: one for one in [*drained, Suspicion(node="n5", score=1.0, users=2, reasons=())]}
    monkeypatch.setattr(exclusions, "suspicions_of_site", lambda *_: found)
    assert exclusions.exclusions_for_next_job(tmp_path, site(10), plan()) == ("n5",)
    exclusions.exclude_nodes(tmp_path, site(), ["n1"], cause(), "r")
    assert exclusions.exclusions_for_next_job(tmp_path, site(10), plan()) == ("n5",)
    assert exclusions.exclusions_for_next_job(tmp_path, site(20), plan()) == ("n5", "n1")


def test_nodes_of_other_partitions_take_nothing_of_the_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However suspected, nor do nodes that are gone; the partition is asked for only if there is a node to exclude."""
    found = {f"n{each}": Suspicion(node=f"n{each}", score=each, users=2, reasons=()) for each in range(1, 6)}
    monkeypatch.setattr(exclusions, "suspicions_of_site", lambda *_: found)
    assert exclusions.exclusions_for_next_job(tmp_path, site(10), plan(), lambda: {"n1", "n2"}) == ("n2",)
    assert exclusions.exclusions_for_next_job(tmp_path, site(10), plan(), lambda: None) == ("n5",)
    monkeypatch.setattr(exclusions, "suspicions_of_site", lambda *_: {})
    assert exclusions.sbatch_exclude_args(tmp_path, site(10), plan(), lambda: 1 / 0) == ()  # type: ignore[return-value, arg-type]


@given(st.integers(1, 30), st.integers(1, 30), st.floats(0, 1), st.integers(0, 30))
def test_a_job_always_fits(size: int, nodes: int, share: float, bad: int) -> None:
    """However many nodes are bad, as many stay as the job asks for; a share of 0 leaves none out."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        exclusions.exclude_nodes(
            Path(folder), site(size), [f"n{number}" for number in range(min(bad, size))], cause(), "r"
        )
        out = exclusions.exclusions_for_next_job(Path(folder), site(size, exclude_share=share), plan(nodes))
    assert nodes > size or len(out) <= size - nodes
    assert len(out) <= max(1, share * size)
    assert share or not out


def test_nodes_that_the_request_names_are_not_left_out(tmp_path: Path) -> None:
    """A job that asks for a node by name would never start without it."""
    exclusions.exclude_nodes(tmp_path, site(), ["n1", "n2"], cause(), "r")
    assert exclusions.exclusions_for_next_job(tmp_path, site(), plan(nodelist="n[1,3]")) == ("n2",)


def test_names_are_names(tmp_path: Path) -> None:
    """What could be another flag, or a path, never reaches sbatch, also where it was put into the file."""
    exclusions.exclude_nodes(tmp_path, site(), ["-w n1", "n1;rm", "../x", "n5"], cause(), "r")
    hostile = msgspec.structs.replace(exclusions.active_exclusions(tmp_path, site())[0], node="--wrap=x")
    with exclusions.exclusions_path(tmp_path).open("ab") as file:
        file.write(msgspec.json.encode(hostile) + b"\n")
    assert exclusions.sbatch_exclude_args(tmp_path, site(), plan()) == ("--exclude=n5",)


@pytest.mark.usefixtures("as_root")
def test_another_user_s_exclusions_do_not_count(tmp_path: Path) -> None:
    """A file that another user made chooses no nodes, and takes no records; another user's own file is ignored."""
    exclusions.exclude_nodes(tmp_path, site(), ["n1"], cause(), "r")
    path = exclusions.exclusions_path(tmp_path)
    other = path.with_name(f".exclusions.{os.geteuid() + 12345}.jsonl")
    other.write_bytes(path.read_bytes().replace(b'"n1"', b'"n7"'))
    assert exclusions.exclusions_for_next_job(tmp_path, site(), plan()) == ("n1",)
    path.chmod(0o666)
    os.chown(path, os.geteuid() + 12345, -1)
    assert exclusions.exclusions_for_next_job(tmp_path, site(), plan()) == ()
    with pytest.raises(ClusterError):
        exclusions.exclude_nodes(tmp_path, site(), ["n2"], cause(), "r")


def test_records_are_removed_long_after_they_have_expired(tmp_path: Path) -> None:
    """The next exclusion removes what expired more than a month ago, and keeps the rest."""
    exclusions.exclude_nodes(tmp_path, site(), ["n1", "n2"], cause(), "r")
    path = exclusions.exclusions_path(tmp_path)
    first, second = exclusions.read_exclusions(tmp_path, "s")
    old = msgspec.structs.replace(first, until="2026-01-01T00:00:00.000Z")
    path.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in (old, second)))
    exclusions.exclude_nodes(tmp_path, site(), ["n3"], cause(), "r")
    assert [entry.node for entry in exclusions.read_exclusions(tmp_path, "s")] == ["n2", "n3"]


def test_a_line_cut_short_costs_only_itself(tmp_path: Path) -> None:
    """After a full disk the list still says what it said, and takes more."""
    exclusions.exclude_nodes(tmp_path, site(), ["n1"], cause(), "r")
    path = exclusions.exclusions_path(tmp_path)
    path.write_bytes(path.read_bytes() + b'{"schema":"pit.exclu')
    exclusions.exclude_nodes(tmp_path, site(), ["n2"], cause(), "r")
    assert {active_exclusion.node for active_exclusion in exclusions.active_exclusions(tmp_path, site())} == {
        "n1",
        "n2",
    }


def test_many_write_at_once(tmp_path: Path) -> None:
    """Every line is whole, and none is lost."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: exclusions.exclude_nodes(tmp_path, site(), [f"n{at}"], cause(), "r"), range(40)))
    lines = exclusions.exclusions_path(tmp_path).read_text().splitlines()
    assert sorted(json.loads(line)["node"] for line in lines) == sorted(f"n{index}" for index in range(40))
