"""A site that falls silent: how long its tickets are waited for, and what a person's word about them is worth."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import CliRunner

from pitools.commands import place_dispatch
from pitools.launch.submission import grant
from pitools.launch.tickets.ticket_state import FORGOTTEN, TicketState
from pitools.place import types
from pitools.place.dispatch import queue_state, reconcile, status, store, tick
from tests.place.dispatch.fake_backends import Killed, Wait, World, add


def first_alpha(made: World) -> None:
    """Let the policy put jobs to alpha, and to beta while alpha is dark."""
    made.decide = lambda now, jobs, pools, held: [  # type: ignore[method-assign]
        types.Submit(job_id=job.job_id, pool="beta/train" if made.clusters["alpha"].is_dark else "alpha/train")
        for job in jobs
        if job.job_id not in {ticket.job_id for ticket in held}
    ]


def start(made: World, site: str = "alpha") -> None:
    """Let the jobs of a cluster have begun."""
    cluster = made.clusters[site]
    for job_id, job in cluster.jobs.items():
        cluster.words[job[0]], job[1] = grant.grant_token(job_id), "RUNNING"


@pytest.mark.parametrize("is_seen_running", [False, True])
def test_a_mark_that_its_site_answered_is_void(world: Callable[..., World], is_seen_running: bool) -> None:
    """A ticket was given up as lost, and its site answers first: at the next silence the job does not run twice."""
    fleet = world(0, 0.0)
    alpha, beta = fleet.clusters["alpha"], fleet.clusters["beta"]
    first_alpha(fleet)
    (job_id,) = add(fleet, 1)
    fleet.tick()
    start(fleet)
    if is_seen_running:
        fleet.tick()
    alpha.is_dark = True
    fleet.tick()
    store.write_mark(store.find_job(fleet.place, job_id), "lost.1")
    alpha.is_dark = False
    fleet.tick()
    assert store.find_job(fleet.place, job_id).state == "running"
    for _ in range(3):
        alpha.is_dark = True
        fleet.tick()
    assert (beta.jobs, store.find_job(fleet.place, job_id).declared_lost) == ({}, frozenset())
    assert [state for _, state in alpha.jobs.values()] == ["RUNNING"]


@pytest.mark.parametrize(("is_dark", "code", "state"), [(False, 1, "running"), (True, 0, "queued")])
def test_declare_lost_says_whether_it_was_done(
    world: Callable[..., World], is_dark: bool, code: int, state: str
) -> None:
    """Exit code 1 where the site answers in the same tick: its ticket stays the job's."""
    fleet = world(0, 0.0)
    first_alpha(fleet)
    (job_id,) = add(fleet, 1)
    fleet.tick()
    start(fleet)
    for cluster in fleet.clusters.values():
        cluster.is_dark = is_dark
    done = CliRunner().invoke(place_dispatch.declare_lost, ["alpha", job_id])
    assert (done.exit_code, store.find_job(fleet.place, job_id).state) == (code, state)


