"""A rank's command: signals reach its programs once, and its exit code is the rank's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pitools.launch import exit_codes
from pitools.launch import plan as planning
from pitools.launch.diagnosis import patterns
from pitools.launch.rank import failure_record, main

MakePlan = Callable[..., planning.Plan]

# Notes each signal it gets, and ends half a second after the first, so that a second would be noted too.
PROGRAM = """
import signal, sys, time
got = []
for number in (signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, lambda number, _: got.append(number))
open("ready", "w").close()
while not got:
    time.sleep(0.01)
end = time.monotonic() + 0.5
while time.monotonic() < end:
    time.sleep(0.01)
open("saved", "w").write(" ".join(signal.Signals(number).name for number in got))
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def rank(make_plan: MakePlan, tmp_path: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """Starts the one rank of a job that runs a command, in a session of its own, as a task of Slurm's is."""

    def start(command: str, entry: str = "", **more: str) -> subprocess.Popen[bytes]:
        (tmp_path / "program.py").write_text(PROGRAM)
        request = {"entry": entry} if entry else {"command": command}
        (tmp_path / "plan.json").write_bytes(msgspec.json.encode(make_plan("local", **request)))
        env = {
            **os.environ,
            "SLURM_JOB_ID": "1",
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "1",
            "SLURM_LOCALID": "0",
            "SLURMD_NODENAME": "here",
            "PIT_ATTEMPT_DIR": str(tmp_path / "attempts" / "0"),
            "PIT_JOB_SECRET": "00" * 16,
            "PIT_HEAD_ADDRESS": "127.0.0.1",
            "PIT_HEAD_NODE": "here",
            "PIT_PORTS": "22000-22127",
            "PYTHON": sys.executable,
            **more,
        }
        (tmp_path / "attempts" / "0").mkdir(parents=True)
        argv = [sys.executable, "-m", "pitools.launch.rank.main", "plan", str(tmp_path / "plan.json")]
        with (tmp_path / "stderr").open("w") as stderr:
            return subprocess.Popen(argv, env=env, cwd=tmp_path, start_new_session=True, stderr=stderr)

    return start


def until(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            time.sleep(0.1)
            return
        time.sleep(0.05)
    raise AssertionError(f"{path.name} did not come")


def everybody(leader: int) -> list[int]:
    """The processes of a session: what Slurm's proctrack/linuxproc signals."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    actual = []
    for pid in pids:
        try:
            if os.getsid(pid) == leader:
                actual.append(pid)
        except ProcessLookupError:
            continue
    return actual


@pytest.mark.parametrize("reach", ["the task alone", "every process"])
@pytest.mark.parametrize(
    ("command", "code"),
    [("true; $PYTHON program.py 0", 0), ("$PYTHON program.py 0 && exit 4", 4), ("$PYTHON program.py 9", 9)],
)
def test_a_command_saves_at_usr2(
    rank: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path, reach: str, command: str, code: int
) -> None:
    """The program gets the signal once, whichever way Slurm sends it; bash goes on, and its exit code is the rank's."""
    process = rank(command)
    until(tmp_path / "ready")
    for pid in [process.pid] if reach == "the task alone" else everybody(process.pid):
        os.kill(pid, signal.SIGUSR2)
    assert process.wait(20) == code
    assert (tmp_path / "saved").read_text() == "SIGUSR2"


def test_a_process_that_no_job_started_is_no_rank() -> None:
    """Without the variables of srun and of pitools' script the program is not started; the exit code is 4."""
    argv = [sys.executable, "-m", "pitools.launch.rank.main", "torch", "--", "echo", "started"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PIT_"))}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (4, "", 1)


def test_a_warning_does_not_end_the_reader_of_a_pipe(
    rank: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """`program | tee` saves and is told on to the end: tee, which knows nothing of the signal, is not ended by it."""
    process = rank("set -o pipefail; ($PYTHON program.py 0; echo after) | tee log")
    until(tmp_path / "ready")
    process.send_signal(signal.SIGUSR2)
    assert process.wait(20) == 0
    assert (tmp_path / "saved").read_text() == "SIGUSR2"
    assert (tmp_path / "log").read_text() == "after\n"


@pytest.mark.parametrize("code", [0, 143])
def test_term_ends_a_command_after_the_program_has_saved(
    rank: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path, code: int
) -> None:
    """bash waits for the program, starts nothing after it, and returns its code."""
    process = rank(f"$PYTHON program.py {code}; touch next")
    until(tmp_path / "ready")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == code
    assert (tmp_path / "saved").read_text() == "SIGTERM"
    assert not (tmp_path / "next").exists()


def test_both_signals_in_turn_arrive(rank: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """A TERM after a USR2 that went to every process is passed on as well."""
    process = rank("$PYTHON program.py 0; true")
    until(tmp_path / "ready")
    for pid in everybody(process.pid):
        os.kill(pid, signal.SIGUSR2)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert (tmp_path / "saved").read_text() == "SIGUSR2 SIGTERM"


def test_an_error_of_pitools_in_an_entry_keeps_its_hint(
    rank: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """What to type follows Python's traceback, once."""
    (tmp_path / "mine.py").write_text(
        "from pitools.core.errors import ConfigError\n"
        "def main():\n"
        "    raise ConfigError('no staged dataset', hint='pit-stage run X')\n"
    )
    assert rank("", entry="mine:main").wait(30) == 1
    *_, error, hint = (tmp_path / "stderr").read_text().splitlines()
    assert error == "pitools.core.errors.ConfigError: no staged dataset"
    assert hint == "next: pit-stage run X"


def test_ports_that_are_all_taken_are_no_fault_of_the_node(
    rank: Callable[..., subprocess.Popen[bytes]],
) -> None:
    """A code of its own, which the judge takes for the network's: no node is left out for it."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert rank("true", PIT_PORTS=f"{port}-{port + 1}").wait(30) == exit_codes.NO_PORTS
    reference = patterns.match_exit_code(exit_codes.NO_PORTS)
    assert reference
    assert (reference.kind, reference.blames_node) == ("network", False)


@pytest.mark.parametrize("code", [0, 3, 143])
def test_a_full_log_disk_does_not_change_the_exit_code(code: int) -> None:
    """The last lines cannot be written: the code is the program's still, and not Python's for a failed flush."""
    script = "import sys; from pitools.launch.rank import main; sys.stdout = open('/dev/full', 'w'); print('last line')"
    done = subprocess.run([sys.executable, "-c", f"{script}; main.exit_process({code})"], check=False)
    assert done.returncode == code


@pytest.mark.parametrize(("value", "code"), [(None, 0), (0, 0), (3, 3), ("why", 1), (True, 1)], ids=str)
def test_exit_codes_are_the_interpreter_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object, code: int
) -> None:
    """`sys.exit()` of an entry that has finished is success, and leaves no record of a failure."""
    monkeypatch.setenv("PIT_ATTEMPT_DIR", str(tmp_path))
    with pytest.raises(SystemExit) as caught, failure_record.record_failure():
        sys.exit(value)  # type: ignore[arg-type]
    assert failure_record.exit_code(caught.value) == code
    assert (tmp_path / "first_failure").exists() == (code != 0)


@pytest.mark.parametrize("other", ["", "#!/bin/sh\nexit 9\n"])
def test_python_is_the_rank_s_interpreter(tmp_path: Path, other: str) -> None:
    """Also where that is `python3` in a folder that has no `python`, or one of another version; for each rank."""
    bin_dir, attempt = tmp_path / "bin", tmp_path / "attempt"
    bin_dir.mkdir()
    attempt.mkdir()
    (bin_dir / "python3").write_text("#!/bin/sh\necho mine\n")
    (bin_dir / "python3").chmod(0o755)
    if other:
        (bin_dir / "python").write_text(other)
        (bin_dir / "python").chmod(0o755)
    for _ in range(2):
        folders = main.python_folders(bin_dir / "python3", attempt)
    env = {"PATH": os.pathsep.join([*folders, os.defpath])}
    for name in ("python", "python3"):
        assert subprocess.run(["sh", "-c", name], env=env, capture_output=True, check=True).stdout == b"mine\n"
    assert main.python_folders(Path(sys.executable), attempt) == [str(Path(sys.executable).parent)]
