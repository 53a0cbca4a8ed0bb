"""The tick, killed anywhere, over sites that lie, fall silent, refuse and forget: every job runs once."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pitools.core import clock
from pitools.core.errors import ClusterError, PitError, Unreachable
from pitools.launch import leave, near
from pitools.launch.plan import Plan
from pitools.launch.request import Request
from pitools.launch.seen import ABSENT, Seen
from pitools.place import model
from pitools.place.queue import board, deciding, follow, tick, tickets, view
from pitools.place.queue import folder as queue
from pitools.place.queue.journal import Entry, Job, Ticket
from pitools.place.queue.offers import Offers
from pitools.place.sites import history
from pitools.place.sites.snapshot import Snapshot
from pitools.run.folder import JobRef
from pitools.site.model import Partition, Site
from pitools.slurm import records
from pitools.slurm.refusals import Unanswered

SITES = ("alpha", "beta", "gamma")


class Killed(BaseException):
    """kill -9 of the tick."""


class Faults:
    """What may go wrong, by chance, until it is told to stop."""

    def __init__(self, dice: random.Random, share: float) -> None:
        self.dice, self.share = dice, share

    def strikes(self, weight: float = 1.0) -> bool:
        return self.dice.random() < self.share * weight

    def kill(self) -> None:
        if self.strikes(0.5):
            raise Killed


class Cluster:
    """A Slurm and its files, in memory: scripts ask for leave as the real ones do."""

    def __init__(self, faults: Faults, ran: Counter[str]) -> None:
        self.faults, self.ran = faults, ran
        self.jobs: dict[str, list[str]] = {}  # Slurm's id → name, state
        self.gated: set[str] = set()
        self.late: list[tuple[str, bool]] = []  # still on its way to slurmctld, though nobody waits for it any more
        self.words: dict[str, str] = {}
        self.last = 0
        self.is_dark = False
        self.has_files = False  # though Slurm is silent

    def answer(self) -> None:
        if self.is_dark or self.faults.strikes(0.3):
            raise Unreachable("connection refused")

    def submit(self, plan: Plan, site: Site, *, name: str, gate: bool = False) -> JobRef:
        self.faults.kill()
        self.answer()
        if self.faults.strikes(0.3):
            raise ClusterError("invalid account")
        if self.faults.strikes(0.6):
            self.late += [(name, gate)] if self.faults.dice.random() < 0.5 else []
            raise Unanswered("socket timed out")
        assert name not in [known for known, _ in self.jobs.values()], "a name is given to sbatch once"
        self._queue(name, gate)
        self.faults.kill()
        if self.faults.strikes():
            raise Unanswered("socket timed out")
        if self.faults.strikes(0.2):
            raise ClusterError("connection reset by peer")  # it says that it refused, and has it
        return JobRef(job_id=str(self.last), site=site.name, submitted=clock.now())

    def _queue(self, name: str, gate: bool) -> None:
        self.last += 1
        self.jobs[str(self.last)] = [name, "PENDING"]
        if gate:
            self.gated.add(name)

    def state(self, site: Site, names: Sequence[str]) -> dict[str, Seen]:
        self.answer()
        known = {name: self._seen(job_id, name, state) for job_id, (name, state) in self.jobs.items()}
        return {name: Seen(ABSENT, "", self.words.get(name, "")) for name in names} | known

    def _seen(self, job_id: str, name: str, state: str) -> Seen:
        code = 0 if state == "COMPLETED" else 75
        job = records.Job(job_id=job_id, raw_id=job_id, state=state, name=name)
        return Seen(state, job_id, self.words.get(name, ""), code, job)

    def take_back(self, site: Site, names: Sequence[str]) -> dict[str, bool]:
        self.faults.kill()
        if self.is_dark and not self.has_files:
            raise Unreachable("connection refused")
        taken = {name: not leave.may_run(self.words.setdefault(name, leave.NO)) for name in names}
        self.faults.kill()
        return taken

    def grant(self, site: Site, name: str, job_id: str) -> bool:
        self.faults.kill()
        self.answer()
        word = self.words.setdefault(name, leave.word(job_id))
        self.faults.kill()
        if self.faults.strikes():
            raise Unreachable("the answer is lost")
        return word == leave.word(job_id)

    def cancel(self, site: Site, jobs: Mapping[str, str]) -> None:
        self.answer()
        for job_id, name in jobs.items():
            if self.jobs.get(job_id) in ([name, "PENDING"], [name, "RUNNING"]):
                self.jobs[job_id][1] = "CANCELLED"

    def forget(self, site: Site, names: Sequence[str]) -> None:
        for name in names:
            assert not leave.may_run(self.words.get(name, "")), "what ran is not forgotten"

    def step(self) -> None:
        """Time passes: jobs start, ask for leave, and end."""
        self.is_dark = self.faults.strikes()
        while self.late and self.faults.dice.random() < 0.5:
            self._queue(*self.late.pop())
        for job_id, job in self.jobs.items():
            name, state = job
            if state == "RUNNING" and leave.may_run(self.words.get(name, "")):
                if self.faults.dice.random() < 0.5:
                    job[1] = "COMPLETED"
            elif state == "RUNNING" and (self.words.get(name) == leave.NO or self.faults.strikes(0.3)):
                self.words.setdefault(name, leave.NO)  # told so, or tired of waiting
                job[1] = "FAILED"
            elif state == "PENDING" and self.faults.dice.random() < 0.5:
                if name not in self.gated:
                    self.words.setdefault(name, leave.word(job_id))
                job[1] = "RUNNING"
            if job[1] == "COMPLETED" and state == "RUNNING":
                self.ran[name.rpartition(".")[0]] += 1
        if self.faults.strikes(0.3):  # slurmctld comes back without its latest job, and gives its number to another
            late = str(self.last)
            if late in self.jobs and self.jobs[late][1] == "PENDING":
                del self.jobs[late]
                self.last -= 1


class World:
    """Several clusters, one queue, and a policy that places, doubles and withdraws at random."""

    def __init__(self, place: Path, seed: int, share: float) -> None:
        self.place, self.dice = place, random.Random(seed)
        self.faults, self.ran = Faults(self.dice, share), Counter[str]()
        self.clusters = {name: Cluster(self.faults, self.ran) for name in SITES}

    def decide(
        self, now_s: float, jobs: Sequence[model.Job], pools: object, held: Sequence[model.Ticket]
    ) -> list[model.Place | model.Withdraw]:
        wanted: list[model.Place | model.Withdraw] = []
        for job in jobs:
            mine = [ticket for ticket in held if ticket.job_id == job.job_id]
            if len(mine) < 3 and self.dice.random() < (0.5 if mine else 0.9):
                wanted.append(model.Place(job_id=job.job_id, pool=self.dice.choice(job.options).pool))
            elif mine and self.faults.strikes():
                wanted.append(model.Withdraw(job_id=job.job_id, pool=mine[0].pool))
        return wanted

    def tick(self) -> view.Ticked | None:
        try:
            return tick.Ticker(self.place, self.decide, timeout_s=5.0, lead_s=0.0).tick()
        except Killed:
            return None


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Makes a world, and lets the tick see it as its sites."""

    def make(seed: int, share: float) -> World:
        monkeypatch.setenv("PIT_PLACE", str(tmp_path / f"place{seed}"))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        made = World(queue.root(), seed, share)
        write = board.append

        def append(job: Job, entry: Entry) -> Job:
            made.faults.kill()
            after = write(job, entry)
            made.faults.kill()
            return after

        option = [model.Option(pool=f"{name}/train", units=1, run_s=9, limit_s=9) for name in SITES]
        monkeypatch.setattr(board, "append", append)
        monkeypatch.setattr(tick, "load", lambda name: Site(name=name, partitions={"train": Partition()}))
        monkeypatch.setattr(tick, "read_snapshot", lambda site, **_: _snapshot(site))
        monkeypatch.setattr(tickets, "hands", lambda site: made.clusters[site.name])
        monkeypatch.setattr(Offers, "of", lambda *_: tuple(option))
        monkeypatch.setattr(deciding.Decider, "plan", staticmethod(lambda *_: None))
        for name in ("VOID_S", "REFUSED_S"):
            monkeypatch.setattr(deciding, name, 0.0)
        return made

    return make


