"""A site that is reached through ssh, with a real sshd: there is no Slurm here, and the far side has habits."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pitools.slurm.client import Client, Transport

pytestmark = pytest.mark.slurm

Pit = Callable[..., subprocess.CompletedProcess[str]]
OverSsh = Callable[[str], Client]

ODD = 'it\'s "a  b"\t$HOME `id` $(id) \\ é;|&<>*!\n#SBATCH --nodes=9'
JOB = "#!/bin/sh\n#SBATCH --output=/dev/null\nexit 3\n"
HELLO = 'name = "hello"\ncommand = "{}"\nnodes = 2\ntime = "2m"\n'


def records(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def over_ssh(clusters: Path, sshd: Any, monkeypatch: pytest.MonkeyPatch) -> OverSsh:
    """Makes the client of alpha through a host of the ssh configuration."""
    monkeypatch.setenv("PATH", sshd.path)
    conf = str(clusters / "alpha" / "slurm.conf")
    return lambda host: Client(Transport(host=host, env={"SLURM_CONF": conf}, timeout_s=20))


def test_a_site_is_judged(far: Pit, site_folder: Path) -> None:
    """A true site file has no finding; a wrong number is seen, so the cluster was asked."""
    assert records(far("site", "check", "--live", "far")) == []
    path = site_folder / "far.toml"
    path.write_text(path.read_text().replace("nodes = 8", "nodes = 9", 1))
    done = far("site", "check", "--live", "far")
    assert done.returncode == 1
    assert json.loads(done.stdout)["problem"] == "nodes = 9, but the cluster has 8"


def test_ones_own_command_at_the_far_site(far: Pit) -> None:
    """`pit site exec` runs it there, with the far Slurm, and returns its exit code."""
    done = far("site", "exec", "far", "--", "scontrol", "show", "config")
    assert "ClusterName             = alpha\n" in done.stdout
    assert far("site", "exec", "far", "--", "sh", "-c", "exit 9").returncode == 9


def test_a_probed_site_file_loads(far: Pit, clusters: Path, site_folder: Path) -> None:
    """What `probe` prints is a site file without findings, with the accounts of the user on the far side."""
    conf = str(clusters / "alpha" / "slurm.conf")
    done = far("site", "probe", "x", "--host", "far", "--conf", conf, LOGNAME="somebody-else")
    assert done.returncode == 0, done.stderr
    (site_folder / "x.toml").write_text(done.stdout)
    shown = {row["key"]: json.loads(row["value"]) for row in records(far("site", "show", "x"))}
    assert (shown["connection.kind"], shown["connection.host"], shown["slurm.conf"]) == ("ssh", "far", conf)
    assert "lab" in shown["accounts"]
    (site_folder / "x.toml").write_text(done.stdout.replace("??", ""))
    assert records(far("site", "check", "x")) == []


def test_a_conf_of_the_far_side_that_others_can_write_is_found(far: Pit, site_folder: Path, tmp_path: Path) -> None:
    """Each folder on the way that others can write to is named; a sticky one is none."""
    path, opened = site_folder / "far.toml", tmp_path / "open"
    opened.mkdir()
    conf = re.search(r'conf = "(.*)"', path.read_text())[1]  # type: ignore[index]
    (opened / "slurm.conf").write_text(Path(conf).read_text())
    (opened / "topology.conf").write_text(Path(conf).with_name("topology.conf").read_text())
    path.write_text(path.read_text().replace(conf, f"{opened}/slurm.conf"))
    for mode, keys in ((0o777, ["slurm.conf"]), (0o1777, [])):
        opened.chmod(mode)
        record = [json.loads(line) for line in far("site", "check", "--live", "far").stdout.splitlines()]
        assert [row["key"] for row in record] == keys


def test_a_host_whose_shells_do_not_find_slurm(far: Pit, site_folder: Path) -> None:
    """The site names the folder of its commands, and they are found."""
    path = site_folder / "bare.toml"
    real = Path(str(shutil.which("scontrol"))).parent
    path.write_text(path.read_text().replace("[slurm]", f'[slurm]\nbin = "{real}"'))
    assert records(far("site", "check", "--live", "bare")) == []


def test_a_run_ends_completed(far: Pit, sshd: Any, tmp_path: Path) -> None:
    """A request runs on two nodes, submitted by way of this sshd, and is waited for to its end."""
    (tmp_path / "hello.toml").write_text(HELLO.format("echo $PIT_RANK $SSH_CONNECTION"))
    run = records(far("launch", "run", "hello.toml", "--site", "far", "--wait"))[-1]
    assert (run["site"], run["state"], run["exit_code"], run["nodes"]) == ("far", "COMPLETED", 0, 2)
    text = (Path(run["run_dir"]) / "attempts" / "0" / "logs" / "1.out").read_text()
    assert re.search(rf"^1 127\.0\.0\.1 \d+ 127\.0\.0\.1 {sshd.port}$", text, re.MULTILINE)


def test_cancel_ends_a_run(far: Pit, alpha: Client, tmp_path: Path) -> None:
    """A run is cancelled, twice without harm, and everybody says CANCELLED."""
    (tmp_path / "long.toml").write_text(HELLO.format("exec sleep 286"))
    run = records(far("launch", "run", "long.toml", "--site", "far"))[-1]
    for _ in range(2):
        records(far("launch", "cancel", run["run_dir"]))
    deadline = time.monotonic() + 30
    while records(far("launch", "show", run["run_dir"]))[-1]["state"] != "CANCELLED":
        assert time.monotonic() < deadline
        time.sleep(0.5)
    while alpha.state_of([run["job_id"]]) != {run["job_id"]: "CANCELLED"}:  # COMPLETING until its node is done
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_a_job_that_is_forgotten(over_ssh: OverSsh) -> None:
    """What the far side prints at a login is not taken for Slurm's answer about a job that nobody knows."""
    slurm = over_ssh("far")
    assert slurm.jobs(["999999"]) == slurm.job("999999") == []
    assert slurm.state_of(["999999"]) == {"999999": "UNKNOWN"}
    slurm.cancel(["999999"])


