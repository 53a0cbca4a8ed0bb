"""Whether it was the kernel, for want of memory, that killed a rank: its log says so, or at least its count.

    python -m pitools.launch.probes.oom ATTEMPT     on the node of a rank that SIGKILL ended, once it has

<attempt>/oom/<rank>.json    pit.oom/1

Where Slurm keeps each step in a cgroup it says so itself. Where it does not, the kernel's log names the process, if
one may read it; and it counts what it killed so, which every rank noted at its start.
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
# srun's first words about a rank that was killed, itself or what it had started.
_SRUN_TASK_KILLED = re.compile(
    rb"srun: error: ([\w.\[\],-]{1,1000}): tasks? [\d,-]+: (?:Killed|Exited with exit code 137)"
)
_OOM_PID = re.compile(r"(?:Killed process (\d+)|oom-kill:.*[,:]pid=(\d+))\b")


class OomKill(Record, frozen=True, kw_only=True, tag="pit.oom/1"):
    """A rank that the kernel killed for want of memory. evidence: how that is known."""

    t: str
    rank: int
    node: str
    evidence: str


def detect_on_nodes(attempt: Path, srun_stderr: bytes) -> None:
    """Look on the nodes of the ranks that srun names first as killed; says nothing where it cannot be known."""
    found = _SRUN_TASK_KILLED.search(srun_stderr)
    if not found:
        return
    try:
        nodes = hostlist.expand(found[1].decode())
        if nodes == [os.environ.get("SLURMD_NODENAME")]:
            record_for_node(attempt, nodes[0])
            return
        python = os.environ.get("PIT_PYTHON", sys.executable)
        run_on_nodes([python, "-m", "pitools.launch.probes.oom", str(attempt)], ",".join(nodes), _SRUN_TIMEOUT_S)
    except (PitError, OSError) as error:
        print(f"pit: whether memory ran out is not known: {error}", file=sys.stderr)


def record_for_node(attempt: Path, node: str) -> None:
    """Write down which of this node's ranks the kernel killed."""
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
    """Process → the line that says that it was killed for want of memory; None where the log may not be read."""
    try:
        log = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    found: dict[int, str] = {}
    booted = datetime.now(UTC) - timedelta(seconds=time.clock_gettime(time.CLOCK_BOOTTIME))
    try:
        while True:
            try:
                age, pid, text = parse_kmsg_record(os.read(log, 8192))
            except BrokenPipeError:  # overwritten meanwhile: the next one is read
                continue
            if pid and booted + age > since - timedelta(seconds=5):
                found[pid] = text
    except OSError:  # EAGAIN: that was all
        return found
    finally:
        os.close(log)


def parse_kmsg_record(record: bytes) -> tuple[timedelta, int, str]:
    """When after boot, of which process (0: it is not about that), and what a record of the kernel's log says."""
    head, _, text = record.decode(errors="replace").partition(";")
    stamp, process = head.split(",")[2:3], _OOM_PID.search(text)
    age = timedelta(microseconds=int(stamp[0]) if stamp and stamp[0].isdecimal() else 0)
    return age, int(process[1] or process[2]) if process else 0, (text.splitlines() or [""])[0]


def oom_kill_count() -> int | None:
    """How many processes this node's kernel has killed for want of memory since it started; None if it does not say."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


if __name__ == "__main__":
    record_for_node(Path(sys.argv[1]), os.environ.get("SLURMD_NODENAME", os.uname().nodename))
