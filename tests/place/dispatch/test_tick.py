"""The tick, killed anywhere, over sites that lie, fall silent, refuse and forget: every job runs once."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pitools.core.errors import ClusterError, ConfigError, NoSpace, PitError, TryLater, Unreachable, UsageError
from pitools.launch.plan import Plan
from pitools.launch.submission import grant
from pitools.launch.tickets import shared_fs
from pitools.launch.tickets.ticket_state import FolderNotCreated
from pitools.place import types
from pitools.place.clusters import wait_log
from pitools.place.clusters.parallel import SitePoller
from pitools.place.clusters.snapshot import Snapshot
from pitools.place.dispatch import journal, planner, queue_state, site_workers, status, store, tick, tickets, watch
from pitools.place.dispatch.journal import QueueJob, QueueTicket
from pitools.run.run_folder import JobRef
from pitools.site.schema import Paths, Site
from pitools.slurm.errors import OutcomeUnknown
from tests.place.dispatch.fake_backends import SITES, Wait, World, add


@pytest.mark.parametrize("seed", range(20))
def test_every_job_runs_once_whatever_happens(world: Callable[..., World], wait: Wait, seed: int) -> None:
    """Ticks are killed, answers lost, sites dark for long, jobs refused or forgotten: none is lost or runs twice."""
    fleet = world(seed, 0.15)
    fleet.clusters["alpha"].has_files = True
    job_ids = add(fleet, 4)
    for _ in range(40):
        fleet.tick()
        wait(tick.FAILOVER_S)
        for cluster in fleet.clusters.values():
            cluster.step()
        assert max(fleet.ran.values(), default=0) <= 1
    fleet.faults.share = 0.0
    for _ in range(60):
        fleet.tick()
        for cluster in fleet.clusters.values():
            cluster.step()
    assert fleet.ran == Counter(job_ids)
    assert {store.find_job(fleet.place, job_id).state for job_id in job_ids} == {"done"}
    # Nothing of ours is left in any queue, and nothing in the folder that every tick reads.
    assert all(
        state not in ("PENDING", "RUNNING") for item in fleet.clusters.values() for _, state in item.jobs.values()
    )
    assert store.read_jobs(fleet.place) == ([], [])


def test_a_dark_site_keeps_its_ticket_and_stops_nobody(world: Callable[..., World]) -> None:
    """A ticket whose site is silent is neither moved nor run again until somebody answers for it."""
    fleet = world(0, 0.0)
    (job_id,) = add(fleet, 1)
    fleet.decide = lambda now, jobs, pools, held: [  # type: ignore[method-assign]
        types.Submit(job_id=job.job_id, pool="alpha/train" if not fleet.clusters["alpha"].is_dark else "beta/train")
        for job in jobs
        if not held
    ]
    fleet.tick()
    fleet.clusters["alpha"].is_dark = True
    ticked = fleet.tick()
    assert ticked
    assert [row.state for row in ticked.jobs] == ["in-doubt"]
    assert "alpha" in ticked.jobs[0].reason
    assert isinstance(ticked.faults["alpha"], PitError)
    assert [item.jobs for item in fleet.clusters.values()][1:] == [{}, {}]
    store.write_mark(store.find_job(fleet.place, job_id), "lost.1")
    fleet.tick()
    fleet.tick()
    assert [name for name, _ in fleet.clusters["beta"].jobs.values()] == [f"{job_id}.2"]
    # It comes back: the ticket that was given up is ended there.
    fleet.clusters["alpha"].is_dark = False
    fleet.tick()
    assert [state for _, state in fleet.clusters["alpha"].jobs.values()] == ["CANCELLED"]


def test_a_number_that_slurm_forgot_may_be_another_s(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmctld crashed, and gave the number of a ticket that it forgot to the next: that one is left to run."""
    fleet = world(0, 0.0)
    job_ids = add(fleet, 2)
    alpha, names = fleet.clusters["alpha"], []
    fleet.decide = lambda now, jobs, pools, held: [  # type: ignore[method-assign]
        types.Submit(job_id=job.job_id, pool="alpha/train")
        for job in jobs
        if job.job_id not in {ticket.job_id for ticket in held}
    ]
    submit = alpha.submit_ticket

    def second_is_late(plan: Plan, site: Site, *, name: str) -> JobRef:
        names.append(name)
        if len(names) == 2:
            raise OutcomeUnknown("socket timed out")
        return submit(plan, site, name=name)

    monkeypatch.setattr(alpha, "submit_ticket", second_is_late)
    fleet.tick()
    assert alpha.jobs == {"1": [names[0], "PENDING"]}
    alpha.jobs = {"1": [names[1], "RUNNING"]}
    alpha.words[names[1]] = "run.1"
    for _ in range(20):
        fleet.tick()
        alpha.step()
    assert alpha.jobs["1"] == [names[1], "COMPLETED"]
    assert fleet.ran == Counter(job_ids)