def _snapshot(site: Site) -> Snapshot:
    node = records.Node(node="n1", state="idle", partitions=("train",))
    partition = records.Partition(partition="train", state="up", node_list="n1")
    return Snapshot(
        site=site.name, seen_s=0.0, skew_s=0.0, cluster=site.name, enforces=(), partitions=(partition,),
        nodes=(node,), jobs=(),
    )  # fmt: skip


def add(world: World, count: int) -> list[str]:
    request = Request(name="bc", command="true")
    asked = [queue.ask(request, SITES, owner="ada") for _ in range(count)]
    return [job.job_id for job in queue.add(world.place, asked)]


@pytest.mark.parametrize("seed", range(20))
def test_every_job_runs_once_whatever_happens(world: Callable[..., World], seed: int) -> None:
    """Ticks are killed, answers lost, sites dark, jobs refused or forgotten: none is lost, and none runs twice."""
    made = world(seed, 0.15)
    job_ids = add(made, 4)
    for _ in range(40):
        made.tick()
        for cluster in made.clusters.values():
            cluster.step()
        assert max(made.ran.values(), default=0) <= 1
    made.faults.share = 0.0
    for _ in range(60):
        made.tick()
        for cluster in made.clusters.values():
            cluster.step()
    assert made.ran == Counter(job_ids)
    assert {queue.find(made.place, job_id).state for job_id in job_ids} == {"done"}
    # Nothing of ours is left in any queue, and nothing in the folder that every tick reads.
    assert all(state not in ("PENDING", "RUNNING") for one in made.clusters.values() for _, state in one.jobs.values())
    assert queue.jobs(made.place) == ([], [])


