"""Find out whether the kernel's OOM killer ended a rank or a child of it, by the kernel's log or its oom_kill counter.

    python -m pitools.launch.probes.oom ATTEMPT RANKS     on the node of ranks that SIGKILL ended, after their end

<attempt>/oom/<rank>.json    pit.oom/1

Slurm reports an OOM kill itself if it keeps each step in a cgroup. Otherwise the kernel's log names the process, if
this user may read it; else the node's oom_kill counter is compared with its value at the rank's start.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

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
    rb"srun: error: ([\w.\[\],-]{1,1000}): tasks? ([\d,-]+): (?:Killed|Exited with exit code 137)"
)
_KILLED = re.compile(r"Killed process (\d+)(?:.*\bUID[: ](\d+))?|oom-kill:.*[,:]pid=(\d+)(?:,uid=(\d+))?")
_JOB_CGROUP = re.compile(r"task_memcg=\S*/job_(\d+)\b")


class OomKill(Record, frozen=True, kw_only=True, tag="pit.oom/1"):
    """A rank that the kernel's OOM killer ended, or whose child it ended.

    pid: of the killed process; 0 if the kernel's log is not readable. evidence: the line of that log, or the counter's
    change, which may be by another job.
    """

    t: str
    rank: int
    node: str
    evidence: str
    pid: int = 0


class KernelKill(NamedTuple):
    """An OOM kill in the kernel's log. uid: None if not in the line. job_id: by the cgroup, "" if it names no job."""

    pid: int
    uid: int | None
    job_id: str
    text: str


def detect_on_nodes(attempt: Path, srun_stderr: bytes) -> None:
    """Record the OOM kills of the ranks that srun names first as killed. Prints failures to stderr."""
    match = _SRUN_TASK_KILLED.search(srun_stderr)
    if not match:
        return
    try:
        nodes, ranks = hostlist.expand(match[1].decode()), match[2].decode()
        if nodes == [os.environ.get("SLURMD_NODENAME")]:
            record_for_node(attempt, nodes[0], ranks)
            return
        python = os.environ.get("PIT_PYTHON", sys.executable)
        argv = [python, "-m", "pitools.launch.probes.oom", str(attempt), ranks]
        run_on_nodes(argv, ",".join(nodes), _SRUN_TIMEOUT_S)
    except (PitError, OSError) as error:
        print(f"pit: out-of-memory check failed: {error}", file=sys.stderr)


def record_for_node(attempt: Path, node: str, ranks: str) -> None:
    """Write a record for each of this node's ranks in `ranks`, such as `0-3,5`, to which an OOM kill is attributed."""
    numbers = {int(name[1:]) for name in hostlist.expand(f"r[{ranks}]")}
    start = run_folder.read_record(attempt / "start.json", AttemptStart)
    since = datetime.fromisoformat(start.started) if start else datetime.now(UTC) - timedelta(minutes=5)
    kills, node_ranks = read_kernel_log(since), ranks_on_node(attempt, node)
    rank_pids = {rank.pid for rank in node_ranks}
    for rank in node_ranks:
        if rank.rank not in numbers or Path(f"/proc/{rank.pid}").exists():
            continue
        count, kill = oom_kill_count(), _kill_of_rank(kills or (), rank.pid, rank_pids)
        evidence = kill.text if kill else ""
        if kills is None and count is not None and rank.oom_kills is not None and count > rank.oom_kills:
            evidence = f"out-of-memory kills on this node since the rank's start: {count - rank.oom_kills}"
        if evidence:
            run_folder.write_record(
                attempt / "oom" / f"{rank.rank}.json",
                OomKill(
                    t=timestamps.now_rfc3339(),
                    rank=rank.rank,
                    node=node,
                    evidence=evidence,
                    pid=kill.pid if kill else 0,
                ),
            )


def _kill_of_rank(kills: Sequence[KernelKill], pid: int, rank_pids: Collection[int]) -> KernelKill | None:
    """Return the kill of a rank itself, else of a process of this job, or of this user if its cgroup names no job."""
    own = next((kill for kill in kills if kill.pid == pid), None)
    job_id = os.environ.get("SLURM_JOB_ID")
    others = (kill for kill in kills if kill.pid not in rank_pids)
    return own or next(
        (kill for kill in others if (kill.job_id == job_id if kill.job_id else kill.uid == os.getuid())), None
    )


def read_kernel_log(since: datetime) -> list[KernelKill] | None:
    """Return the OOM kills in the kernel's log; None if the log is not readable."""
    try:
        log = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    kills: dict[int, KernelKill] = {}
    booted = datetime.now(UTC) - timedelta(seconds=time.clock_gettime(time.CLOCK_BOOTTIME))
    try:
        while True:
            try:
                age, kill = parse_kmsg_record(os.read(log, 8192))
            except BrokenPipeError:  # the record was overwritten: read the next one
                continue
            if kill and booted + age > since - timedelta(seconds=5):
                # The kernel writes two lines about a kill: the first names the cgroup, the second the sizes.
                earlier = kills.get(kill.pid)
                kills[kill.pid] = kill._replace(job_id=kill.job_id or (earlier.job_id if earlier else ""))
    except OSError:  # EAGAIN: end of the log
        return list(kills.values())
    finally:
        os.close(log)


def parse_kmsg_record(record: bytes) -> tuple[timedelta, KernelKill | None]:
    """Parse a record of /dev/kmsg: return its time since boot, and the OOM kill that it reports, if any."""
    head, _, text = record.decode(errors="replace").partition(";")
    stamp, line = head.split(",")[2:3], (text.splitlines() or [""])[0]
    age = timedelta(microseconds=int(stamp[0]) if stamp and stamp[0].isdecimal() else 0)
    if not (match := _KILLED.search(line)):
        return age, None
    uid, job = match[2] or match[4], _JOB_CGROUP.search(line)
    return age, KernelKill(int(match[1] or match[3]), int(uid) if uid else None, job[1] if job else "", line)


def oom_kill_count() -> int | None:
    """Return the number of OOM kills on this node since boot; None if the kernel does not count them."""
    try:
        match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


if __name__ == "__main__":
    record_for_node(Path(sys.argv[1]), os.environ.get("SLURMD_NODENAME", os.uname().nodename), sys.argv[2])
