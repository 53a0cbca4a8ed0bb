"""Table `processes`, from folders that stand for /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.node.gather import processes
from pitools.node.gather.processes import read_processes
from pitools.node.gather.read import Query

TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
SWITCHES = "voluntary_ctxt_switches:\t{}\nnonvoluntary_ctxt_switches:\t2"


def stat(pid: int, name: str, state: str = "S", parent: int = 1, flags: int = 0) -> str:
    """Return /proc/PID/stat of a process that began 60 s after boot, used 3 CPU seconds, and has 10 pages."""
    cpu = f"{2 * TICKS} {TICKS} 0 0 20 0 1 0 {60 * TICKS} 99 10 0 0"
    return f"{pid} ({name}) {state} {parent} 1 1 0 -1 {flags} 0 0 0 0 {cpu}"


PROC = {
    "uptime": "120.0 9.0",
    "meminfo": f"MemTotal: {PAGE} kB\nMemAvailable: 1 kB",
    "1/stat": stat(1, "systemd", parent=0),
    "1/cmdline": b"/sbin/init\0--flag\0",
    "40/stat": stat(40, "kswapd0", parent=2, flags=0x200040),
    "41/stat": stat(41, "kworker/3:1-events", state="I", parent=2, flags=0x4208060),
    "70/stat": stat(70, "a) R (b 1 2", parent=1),
    "70/cmdline": "x" * 1500,
    "70/cgroup": "0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0",
    "71/stat": stat(71, "python3", parent=70),
    "71/cgroup": "9:cpuset:/\n4:memory:/slurm/uid_1000/job_4712/step_batch",
    "72/stat": stat(72, "dd", state="D"),
    "72/status": f"Name:\tdd\nState:\tD (disk sleep)\n{SWITCHES.format(7)}",
    "72/cmdline": b"dd\0if=/dev/sda\0",
    "72/cgroup": "0::/user.slice/job_9",
    "73/stat": "73 (ended",
}


@pytest.fixture(autouse=True, scope="module")
def no_wait() -> Iterator[None]:
    """Read processes in state D again at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes.time, "sleep", lambda _: None)
        yield


def test_each_process_is_a_row(tmp_path: Path, write_tree, last_rows) -> None:
    """Names with parentheses, jobs of both versions of cgroups, and kernel threads but those of one CPU."""
    proc = write_tree(tmp_path / "proc", PROC)
    rows = last_rows("processes", read_processes(Query(root=proc.parent)))
    assert {pid: (row["name"], row["parent"], row["job_id"]) for pid, row in rows.items()} == {
        1: ("systemd", "", ""),
        40: ("kswapd0", "", ""),
        70: ("a) R (b 1 2", "systemd", "4711"),
        71: ("python3", "a) R (b 1 2", "4712"),
        72: ("dd", "systemd", ""),
    }
    assert rows[1] == {
        "pid": 1,
        "name": "systemd",
        "user": rows[1]["user"],
        "uid": os.geteuid(),
        "state": "S",
        "is_kernel": False,
        "is_blocked": False,
        "age_s": 60.0,
        "cpu_s": 3.0,
        "cpu_share": 0.05,
        "memory_bytes": 10 * PAGE,
        "memory_share": round(10 / 1024, 6),
        "parent": "",
        "command": "/sbin/init --flag",
        "job_id": "",
        "responds": True,
    }
    assert (rows[40]["is_kernel"], rows[40]["command"], rows[70]["command"]) == (True, "[kswapd0]", "x" * 1024)


def test_processes_of_a_step_are_of_its_job(tmp_path: Path, write_tree, last_rows) -> None:
    """Where Slurm uses no cgroups, they descend from a process that names the job; if it is not read, it is unknown."""
    tree = {
        "uptime": "120.0 9.0",
        "1/stat": stat(1, "systemd", parent=0),
        "80/stat": stat(80, "slurmstepd"),
        "80/cmdline": b"slurmstepd: [4713.batch]\0",
        "81/stat": stat(81, "bash", parent=80),
        "82/stat": stat(82, "python3", parent=81),
        "90/stat": stat(90, "slurmstepd", state="D"),
        "91/stat": stat(91, "bash", parent=90),
        "92/stat": stat(92, "sshd", parent=93),
        "93/stat": stat(93, "sshd", parent=92),
    }
    rows = last_rows("processes", read_processes(Query(root=write_tree(tmp_path / "proc", tree).parent)))
    assert {pid: rows[pid]["job_id"] for pid in (82, 91, 92, 1)} == {82: "4713", 91: None, 92: "", 1: ""}


