"""The run folder: found, ordered, and read whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pitools.core.errors import DataError
from pitools.launch.submission import grant
from pitools.run import run_folder
from pitools.run.attempt_records import first_failure
from pitools.run.steps import StepLog


def test_ids_sort_by_time_and_differ() -> None:
    """Two runs made in the same second have different ids."""
    ids = {run_folder.new_run_id("x") for _ in range(50)}
    assert len(ids) == 50
    assert all(run_id.startswith("x-20") for run_id in ids)


def test_folders_whose_names_are_not_utf8_are_left_out(tmp_path: Path) -> None:
    """No record can hold them."""
    for name in (b"x-1", b"x-\xff"):
        folder = tmp_path / os.fsdecode(name)
        folder.mkdir()
        (folder / "plan.json").touch()
    assert run_folder.run_dirs(tmp_path) == [tmp_path / "x-1"]


def test_attempts_sort_as_numbers(tmp_path: Path) -> None:
    """Restarts of a job, and of an array's tasks, in the order of their numbers; nothing else counts."""
    for name in ("10", "2", "0", "1.0", "1.10", "1.9", "x", "logs"):
        (tmp_path / "attempts" / name).mkdir(parents=True)
    assert [path.name for path in run_folder.attempt_dirs(tmp_path)] == ["0", "1.0", "1.9", "1.10", "2", "10"]


def test_how_the_last_attempt_ended(tmp_path: Path) -> None:
    """Of the newest alone, whose end counts once its record is whole."""
    assert (run_folder.last_attempt(tmp_path), run_folder.last_exit(tmp_path)) == (None, None)
    ends = [run_folder.AttemptExit(job_id="7", exit_code=code, ended="") for code in (1, 0)]
    run_folder.write_record(tmp_path / "attempts" / "9" / "exit.json", ends[0])
    assert run_folder.last_exit(tmp_path) == ends[0]
    newest = tmp_path / "attempts" / "10"
    newest.mkdir()
    assert (run_folder.last_attempt(tmp_path), run_folder.last_exit(tmp_path)) == (newest, None)
    (newest / "exit.json").write_bytes(b"")
    assert run_folder.last_exit(tmp_path) is None
    run_folder.write_record(newest / "exit.json", ends[1])
    assert run_folder.last_exit(tmp_path) == ends[1]


def test_the_first_event_is_read_alone(tmp_path: Path) -> None:
    """Whatever follows it; where it is none, or there is none, nothing is known."""
    assert run_folder.first_event(tmp_path) is None
    run_folder.append_event(tmp_path, "created", site="alpha")
    run_folder.append_event(tmp_path, "submitted", why='"event":"created"')
    first = run_folder.first_event(tmp_path)
    assert first is not None
    assert (first.event, first.detail) == ("created", {"site": "alpha"})
    (tmp_path / "events.jsonl").write_text('{"event":"created"\n')
    assert run_folder.first_event(tmp_path) is None


def test_an_event_that_cannot_be_written_is_lost(tmp_path: Path) -> None:
    """A full disk, or the like, does not end what the event is about; only the first event has to be there."""
    (tmp_path / "events.jsonl").mkdir()
    run_folder.append_event(tmp_path, "decided")
    with pytest.raises(OSError, match=r"events\.jsonl"):
        run_folder.record_created(tmp_path, "alpha")


@pytest.mark.parametrize("text", ["", "1", "1 0", "1 ? n1", "x 0 n1", "1 0 n1 n2", "\xff"])
def test_half_a_word_of_the_first_failure_is_none(tmp_path: Path, text: str) -> None:
    """The rank that writes it may be killed as it does; whole it says which code, rank and node."""
    (tmp_path / "first_failure").write_text(text, "latin-1")
    assert first_failure(tmp_path) is None
    (tmp_path / "first_failure").write_text("-9 31 n-1.x\n")
    assert first_failure(tmp_path) == (-9, 31, "n-1.x")


def test_a_run_is_found_by_id_and_by_path(tmp_path: Path) -> None:
    """And a misspelt id names the nearest."""
    run = tmp_path / "runs" / "bc-20261121-013341-9f3c2a"
    run.mkdir(parents=True)
    (run / "plan.json").write_text("{}")
    assert run_folder.find_run(tmp_path / "runs", run.name) == run
    assert run_folder.find_run(tmp_path / "elsewhere", str(run)) == run
    with pytest.raises(run_folder.RunNotFound) as caught:
        run_folder.find_run(tmp_path / "runs", "bc-20261121-013341-9f3c2b")
    assert caught.value.suggestions == (run.name,)


def test_a_record_that_is_none_is_damage(tmp_path: Path) -> None:
    """No file is None; a file of something else, of any size, or a pipe, is a DataError that names it."""
    path = tmp_path / "exit.json"
    assert run_folder.read_record(path, run_folder.AttemptExit) is None
    run_folder.write_record(path, run_folder.AttemptExit(job_id="1", exit_code=0, ended="now"))
    assert run_folder.read_record(path, run_folder.AttemptExit) == run_folder.AttemptExit(
        job_id="1", exit_code=0, ended="now"
    )

    def pipe() -> None:
        path.unlink()
        os.mkfifo(path)

    for write in (lambda: path.write_text("{}"), lambda: os.truncate(path, 1 << 40), pipe):
        write()
        with pytest.raises(DataError) as caught:
            run_folder.read_record(path, run_folder.AttemptExit)
        assert caught.value.where == str(path)


@pytest.mark.parametrize(("access", "above"), [("owner", 0o755), ("group", 0o775)])
def test_a_lax_umask_lets_nobody_else_write(tmp_path: Path, access: str, above: int) -> None:
    """Of a run nothing can be written by its group; what is made above it only where the site trusts the group."""
    run = tmp_path / "lab" / "runs" / "a"
    old_umask = os.umask(0o002)
    try:
        run_folder.make_run_dir(run, access)
        for name in ("jobs", "attempts", "attempts/0"):  # as they are made before there is anything in them
            (run / name).mkdir(0o755)
        run_folder.write_record(
            run / "jobs" / "0" / "job.json", run_folder.JobRef(job_id="1", site="alpha", submitted="now")
        )
        run_folder.append_event(run, "created")
        StepLog(run / "attempts" / "0" / "steps", 0).close()
        grant.claim(run / "jobs" / "1", grant.REVOKED)
    finally:
        os.umask(old_umask)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (run.parent, run.parent.parent)] == [above, above]
    opened = [path for path in run.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o022]
    assert [path.name for path in opened] == []
