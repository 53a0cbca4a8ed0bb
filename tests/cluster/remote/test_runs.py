"""A run on a site that shares nothing with this machine: no files, no user, no Slurm here."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.core import hostlist
from pitools.core.errors import ClusterError, ConfigError
from pitools.launch import plan as planning
from pitools.launch.submission import node_choice
from pitools.launch.tickets import remote
from pitools.launch.tickets.ticket_state import TicketState
from pitools.run import run_folder
from pitools.site import remote_files
from pitools.site.schema import Site
from pitools.slurm.client import Client

pytestmark = pytest.mark.slurm

MakePlan = Callable[..., planning.Plan]
MAIN = """\
import os, pathlib
from helper import word

def main(note):
    data = pathlib.Path(os.environ["PIT_DATA_PICK"])
    print(word, note, os.environ["PIT_RANK"], (data / "a/0").read_bytes().hex(), os.getcwd(), os.getuid(), flush=True)
"""


def until(site: Site, name: str, ready: Callable[[TicketState], bool], timeout_s: float = 60) -> TicketState:
    deadline = time.monotonic() + timeout_s
    while not ready(states := remote.ticket_states(site, [name])[name]):
        assert time.monotonic() < deadline, states
        time.sleep(0.3)
    return states


def over(seen: TicketState) -> bool:
    return seen.is_over


def near_words(tmp_path: Path) -> list[bytes]:
    return [os.fsencode(tmp_path), b"pytest-of", os.fsencode(Path(sys.executable).parent)]


def test_a_run_from_end_to_end(
    site: Site, make_plan: MakePlan, far_side: Any, alpha: Client, name: str, make_dataset: Any, tmp_path: Path
) -> None:
    """Code, data and run travel over one connection; ranks of another user run them; logs come back, no path goes."""
    work = tmp_path / "work"
    (work / "main.py").write_text(MAIN)
    (work / "helper.py").write_text("word = 'helped'\n")
    (work / ".git").mkdir()
    (work / ".git" / "HEAD").write_text("x")
    (work / "here.py").symlink_to(work / "helper.py")
    version = make_dataset([3, 100_000])
    plan = make_plan(
        entry="main:main", args={"note": "it's"}, nodes=2, data={"pick": str(version)}, env={"ODD": "a 'b' $c"}
    )
    login_hosts = far_side.logins()
    submission = remote.submit_ticket(plan, site, name=name)
    assert (submission.data_bytes, submission.data_s > 0) == (100_003, True)
    again = remote.submit_ticket(plan, site, name=name)
    assert (again.job_id, again.data_bytes) == (submission.job_id, 0)
    observed = until(site, name, over)
    assert far_side.logins() - login_hosts == 1
    (job,) = alpha.jobs(name=name, all_states=True)
    assert (job.raw_id, job.user) == (submission.job_id, far_side.user)
    deadline = time.monotonic() + 30
    while (state := alpha.state_of([job.raw_id])[job.raw_id]) != "COMPLETED":  # the run is over before Slurm says so
        assert (state in ("RUNNING", "COMPLETING"), time.monotonic() < deadline) == (True, True)
        time.sleep(0.2)
    assert (observed.state, observed.job_id, observed.exit_code, observed.grant) == (
        "COMPLETED",
        submission.job_id,
        0,
        f"run.{submission.job_id}",
    )

    assert remote.fetch_run(site, name, tmp_path / "back")
    assert not (tmp_path / "back" / "code").exists()
    for rank in range(2):
        parts = (tmp_path / "back" / "attempts" / "0" / "logs" / f"{rank}.out").read_text().splitlines()[-1].split()
        assert parts[:3] == ["helped", "it's", str(rank)]
        assert parts[3] == (version / "a" / "0").read_bytes().hex()
        assert int(parts[-1]) == far_side.root.stat().st_uid
    record = run_folder.read_record(tmp_path / "back" / "attempts" / "0" / "exit.json", run_folder.AttemptExit)
    assert record is not None
    assert record.exit_code == 0
    target = Path(remote.ticket_dir(site, name))
    assert {path.name for path in (target / "code").iterdir()} == {"main.py", "helper.py", "here.py"}
    assert (target / "code" / "here.py").readlink() == Path("helper.py")
    for item in ("script.sbatch", "plan.json", "job.json"):
        assert not [near_word for near_word in near_words(tmp_path) if near_word in (target / item).read_bytes()]
    remote.remove_ticket_dirs(site, [name])
    assert not target.exists()
    assert remote.ticket_states(site, [name])[name].state == "COMPLETED"  # squeue still knows


def test_it_gets_the_best_of_the_free_nodes(site: Site, make_plan: MakePlan, name: str) -> None:
    """As here: it is told the leaf that has room for it before it begins."""
    tell = '[ "$PIT_RANK" != 0 ] || scontrol show job "$SLURM_JOB_ID" > "$PIT_RUN_DIR/told"'
    submission = remote.submit_ticket(make_plan(command=tell, nodes=3, topology="exclude"), site, name=name)
    until(site, name, over)
    words = Path(remote.ticket_dir(site, name), "told").read_text().split()
    reported = dict(text.split("=", 1) for text in words if "=" in text)
    assert reported["JobId"] == submission.job_id
    leaves = [{f"alpha0{n + even}" for n in (1, 3, 5, 7)} for even in (0, 1)]
    other, own_part = sorted(leaves, key=lambda leaf: leaf.issuperset(hostlist.expand(reported["NodeList"])))
    assert set(hostlist.expand(reported["NodeList"])) < own_part
    assert set(hostlist.expand(reported["ExcNodeList"])) == other


def test_what_was_queued_before_is_only_looked_up(
    site: Site, make_plan: MakePlan, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody chooses nodes for it again, though Slurm may have forgotten it: its run stays as it is."""
    plan = make_plan(nodes=2, topology="exclude")
    submission = remote.submit_ticket(plan, site, name=name)
    until(site, name, over)

    def forgotten(*_: object, **__: object) -> None:
        raise ClusterError(f"Slurm does not know job {submission.job_id}")

    monkeypatch.setattr(node_choice, "acquire_nodes", forgotten)
    assert remote.submit_ticket(plan, site, name=name).job_id == submission.job_id
    assert Path(remote.ticket_dir(site, name), "attempts").is_dir()