def test_a_mark_is_void_before_the_answer_is_written(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tick that is killed once it has written down what the site answered leaves no mark for the next silence."""
    fleet = world(0, 0.0)
    alpha = fleet.clusters["alpha"]
    first_alpha(fleet)
    (job_id,) = add(fleet, 1)
    fleet.tick()
    start(fleet)
    store.write_mark(store.find_job(fleet.place, job_id), "lost.1")
    write = queue_state.append_entry

    def killed(*given: object) -> None:
        write(*given)  # type: ignore[arg-type]
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(queue_state, "append_entry", killed)
        assert fleet.tick() is None
    alpha.is_dark = True
    fleet.tick()
    fleet.tick()
    assert fleet.clusters["beta"].jobs == {}
    assert store.find_job(fleet.place, job_id).state == "running"


def test_a_mark_holds_while_the_site_cannot_say(world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that answers and does not know what became of a ticket has answered nothing: the person's word counts."""
    fleet = world(0, 0.0)
    alpha = fleet.clusters["alpha"]
    first_alpha(fleet)
    (job_id,) = add(fleet, 1)
    fleet.tick()
    start(fleet)
    fleet.tick()
    alpha.jobs.clear()
    store.write_mark(store.find_job(fleet.place, job_id), "lost.1")
    fleet.tick()
    assert store.find_job(fleet.place, job_id).tickets[0].state == "void"


@pytest.mark.parametrize("up_s", [0.0, 10.0, 3600.0])
def test_a_silence_is_counted_from_its_beginning(world: Callable[..., World], wait: Wait, up_s: float) -> None:
    """However long a site was up: its waiting tickets stay for FAILOVER_S of silence, and go elsewhere then."""
    fleet = world(0, 0.0)
    alpha, beta = fleet.clusters["alpha"], fleet.clusters["beta"]
    alpha.has_files = True
    first_alpha(fleet)
    (job_id,) = add(fleet, 1)
    for _ in range(3):
        fleet.tick()
        wait(up_s / 3)
    alpha.is_dark = True
    fleet.tick()
    wait(tick.FAILOVER_S - 5)
    fleet.tick()
    assert (alpha.words, beta.jobs) == ({}, {})
    wait(10)
    fleet.tick()
    fleet.tick()
    assert alpha.words == {f"{job_id}.1": grant.REVOKED}
    assert [name for name, _ in beta.jobs.values()] == [f"{job_id}.2"]


def test_without_its_files_a_stranded_ticket_stays(world: Callable[..., World], wait: Wait) -> None:
    """Where a site's files are silent, too, nobody knows whether a ticket has begun: it stays until they are there."""
    fleet = world(0, 0.0)
    alpha, beta = fleet.clusters["alpha"], fleet.clusters["beta"]
    first_alpha(fleet)
    (job_id,) = add(fleet, 1)
    fleet.tick()
    alpha.is_dark = True
    for _ in range(3):
        fleet.tick()
        wait(tick.FAILOVER_S)
    assert beta.jobs == {}
    alpha.has_files = True
    fleet.tick()
    fleet.tick()
    assert [name for name, _ in beta.jobs.values()] == [f"{job_id}.2"]


def test_a_new_ticket_has_its_own_patience(
    world: Callable[..., World], wait: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site came back, was given a ticket by a tick that was killed, and is silent again: that is a new silence."""
    fleet = world(0, 0.0)
    alpha = fleet.clusters["alpha"]
    alpha.has_files = alpha.is_dark = True
    first_alpha(fleet)
    add(fleet, 1)
    fleet.decide = lambda *_: []  # type: ignore[method-assign]
    fleet.tick()
    wait(tick.FAILOVER_S * 10)
    alpha.is_dark = False
    first_alpha(fleet)
    with monkeypatch.context() as patch:
        patch.setattr(status, "write_status", lambda *_: (_ for _ in ()).throw(Killed))
        assert fleet.tick() is None
    assert len(alpha.jobs) == 1
    alpha.is_dark = True
    fleet.tick()
    assert alpha.words == {}


def test_a_silence_is_no_time_in_which_nodes_were_asked(world: Callable[..., World], wait: Wait) -> None:
    """What slurmctld forgot may run until it has asked its nodes: the time that it was away itself does not count."""
    fleet = world(0, 0.0)
    alpha = fleet.clusters["alpha"]
    first_alpha(fleet)
    (job_id,) = add(fleet, 1)
    fleet.tick()
    start(fleet)
    fleet.tick()
    answer = alpha.ticket_states
    alpha.ticket_states = lambda site, names: {  # type: ignore[method-assign]
        name: TicketState(FORGOTTEN, "1", "run.1") for name in answer(site, names)
    }
    fleet.tick()
    alpha.is_dark = True
    fleet.tick()
    wait(reconcile.ORPHAN_AFTER_S * 10)
    alpha.is_dark = False
    for is_live, then_s in ((True, reconcile.ORPHAN_AFTER_S / 2), (True, reconcile.ORPHAN_AFTER_S), (False, 0.0)):
        fleet.tick()
        assert store.find_job(fleet.place, job_id).tickets[0].is_live is is_live
        wait(then_s)