def test_a_users_program_is_no_step(tmp_path: Path, write_tree, last_rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be called slurmstepd and name any job: it is not asked, before its row is announced nor later."""
    tree = {
        "uptime": "120.0 9.0",
        "80/stat": stat(80, "slurmstepd"),
        "80/cmdline": b"slurmstepd: [4713.batch]\0",
        "81/stat": stat(81, "bash", parent=80),
    }
    query = Query(root=write_tree(tmp_path / "proc", tree).parent)
    monkeypatch.setattr(processes, "_owner", lambda _proc, pid: {"user": "u", "uid": 4242})
    asked: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(processes, "_command", lambda _proc, pid: asked.append(pid) or "")
        assert next(read_processes(query))["responds"] is False
    assert asked == []
    assert last_rows("processes", read_processes(query))[81]["job_id"] == ""


@pytest.mark.parametrize(
    ("later", "waits_in", "is_blocked"),
    [
        (PROC["72/status"], "folio_wait_bit", True),
        (PROC["72/status"], "0", True),
        (PROC["72/status"], "kernel_clone", False),
        (f"Name:\tdd\nState:\tD (disk sleep)\n{SWITCHES.format(8)}", "folio_wait_bit", False),
        (f"Name:\tdd\nState:\tS (sleeping)\n{SWITCHES.format(7)}", "folio_wait_bit", False),
        ("", "", False),
    ],
    ids=["unchanged", "place unknown", "vfork", "ran meanwhile", "sleeps", "ended"],
)
def test_blocked_is_a_process_that_does_not_run(
    tmp_path: Path, write_tree, last_rows, monkeypatch: pytest.MonkeyPatch, later: str, waits_in: str, is_blocked: bool
) -> None:
    """A process in D now and later, without a switch in between, is blocked; not one that waits for its own child."""
    proc = write_tree(tmp_path / "proc", {**PROC, "72/wchan": waits_in})
    monkeypatch.setattr(processes.time, "sleep", lambda _: (proc / "72/status").write_text(f"{later}\n"))
    rows = last_rows("processes", read_processes(Query(root=proc.parent)))
    assert [pid for pid, row in rows.items() if row["is_blocked"]] == ([72] if is_blocked else [])


def test_a_wait_for_blocked_processes_is_no_hang(tmp_path: Path, write_tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row follows each second of it: else the table would be given up, or need a time-out that is too long."""
    slept: list[float] = []
    monkeypatch.setattr(processes.time, "sleep", slept.append)
    waits = []
    for _ in read_processes(Query(root=write_tree(tmp_path / "proc", PROC).parent)):
        waits.append(sum(slept))
        slept.clear()
    assert (sum(waits), max(waits)) == (5, 1)


def test_a_command_line_that_hangs_is_announced(tmp_path: Path, write_tree) -> None:
    """Before the command line of any process is read, its row says that it does not respond; then it is left out."""
    proc = write_tree(tmp_path / "proc", PROC)
    rows = [row for row in read_processes(Query(root=proc.parent)) if row["pid"] == 72]
    assert [row["responds"] for row in rows[:2]] == [False, True]
    assert [row.get("command") for row in rows[:2]] == [None, "dd if=/dev/sda"]
    assert [row["responds"] for row in read_processes(Query(root=proc.parent)) if row["pid"] == 71] == [
        False,
        True,
    ]
    assert [row for row in read_processes(Query(hung={"72"}, root=proc.parent)) if row["pid"] == 72] == []


@given(data=st.binary(max_size=300), name=st.sampled_from([*PROC]))
def test_any_bytes_make_no_error(tmp_path_factory: pytest.TempPathFactory, write_tree, last_rows, data, name) -> None:
    """Whatever a file holds, the other processes are read."""
    proc = write_tree(tmp_path_factory.mktemp("root") / "proc", {**PROC, name: data})
    rows = last_rows("processes", read_processes(Query(root=proc.parent)))
    assert {1, 40, 70, 71, 72} <= {*rows, int(name.partition("/")[0]) if "/" in name else 1}


def test_this_process_is_read(last_rows) -> None:
    """Of this machine, this process's facts are those that it has."""
    row = last_rows("processes", read_processes(Query()))[os.getpid()]
    assert (row["uid"], row["is_kernel"], row["responds"]) == (os.geteuid(), False, True)
    assert row["memory_bytes"] > 1 << 20
    assert "python" in row["command"]
