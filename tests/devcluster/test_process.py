from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from devcluster_parts import stray_processes, tools
from devcluster_parts.errors import ClusterProblem
from devcluster_parts.process import identify, is_alive, read_record, send, spawn, stop


@pytest.fixture
def sleeper():
    """A process of somebody's."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def start(tmp_path, *argv, **env):
    """Spawn with the usual places for output and record."""
    return spawn(argv, env={"PATH": os.environ["PATH"], **env}, output=tmp_path / "out", record=tmp_path / "who.json")


def said(tmp_path, who):
    """What the process wrote, once it has ended."""
    end = time.monotonic() + 10
    while is_alive(who) and time.monotonic() < end:
        time.sleep(0.02)
    return (tmp_path / "out").read_text()


def test_an_id_that_passed_to_another_process_is_not_signalled(sleeper):
    """The same pid with another start time, or from another boot, is another process."""
    identity = identify(sleeper.pid)
    for other in (
        dataclasses.replace(identity, start=identity.start - 1),
        dataclasses.replace(identity, boot="another"),
    ):
        assert not is_alive(other)
        assert not send(other, signal.SIGKILL)
        assert stop([other], term_s=0.1) == []
    assert sleeper.poll() is None


def test_a_zombie_has_ended(sleeper):
    """A process that nobody reaped holds nothing any more; `down` must not wait for it."""
    identity = identify(sleeper.pid)
    assert stop([identity], term_s=5.0) == []
    assert identify(sleeper.pid) is None


def test_a_process_that_ignores_term_is_killed(tmp_path):
    """TERM is asked, KILL is not."""
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    name = start(tmp_path, sys.executable, "-c", code)
    end = time.monotonic() + 10
    while "deaf" not in (tmp_path / "out").read_text() and time.monotonic() < end:
        time.sleep(0.02)
    assert stop([name], term_s=0.2) == []
    assert not is_alive(name)


def test_a_daemon_has_a_record_before_it_runs(tmp_path):
    """The program itself finds its own id in the record."""
    record = tmp_path / "who.json"
    name = start(tmp_path, sys.executable, "-c", f"import os; print(os.getpid(), open({str(record)!r}).read())")
    pid, retained = said(tmp_path, name).split(maxsplit=1)
    assert int(pid) == json.loads(retained)["pid"] == name.pid
    assert read_record(record) == name


def test_a_daemon_inherits_nothing(tmp_path, monkeypatch):
    """No terminal's session, no open file, no variable of the caller's, no ignored signal."""
    monkeypatch.setenv("SBATCH_PARTITION", "wrong")
    held = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(held, True)
    code = """
import os, signal
fds = [fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}") != "/"]
print(os.getsid(0) == os.getppid(), os.getsid(0), fds, [key for key in os.environ if key.startswith("SBATCH")])
print(os.getcwd(), os.readlink("/proc/self/fd/0"))
"""
    try:
        name = start(tmp_path, sys.executable, "-c", code)
        first, second = said(tmp_path, name).splitlines()
    finally:
        os.close(held)
    assert str(os.getsid(0)) not in first.split()
    assert "[] []" in first
    assert second == "/ /dev/null"


def test_a_program_that_is_not_there_leaves_no_record(tmp_path):
    """The failure is told where it happened, at once."""
    with pytest.raises(ClusterProblem, match="cannot start no-such-daemon"):
        start(tmp_path, "no-such-daemon")
    assert not (tmp_path / "who.json").exists()


def test_what_an_interrupted_up_left_is_found_with_its_children(tmp_path):
    """Set-up programs are told by a mark in their environment, their children by descent; others are not."""
    env = {stray_processes.SETUP_MARK: str(tmp_path), "PATH": os.environ["PATH"]}
    with subprocess.Popen(["sh", "-c", "env -i sleep 60 & wait"], env=env) as shell:
        process = subprocess.Popen(["sleep", "60"], env={stray_processes.SETUP_MARK: f"{tmp_path}x"})
        end = time.monotonic() + 10
        while len(actual := stray_processes.setup_processes(tmp_path)) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        assert shell.pid in [name.pid for name in actual]
        assert stop(actual, term_s=5.0) == []
    assert process.poll() is None
    process.kill()
    process.wait()


def test_a_task_is_told_from_a_users_shell(tmp_path):
    """Only what slurmd launched names our slurm.conf and a node; a shell that exported SLURM_CONF is left alone."""
    ours = {"SLURM_CONF": f"{tmp_path}/alpha/slurm.conf"}
    shell = subprocess.Popen(["sleep", "60"], env=ours)
    task = subprocess.Popen(["sleep", "60"], env={**ours, "SLURMD_NODENAME": "alpha01"})
    try:
        assert [job_process.pid for job_process in stray_processes.job_processes(tmp_path)] == [task.pid]
    finally:
        for process in (shell, task):
            process.kill()
            process.wait()


def test_missing_programs_are_named_with_their_packages(monkeypatch):
    """Exit 4 with the line to type, for all of them at once."""
    monkeypatch.setattr(tools, "PACKAGES", {"no-slurmctld": "slurmctld", "sh": "dash", "no-mariadbd": "mariadb-server"})
    with pytest.raises(ClusterProblem) as caught:
        tools.check_tools()
    assert caught.value.hint == "apt-get install mariadb-server slurmctld"
    assert caught.value.exit_code == 4
