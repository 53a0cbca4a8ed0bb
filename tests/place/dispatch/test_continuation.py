"""Jobs whose runs are preempted, or save before their time limit: they go on in another ticket."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pitools.core.errors import NoSpace
from pitools.launch import plan as planning
from pitools.launch.plan import Plan
from pitools.launch.recovery import apply_decision
from pitools.launch.request import Request, RetryBudget
from pitools.launch.submission import grant
from pitools.launch.tickets.ticket_state import TicketState
from pitools.place import types
from pitools.place.dispatch import continuation, options, store, tick, tickets
from pitools.place.dispatch.journal import QueueJob
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart
from pitools.run.run_folder import JobRef
from pitools.site.schema import Paths, Site, SitePartition
from tests.place.dispatch.fake_backends import World

NOW = "2026-11-21T12:00:00Z"
DECIDE, SUBMIT, MAKE_JOB_PLAN = continuation.decide, continuation.submit, options.make_job_plan


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        ("FAILED", 95, True),
        ("FAILED", 143, True),
        ("TIMEOUT", 95, True),
        ("TIMEOUT", None, True),
        ("PREEMPTED", None, True),
        ("FAILED", 1, False),
        ("CANCELLED", 95, False),
        ("COMPLETED", 0, False),
        ("RUNNING", 95, False),
    ],
)
def test_what_a_stop_is(state: str, code: int | None, expected: bool) -> None:
    """A preemption, a time limit, or the exit code of a program that saved at a signal; not a cancel, nor a failure."""
    assert continuation.is_stop(TicketState(state, "7", "run.7", code)) is expected


class Queue:
    """A job of a queue whose runs are real folders: first at alpha, then at beta."""

    def __init__(self, fleet: World, runs: Path, workdir: Path, retries: int) -> None:
        self.fleet, self.runs = fleet, runs
        self.request = Request(
            name="bc",
            command="true",
            time="10m",
            partition="train",
            workdir=str(workdir),
            retry=RetryBudget(max=retries),
        )
        (self.job_id,) = (
            job.job_id
            for job in store.enqueue(fleet.place, [store.make_request(self.request, ("alpha", "beta"), user="ada")])
        )

    @property
    def job(self) -> QueueJob:
        return store.find_job(self.fleet.place, self.job_id)

    def start(self) -> Path:
        """Tick until the job has a new ticket, start that, and return its run folder."""
        self.fleet.tick()
        self.fleet.tick()
        (ticket,) = self.job.live
        cluster = self.fleet.clusters[ticket.site]
        (slurm_id,) = (job_id for job_id, job in cluster.jobs.items() if job == [ticket.name, "PENDING"])
        cluster.words[ticket.name], cluster.jobs[slurm_id][1] = grant.grant_token(slurm_id), "RUNNING"
        run_dir = self.runs / ticket.name
        (run_dir / "attempts" / "0").mkdir(parents=True)
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        (run_dir / grant.GRANT_LINK).symlink_to(grant.grant_token(slurm_id))
        plan = planning.make_plan(self.request, tick.load_site(ticket.site), "test")
        (run_dir / "plan.json").write_bytes(msgspec.json.encode(plan))
        saved = int((run_dir / "progress").read_text()) if (run_dir / "progress").exists() else 0
        start = AttemptStart(
            attempt="0",
            job_number=0,
            job_id=slurm_id,
            cluster="",
            restart_count=0,
            node_list="n1",
            nodes=1,
            started=NOW,
            saved_steps=saved,
        )
        run_folder.write_record(run_dir / "attempts" / "0" / "start.json", start)
        return run_dir

    def stop(self, run_dir: Path, code: int = 95, state: str = "FAILED") -> None:
        """The run's program ends with this code, and its job in this state."""
        ended = run_folder.AttemptExit(job_id="", exit_code=code, ended=NOW)
        run_folder.write_record(run_dir / "attempts" / "0" / "exit.json", ended)
        for cluster in self.fleet.clusters.values():
            for job in cluster.jobs.values():
                if job[0] == run_dir.name:
                    job[1], cluster.exit_codes[job[0]] = state, code