def test_a_withdrawn_job_leaves_every_queue(world: Callable[..., World]) -> None:
    """A cancelled job is taken back where it waits and ended where it runs."""
    fleet = world(1, 0.0)
    waiting, running = add(fleet, 2)
    fleet.tick()
    for cluster in fleet.clusters.values():
        for job_id, job in cluster.jobs.items():
            if job[0].startswith(running):
                cluster.words[job[0]], job[1] = grant.grant_token(job_id), "RUNNING"
    fleet.tick()
    for job_id in (waiting, running):
        store.write_mark(store.find_job(fleet.place, job_id), "cancel")
    for _ in range(4):
        fleet.tick()
    assert {store.find_job(fleet.place, job_id).state for job_id in (waiting, running)} == {"cancelled"}
    states = {state for item in fleet.clusters.values() for _, state in item.jobs.values()}
    assert states == {"CANCELLED"}


def test_another_tick_at_work_is_told(world: Callable[..., World]) -> None:
    """The second tick does nothing, and what it shows is the queue as it is."""
    fleet = world(2, 0.0)
    (job_id,) = add(fleet, 1)
    with store.tick_lock(fleet.place):
        assert fleet.tick() is None
    assert [row.job_id for row in watch.read_queue(fleet.place).jobs] == [job_id]


def test_a_dark_site_that_is_not_asked_stays_dark(world: Callable[..., World]) -> None:
    """Nobody asks a site that no job needs now: it is shown as it was seen last, and one never seen is not shown."""
    fleet = world(0, 0.0)
    add(fleet, 1)
    fleet.decide = lambda now, jobs, pools, held: [  # type: ignore[method-assign]
        types.Submit(job_id=job.job_id, pool="beta/train") for job in jobs if not held
    ]
    fleet.clusters["alpha"].is_dark = True
    fleet.tick()
    beta = fleet.clusters["beta"]
    for job_id, job in beta.jobs.items():
        beta.words[job[0]], job[1] = grant.grant_token(job_id), "RUNNING"
    fleet.tick()
    fleet.clusters["alpha"].is_dark = False
    last = fleet.tick()
    assert last
    assert {row.site: (row.state, bool(row.reason)) for row in last.sites.sites} == {
        "alpha": ("unreachable", True),
        "beta": ("up", False),
        "gamma": ("up", False),
    }
    (fleet.place / "sites.json").unlink()
    last = fleet.tick()
    assert last
    assert [row.site for row in last.sites.sites] == ["beta"]


