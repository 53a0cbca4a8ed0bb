"""Leave to run: the one word that decides, and the script that asks for it."""

from __future__ import annotations

import shlex
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from pitools.launch import exit_codes
from pitools.launch.submission import grant
from pitools.launch.tickets import shared_fs
from pitools.run import run_folder
from pitools.run.attempt_records import SUCCEEDED
from pitools.site.schema import Paths, Site


@pytest.fixture
def ticket(tmp_path: Path) -> Path:
    return tmp_path / "it's a run.1"


def start(run_dir: Path, job_id: str) -> subprocess.Popen[bytes]:
    """What Slurm does with a ticket's script."""
    (run_dir / "attempts").mkdir(parents=True, exist_ok=True)
    text = f"#!/bin/bash\n#SBATCH --job-name=x\nset -e\necho {job_id} >> {shlex.quote(str(run_dir))}/ran\n"
    path = run_dir / f"script.{job_id}"
    path.write_text(grant.add_grant_check(text, str(run_dir)))
    return subprocess.Popen(["bash", str(path)], env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": job_id})


def ran(run_dir: Path) -> list[str]:
    path = run_dir / "ran"
    return path.read_text().split() if path.exists() else []


def test_flags_stay_before_the_first_command(ticket: Path) -> None:
    """sbatch reads its flags up to the first command: leave is asked for after them."""
    lines = grant.add_grant_check(
        "#!/bin/bash\n#SBATCH -N1\n\n# a word\n#SBATCH -t5\nset -e\n", str(ticket)
    ).splitlines()
    assert lines[:5] == ["#!/bin/bash", "#SBATCH -N1", "", "# a word", "#SBATCH -t5"]
    assert lines[-1] == "set -e"


def test_of_two_jobs_of_one_name_one_runs(ticket: Path) -> None:
    """A submission that went unanswered and was made again makes two jobs, and one run."""
    codes = [start(ticket, job_id).wait() for job_id in ("7", "8")]
    assert (codes, ran(ticket)) == ([0, exit_codes.NOT_GRANTED], ["7"])


def test_a_word_names_its_job() -> None:
    """The word that lets a job run has its id; no other word, and no word, lets any."""
    assert grant.granted_job_id(grant.grant_token("7")) == "7"
    assert [grant.is_granted(text) for text in (grant.grant_token("7"), grant.REVOKED, "", "7")] == [
        True,
        False,
        False,
        False,
    ]


def test_what_was_taken_back_does_not_run(ticket: Path) -> None:
    """After `no` the job ends with 75, whenever Slurm starts it."""
    assert grant.claim(ticket, grant.REVOKED) == grant.REVOKED
    assert start(ticket, "7").wait() == exit_codes.NOT_GRANTED
    assert ran(ticket) == []


def test_what_has_begun_is_not_taken_back(ticket: Path) -> None:
    """Taking back a ticket that has leave says so."""
    start(ticket, "7").wait()
    assert grant.is_granted(grant.claim(ticket, grant.REVOKED))


def test_a_requeued_job_goes_on_unless_it_had_completed(ticket: Path) -> None:
    """Slurm may start a job again; only a completed one is not repeated."""
    start(ticket, "7").wait()
    assert start(ticket, "7").wait() == 0
    assert ran(ticket) == ["7", "7"]
    (ticket / "attempts" / "1").mkdir()
    (ticket / "attempts" / "1" / SUCCEEDED).touch()
    assert start(ticket, "7").wait() == 0
    assert ran(ticket) == ["7", "7"]


def test_without_its_folder_there_is_no_leave(ticket: Path, tmp_path: Path) -> None:
    """A job that turns up after its folder was removed does nothing."""
    text = grant.add_grant_check(f"#!/bin/bash\ntouch {tmp_path}/ran\n", str(ticket))
    done = subprocess.run(
        ["bash"], input=text, text=True, env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"}, check=False
    )
    assert done.returncode == exit_codes.NOT_GRANTED
    assert not (tmp_path / "ran").exists()


def test_all_hear_the_same_word(ticket: Path) -> None:
    """Of many that leave a word at once, one decides and all others learn it."""
    words = [grant.REVOKED, *(grant.grant_token(str(n)) for n in range(15))]
    together = threading.Barrier(len(words))
    ticket.mkdir()

    def take(word: str) -> str:
        together.wait()
        return grant.claim(ticket, word)

    with ThreadPoolExecutor(len(words)) as pool:
        assert len(set(pool.map(take, words))) == 1


def test_a_folder_goes_as_a_whole(tmp_path: Path) -> None:
    """What is forgotten is moved away before it is removed: no job finds half a folder, without the word, to run in."""
    site = Site(name="x", paths=Paths(runs=str(tmp_path)))
    grant.claim(tmp_path / "a.1", grant.REVOKED)
    grant.claim(tmp_path / ".b.1", grant.REVOKED)  # somebody was killed here
    grant.claim(tmp_path / "b.1", grant.REVOKED)
    shared_fs.remove_ticket_dirs(site, ["a.1", "b.1", "c.1"])
    assert list(tmp_path.iterdir()) == []


def test_who_has_leave_keeps_it(tmp_path: Path) -> None:
    """Of several tickets that are taken back those with leave are told; the others never get it."""
    site = Site(name="x", paths=Paths(runs=str(tmp_path)))
    grant.claim(tmp_path / "a.1", grant.REVOKED)
    (tmp_path / "b.1").mkdir()
    grant.claim(tmp_path / "b.1", grant.grant_token("7"))
    assert shared_fs.revoke(site, ["a.1", "b.1", "c.1"]) == {"a.1": True, "b.1": False, "c.1": True}
    assert [grant.read_grant(tmp_path / name) for name in ("a.1", "b.1", "c.1")] == [
        grant.REVOKED,
        "run.7",
        grant.REVOKED,
    ]


def test_one_damaged_ticket_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a record, as a full disk leaves it: that one was queued, and what became of it is not known."""
    site = Site(name="x", paths=Paths(runs=str(tmp_path)))
    slurm = SimpleNamespace(user=lambda: "me", jobs=lambda **_: [], accounting=lambda *_, **__: [])
    monkeypatch.setattr(shared_fs, "client", lambda _: slurm)
    for name in ("a.1", "b.1"):
        run_folder.write_record(tmp_path / name / "job.json", run_folder.JobRef(job_id="7", site="x", submitted=""))
        attempt_exit = run_folder.AttemptExit(job_id="7", exit_code=0, ended="")
        run_folder.write_record(tmp_path / name / "attempts" / "0" / "exit.json", attempt_exit)
    for part in ("job.json", "attempts/0/exit.json"):
        (tmp_path / "a.1" / part).write_bytes(b"{")
    states = shared_fs.ticket_states(site, ["a.1", "b.1", "c.1"])
    assert [states[name].state for name in ("a.1", "b.1", "c.1")] == ["UNKNOWN", "COMPLETED", "ABSENT"]