@pytest.fixture
def queue(world: Callable[..., World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Queue]:
    """Makes a queue with one job, whose budget of retries is `retries`."""
    fleet, runs, workdir = world(0, 0.0), tmp_path / "runs", tmp_path / "work"
    workdir.mkdir()
    partitions = {"train": SitePartition(nodes=1)}
    monkeypatch.setattr(
        tick, "load_site", lambda name: Site(name=name, paths=Paths(runs=str(runs)), partitions=partitions)
    )
    for module, name, real in (
        (continuation, "decide", DECIDE),
        (continuation, "submit", SUBMIT),
        (options, "make_job_plan", MAKE_JOB_PLAN),
    ):
        monkeypatch.setattr(module, name, real)

    def submit_ticket(plan: Plan, site: Site, *, name: str, populate: Callable[[Path], None]) -> JobRef:
        (runs / name).mkdir()
        populate(runs / name)
        return fleet.clusters[site.name].submit_ticket(plan, site, name=name)

    monkeypatch.setattr(continuation.shared_fs, "submit_ticket", submit_ticket)
    for cluster in fleet.clusters.values():
        monkeypatch.setattr(
            cluster, "withdraw_grants", lambda site, names: tickets.shared_fs.withdraw_grants(site, names)
        )
        monkeypatch.setattr(cluster, "runs_dir", lambda site: site.paths.runs)
    fleet.decide = lambda now, jobs, pools, held: [  # type: ignore[method-assign]
        types.Submit(job_id=job.job_id, pool=f"{'beta' if (runs / f'{job.job_id}.1').exists() else 'alpha'}/train")
        for job in jobs
        if not held
    ]
    return lambda retries=100: Queue(fleet, runs, workdir, retries)


def test_a_job_that_was_stopped_goes_on_at_another_site(queue: Callable[..., Queue]) -> None:
    """Its next ticket's run has the checkpoints and the code of the last; that one's own job cannot begin again."""
    made = queue()
    first = made.start()
    (first / "checkpoints" / "mine.bin").write_bytes(b"weights")
    (first / "progress").write_text("40\n")
    (first / "code").mkdir()
    made.stop(first)
    second = made.start()
    assert (second.name, made.job.tickets[1].pool) == (f"{made.job_id}.2", "beta/train")
    assert (second / "checkpoints" / "mine.bin").read_bytes() == b"weights"
    assert (second / "progress").read_text() == "40\n"
    assert grant.read_grant(first) == grant.REVOKED
    assert continuation.request_to_run(made.job).workdir == str(first / "code")
    made.fleet.tick()
    assert made.job.state == "running"
    cluster = made.fleet.clusters["beta"]
    for job in cluster.jobs.values():
        job[1] = "COMPLETED"
    made.fleet.tick()
    assert (made.job.state, [ticket.state for ticket in made.job.tickets]) == ("done", ["stopped", "over"])


def test_between_two_tickets_the_job_is_queued(queue: Callable[..., Queue]) -> None:
    """`list` says what stopped it, and where it ran last."""
    made = queue()
    first = made.start()
    (first / "progress").write_text("40\n")
    made.stop(first)
    made.fleet.decide = lambda *_: []  # type: ignore[method-assign]
    ticked = made.fleet.tick()
    assert ticked
    (row,) = ticked.jobs
    assert (row.state, row.run, row.pool) == ("queued", first.name, "alpha/train")
    assert row.reason.startswith("time-limit at alpha, to be continued")
    store.write_mark(made.job, "cancel")
    made.fleet.tick()
    assert made.job.state == "cancelled"


@pytest.mark.parametrize("code", [95, 143])
def test_what_makes_no_progress_ends(queue: Callable[..., Queue], code: int) -> None:
    """By the budgets of runs without a queue: two time limits in a row, each in another ticket, without a new step."""
    made = queue(retries=2)
    for _ in range(2):
        assert not made.job.is_over
        made.stop(made.start(), code)
    made.fleet.tick()
    assert (made.job.state, len(made.job.tickets)) == ("failed", 2)
    assert made.job.end_entry
    assert made.job.end_entry.exit_code == code


def test_progress_resets_the_budget(queue: Callable[..., Queue]) -> None:
    """A job that saves more in each ticket goes on for as long as it does."""
    made = queue(retries=2)
    for number in range(1, 5):
        run_dir = made.start()
        assert run_dir.name == f"{made.job_id}.{number}"
        (run_dir / "checkpoints" / "mine.bin").write_bytes(b"weights")
        (run_dir / "progress").write_text(f"{number * 10}\n")
        made.stop(run_dir)
    made.fleet.tick()
    assert made.job.state in ("queued", "submitted")


def test_only_the_last_run_that_was_stopped_is_kept(queue: Callable[..., Queue]) -> None:
    """A job that is preempted for a month does not fill the disk with all that its tickets saved."""
    made = queue()
    run_dir = made.start()
    (made.job.path / "run.0" / "checkpoints").mkdir(parents=True)
    (run_dir / "progress").write_text("40\n")
    made.stop(run_dir)
    made.fleet.tick()
    assert [path.name for path in made.job.path.glob("run.*")] == []
    assert run_dir.is_dir()


@pytest.mark.parametrize("has_verdict", [True, False])
def test_a_run_that_ends_well_while_it_is_preempted_is_done(queue: Callable[..., Queue], has_verdict: bool) -> None:
    """Slurm calls its job PREEMPTED although the program ended with 0 in the grace time."""
    made = queue()
    run_dir = made.start()
    if has_verdict:
        apply_decision.write_verdict(run_dir, "succeeded", "", 0)
    made.stop(run_dir, 0, "PREEMPTED")
    made.fleet.tick()
    assert made.job.end_entry
    assert (made.job.state, made.job.end_entry.exit_code) == ("done", 0)


def test_a_run_that_was_cancelled_is_not_continued(queue: Callable[..., Queue]) -> None:
    """`pit launch cancel` of the ticket's run, which ended by itself before scancel came, ends the job."""
    made = queue()
    run_dir = made.start()
    (run_dir / "progress").write_text("40\n")
    apply_decision.write_verdict(run_dir, "cancelled")
    made.stop(run_dir)
    made.fleet.tick()
    assert made.job.state == "cancelled"


def test_a_run_that_has_no_room_yet_is_fetched_later(
    queue: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or quota ends no job, and hides no other ticket of the site; `list` says why the job waits."""
    made = queue()
    run_dir = made.start()
    (run_dir / "progress").write_text("40\n")
    made.stop(run_dir)

    def fail(*_: object) -> None:
        raise NoSpace("no space left", where="run")

    with monkeypatch.context() as patch:
        patch.setattr(made.fleet.clusters["alpha"], "withdraw_grants", fail)
        for _ in range(3):
            ticked = made.fleet.tick()
            assert ticked
            assert (ticked.faults, made.job.state, made.job.tickets[0].is_settled) == ({}, "queued", False)
    assert "no space left" in ticked.jobs[0].reason
    assert made.start().name == f"{made.job_id}.2"


@pytest.mark.parametrize("lost", ["plan.json", "."])
def test_a_run_that_cannot_be_continued_fails_its_job(queue: Callable[..., Queue], lost: str) -> None:
    """Without its plan, or its folder, nothing is known of the run: the job ends, and says so."""
    made = queue()
    run_dir = made.start()
    made.stop(run_dir)
    if lost == ".":
        shutil.rmtree(run_dir)
    else:
        (run_dir / lost).unlink()
    made.fleet.tick()
    assert made.job.state == "failed"
    assert made.job.end_entry
    assert "cannot be continued" in made.job.end_entry.reason
