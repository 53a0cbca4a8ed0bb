"""From the queue to decisions: who may wait in a site's own queue."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pitools.core.errors import ClusterError, ConfigError, DataError, PitError, UsageError
from pitools.launch.request import Request
from pitools.launch.tickets.ticket_state import TicketState
from pitools.place.dispatch import options, planner, store, tickets
from pitools.place.dispatch.queue_state import QueueState
from pitools.place.estimate.plan import PlacementOptions
from pitools.place.policy.decide import decide
from pitools.place.policy.params import PolicyParams
from pitools.place.types import PlacementOption, PoolState, Submit
from pitools.run.run_folder import JobRef
from pitools.site.schema import Site
from tests.place.dispatch.fake_backends import Cluster, Faults, snapshot

OPTION = PlacementOption(pool="a/train", units=1, run_s=60.0, limit_s=60.0)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What is placed of short jobs with these names and topologies, in a pool with so much free."""
    monkeypatch.setenv("PIT_QUEUE", str(tmp_path / "place"))

    def make(free: int, **topologies: str) -> list[str]:
        requested = [
            store.make_request(Request(name=name, command="true", time="1m", topology=by), ("a",), user="ada")  # type: ignore[arg-type]
            for name, by in topologies.items()
        ]
        store.enqueue(store.queue_dir(), requested)
        decider = planner.Planner(partial(decide, policy=PolicyParams()), store.queue_dir())
        monkeypatch.setattr(decider._offers, "options", lambda job, seen: (OPTION,))
        running = [] if free else [(1e12, 2)]
        pool = PoolState(pool="a/train", units=2, free=free, running=running, max_pending=4)
        world = planner.ClusterView({"a": (Site(name="a"), None)}, {"a/train": pool})  # type: ignore[dict-item]
        expected = decider.decide(QueueState(store.queue_dir()), world)
        assert all(isinstance(submit, Submit) for submit in expected.submits)
        return sorted(submit.job_id.partition("-")[0] for submit in expected.submits)

    return make


def test_short_jobs_wait_in_a_full_queue(places: Callable[..., list[str]]) -> None:
    """So that no node waits for a tick; who wants the best of the free nodes waits until some are free."""
    assert places(0, plain="none", choosy="exclude") == ["plain"]


def test_who_wants_the_best_nodes_is_sent_when_some_are_free(places: Callable[..., list[str]]) -> None:
    """As everybody is."""
    assert places(2, plain="none", choosy="exclude") == ["choosy", "plain"]


def test_a_job_without_time_for_its_estimate_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tick's time is used up: the job is named; later its old options hold where there is no time for new ones."""
    monkeypatch.setenv("PIT_QUEUE", str(tmp_path / "place"))
    request = store.make_request(Request(name="a", command="true", time="1m"), ("a",), user="ada")
    (job,) = store.enqueue(store.queue_dir(), [request])
    offered = PlacementOptions((OPTION,), "")
    monkeypatch.setattr(options.plan, "options_from_snapshots", lambda *_, **__: offered)
    monkeypatch.setattr(options, "CACHE_S", -1.0)
    cache, answered = (
        options.OptionCache(),
        {"a": (Site(name="a"), snapshot(Site(name="a"), Cluster(Faults(random.Random(0), 0.0), Counter())))},
    )
    for budget_s, is_known in ((-1.0, False), (60.0, True), (-1.0, True)):
        monkeypatch.setattr(options, "_BUDGET_S", budget_s)
        cache.begin_tick()
        assert cache.options(job, answered) == (offered.options if is_known else ())
        assert bool(cache.unfit_reason(job.job_id)) is not is_known


def test_every_job_of_a_long_queue_is_estimated_in_time(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tick is a process with time for two of five jobs: the next one begins with those that were left out."""
    monkeypatch.setenv("PIT_QUEUE", str(tmp_path / "place"))
    request = Request(name="a", command="true", time="1m")
    store.enqueue(store.queue_dir(), [store.make_request(request, ("x",), user="ada") for _ in range(5)])
    estimated: list[str] = []
    clock = [0.0]

    def estimate(wanted: Any, *_: object, **__: object) -> PlacementOptions:
        estimated.append(wanted.origin)
        clock[0] += 3.0
        return PlacementOptions((), "too small")

    monkeypatch.setattr(options.plan, "options_from_snapshots", estimate)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    state, postponed = QueueState(store.queue_dir()), ()
    for _ in range(3):
        decider = planner.Planner(partial(decide, policy=PolicyParams()), store.queue_dir())
        reply = planner.SiteReply({}, made.snapshot())
        view = decider.build_view(state, {"x": made.site()}, {"x": reply}, postponed)
        decider.decide(state, view)
        postponed = decider.postponed
    assert len(estimated) == 6
    assert set(estimated) == set(state.jobs)


def test_the_users_jobs_outside_the_queue_compete_with_it(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count as others' jobs, whether or not the reply of the site's tickets lists them."""
    monkeypatch.setenv("PIT_QUEUE", str(tmp_path / "place"))
    pending = made.job("1", state="PENDING", reason="Priority", user="me", name="by-hand")
    for replied in ({}, {"by-hand": TicketState("PENDING", "1", job=pending)}):
        reply = planner.SiteReply(replied, made.snapshot(jobs=(pending,)))
        decider = planner.Planner(partial(decide, policy=PolicyParams()), store.queue_dir())
        view = decider.build_view(QueueState(store.queue_dir()), {"x": made.site()}, {"x": reply})
        assert view.pools["x/gpu"].others_pending == 8


@pytest.mark.parametrize("error", [ConfigError, DataError, UsageError, ClusterError])
def test_who_cannot_be_sent_there_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[PitError]
) -> None:
    """A fabric that is described wrong, nodes that are named already: that job is refused, and the next is sent."""
    monkeypatch.setenv("PIT_QUEUE", str(tmp_path / "place"))
    requested = [
        store.make_request(Request(name=name, command="true", time="1m"), ("a",), user="ada")
        for name in ("bad", "good")
    ]
    store.enqueue(store.queue_dir(), requested)
    board, sent = QueueState(store.queue_dir()), []

    class Hands:
        def runs_dir(self, site: Site) -> str:
            return "/runs"

        def submit_ticket(self, plan: object, site: Site, *, name: str) -> JobRef:
            if name.startswith("bad"):
                raise error("no fabric")
            sent.append(name)
            return JobRef(job_id="7", site="a", submitted="")

        def revoke(self, site: Site, names: Sequence[str]) -> dict[str, bool]:
            return dict.fromkeys(names, True)

    monkeypatch.setattr(options, "make_job_plan", lambda *_: SimpleNamespace(data=()))
    monkeypatch.setattr(tickets, "backend", lambda site: Hands())
    expected = [Submit(job_id=item, pool="a/train") for item in sorted(board.jobs)]
    tickets.submit_all(board, Site(name="a"), expected, deadline=math.inf, on_submitted=lambda *_: None)
    assert [name.partition("-")[0] for name in sent] == ["good"]
    assert [len(job.refusals) for _, job in sorted(board.jobs.items())] == [1, 0]
