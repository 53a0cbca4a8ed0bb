"""Cycles, and what is exported of sites that answer, fail and hang."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from slurm_texts import CLOCK_S, job_text, node_text

from pitools.core.errors import ClusterError, NoSpace, TryLater
from pitools.monitor.export import collect, state
from pitools.monitor.export.board import Board, _add, _family
from pitools.monitor.export.collect import WORKERS, Worker
from pitools.monitor.export.metrics import BY_NAME, METRICS
from pitools.site.schema import Site

MakeSite = Callable[..., Site]
ALL = ("jobs", "nodes", "topology", "state")


def exported(board: Board) -> dict[tuple[str, ...], float]:
    """The samples by metric, cluster and the values of other labels."""
    families = text_string_to_metric_families(generate_latest(board).decode())
    return {
        (one.name, one.labels["cluster"], *(text for key, text in one.labels.items() if key != "cluster")): one.value
        for family in families
        for one in family.samples
    }


def cycle(*sites: Site, times: int = 1) -> dict[tuple[str, ...], float]:
    """What a new exporter exports after each of so many runs of the command; the last."""
    for _ in range(times):
        board, lines = Board(sites), list[str]()
        board.run_once(lambda: None, lines.append)
    return exported(board)


def test_jobs_and_nodes_are_asked_in_turn(make_site: MakeSite, tmp_path: Path) -> None:
    """One command a cycle: jobs, nodes, the fabric once an hour; each keeps what the other has said."""
    found = cycle(make_site(), times=5)
    calls = (tmp_path / "alpha" / "calls").read_text().split()
    assert [one for one in calls if one != "date"] == ["squeue", "scontrol", "scontrol", "squeue", "scontrol"]
    assert found["pit_jobs", "alpha", "gpu", "running"] == 1
    assert found["pit_nodes", "alpha", "allocated"] == found["pit_nodes", "alpha", "idle"] == 1
    assert found["pit_job_leaf_spread_ratio", "alpha", "max"] == 1
    assert {key[2] for key in found if key[0] == "pit_collector_success"} == {"jobs", "nodes", "topology", "state"}


def test_a_tier_has_its_count_of_starts_before_the_first(make_site: MakeSite) -> None:
    """So an alert sees a first start; beyond the limit ages and starts have the same tiers, and the oldest is kept."""
    texts = [
        job_text(
            State="PENDING",
            NodeList="",
            Reason="Priority",
            QOS=f"q{minute:02}",
            EligibleTime=f"2026-11-26T22:{minute}:00",
        )
        for minute in range(10, 50)
    ]
    found = cycle(make_site(jobs="".join(reversed(texts))))
    starts = {key[2] for key in found if key[0] == "pit_queue_wait_seconds_count"}
    ages = {key[2]: value for key, value in found.items() if key[0] == "pit_queue_age_seconds"}
    assert {"high", "usual", "q49", "other"} <= starts
    assert ages.keys() == starts - {"high", "usual"}
    assert ages["other"] == 70 * 60  # of q10, at 23:20


@pytest.mark.parametrize(
    "failure", ["echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", "exec sleep 60"]
)
def test_a_dead_site_keeps_no_values_and_delays_nobody(make_site: MakeSite, failure: str) -> None:
    """Its collectors have success 0, and what it said is gone; another site is exported before it times out."""
    good, bad = make_site("good"), make_site("bad", timeout_s=3)
    cycle(bad, times=3)  # of the good one there is no state: what is exported of it is of this cycle
    bad = make_site("bad", timeout_s=3, fail=failure)
    board, lines, began_s = Board([good, bad]), list[str](), time.time()
    seen: list[bool] = []

    def changed() -> None:
        seen.append(exported(board).get(("pit_collector_success", "good", "jobs")) == 1)

    assert not board.run_once(changed, lines.append)
    found = exported(board)
    assert {found["pit_collector_success", "bad", name] for name in ("jobs", "nodes")} == {0}
    about = ("pit_collector", "pit_exporter")
    assert not {key for key in found if key[1] == "bad" and not key[0].startswith(about)}
    assert found["pit_jobs", "good", "gpu", "running"] == 1
    assert any(seen[:-2]) or "sleep" not in failure
    ended_s = [found["pit_exporter_cycle_timestamp_seconds", name] for name in ("good", "bad")]
    assert all(began_s <= one <= time.time() for one in ended_s)
    assert len([line for line in lines if line.startswith("site bad: jobs: ")]) == 1
    again = list[str]()
    assert not Board([bad]).run_once(lambda: None, again.append)
    assert not again  # said once


def test_jobs_that_fail_each_time_are_no_failure_of_nodes(make_site: MakeSite, tmp_path: Path) -> None:
    """Of a controller that stops to answer all values go, once: a squeue that always takes too long hides no nodes."""
    site = make_site()
    cycle(site, times=3)
    (tmp_path / "alpha" / "squeue").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    found = [cycle(site) for _ in range(6)]
    success = [[one["pit_collector_success", "alpha", name] for name in ("jobs", "nodes")] for one in found]
    assert [0, 0] in success[:2]
    assert success[2:] == [[0, 1]] * 4


def test_a_query_is_due_when_a_clock_was_set_back() -> None:
    """At once, not when the clock will show the time of the last query again."""
    queried = state.Queried(began_s=5000.0)
    assert collect._due_s(queried, 290.0, 1000.0) <= 1000.0 < 5100.0 < collect._due_s(queried, 290.0, 5100.0)


def test_a_worker_outlives_the_reader_of_its_lines(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cycle follows cycle, though a line about a failure cannot be written: stderr's reader may have gone."""
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    cycles = Counter[str]()

    def query(_site: Site, worker: Worker, _before: state.WorkerState) -> tuple[state.WorkerState, list[str]]:
        asked.put(worker.name)
        cycles[worker.name] += 1
        if cycles[worker.name] == 3:
            threading.Event().wait()  # for ever: a daemon thread
        return state.WorkerState(), ["a line"]

    def report(_line: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(collect, "run_cycle", query)
    Board([make_site()]).run_forever(0, report)
    assert Counter(asked.get(timeout=10) for _ in range(3 * len(WORKERS))) == {one.name: 3 for one in WORKERS}


def test_the_gauges_of_an_older_state_are_left_out(make_site: MakeSite) -> None:
    """Of a metric whose labels have changed since; the others are exported."""
    now_s = time.time()
    rows = (("pit_nodes", ("idle", "rack1"), (3.0,)), ("pit_gpus", ("idle",), (8.0,)), ("pit_gone", (), (1.0,)))
    old = state.WorkerState(queried={"nodes": state.Queried(began_s=now_s, success_s=now_s, gauges=rows)})
    state.write_state(state.state_path("alpha", "slurm"), old)
    found = cycle(make_site())
    assert found["pit_gpus", "alpha", "idle"] == 8
    assert not {"pit_nodes", "pit_gone"} & {key[0] for key in found}


def test_what_hangs_without_an_end_is_seen(make_site: MakeSite) -> None:
    """A worker that is stuck, as on a dead file system, has success 0 after its limit, whatever it said before."""
    site = make_site()
    cycle(site, times=2)
    board = Board([site])
    board.run_once(lambda: None, lambda _: None)
    slot = board._slots["alpha", "slurm"]
    board._put(("alpha", "slurm"), slot._replace(began=time.monotonic() - collect.limit_s(site, slot.worker) - 1))
    found = exported(board)
    assert found["pit_collector_success", "alpha", "jobs"] == 0
    assert not [key for key in found if key[0] == "pit_jobs"]


def test_the_end_of_a_cycle_outlives_its_process(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a cycle of cron goes on, or hangs, the file has the end of the one before."""
    site = make_site()
    before_s = cycle(site)["pit_exporter_cycle_timestamp_seconds", "alpha"]
    seen = {}
    board = Board([site])

    def query(_site: Site, worker: Worker, before: state.WorkerState) -> tuple[state.WorkerState, list[str]]:
        seen[worker.name] = exported(board)
        return before, []

    monkeypatch.setattr(collect, "run_cycle", query)
    board.run_once(lambda: None, lambda _: None)
    assert seen["slurm"]["pit_exporter_cycle_timestamp_seconds", "alpha"] == pytest.approx(before_s, abs=0.5)


def test_counters_outlive_restarts_and_lost_answers(make_site: MakeSite, tmp_path: Path) -> None:
    """They go on from the state file; a damaged one is put aside, and the exporter begins again."""
    drained = node_text("n01", "IDLE+DRAIN", tail=" Reason=dusty [root@2026-11-26T23:15:00]")
    site = make_site(nodes=drained)
    cycle(site, times=2)
    clock = tmp_path / "alpha" / "date"
    clock.write_text(clock.read_text().replace("5200", "5260"))
    found = cycle(site, times=3)
    assert found["pit_drained_gpu_seconds_total", "alpha", "other"] == 240
    assert cycle(site)["pit_drained_gpu_seconds_total", "alpha", "other"] == 240
    path = state.state_path("alpha", "slurm")
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("{")
    lines = list[str]()
    assert not Board([site]).run_once(lambda: None, lines.append)
    assert [line.partition(": damaged")[0] for line in lines] == [f"site alpha: state: {path}"]
    assert path.with_name("alpha.slurm.json.damaged").exists()
    assert ("pit_jobs", "alpha", "gpu", "running") in cycle(site)


def test_a_clock_that_is_set_counts_nothing(make_site: MakeSite, tmp_path: Path) -> None:
    """No cost, wait or drained time of the hour by which Slurm's clock goes back, forward or right again."""
    started = job_text(StartTime="2026-11-26T23:19:50")
    site = make_site(
        jobs=started, nodes=node_text("n01", "IDLE+DRAIN", tail=" Reason=dusty [root@2026-11-26T23:15:00]")
    )
    clock, found = tmp_path / "alpha" / "date", list[dict[tuple[str, ...], float]]()
    for set_s in (-30, 0, -600, 0, 600, 0):
        clock.write_text(f"#!/bin/sh\necho {CLOCK_S + set_s}\n")
        found.append(cycle(site, times=3))
    keys = [
        ("pit_queue_wait_seconds_count", "alpha", "usual"),
        ("pit_cost_total", "alpha", "USD", "gpu"),
        ("pit_drained_gpu_seconds_total", "alpha", "other"),
    ]
    assert [[one.get(key, 0.0) for key in keys] for one in found[1:]] == [
        [1, pytest.approx(2 * 2.0 * 10 / 3600), 120]
    ] * 5


def test_a_state_that_cannot_be_kept_is_no_fault_of_slurm(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk gauges go on, of jobs and nodes in turn; counters, which would go back, are absent meanwhile."""
    site, lines = make_site(), list[str]()
    cycle(site, times=3)
    board = Board([site])

    def fail(*_: object) -> None:
        raise NoSpace("no space left on device")

    def look() -> dict[tuple[str, ...], float]:
        board.run_once(lambda: None, lines.append)
        return exported(board)

    with monkeypatch.context() as full:
        full.setattr(state, "write_state", fail)
        looks = [look() for _ in range(2)]
    success = {(name, "alpha", key): float(key != "state") for name in ["pit_collector_success"] for key in ALL}
    for found in looks:
        assert {key: value for key, value in found.items() if key[0] == "pit_collector_success"} == success
        assert found["pit_jobs", "alpha", "gpu", "running"] == 1
        assert not [key for key in found if BY_NAME.get(key[0], METRICS[0]).kind == "counter"]
    assert look()["pit_drained_gpu_seconds_total", "alpha", "other"] == 0
    assert [line.partition("state: ")[2] for line in lines] == ["no space left on device", "succeeds again"]
    left = state.read_state(state.state_path("alpha", "slurm"))
    assert left.queried["nodes"].began_s == board._slots["alpha", "slurm"].state.queried["nodes"].began_s


def test_the_fabric_returns_with_its_slurm(make_site: MakeSite) -> None:
    """In the cycle after jobs or nodes, though it was asked in vain a moment ago."""
    fail = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
    away = cycle(make_site(fail=fail), times=4)
    assert away["pit_collector_success", "alpha", "topology"] == 0
    back = cycle(make_site(), times=4)
    assert {back["pit_collector_success", "alpha", name] for name in ("jobs", "nodes", "topology")} == {1}


@pytest.mark.parametrize("is_kept", [False, True])
def test_what_is_not_asked_ends(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch, is_kept: bool) -> None:
    """After 5 min, as a failure; but not where the state is not kept: cron then asks the same one each time."""
    ages_s = {"jobs": 2000.0, "nodes": 1000.0, "topology": 10.0}
    queried = {name: state.Queried(began_s=time.time() - age_s, success_s=1.0) for name, age_s in ages_s.items()}
    state.write_state(state.state_path("alpha", "slurm"), state.WorkerState(queried=queried))
    if not is_kept:
        monkeypatch.setattr(state, "write_state", lambda *_: 1 / 0)
    found = cycle(make_site())
    success = {key[2]: value for key, value in found.items() if key[0] == "pit_collector_success"}
    assert success == {"jobs": 1, "topology": 1, "state": is_kept} | ({"nodes": 0} if is_kept else {})


def test_a_state_that_cannot_be_read_is_not_overwritten(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counters go on when it can be read again."""
    site = make_site()
    cycle(site, times=2)
    path = state.state_path("alpha", "slurm")
    before, reading = path.read_bytes(), state.read_state

    def fail(_path: Path) -> state.WorkerState:
        raise ClusterError("Stale file handle")

    monkeypatch.setattr(state, "read_state", fail)
    board = Board([site])
    assert not board.run_once(lambda: None, lambda _: None)
    found = exported(board)
    assert {key[2]: value for key, value in found.items() if key[0] == "pit_collector_success"} == {
        "jobs": 1,
        "state": 0,
    }
    assert path.read_bytes() == before
    monkeypatch.setattr(state, "read_state", reading)
    assert board.run_once(lambda: None, lambda _: None)
    assert {"jobs", "nodes"} <= board._slots["alpha", "slurm"].state.queried.keys()


def test_what_other_exporters_hold_is_skipped(make_site: MakeSite, tmp_path: Path) -> None:
    """What they have left is exported, nothing is asked, and it is said; if they hold all, nobody waits."""
    alpha, beta = make_site("alpha"), make_site("beta")
    cycle(alpha)
    lines = list[str]()
    with contextlib.ExitStack() as service:
        for worker in WORKERS:
            service.enter_context(state.take("alpha", worker.name))  # type: ignore[arg-type]
        board, calls = Board([alpha, beta]), (tmp_path / "alpha" / "calls").read_text()
        assert board.run_once(lambda: None, lines.append)
        assert [line.partition(": skipped")[0] for line in lines] == ["site alpha"]
        assert (tmp_path / "alpha" / "calls").read_text() == calls
        assert {exported(board)["pit_jobs", name, "gpu", "running"] for name in ("alpha", "beta")} == {1}
        for run in (Board([alpha]).run_once, Board([alpha]).run_forever):
            with pytest.raises(TryLater, match="export all of these sites"):
                run(0, lines.append)  # type: ignore[arg-type]
    assert cycle(alpha)["pit_nodes", "alpha", "idle"] == 1


def test_a_slow_site_takes_no_cycle_of_others(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """While cron's process waits for it the next one asks the others; the older file has then what the newer had."""
    sites, query, goes_on = [make_site("good"), make_site("slow")], collect.run_cycle, threading.Event()
    lines, newer, board, writes = list[str](), Board(sites), Board(sites), Counter[str]()

    def run_cycle(site: Site, worker: Worker, before: state.WorkerState) -> tuple[state.WorkerState, list[str]]:
        if site.name == "slow":
            assert goes_on.wait(30)
        return query(site, worker, before)

    def changed() -> None:
        writes["older"] += 1
        if writes["older"] == len(WORKERS):  # the good site's have ended
            newer.run_once(lambda: None, lines.append)
            goes_on.set()

    monkeypatch.setattr(collect, "run_cycle", run_cycle)
    assert board.run_once(changed, lines.append)
    assert [line.partition(": skipped")[0] for line in lines] == ["site slow"]
    assert {exported(one)["pit_nodes", "good", "idle"] for one in (newer, board)} == {1}


class WholeTable(Collector):
    """Each metric of the table, with one series."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def collect(self) -> Iterator[Family]:
        """Yield what a board makes of it."""
        for metric in METRICS:
            family = _family(metric)
            _add(family, self.site, metric.name, ("x",) * len(metric.labels), [1.0] * (len(metric.buckets) + 2))
            yield family


@pytest.mark.parametrize("is_whole_table", [False, True])
def test_the_text_satisfies_promtool_and_both_parsers(make_site: MakeSite, is_whole_table: bool) -> None:
    """Text for `promtool check metrics` without a finding, and OpenMetrics that its strict parser takes."""
    hostile = job_text(State="PENDING", QOS='q"\\\u00e9', NodeList="", Reason="Priority")
    site = make_site(jobs=job_text() + hostile)
    cycle(site, times=3)
    board = Board([site])
    board.run_once(lambda: None, lambda _: None)
    source = WholeTable(site) if is_whole_table else board
    assert list(parse_openmetrics(openmetrics.generate_latest(source).decode()))
    try:
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=generate_latest(source), capture_output=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
