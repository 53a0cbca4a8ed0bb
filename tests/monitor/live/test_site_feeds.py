"""What a controller says of its partitions, and which sites are watched."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.core.errors import ClusterError, UsageError
from pitools.launch import slurm_cache
from pitools.launch.slurm_cache import CachedState
from pitools.launch.slurm_cache.store import QueryFailure
from pitools.monitor.live.alerts import alerts
from pitools.monitor.live.feed import Answer
from pitools.monitor.live.site_feeds import SlurmView, make_feeds, queues_of, read_slurm
from pitools.place.clusters import cache, snapshot
from pitools.place.clusters.snapshot import ControllerState
from pitools.slurm.records import Node, Partition, SlurmJob
from tests.monitor.fleet import Runs

MakeSite = Callable[..., Runs]
NODES = (
    Node(node="n1", state="idle", gpus=8, gpus_allocated=0),
    Node(node="n2", state="mixed", gpus=8, gpus_allocated=5),
    Node(node="n3", state="idle", flags=("drain",), gpus=8, reason="pit node [n3-20261127012000] ecc: 4 errors"),
    Node(node="n4", state="down", flags=("not_responding",)),
)
JOBS = tuple(
    SlurmJob(job_id=str(number), raw_id=str(number), state=state, partition=partition, reason=reason)
    for number, (state, partition, reason) in enumerate(
        (
            ("RUNNING", "a", ""),
            ("PENDING", "a,b", "Priority"),
            ("PENDING", "a", "Resources"),
            ("PENDING", "a", "Resources"),
        )
    )
)
STATE = ControllerState(
    seen_s=1.0,
    skew_s=0.0,
    cluster="c",
    enforced_limits=(),
    partitions=(
        Partition(partition="a", state="up", node_list="n[1-3]"),
        Partition(partition="b", state="down", node_list="n[3-4]"),
    ),
    nodes=NODES,
    jobs=JOBS,
)


def test_partitions_are_counted() -> None:
    """Idle nodes could start a job; a job of two partitions waits in both; the commonest reason comes first."""
    first, second = queues_of(STATE)
    assert (first.nodes, first.idle, first.unusable, first.gpus, first.gpus_used) == (3, 1, 1, 24, 5)
    assert (first.running, first.pending, first.reason) == (1, 3, "Resources 2, Priority 1")
    assert (second.state, second.nodes, second.idle, second.unusable, second.pending) == ("down", 2, 0, 2, 1)


def test_alerts_name_what_is_wrong(make_site: MakeSite, tmp_path: Path) -> None:
    """Nodes out of service, with what to type; runs that stopped, for a day; a site's own error."""
    runs = make_site("east", "slurm")
    fresh, old = runs.add("fresh", state="FAILED", age_s=60), runs.add("old", state="FAILED", age_s=4e5)
    runs.add("fine", state="COMPLETED")
    (site,) = make_feeds(["east"])
    assert site.runs
    assert site.slurm
    site.runs.answer = Answer(site.runs._call(), time.monotonic(), None)
    view = SlurmView({}, time.time(), queues_of(STATE), (NODES[2], NODES[3]))
    site.slurm.answer = Answer(view, time.monotonic(), UsageError("no answer"))
    listed = {alert.subject: alert for alert in alerts([site])}
    assert set(listed) == {"", fresh.name, "n3", "n4"}
    assert old.name not in listed
    assert listed["n3"].next == "pit node show n3 --site east"
    assert (listed["n4"].level, listed["n4"].next) == ("error", "scontrol show node n4")
    assert listed[""].text == "no answer"
    assert site.is_slurm_stale
    runs.root.rename(tmp_path / "gone")
    site.runs.start()
    while not site.runs.answer.error:
        time.sleep(0.01)
    site.runs.stop()
    assert site.is_runs_stale
    assert site.runs.answer.value


@pytest.mark.parametrize(("runs_age_s", "slurm_age_s", "is_stale"), [(8, 85, False), (12, 95, True)])
def test_what_is_old_is_grey(make_site: MakeSite, runs_age_s: float, slurm_age_s: float, is_stale: bool) -> None:
    """After 10 s without the folder, and 90 s without the controller, without any error."""
    make_site("east", "slurm")
    (site,) = make_feeds(["east"])
    assert site.runs
    assert site.slurm
    site.runs.answer = Answer([], time.monotonic() - runs_age_s, None)
    site.slurm.answer = Answer(SlurmView({}, time.time() - slurm_age_s, (), ()), time.monotonic(), None)
    assert (site.is_runs_stale, site.is_slurm_stale) == (is_stale, is_stale)


def test_a_controller_is_asked_when_its_answer_is_old(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queues of a view that is new are kept; its states are those of now, and a query that failed is an error."""
    site, asked = make_site("east", "slurm").site, list[str]()
    states = {"7": CachedState(state="RUNNING", age_s=0)}

    def query(key: str, *_: object, **__: object) -> ControllerState:
        asked.append(key)
        return STATE

    monkeypatch.setattr(slurm_cache, "cached_states", lambda *_: states)
    monkeypatch.setattr(cache, "get_or_query", query)
    first = read_slurm(site, ["7"], None)
    assert [queue.partition for queue in first.queues] == ["a", "b"]
    before = SlurmView({}, time.time() - 1, (), ())
    assert read_slurm(site, ["7"], before) == before._replace(states=states)
    assert len(asked) == 1
    assert read_slurm(site, ["7"], before._replace(seen_s=time.time() - snapshot.MAX_AGE_S - 1)) == first
    failure = QueryFailure(message="no answer", where="east", hint="", retry=True, failed_at_s=0)
    states["8"] = CachedState(state="UNKNOWN", age_s=9, failure=failure)
    with pytest.raises(ClusterError):
        read_slurm(site, ["7", "8"], first)


def test_which_sites_are_watched(make_site: MakeSite, tmp_path: Path) -> None:
    """All but templates and sites without Slurm and runs; one whose file is wrong is shown with its problem."""
    make_site("east")
    (tmp_path / "sites" / "wrong.toml").write_text("naem = 1\n")
    found = {site.name: site for site in make_feeds()}
    assert {"east", "alpha", "beta", "wrong"} <= set(found)
    assert {"h100-ib", "gb200-nvl72"}.isdisjoint(found)
    assert found["wrong"].problem
    assert [alert.site for alert in alerts([found["wrong"]])] == ["wrong"]
    with pytest.raises(UsageError):
        make_feeds(["nowhere"])
