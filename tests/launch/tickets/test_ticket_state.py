"""What is known of a ticket, from Slurm's word and its folder's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pitools.core.errors import Unreachable
from pitools.launch.tickets import shared_fs, ticket_state
from pitools.launch.tickets.remote import states
from pitools.launch.tickets.ticket_state import ABSENT, FORGOTTEN, TicketState
from pitools.run import run_folder
from pitools.run.attempt_records import Decision
from pitools.run.run_folder import AttemptExit
from pitools.site.schema import Paths, Site
from pitools.slurm.records import AccountingRow, SlurmJob
from pitools.slurm.states import UNKNOWN


class Books:
    """A slurmdbd with these rows; None: one that is away."""

    def __init__(self, *rows: tuple[str, str, str] | None) -> None:
        self.rows = rows

    def accounting(self, ids: Sequence[str], **_: Any) -> list[AccountingRow]:
        if None in self.rows:
            raise Unreachable("no answer")
        rows = [row for row in self.rows if row and row[0] in ids]
        return [
            AccountingRow(job_id=item, raw_id=item, name=name, state=state, exit_code=1) for item, name, state in rows
        ]


@pytest.mark.parametrize(("code", "state"), [(None, UNKNOWN), (0, "COMPLETED"), (3, "FAILED"), (143, UNKNOWN)])
def test_what_slurm_forgot_is_told_by_its_run(code: int | None, state: str) -> None:
    """Its own word counts, unless it was ended by a signal: then nobody here knows why."""
    assert ticket_state.state_of_unlisted("7", "run.7", code).state == state
    assert ticket_state.state_of_unlisted("", "", None).state == ABSENT
    assert ticket_state.state_without_id("", code).state == state


@pytest.mark.parametrize(
    ("action", "kind", "code"), [("defer", "time-limit", 95), ("defer", "preempted", 1), ("stop", "time-limit", 1)]
)
def test_what_a_run_decided_itself_counts(tmp_path: Path, action: Any, kind: Any, code: int) -> None:
    """A run that saved at the notice goes on whatever its code: for Slurm alone to say where it may be a cancel."""
    site, attempt = Site(name="s", paths=Paths(runs=str(tmp_path))), tmp_path / "a.1" / "attempts" / "0"
    run_folder.write_record(attempt / "exit.json", AttemptExit(job_id="7", exit_code=1, ended=""))
    assert shared_fs._exit_code(tmp_path / "a.1") == states._read_ticket_dirs(site, ["a.1"])["a.1"].exit_code == 1
    run_folder.write_record(attempt / "decision.json", Decision(attempt="0", action=action, kind=kind, reason=""))
    assert shared_fs._exit_code(tmp_path / "a.1") == states._read_ticket_dirs(site, ["a.1"])["a.1"].exit_code == code


def test_who_has_completed_has_completed() -> None:
    """A slurmctld that was away when it ended says that it runs, for minutes."""
    job = SlurmJob(job_id="7", raw_id="7", state="RUNNING", name="a.1")
    assert ticket_state.state_of_listed(job, "run.7", 0)[:4] == ("COMPLETED", "7", "run.7", 0)
    assert ticket_state.state_of_listed(job, "run.7", 3)[:4] == ("RUNNING", "7", "run.7", None)


@pytest.mark.parametrize(
    ("rows", "state"),
    [
        ([("7", "a.1", "TIMEOUT")], "TIMEOUT"),
        ([("7", "a.1", "RUNNING")], FORGOTTEN),
        ([("7", "other", "COMPLETED")], FORGOTTEN),
        ([], FORGOTTEN),
        ([None], UNKNOWN),
    ],
)
def test_accounting_is_believed_of_ends_alone(rows: list[Any], state: str) -> None:
    """Not of what runs, nor of another job that was given the number after a crash."""
    books: Any = Books(*rows)
    assert ticket_state.with_accounting(books, {"a.1": TicketState(UNKNOWN, "7"), "b.1": TicketState(ABSENT)}) == {
        "a.1": TicketState(state, "7", exit_code=1 if state == "TIMEOUT" else None),
        "b.1": TicketState(ABSENT),
    }


def test_of_two_jobs_of_one_name_the_one_with_leave_counts() -> None:
    """Whichever Slurm lists first; without a word it is the first."""
    two = [SlurmJob(job_id=item, raw_id=item, state="RUNNING", name="a.1") for item in ("7", "8")]
    assert ticket_state.jobs_by_name(two, {"a.1": "run.8"})["a.1"].raw_id == "8"
    assert ticket_state.jobs_by_name(two, {"a.1": "run.7"})["a.1"].raw_id == "7"
    assert ticket_state.jobs_by_name(two, {})["a.1"].raw_id == "7"