def test_psbatch(far: Pit, alpha: Client, tmp_path: Path) -> None:
    """A script on stdin or in a file here runs there; its exit code, comment and name are what they are without ssh.

    An exit code of 127 is the job's own, whose command was not found there, and no missing tool here.
    """
    (tmp_path / "my job.sh").write_text(JOB)
    words = ("psbatch", "--site", "far", "--parsable", "--wait", "--comment", ODD)
    with ThreadPoolExecutor(3) as pool:  # they wait for their jobs together
        stdin = pool.submit(far, *words, stdin=JOB)
        file = pool.submit(far, *words, "my job.sh")
        missing = pool.submit(far, *words[:3], "--wait", "--output=/dev/null", "--wrap=exit 127")
    for done, name in ((stdin.result(), "sbatch"), (file.result(), "my job.sh")):
        assert done.returncode == 3, done.stderr
        (job,) = alpha.jobs([done.stdout.strip()], all_states=True)
        assert (job.comment, job.account, job.partition, job.time_limit_s) == (ODD, "lab", "train", 3600)
        assert job.name == name
    assert missing.result().returncode == 127, missing.result().stderr


def test_psbatch_takes_the_callers_variables_along(far: Pit, alpha: Client) -> None:
    """SBATCH_* variables here stand above the site's defaults there, as they do without ssh."""
    done = far(
        "psbatch", "--site", "far", "--parsable", "--hold", stdin=JOB, SBATCH_PARTITION="dev", SBATCH_JOB_NAME=ODD
    )
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.strip()
    (job,) = alpha.jobs([job_id])
    alpha.cancel([job_id])
    assert (job.partition, job.name, job.account) == ("dev", ODD, "lab")


