"""What a look at a site makes of the tickets there: above all of one that had leave, and of which nothing is known."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace

from pitools.core import timestamps
from pitools.core.errors import NoSpace
from pitools.launch.request import Request
from pitools.launch.tickets.ticket_state import ABSENT, FORGOTTEN, TicketState
from pitools.place.dispatch import journal, reconcile, status, store, tick, tickets
from pitools.place.dispatch.queue_state import QueueState
from pitools.place.dispatch.reconcile import reconcile_tickets
from pitools.site.schema import Site
from pitools.slurm.records import SlurmJob
from pitools.slurm.states import UNKNOWN


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QueueState:
    """One job, whose plain ticket at alpha is in Slurm's queue."""
    monkeypatch.setenv("PIT_QUEUE", str(tmp_path / "place"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    request = Request(name="bc", command="true")
    store.enqueue(store.queue_dir(), [store.make_request(request, ("alpha", "beta"), user="ada")])
    queue_state = QueueState(store.queue_dir())
    (job,) = queue_state.jobs.values()
    job, ticket = queue_state.record_intent(job.job_id, "alpha/train", str(tmp_path / "runs"), "", {})
    queue_state.append_entry(job, "submitted", ticket.number, slurm_id="7")
    time.sleep(0.002)  # whoever is asked in the same moment may know nothing of it yet
    return queue_state


def look(board: QueueState, seen: TicketState) -> journal.QueueJob:
    """The job after alpha was asked, and said this of its ticket."""
    (job,) = board.jobs.values()
    reconcile_tickets(board, "alpha", timestamps.now_rfc3339(), {job.tickets[0].name: seen})
    (job,) = board.jobs.values()
    return job


def row(board: QueueState) -> status.QueueJobRow:
    (job,) = board.jobs.values()
    return status.job_row(job, status.DispatchStatus(ticked_at="", sites=()))


@pytest.mark.parametrize("state", [UNKNOWN, ABSENT])
def test_who_had_leave_and_is_unknown_does_not_run_again(
    board: QueueState, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Without accounting it may have run to its end: the job stays in doubt until somebody answers for it."""
    monkeypatch.setattr(reconcile, "ORPHAN_AFTER_S", -1.0)
    for _ in range(3):
        job = look(board, TicketState(state, "7", "run.7"))
        assert [ticket.is_live for ticket in job.tickets] == [True]
    assert row(board).state == "in-doubt"
    assert "pit place declare-lost alpha" in row(board).reason
    store.write_mark(job, "lost.1")
    queue_state = QueueState(board.queue_dir)
    tick._apply_lost_marks(queue_state, ())
    assert [ticket.state for item in queue_state.jobs.values() for ticket in item.tickets] == ["void"]


def test_what_a_crash_forgot_runs_again(board: QueueState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where accounting answers, and has never heard of its end, slurmctld lost it: after a while it counts as ended."""
    forgotten = TicketState(FORGOTTEN, "7", "run.7")
    assert look(board, TicketState(UNKNOWN, "7", "run.7")).tickets[0].unknown_since
    monkeypatch.setattr(reconcile, "ORPHAN_AFTER_S", -1.0)
    assert look(board, forgotten).tickets[0].is_live  # so long it has to stay so, from when accounting has answered
    assert look(board, forgotten).tickets[0].state == "void"


def test_doubt_ends_with_an_answer(board: QueueState) -> None:
    """It is there again: it runs, and nothing of the doubt is left."""
    look(board, TicketState(UNKNOWN, "7", "run.7"))
    job = look(board, TicketState("RUNNING", "7", "run.7", None, SlurmJob(job_id="7", raw_id="7", state="RUNNING")))
    assert (job.state, job.tickets[0].unknown_since) == ("running", "")
    assert row(board).state == "running"


@pytest.mark.parametrize(
    ("reason", "is_withdrawn"),
    [("launch failed requeued held", True), ("BadConstraints", True), ("JobHeldAdmin", True), ("JobHeldUser", False)],
)
def test_a_held_ticket_is_withdrawn_or_reported(board: QueueState, reason: str, is_withdrawn: bool) -> None:
    """It will not start by itself: it is withdrawn, unless its user holds it; then `list` says so until its release."""
    job = look(board, pending(reason))
    assert [ticket.end_state for ticket in job.tickets] == [reason if is_withdrawn else ""]
    if not is_withdrawn:
        assert reason in row(board).reason
        look(board, pending("Priority"))
        assert reason not in row(board).reason


def test_an_operators_hold_is_respected(board: QueueState) -> None:
    """A job that may run at this site alone keeps its ticket there."""
    (job,) = board.jobs.values()
    board.jobs[job.job_id] = replace(job, request=replace(job.request, sites=("alpha",)))
    assert look(board, pending("JobHeldAdmin")).tickets[0].state == "pending"
    assert "JobHeldAdmin" in row(board).reason


def pending(reason: str) -> TicketState:
    return TicketState("PENDING", "7", "", None, SlurmJob(job_id="7", raw_id="7", state="PENDING", reason=reason))


def test_a_clock_that_was_set_back_hides_no_ticket(board: QueueState) -> None:
    """A ticket from the future is as good as one of the past."""
    (job,) = board.jobs.values()
    later = timestamps.to_rfc3339(datetime.now(UTC) + timedelta(hours=1))
    path = job.path / "journal.jsonl"
    path.write_text(path.read_text().replace(job.tickets[0].submitted_at, later))
    queue_state = QueueState(board.queue_dir)
    assert (
        look(
            queue_state, TicketState("RUNNING", "7", "run.7", None, SlurmJob(job_id="7", raw_id="7", state="RUNNING"))
        ).state
        == "running"
    )


def test_a_disk_that_fills_within_a_line(board: QueueState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an intent is none: it is not acted on, and the next one stands on a line of its own."""
    (job,) = board.jobs.values()
    board.append_entry(job, "void", 1)
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
        with pytest.raises(NoSpace):
            board.record_intent(job.job_id, "beta/train", "/runs", "", {})
    assert len(board.jobs[job.job_id].tickets) == 1
    board.record_intent(job.job_id, "beta/train", "/runs", "", {})
    assert [ticket.pool for ticket in store.find_job(board.queue_dir, job.job_id).tickets] == [
        "alpha/train",
        "beta/train",
    ]


def test_a_ticket_is_settled_once_its_folder_is_removed(
    board: QueueState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A tick that is killed before the removal, or a folder that cannot be removed: the next tick removes it."""
    site = Site(name="alpha")
    (job,) = board.jobs.values()
    run_dir = tmp_path / "runs" / job.tickets[0].name
    run_dir.mkdir(parents=True)
    board.append_entry(job, journal.EntryKind.VOID, 1)
    for _ in range(2):
        due = reconcile_tickets(board, "alpha", timestamps.now_rfc3339(), {})
        assert [ticket.name for _, ticket in due.remove] == [run_dir.name]
    tickets.remove_dirs(board, site, due.remove)
    assert not run_dir.exists()
    (job,) = board.jobs.values()
    assert job.tickets[0].is_settled


def test_what_ran_after_it_was_given_up_is_kept(board: QueueState) -> None:
    """A ticket that somebody gave up as lost, and that had run: its folder is not removed."""
    (job,) = board.jobs.values()
    board.append_entry(job, journal.EntryKind.VOID, 1)
    due = reconcile_tickets(
        board, "alpha", timestamps.now_rfc3339(), {job.tickets[0].name: TicketState("COMPLETED", "7", "run.7")}
    )
    assert (due.remove, due.cancel) == ([], {})