def test_a_dark_site_keeps_its_ticket_and_stops_nobody(world: Callable[..., World]) -> None:
    """A ticket whose site is silent is neither moved nor run again until somebody answers for it."""
    made = world(0, 0.0)
    (job_id,) = add(made, 1)
    made.decide = lambda now, jobs, pools, held: [  # type: ignore[method-assign]
        model.Place(job_id=job.job_id, pool="alpha/train" if not made.clusters["alpha"].is_dark else "beta/train")
        for job in jobs
        if not held
    ]
    made.tick()
    made.clusters["alpha"].is_dark = True
    ticked = made.tick()
    assert ticked
    assert [row.state for row in ticked.jobs] == ["in-doubt"]
    assert "alpha" in ticked.jobs[0].why
    assert isinstance(ticked.faults["alpha"], PitError)
    assert [one.jobs for one in made.clusters.values()][1:] == [{}, {}]
    queue.mark(queue.find(made.place, job_id), "lost.1")
    made.tick()
    made.tick()
    assert [name for name, _ in made.clusters["beta"].jobs.values()] == [f"{job_id}.2"]
    # It comes back: the ticket that was given up is ended there.
    made.clusters["alpha"].is_dark = False
    made.tick()
    assert [state for _, state in made.clusters["alpha"].jobs.values()] == ["CANCELLED"]