def test_psbatch_in_a_loop(sshd: Any, alpha: Client, site_folder: Path) -> None:
    """Without a script to read, ssh does not eat the lines of the loop that psbatch stands in."""
    loop = 'while read -r name; do "$0" --site far --parsable --hold --job-name "$name" --wrap true; done'
    env = {"PATH": sshd.path, "PIT_SITE_PATH": str(site_folder)}
    done = subprocess.run(
        ["bash", "-c", loop, str(Path(sys.executable).with_name("psbatch"))],
        env=env,
        input="one\ntwo\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ids = done.stdout.split()
    assert sorted(job.name for job in alpha.jobs(ids)) == ["one", "two"], done.stderr
    alpha.cancel(ids)


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("down", "Connection refused"),
        ("silent", "Connection timed out"),
        ("strange", "Host key for loopback has changed and you have requested strict checking."),
    ],
)
def test_a_host_that_lets_nobody_in(far: Pit, tmp_path: Path, host: str, why: str) -> None:
    """No server, one that never speaks, another host's key: try again later, with the reason, and nothing is left."""
    (tmp_path / "hello.toml").write_text(HELLO.format("true"))
    for words in (["site", "check", "--live", host], ["launch", "run", "hello.toml", "--site", host]):
        done = far(*words)
        assert done.returncode == 75, done.stderr
        reported = done.stderr.split("\n")[-4:]
        assert reported[0].startswith(f'pit: error: ssh to "{host}" failed: ')
        assert why in reported[0]
        assert reported[1].endswith(f" on {host}")
    assert list((tmp_path / "runs").iterdir()) == []
    done = far("psbatch", "--site", host, stdin=JOB)
    assert done.returncode == 75
    assert why in done.stderr
    assert f'ssh to "{host}" failed' in done.stderr


def test_variables_of_the_far_side_bend_nothing(far: Pit, over_ssh: OverSsh, alpha: Client) -> None:
    """Where every login is full of SQUEUE_, SLURM_ and SBATCH_ variables in another zone, the answers are the same."""
    bent, plain = over_ssh("bent"), over_ssh("far")
    assert (bent.config().cluster, bent.partitions()) == ("alpha", plain.partitions())
    done = far("psbatch", "--site", "bent", "--parsable", "--hold", f"--comment={ODD}", stdin=JOB)
    assert done.returncode == 0, done.stderr
    ids = [done.stdout.strip(), bent.submit(JOB, args=["--hold", "--account=lab"]).job_id]
    jobs = {job.job_id: job for job in bent.jobs(ids)}
    assert [(jobs[i].state, jobs[i].partition) for i in ids] == [("PENDING", "train")] * 2
    assert jobs == {job.job_id: job for job in plain.jobs(ids)}
    bent.cancel(ids)
    assert set(bent.state_of(ids).values()) == {"CANCELLED"}


def test_a_host_without_slurm(far: Pit, tmp_path: Path) -> None:
    """Slurm's commands are not on the far side's PATH: a missing tool, and nothing is left behind."""
    (tmp_path / "hello.toml").write_text(HELLO.format("true"))
    for words in (
        ["site", "check", "--live", "bare"],
        ["launch", "run", "hello.toml", "--site", "bare"],
        ["psbatch", "--site", "bare", "--wrap=true"],
    ):
        done = far(*words)
        assert done.returncode == 4, done.stderr
        assert "is not on the PATH of bare" in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_shared_connection(over_ssh: OverSsh, sshd: Any) -> None:
    """With ControlMaster in the user's configuration, the connection that stays open keeps no command waiting."""
    slurm = over_ssh("kept")
    try:
        assert slurm.version() == slurm.config().version
    finally:
        subprocess.run([f"{sshd.path}/ssh", "-O", "exit", "kept"], capture_output=True, check=True)