def test_a_slow_site_holds_up_no_repeated_tick(world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """`watch` serves the others, and takes its answer in a later tick."""
    monkeypatch.setattr(SitePoller, "straggler_s", 0.0)
    monkeypatch.setattr(tick, "QUERY_TIMEOUT_S", 3600.0)  # who waits to the deadline has its answer
    fleet, goes_on = world(0, 0.0), threading.Event()
    fleet.decide = lambda now, jobs, pools, held: []  # type: ignore[method-assign]
    add(fleet, 1)
    fleet.tick()
    since = status.read_site_status(fleet.place).sites[0].since
    read = tick.snapshot.read_snapshot

    def slow(site: Site, **limits: float) -> Snapshot:
        if site.name == "alpha":
            goes_on.wait(60)
        return read(site, **limits)

    monkeypatch.setattr(tick.snapshot, "read_snapshot", slow)
    ticker = tick.Dispatcher(fleet.place, fleet.decide, repeats=True)
    for _ in range(2):
        ticked = ticker.tick()
        assert ticked
        assert {row.site: row.state for row in ticked.sites.sites}["beta"] == "up"
        row = ticked.sites.sites[0]
        assert (row.site, row.state, row.since) == ("alpha", "up", since)
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "query alpha":
            thread.join(60)
    ticked = ticker.tick()
    assert ticked
    assert ticked.sites.sites[0].state == "up"


def test_a_slow_site_comes_back_in_a_tick_of_cron(world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """It was unreachable in the last tick, and answers later than the others: no later tick takes the answer."""
    monkeypatch.setattr(SitePoller, "straggler_s", 0.0)
    monkeypatch.setattr(tick, "QUERY_TIMEOUT_S", 3600.0)  # who waits to the deadline has its answer
    fleet, beta_answers = world(0, 0.0), threading.Event()
    fleet.decide = lambda now, jobs, pools, held: []  # type: ignore[method-assign]
    add(fleet, 1)
    fleet.clusters["alpha"].is_dark = True
    fleet.tick()
    assert status.read_site_status(fleet.place).sites[0].state == "unreachable"
    fleet.clusters["alpha"].is_dark = False
    read = tick.snapshot.read_snapshot

    def slow(site: Site, **limits: float) -> Snapshot:
        if site.name == "alpha":
            beta_answers.wait(60)
            time.sleep(0.2)
        else:
            beta_answers.set()
        return read(site, **limits)

    monkeypatch.setattr(tick.snapshot, "read_snapshot", slow)
    ticked = tick.Dispatcher(fleet.place, fleet.decide).tick()
    assert ticked
    assert {row.state for row in ticked.sites.sites} == {"up"}


@pytest.mark.parametrize("left", [b"", b"\0" * 50, b'{"schema":"pit.dispatch-status/1","t":'])
def test_a_damaged_record_of_what_was_seen_stops_no_tick(world: Callable[..., World], left: bytes) -> None:
    """It is not made durable, so a loss of power may damage it; the tick writes it anew."""
    fleet = world(0, 0.0)
    add(fleet, 1)
    (fleet.place / "sites.json").write_bytes(left)
    assert fleet.tick()
    assert [row.site for row in status.read_site_status(fleet.place).sites] == ["alpha", "beta", "gamma"]


def test_watch_tells_each_change_once(world: Callable[..., World]) -> None:
    """A row is told when it is new or not as it was, and once more when the job was put away."""
    fleet = world(3, 0.0)
    add(fleet, 1)
    changes, reported = watch.ChangedRows(), []
    for _ in range(20):
        ticked = fleet.tick()
        assert ticked
        reported += [row.state for row in changes.changed(ticked, fleet.place) if isinstance(row, status.QueueJobRow)]
        for cluster in fleet.clusters.values():
            cluster.step()
    assert reported[-1] == "done"
    assert reported.count("done") == 1


def test_a_damaged_job_ends_no_watch(world: Callable[..., World]) -> None:
    """It is gone from the rows, and among the broken ones."""
    fleet = world(0, 0.0)
    (job_id,) = add(fleet, 1)
    changes = watch.ChangedRows()
    for is_damaged in (False, True):
        if is_damaged:
            (fleet.place / "jobs" / job_id / "journal.jsonl").write_text("{\n")
        ticked = fleet.tick()
        assert ticked
        jobs = [row for row in changes.changed(ticked, fleet.place) if isinstance(row, status.QueueJobRow)]
        assert (len(jobs), len(ticked.sites.broken)) == ((0, 1) if is_damaged else (1, 0))


def test_a_new_problem_of_a_site_is_reported() -> None:
    """The file is wrong, then missing: both are told, once; a site that is silent for another reason is not news."""

    def messages(state: str, reason: str) -> int:
        row = status.SiteStatusRow(site="alpha", state=state, since="t", reason=reason)
        sites = status.DispatchStatus(ticked_at="t", sites=(row,))
        return len(news.new_messages(status.TickResult([], sites, {})))

    news = watch.Messages()
    seen = [("misconfigured", "key"), ("misconfigured", "gone"), ("misconfigured", "gone"), ("up", "")]
    assert [messages(*row) for row in seen] == [1, 1, 0, 1]
    assert [messages("unreachable", reason) for reason in ("no answer within 20.1 s", "refused")] == [1, 0]


def test_near_and_far_have_the_same_hands() -> None:
    """What a tick can do at a site does not depend on how far it is."""
    local: tickets.SiteBackend = shared_fs
    assert tickets.backend(Site(name="a")) is local


def test_tickets_of_one_job_placed_at_once(world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that gives one to all sites in the same moment: one site alone gets it."""
    fleet = world(4, 0.0)
    fleet.decide = lambda now, jobs, pools, held: [  # type: ignore[method-assign]
        types.Submit(job_id=job.job_id, pool=option.pool) for job in jobs if not held for option in job.options
    ]
    together = threading.Barrier(len(SITES))
    intend = queue_state.QueueState.record_intent

    def at_once(*given: Any) -> tuple[QueueJob, QueueTicket]:
        together.wait(5)
        return intend(*given)

    monkeypatch.setattr(queue_state.QueueState, "record_intent", at_once)
    (job_id,) = add(fleet, 1)
    fleet.tick()
    names = [name for item in fleet.clusters.values() for name, _ in item.jobs.values()]
    assert names == [f"{job_id}.1"]


@pytest.mark.parametrize("method", ["submit_ticket", "revoke"])
def test_a_hanging_action_costs_its_site_alone(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The tick ends without it, the next ones leave the site out, and what comes of it late is not journalled."""
    monkeypatch.setattr(site_workers, "ACTION_TIMEOUT_S", 0.2)
    fleet, hangs, goes_on, ended = world(0, 0.0), threading.Event(), threading.Event(), threading.Event()
    alpha, place = fleet.clusters["alpha"], "alpha"
    fleet.decide = lambda now, jobs, pools, held: [  # type: ignore[method-assign]
        types.Submit(job_id=job.job_id, pool=f"{place}/train")
        for job in jobs
        if f"{place}/train" in pools and job.job_id not in {ticket.job_id for ticket in held}
    ]
    call = getattr(alpha, method)

    def hang(*given: Any, **named: Any) -> object:
        hangs.set()
        goes_on.wait(30)
        try:
            return call(*given, **named)
        finally:
            ended.set()

    job_ids = add(fleet, 2)
    if method == "revoke":
        fleet.tick()
        store.write_mark(store.find_job(fleet.place, job_ids.pop()), "cancel")
    with monkeypatch.context() as patch:
        patch.setattr(alpha, method, hang)
        ticked = fleet.tick()
        assert ticked
        assert hangs.is_set()
        assert isinstance(ticked.faults["alpha"], site_workers.SiteBusy)
        assert {row.site: row.state for row in ticked.sites.sites}["alpha"] == "busy"
        place = "beta"
        job_ids += add(fleet, 1)
        ticked = fleet.tick()
        assert ticked
        assert list(ticked.faults) == ["alpha"]
        assert [name for name, _ in fleet.clusters["beta"].jobs.values()][-1] == f"{job_ids[-1]}.1"
        goes_on.set()
        assert ended.wait(30)
    for _ in range(200):
        fleet.tick()
        for cluster in fleet.clusters.values():
            cluster.step()
        if not store.read_jobs(fleet.place)[0]:
            break
        time.sleep(0.01)
    assert fleet.ran == Counter(job_ids)


def _fleet_for(world: Callable[..., World], *places: str) -> World:
    """Return a fleet whose policy takes the first of these sites that is offered to a job."""
    fleet = world(0, 0.0)
    fleet.decide = (
        lambda now, jobs, pools, held: [  # type: ignore[method-assign]
            types.Submit(job_id=job.job_id, pool=pool)
            for job in jobs
            if job.job_id not in {ticket.job_id for ticket in held}
            for pool in [f"{place}/train" for place in places if _is_offered(f"{place}/train", job, pools)][:1]
        ]
    )
    return fleet


def _is_offered(pool: str, job: types.PendingJob, pools: Any) -> bool:
    return pool in [option.pool for option in job.options] and not pools[pool].is_unreachable


@pytest.mark.parametrize("end_state", ["NODE_FAIL", "COMPLETED"])
def test_a_ticket_that_fails_before_its_grant_ends_its_job(world: Callable[..., World], end_state: str) -> None:
    """Its script or a prolog fails wherever it starts: the job fails after a few tickets, and says why."""
    fleet = _fleet_for(world, "alpha", "beta")
    (job_id,) = add(fleet, 1)
    for _ in range(20):
        fleet.tick()
        for cluster in fleet.clusters.values():
            for job in cluster.jobs.values():
                job[1] = end_state if job[1] == "PENDING" else job[1]
    job = store.find_job(fleet.place, job_id)
    assert (job.state, len(job.tickets)) == ("failed", journal.MAX_FAILED_STARTS)
    assert job.end_entry
    assert (job.end_entry.state, job.tickets[-1].state) == ("FAILED", "over")
    assert store.read_jobs(fleet.place) == ([], [])


def test_a_ticket_that_failed_is_tried_elsewhere(world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool where it ended before its grant is left out for a while; `list` says why the job waits."""
    fleet = _fleet_for(world, "alpha")
    monkeypatch.setattr(planner, "RETRY_REFUSED_S", 600.0)
    add(fleet, 1)
    fleet.tick()
    fleet.clusters["alpha"].jobs["1"][1] = "FAILED"
    for _ in range(3):
        ticked = fleet.tick()
    assert ticked
    assert "alpha/train: FAILED" in ticked.jobs[0].reason
    assert len(fleet.clusters["alpha"].jobs) == 1


@pytest.mark.parametrize("error", [FolderNotCreated("disk full"), NoSpace("disk full"), TryLater("slurmctld is busy")])
def test_a_site_that_takes_no_ticket_now_is_left_out(
    world: Callable[..., World], wait: Wait, monkeypatch: pytest.MonkeyPatch, error: PitError
) -> None:
    """A full disk or a busy slurmctld: one job tries, all go elsewhere, and the site is tried again later."""
    fleet = _fleet_for(world, "alpha", "beta")
    job_ids = add(fleet, 3)
    alpha, tries = fleet.clusters["alpha"], []

    def refuse(plan: Plan, site: Site, *, name: str) -> JobRef:
        tries.append(name)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(alpha, "submit_ticket", refuse)
        if isinstance(error, FolderNotCreated):
            patch.setattr(alpha, "revoke", lambda *_: (_ for _ in ()).throw(error))
        first = fleet.tick()
        assert first
        assert (len(tries), first.faults) == (1, {})
        fleet.tick()
        assert (len(tries), len(fleet.clusters["beta"].jobs)) == (1, len(job_ids))
    wait(planner.RETRY_DEFERRED_S)
    job_ids += add(fleet, 1)
    fleet.tick()
    assert [name for name, _ in alpha.jobs.values()] == [f"{job_ids[-1]}.1"]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_refused_ticket_that_runs_is_the_jobs(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """Slurm says that it refused, and has started it: it runs once, or is ended as soon as its id is known."""
    fleet = _fleet_for(world, "alpha")
    (job_id,) = add(fleet, 1)
    alpha = fleet.clusters["alpha"]
    submit = alpha.submit_ticket

    def start_and_refuse(plan: Plan, site: Site, *, name: str) -> JobRef:
        submit(plan, site, name=name)
        alpha.jobs["1"][1], alpha.words[name] = "RUNNING", grant.grant_token("1")
        raise ClusterError("connection reset by peer")

    monkeypatch.setattr(alpha, "submit_ticket", start_and_refuse)
    fleet.tick()
    assert store.find_job(fleet.place, job_id).state == "running"
    if is_cancelled:
        store.write_mark(store.find_job(fleet.place, job_id), "cancel")
        for _ in range(3):
            fleet.tick()
        assert alpha.jobs["1"][1] == "CANCELLED"
        return
    for _ in range(20):
        fleet.tick()
        alpha.step()
    assert fleet.ran == Counter([job_id])


def test_a_ticket_stays_in_its_folder_of_runs(world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tick has another PIT_RUNS: the ticket's grant is read, and its job runs once."""
    fleet = world(0, 0.0)
    (job_id,) = add(fleet, 1)
    fleet.decide = lambda now, jobs, pools, held: [  # type: ignore[method-assign]
        types.Submit(job_id=job.job_id, pool="alpha/train") for job in jobs if not held
    ]
    fleet.tick()
    alpha, load = fleet.clusters["alpha"], tick.load_site
    folders = set()

    def moved(name: str) -> Site:
        return msgspec.structs.replace(load(name), paths=Paths(runs="/elsewhere"))

    for method in ("ticket_states", "revoke", "remove_ticket_dirs"):
        call = getattr(alpha, method)
        monkeypatch.setattr(
            alpha, method, lambda site, *given, call=call: folders.add(site.paths.runs) or call(site, *given)
        )
    monkeypatch.setattr(tick, "load_site", moved)
    for _ in range(10):
        fleet.tick()
        alpha.step()
    assert (fleet.ran, folders) == (Counter([job_id]), {"/runs"})


def test_a_job_that_cannot_be_archived_hides_no_other(world: Callable[..., World]) -> None:
    """Something is in its way: the tick says so, archives the others and goes on."""
    fleet = world(0, 0.0)
    stuck, other = sorted(add(fleet, 2))
    (fleet.place / "done" / stuck / "in the way").mkdir(parents=True)
    for job_id in (stuck, other):
        store.write_mark(store.find_job(fleet.place, job_id), "cancel")
    for _ in range(2):
        ticked = fleet.tick()
        assert ticked
        assert [stuck in text for text in ticked.sites.broken] == [True]
    assert [job.job_id for job in store.read_jobs(fleet.place)[0]] == [stuck]


def test_waits_are_noted(world: Callable[..., World]) -> None:
    """What is foretold of each ticket stands in the site's history, and its end: started, or taken back."""
    fleet = world(5, 0.0)
    fleet.decide = lambda now, jobs, pools, held: [  # type: ignore[method-assign]
        types.Submit(job_id=job.job_id, pool=pool)
        for job, pool in zip(jobs, ("alpha/train", "beta/train"), strict=False)
        if not held
    ]
    job_id, other = sorted(add(fleet, 2))
    fleet.tick()
    for job_id_there, job in fleet.clusters["alpha"].jobs.items():
        fleet.clusters["alpha"].words[job[0]], job[1] = grant.grant_token(job_id_there), "RUNNING"
    store.write_mark(store.find_job(fleet.place, other), "cancel")
    fleet.tick()
    noted = {site: wait_log.read_waits(site) for site in ("alpha", "beta")}
    began, end = noted["alpha"]
    assert isinstance(began, wait_log.WaitPredicted)
    assert (began.ticket.rpartition(".")[0], began.estimate_s, began.features) == (
        job_id,
        0.0,
        {"units": 1.0, "limit_s": 9.0, "queued_ahead": 0.0},
    )
    assert [(item.ticket == began.ticket, item.started) for item in (end,) if isinstance(item, wait_log.WaitEnded)] == [
        (True, True)
    ]
    assert [getattr(item, "started", None) for item in noted["beta"]] == [None, False]


def test_waits_are_noted_behind_our_own_tickets(world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is queued ahead counts the queue's own earlier tickets, as `pit place plan` does, in every tick."""
    fleet = world(5, 0.0)
    pool = types.PoolState(pool="alpha/train", units=4, free=4, max_pending=9)
    monkeypatch.setattr(planner.pools, "pool_states", lambda _, __, site: [pool] if site.name == "alpha" else [])
    fleet.decide = lambda now, jobs, pools, held: [  # type: ignore[method-assign]
        types.Submit(job_id=job.job_id, pool="alpha/train")
        for job in jobs
        if job.job_id not in {t.job_id for t in held}
    ]
    for _ in range(2):
        add(fleet, 2)
        fleet.tick()
    ahead = [line.features["queued_ahead"] for line in wait_log.read_waits("alpha") if hasattr(line, "features")]
    assert ahead == [0.0, 0.25, 0.5, 0.75]


def test_what_nobody_thought_of_is_the_fault_of_its_site(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tick goes on at the others, and says where it was; the job is found again by the next."""
    fleet = world(0, 0.0)
    job_ids = add(fleet, 2)
    fleet.decide = lambda now, jobs, pools, held: [  # type: ignore[method-assign]
        types.Submit(job_id=job.job_id, pool=f"{name}/train")
        for job, name in zip(jobs, ("alpha", "beta"), strict=False)
        if job.job_id not in {ticket.job_id for ticket in held}
    ]
    with monkeypatch.context() as patch:
        patch.setattr(fleet.clusters["alpha"], "submit_ticket", lambda *_, **__: {}["nothing"])
        ticked = fleet.tick()
    assert ticked is not None
    assert {row.site: (row.state, bool(row.reason)) for row in ticked.sites.sites}["alpha"] == ("failing", True)
    assert [name for name, _ in fleet.clusters["beta"].jobs.values()] == [f"{max(job_ids)}.1"]
    for _ in range(20):
        fleet.tick()
        for cluster in fleet.clusters.values():
            cluster.step()
    assert fleet.ran == Counter(job_ids)


def test_a_site_that_only_fails_is_still_heard(world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """An action fails in every tick: the site counts as answering all the while, and the code is that of the error."""
    fleet = _fleet_for(world, "alpha")
    add(fleet, 1)
    monkeypatch.setattr(fleet.clusters["alpha"], "submit_ticket", lambda *_, **__: {}["nothing"])
    since = set()
    for _ in range(3):
        ticked = fleet.tick()
        assert ticked
        rows = {row.site: row for row in ticked.sites.sites}
        since.add((rows["alpha"].state, rows["alpha"].since, rows["alpha"].answering_since))
    assert len(since) == 1
    assert (since.pop()[0], ticked.exit_code) == ("failing", 0)  # beta is up
    alone = {"alpha": ClusterError("refused")}
    assert _exit_code(fleet, alone, {"alpha"}) == 4


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ({"alpha": ConfigError("key")}, 3),
        ({"alpha": UsageError("no site")}, 3),
        ({"alpha": ConfigError("key"), "beta": Unreachable("silent")}, 75),
        ({"alpha": site_workers.SiteBusy("upload")}, 0),
        ({}, 0),
    ],
)
def test_the_code_says_why_no_site_served(world: Callable[..., World], errors: dict[str, PitError], code: int) -> None:
    """75 is for silence alone: a wrong file is 3, and an upload that goes on is no failure."""
    assert _exit_code(world(0, 0.0), errors, set()) == code


def _exit_code(fleet: World, errors: dict[str, PitError], answered: set[str]) -> int:
    queue = queue_state.QueueState(fleet.place)
    return status.write_status(fleet.place, queue, "now", {}, errors, answered, {}).exit_code


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_site_that_is_not_asked_loses_no_ticket(
    world: Callable[..., World], wait: Wait, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    """Its lock is held by an action, or its file is wrong: its running job is not given up, and is shown as running."""
    fleet = _fleet_for(world, "alpha", "beta")
    (job_id,) = add(fleet, 1)
    fleet.tick()
    (ticket,) = fleet.clusters["alpha"].jobs.values()
    fleet.clusters["alpha"].words[ticket[0]], ticket[1] = grant.grant_token("1"), "RUNNING"
    fleet.tick()
    load = tick.load_site
    held = store.try_lock(fleet.place / "site.alpha.lock") if is_busy else None
    if not is_busy:
        monkeypatch.setattr(tick, "load_site", lambda name: load(name) if name != "alpha" else load_wrong(name))
    store.write_mark(store.find_job(fleet.place, job_id), "lost.1")
    wait(tick.FAILOVER_S)
    ticked = fleet.tick()
    assert ticked
    assert [row.state for row in ticked.sites.sites if row.site == "alpha"] == ["busy" if is_busy else "misconfigured"]
    assert [row.state for row in ticked.jobs] == ["running"]
    assert fleet.clusters["beta"].jobs == {}
    if held is not None:
        os.close(held)


def load_wrong(name: str) -> Site:
    raise ConfigError("unknown key", where=f"{name}.toml")
