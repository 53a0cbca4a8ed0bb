"""One small cluster of its own, beside whatever else runs here: up, heal, interrupt, down."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from devcluster_parts import stray_processes
from devcluster_parts.process import is_alive, read_record
from devcluster_parts.tools import search_path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "devcluster"
pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm_installed")]


@pytest.fixture
def root(devcluster):
    """A root of our own, with a short path; whatever a test leaves there is ended."""
    with tempfile.TemporaryDirectory(prefix="dct", dir="/var/tmp") as folder:
        where = Path(folder) / "r"
        yield where
        assert devcluster("down", "--root", where).returncode == 0


def options(root: Path, second: int = 0) -> list[object]:
    """A cluster of two nodes at ports that nobody uses, nor the other (`second` = 1) of this test run will."""
    ports = (2000 + ((os.getpid() + number) % 10 * 2 + second) * 400 for number in range(10))
    port = next(port for port in ports if is_free(port))
    return ["--root", root, "--clusters", "gamma", "--nodes", 2, "--base-port", port]


def is_free(port: int) -> bool:
    """Whether the first ports from this one can be had."""
    with contextlib.ExitStack() as stack:
        try:
            for number in range(40):
                stack.enter_context(socket.create_server(("127.0.0.1", port + number)))
        except OSError:
            return False
    return True


def client(root: Path, *argv: str) -> str:
    """What a Slurm command says of the cluster."""
    env = {"PATH": search_path(), "SLURM_CONF": f"{root}/gamma/slurm.conf"}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True).stdout


def running(root: Path) -> dict[str, str]:
    """Daemon to state, as `status` tells it."""
    done = subprocess.run([SCRIPT, "status", "--root", root, "--format", "jsonl"], capture_output=True, text=True)
    return {row["name"]: row["state"] for row in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def interrupted():
    """How a cluster does whose first `up` was killed while it set up the accounts; it is busy beside other tests."""
    with tempfile.TemporaryDirectory(prefix="dct", dir="/var/tmp") as folder, ThreadPoolExecutor(1) as pool:
        yield pool.submit(interrupt, Path(folder) / "r")


def interrupt(root: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """What the third `up` said, and the state of every daemon after it."""
    record = root / "processes" / "slurmdbd.json"
    try:
        kill_up([*map(str, options(root, second=1))], root, record.exists)
        with slow(read_record(record).pid):
            kill_up(["--root", str(root)], root, lambda: "sacctmgr" in set_up_by(root))
        again = [SCRIPT, "up", "--root", root]
        third = subprocess.run(again, capture_output=True, text=True, timeout=150, check=False)
        return third, running(root)
    finally:
        subprocess.run([SCRIPT, "down", "--root", root], capture_output=True, timeout=150, check=True)


def kill_up(words: list[str], root: Path, moment: Callable[[], bool]) -> None:
    """A `kill -9` of `up` at this moment; fails with its words when it ends before."""
    output = root.with_name("said")
    with output.open("w") as file, subprocess.Popen([SCRIPT, "up", *words], stdout=file, stderr=file) as process:
        while not moment() and process.poll() is None:
            time.sleep(0.02)
        assert process.poll() is None, output.read_text()
        process.kill()


@contextlib.contextmanager
def slow(pid: int) -> Iterator[None]:
    """A process that does nothing for its first two seconds."""
    os.kill(pid, signal.SIGSTOP)
    awake = threading.Timer(2, os.kill, (pid, signal.SIGCONT))
    awake.start()
    try:
        yield
    finally:
        awake.join()


def set_up_by(root: Path) -> set[str]:
    """The programs that an `up` of this root waits for."""
    actual = set()
    for setup_process in stray_processes.setup_processes(root):
        with contextlib.suppress(OSError):
            actual.add(Path(f"/proc/{setup_process.pid}/comm").read_text().strip())
    return actual


def test_up_heal_down(root, devcluster, interrupted):
    """Up runs a job, up again changes nothing, a killed controller and node come back, down leaves nothing."""
    # The temporary file of some other MariaDB, which one that began in the same folder would remove.
    with tempfile.NamedTemporaryFile(prefix="#sql", suffix=".MAI", dir="/tmp") as anothers:
        first = devcluster("up", *options(root))
        assert Path(anothers.name).exists()
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"export SLURM_CONF={root}/gamma/slurm.conf\nexport PIT_SITE_PATH={root}/sites\n"
    assert f'conf = "{root}/gamma/slurm.conf"' in (root / "sites" / "gamma.toml").read_text()
    tasks = client(root, "srun", "-N2", "sh", "-c", "echo $SLURM_TOPOLOGY_ADDR").split()
    assert sorted(tasks) == ["spine.leaf1.gamma01", "spine.leaf2.gamma02"]
    assert client(root, "sacctmgr", "-nP", "list", "user", getpass.getuser(), "format=defaultaccount") == "lab\n"

    records = {path.stem: read_record(path) for path in (root / "processes").glob("*.json")}
    assert "already up" in devcluster("up", "--root", root).stderr
    for name in ("gamma-slurmctld", "slurmd-gamma02"):
        os.kill(records[name].pid, signal.SIGKILL)
    assert {name for name, state in running(root).items() if state == "down"} == {"gamma-slurmctld", "slurmd-gamma02"}
    healed = devcluster("up", "--root", root)
    assert healed.returncode == 0, healed.stderr
    assert set(running(root).values()) == {"up"}

    script = "setsid sleep 600 & srun sh -c 'trap : TERM; sleep 600; sleep 600'"
    client(root, "sbatch", "-N2", "-o", "/dev/null", "--wrap", script)
    end = time.monotonic() + 20
    while len(tasks := stray_processes.job_processes(root)) < 10 and time.monotonic() < end:
        time.sleep(0.1)
    everyone = [read_record(path) for path in (root / "processes").glob("*.json")] + tasks
    assert len(everyone) >= 15
    done = devcluster("down", "--root", root)
    assert done.returncode == 0, done.stderr
    assert not root.exists()
    assert [who for who in everyone if is_alive(who)] == []


def test_up_killed_midway_is_finished_by_the_next(interrupted):
    """A `kill -9` before slurmdbd answers, and one while the accounts are made, leave nothing that stops the next."""
    third, states = interrupted.result(200)
    assert third.returncode == 0, third.stderr
    assert set(states.values()) == {"up"}


def test_a_port_of_another_is_refused(root, devcluster):
    """The port and the option to change are named, exit 4; what was started is ended by `down`."""
    requested = options(root)
    port = requested[-1]
    with subprocess.Popen(
        ["python3", "-c", f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(60)"]
    ) as process:
        time.sleep(0.5)
        done = devcluster("up", *requested)
        process.kill()
    assert done.returncode == 4
    assert f"port {port}" in done.stderr
    assert "--base-port" in done.stderr