def test_nodes_that_cannot_be_reserved(
    site: Site, make_plan: MakePlan, far_side: Any, alpha: Client, name: str
) -> None:
    """A Slurm that lets only operators reserve nodes: the job is cancelled, and its folder is gone."""
    if far_side.user == getpass.getuser():
        pytest.skip("the cluster's own user may reserve nodes")
    with pytest.raises(ClusterError, match="--by reservation"):
        remote.submit_ticket(make_plan(nodes=2, topology="reservation"), site, name=name)
    assert not Path(remote.ticket_dir(site, name)).exists()
    assert [job.state for job in alpha.jobs(name=name, all_states=True)] == ["CANCELLED"]


@pytest.mark.usefixtures("as_root")
def test_this_side_sees_nothing_of_that_side(
    site: Site, make_plan: MakePlan, far_side: Any, alpha: Client, name: str, make_dataset: Any, tmp_path: Path
) -> None:
    """The same where the far root is hidden from every process here, and these files from everybody there."""
    version = make_dataset([1000])
    plan = make_plan(command='wc -c < "$PIT_DATA_PICK/a/0"; echo $PIT_RANK', data={"pick": str(version)})
    (tmp_path / "site.json").write_bytes(msgspec.json.encode(site))
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan))
    script = tmp_path / "near.py"
    script.write_text(
        "import sys, time, msgspec, pathlib\n"
        "from pitools.launch.tickets import remote\nfrom pitools.launch import plan\n"
        "from pitools.site.schema import Site\n"
        "read = lambda path, kind: msgspec.json.decode(pathlib.Path(path).read_bytes(), type=kind)\n"
        "site, planned = read(sys.argv[1], Site), read(sys.argv[2], plan.Plan)\n"
        "name, root, back = sys.argv[3], pathlib.Path(sys.argv[4]), pathlib.Path(sys.argv[5])\n"
        "assert not list(root.iterdir())\n"
        "remote.submit_ticket(planned, site, name=name)\n"
        "while not remote.ticket_states(site, [name])[name].is_over: time.sleep(0.3)\n"
        "assert remote.fetch_run(site, name, back)\n"
        "assert not list(root.iterdir())\n"
    )
    hide = 'mount -t tmpfs none "$1" && PATH="$2" && shift 2 && exec "$@"'
    files_here = [tmp_path / item for item in ("near.py", "site.json", "plan.json")]
    words = [sys.executable, *files_here, name, far_side.root, tmp_path / "b"]
    done = subprocess.run(
        [
            "/usr/bin/unshare",
            "-m",
            "/bin/sh",
            "-c",
            f"PATH=/usr/bin:/bin; {hide}",
            "sh",
            far_side.root,
            far_side.near,
            *words,
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "b" / "attempts" / "0" / "logs" / "0.out").read_text().endswith("1000\n0\n")
    assert tmp_path.stat().st_uid == 0
    hidden = ["/usr/sbin/runuser", "-u", far_side.user, "--", "/bin/ls", str(tmp_path)]
    assert far_side.user == "root" or subprocess.run(hidden, capture_output=True, check=False).returncode


def test_leave_to_run(site: Site, make_plan: MakePlan, alpha: Client, name: str) -> None:
    """What runs is not taken back; one that was while it waited ends with 75 when it is its turn."""
    plan = make_plan(nodelist="alpha01", cpus_per_task=4, command='echo ran > "$PIT_RUN_DIR/proof"; sleep 2')
    other = f"{name}-2"
    for item in (name, other):
        remote.submit_ticket(plan, site, name=item)
    until(site, name, lambda seen: bool(seen.grant))
    assert remote.revoke(site, [name, other, f"{name}-3"]) == {name: False, other: True, f"{name}-3": True}
    assert until(site, name, over).state == "COMPLETED"
    assert remote_files.read_file(site, f"{remote.ticket_dir(site, name)}/proof") == b"ran\n"
    assert until(site, other, over).state == "FAILED"
    assert remote_files.read_file(site, f"{remote.ticket_dir(site, other)}/proof") is None
    with pytest.raises(ClusterError, match="revoked"):
        remote.submit_ticket(plan, site, name=f"{name}-3")
    assert not alpha.jobs(name=f"{name}-3", all_states=True)


def test_many_at_once_are_one_job(site: Site, make_plan: MakePlan, alpha: Client, name: str) -> None:
    """Four submissions of one name at the same moment: one job, and everybody is told its id."""
    plan = make_plan(command="true")
    reported: list[str] = []
    threads = [
        threading.Thread(target=lambda: reported.append(remote.submit_ticket(plan, site, name=name).job_id))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (job,) = alpha.jobs(name=name, all_states=True)
    assert reported == [job.raw_id] * 4


def test_what_slurm_refuses_leaves_nothing(site: Site, make_plan: MakePlan, name: str) -> None:
    """Slurm's own sentence, and no folder there."""
    plan = make_plan(command="true", constraint="nosuch")
    with pytest.raises(ClusterError, match=r"feature"):
        remote.submit_ticket(plan, site, name=name)
    assert not remote_files.existing(site, [remote.ticket_dir(site, name)])


@pytest.mark.parametrize("bad", ["", "..", "a/b", "-x", "a b", "a\nb", "x" * 200])
def test_names_that_are_no_names(site: Site, make_plan: MakePlan, bad: str) -> None:
    """What could be another folder or two lines is refused before anything is asked."""
    for call in (lambda: remote.submit_ticket(make_plan(), site, name=bad), lambda: remote.ticket_states(site, [bad])):
        with pytest.raises(ConfigError):
            call()


def test_a_local_reach_with_other_paths(
    site: Site, make_plan: MakePlan, make_dataset: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ssh the same functions work on this machine, as its own user."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    paths = {key: f"{tmp_path}/there/{key}" for key in ("runs", "data", "nvme")}
    here = msgspec.structs.replace(
        site, connection=type(site.connection)(), paths=type(site.paths)(**paths, python=sys.executable)
    )
    version = make_dataset([10])
    plan = make_plan(command="wc -c < $PIT_DATA_PICK/a/0", data={"pick": str(version)})
    remote.submit_ticket(plan, here, name=name)
    until(here, name, over)
    assert remote.fetch_run(here, name, tmp_path / "back")
    assert (tmp_path / "back" / "attempts" / "0" / "logs" / "0.out").read_text().endswith("10\n")
    assert json.loads((tmp_path / "back" / "plan.json").read_text())["request"]["workdir"].startswith(paths["runs"])


def test_the_run_itself_knows_best(site: Site, make_plan: MakePlan, far_side: Any, alpha: Client, name: str) -> None:
    """A run that wrote down that it completed has, whatever Slurm still believes."""
    submission = remote.submit_ticket(make_plan(command="sleep 60"), site, name=name)
    attempts = Path(remote.ticket_dir(site, name)) / "attempts"
    # Its attempt first: one that begins after the ninth is the tenth, and the newest.
    until(site, name, lambda seen: seen.state == "RUNNING" and (attempts / "0" / "start.json").exists())
    path = attempts / "9" / "exit.json"
    run_folder.write_record(path, run_folder.AttemptExit(job_id=submission.job_id, exit_code=0, ended=""))
    assert remote.ticket_states(site, [name])[name][:4] == (
        "COMPLETED",
        submission.job_id,
        f"run.{submission.job_id}",
        0,
    )
    remote.cancel_tickets(site, {submission.job_id: name})
