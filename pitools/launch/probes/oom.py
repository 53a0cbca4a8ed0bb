"""Find out whether the kernel's OOM killer ended a rank, by the kernel's log or its oom_kill counter.

    python -m pitools.launch.probes.oom ATTEMPT     on the node of a rank that SIGKILL ended, after its end

<attempt>/oom/<rank>.json    pit.oom/1

Slurm reports an OOM kill itself if it keeps each step in a cgroup. Otherwise the kernel's log names the process, if
this user may read it; else the node's oom_kill counter is compared with its value at the rank's start.
"""

from __future__ import annotations

import os
import re
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pitools.core import hostlist, timestamps
from pitools.core.errors import PitError
from pitools.core.record import Record
from pitools.launch.probes.node_step import run_on_nodes
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart, ranks_on_node

_KMSG = Path("/dev/kmsg")
_SRUN_TIMEOUT_S = 8.0
# srun's first message about a killed rank: SIGKILL of the rank itself, or of a child (exit code 137).
_SRUN_TASK_KILLED = re.compile(
    rb"srun: error: ([\w.\[\],-]{1,1000}): tasks? [\d,-]+: (?:Killed|Exited with exit code 137)"
)
_OOM_PID = re.compile(r"(?:Killed process (\d+)|oom-kill:.*[,:]pid=(\d+))\b")


class OomKill(Record, frozen=True, kw_only=True, tag="pit.oom/1"):
    """A rank that the kernel's OOM killer ended. evidence: the line of the kernel's log, or the counter's change."""

    t: str
    rank: int
    node: str
    evidence: str


def detect_on_nodes(attempt: Path, srun_stderr: bytes) -> None:
    """Record OOM kills on the nodes that srun names first as having killed ranks. Prints failures to stderr."""
    match = _SRUN_TASK_KILLED.search(srun_stderr)
    if not match:
        return
    try:
        nodes = hostlist.expand(match[1].decode())
        if nodes == [os.environ.get("SLURMD_NODENAME")]:
            record_for_node(attempt, nodes[0])
            return
        python = os.environ.get("PIT_PYTHON", sys.executable)
        run_on_nodes([python, "-m", "pitools.launch.probes.oom", str(attempt)], ",".join(nodes), _SRUN_TIMEOUT_S)
    except (PitError, OSError) as error:
        print(f"pit: out-of-memory check failed: {error}", file=sys.stderr)


def record_for_node(attempt: Path, node: str) -> None:
    """Write a record for each of this node's ranks that the OOM killer ended."""
    start = run_folder.read_record(attempt / "start.json", AttemptStart)
    since = datetime.fromisoformat(start.started) if start else datetime.now(UTC) - timedelta(minutes=5)
    oom_lines = read_kernel_log(since)
    for rank in ranks_on_node(attempt, node):
        if Path(f"/proc/{rank.pid}").exists():
            continue
        evidence = oom_lines.get(rank.pid, "") if oom_lines is not None else ""
        count = oom_kill_count()
        if not evidence and oom_lines is None and None not in (count, rank.oom_kills) and count > rank.oom_kills:  # type: ignore[operator]
            evidence = f"this node's kernel killed {count - rank.oom_kills} for want of memory since"  # type: ignore[operator]
        if evidence:
            run_folder.write_record(
                attempt / "oom" / f"{rank.rank}.json",
                OomKill(t=timestamps.now_rfc3339(), rank=rank.rank, node=node, evidence=evidence),
            )


def read_kernel_log(since: datetime) -> dict[int, str] | None:
    """Return process id → line of its OOM kill in the kernel's log; None if the log is not readable."""
    try:
        log = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    oom_lines: dict[int, str] = {}
    booted = datetime.now(UTC) - timedelta(seconds=time.clock_gettime(time.CLOCK_BOOTTIME))
    try:
        while True:
            try:
                age, pid, text = parse_kmsg_record(os.read(log, 8192))
            except BrokenPipeError:  # the record was overwritten: read the next one
                continue
            if pid and booted + age > since - timedelta(seconds=5):
                oom_lines[pid] = text
    except OSError:  # EAGAIN: end of the log
        return oom_lines
    finally:
        os.close(log)


def parse_kmsg_record(record: bytes) -> tuple[timedelta, int, str]:
    """Parse a record of /dev/kmsg: return its time since boot, the OOM-killed process (0: none), and its text."""
    head, _, text = record.decode(errors="replace").partition(";")
    stamp, process = head.split(",")[2:3], _OOM_PID.search(text)
    age = timedelta(microseconds=int(stamp[0]) if stamp and stamp[0].isdecimal() else 0)
    return age, int(process[1] or process[2]) if process else 0, (text.splitlines() or [""])[0]


def oom_kill_count() -> int | None:
    """Return the number of OOM kills on this node since boot; None if the kernel does not count them."""
    try:
        match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


if __name__ == "__main__":
    record_for_node(Path(sys.argv[1]), os.environ.get("SLURMD_NODENAME", os.uname().nodename))