def test_a_ticket_that_is_stranded_goes_elsewhere(world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Slurm is silent for long and the files are not, the ticket is taken back and the job placed anew."""
    made = world(0, 0.0)
    alpha, beta = made.clusters["alpha"], made.clusters["beta"]
    monkeypatch.setattr(tick, "FAILOVER_S", 0.0)
    made.decide = lambda now, jobs, pools, held: [  # type: ignore[method-assign]
        model.Place(job_id=job.job_id, pool="beta/train" if alpha.is_dark else "alpha/train")
        for job in jobs
        if job.job_id not in {ticket.job_id for ticket in held}
    ]
    (job_id,) = add(made, 1)
    made.tick()
    alpha.is_dark = True
    made.tick()
    made.tick()
    assert beta.jobs == {}  # without its files nobody knows whether it has begun
    alpha.has_files = True
    made.tick()
    made.tick()
    assert [name for name, _ in beta.jobs.values()] == [f"{job_id}.2"]
    assert alpha.words == {f"{job_id}.1": leave.NO}


def test_a_number_that_slurm_forgot_may_be_another_s(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmctld crashed, and gave the number of a ticket that it forgot to the next: that one is left to run."""
    made = world(0, 0.0)
    job_ids = add(made, 2)
    alpha, names = made.clusters["alpha"], []
    made.decide = lambda now, jobs, pools, held: [  # type: ignore[method-assign]
        model.Place(job_id=job.job_id, pool="alpha/train")
        for job in jobs
        if job.job_id not in {ticket.job_id for ticket in held}
    ]
    submit = alpha.submit

    def second_is_late(plan: Plan, site: Site, *, name: str, gate: bool = False) -> JobRef:
        names.append(name)
        if len(names) == 2:
            raise Unanswered("socket timed out")
        return submit(plan, site, name=name, gate=gate)

    monkeypatch.setattr(alpha, "submit", second_is_late)
    made.tick()
    assert alpha.jobs == {"1": [names[0], "PENDING"]}
    alpha.jobs = {"1": [names[1], "RUNNING"]}
    alpha.words[names[1]] = "run.1"
    for _ in range(20):
        made.tick()
        alpha.step()
    assert alpha.jobs["1"] == [names[1], "COMPLETED"]
    assert made.ran == Counter(job_ids)


def test_a_withdrawn_job_leaves_every_queue(world: Callable[..., World]) -> None:
    """A cancelled job is taken back where it waits and ended where it runs."""
    made = world(1, 0.0)
    waiting, running = add(made, 2)
    made.tick()
    for cluster in made.clusters.values():
        for job_id, job in cluster.jobs.items():
            if job[0].startswith(running):
                cluster.words[job[0]], job[1] = leave.word(job_id), "RUNNING"
    made.tick()
    for job_id in (waiting, running):
        queue.mark(queue.find(made.place, job_id), "cancel")
    for _ in range(4):
        made.tick()
    assert {queue.find(made.place, job_id).state for job_id in (waiting, running)} == {"withdrawn"}
    states = {state for one in made.clusters.values() for _, state in one.jobs.values()}
    assert states == {"CANCELLED"}


def test_another_tick_at_work_is_told(world: Callable[..., World]) -> None:
    """The second tick does nothing, and what it shows is the queue as it is."""
    made = world(2, 0.0)
    (job_id,) = add(made, 1)
    with queue.locked(made.place):
        assert made.tick() is None
    assert [row.job_id for row in follow.look(made.place).jobs] == [job_id]


def test_watch_tells_each_change_once(world: Callable[..., World]) -> None:
    """A row is told when it is new or not as it was, and once more when the job was put away."""
    made = world(3, 0.0)
    add(made, 1)
    changes, told = follow.Changes(), []
    for _ in range(20):
        ticked = made.tick()
        assert ticked
        told += [row.state for row in changes.of(ticked, made.place) if isinstance(row, view.JobRow)]
        for cluster in made.clusters.values():
            cluster.step()
    assert told[-1] == "done"
    assert told.count("done") == 1


def test_near_and_far_have_the_same_hands() -> None:
    """What a tick can do at a site does not depend on how far it is."""
    local: tickets.Hands = near
    assert tickets.hands(Site(name="a")) is local


def test_tickets_of_one_job_placed_at_once(world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """All sites are given one in the same moment: each has a name of its own, and one alone goes without a gate."""
    made = world(4, 0.0)
    made.decide = lambda now, jobs, pools, held: [  # type: ignore[method-assign]
        model.Place(job_id=job.job_id, pool=option.pool) for job in jobs if not held for option in job.options
    ]
    together = threading.Barrier(len(SITES))
    intend = board.Board.intend

    def at_once(*given: Any) -> tuple[Job, Ticket]:
        together.wait(5)
        return intend(*given)

    monkeypatch.setattr(board.Board, "intend", at_once)
    (job_id,) = add(made, 1)
    made.tick()
    names = [name for one in made.clusters.values() for name, _ in one.jobs.values()]
    assert sorted(names) == [f"{job_id}.{n}" for n in (1, 2, 3)]
    assert sorted(len(one.gated) for one in made.clusters.values()) == [0, 1, 1]


def test_waits_are_noted(world: Callable[..., World]) -> None:
    """What is foretold of each ticket stands in the site's history, and its end: started, or taken back."""
    made = world(5, 0.0)
    made.decide = lambda now, jobs, pools, held: [  # type: ignore[method-assign]
        model.Place(job_id=job.job_id, pool=pool)
        for job in jobs
        for pool in ("alpha/train", "beta/train")
        if pool not in {one.pool for one in held if one.job_id == job.job_id}
    ]
    (job_id,) = add(made, 1)
    made.tick()
    for job_id_there, job in made.clusters["alpha"].jobs.items():
        made.clusters["alpha"].words[job[0]], job[1] = leave.word(job_id_there), "RUNNING"
        made.clusters["alpha"].gated.clear()
    made.tick()
    made.tick()
    noted = {site: history.waits(site) for site in ("alpha", "beta")}
    began, ended = noted["alpha"]
    assert isinstance(began, history.Foretold)
    assert (began.job.rpartition(".")[0], began.raw_s, began.features) == (
        job_id, 0.0, {"units": 1.0, "limit_s": 9.0, "ahead": 0.0},
    )  # fmt: skip
    assert [(one.job == began.job, one.started) for one in (ended,) if isinstance(one, history.Waited)] == [
        (True, True)
    ]
    assert [getattr(one, "started", None) for one in noted["beta"]] == [None, False]


def test_what_nobody_thought_of_is_the_fault_of_its_site(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tick goes on at the others, and says where it was; the job is found again by the next."""
    made = world(0, 0.0)
    job_ids = add(made, 2)
    made.decide = lambda now, jobs, pools, held: [  # type: ignore[method-assign]
        model.Place(job_id=job.job_id, pool=f"{name}/train")
        for job, name in zip(jobs, ("alpha", "beta"), strict=False)
        if job.job_id not in {ticket.job_id for ticket in held}
    ]
    with monkeypatch.context() as patch:
        patch.setattr(made.clusters["alpha"], "submit", lambda *_, **__: {}["nothing"])
        ticked = made.tick()
    assert ticked is not None
    why = {row.site: row.why for row in ticked.sites.sites}
    assert "KeyError: 'nothing' (test_tick.py:" in why["alpha"]
    assert [name for name, _ in made.clusters["beta"].jobs.values()] == [f"{max(job_ids)}.1"]
    for _ in range(20):
        made.tick()
        for cluster in made.clusters.values():
            cluster.step()
    assert made.ran == Counter(job_ids)
