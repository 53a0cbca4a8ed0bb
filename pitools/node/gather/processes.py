"""Read the processes of the node."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from pitools.core import trust
from pitools.node.gather.read import Query, list_names, read_bytes, read_measure, read_text
from pitools.node.gather.system import read_meminfo
from pitools.node.types import Row

_BLOCKED_S = 5
_COMMAND_CHARACTERS = 1024
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Where a parent waits, in state D, for its child of vfork(2) to run a program or end: it may do so for ever.
_OF_VFORK = frozenset(("kernel_clone", "_do_fork", "do_fork", "wait_for_vfork_done"))
_STEP = re.compile(r"slurmstepd: \[(\d+)\.", re.ASCII)
_SLURM_JOB = re.compile(r"slurm\S*/job_(\d+)(?:/|$)", re.ASCII | re.MULTILINE)

_user_name = lru_cache(maxsize=None)(trust.user_name)  # may ask a directory service


class _Stat(NamedTuple):
    """What /proc/PID/stat says."""

    pid: int
    name: str
    state: str
    parent: int
    is_kernel: bool
    cpu_s: float
    started_s: float  # after boot
    memory_bytes: int


def read_processes(query: Query) -> Iterator[Row]:
    """Yield the rows of table `processes`; those in state D are read again after 5 s."""
    proc = query.proc
    uptime_s = read_measure(proc / "uptime")
    total = read_meminfo(proc).get("MemTotal")
    stats = {stat.pid: stat for name in list_names(proc) if name.isdigit() and (stat := _read_stat(proc, name))}
    # Without proctrack/cgroup a job's processes are in no cgroup of it, but descend from its steps.
    owners = (0, os.geteuid())  # of slurmd: any user may call a program slurmstepd, and name a job
    steps = {
        stat.pid: _job_of_step(proc, stat)
        for stat in stats.values()
        if stat.name == "slurmstepd" and _owner(proc, stat.pid)["uid"] in owners
    }
    waiting: list[tuple[Row, bytes | None]] = []
    for stat in stats.values():
        if (stat.is_kernel and "/" in stat.name) or str(stat.pid) in query.hung:
            continue  # a thread of one CPU: kworker/3:1, migration/3
        parent = stats.get(stat.parent)
        age_s = max(0.0, uptime_s - stat.started_s) if uptime_s is not None else None
        row: Row = {
            "pid": stat.pid,
            "name": stat.name,
            **_owner(proc, stat.pid),
            "state": stat.state,
            "is_kernel": stat.is_kernel,
            "is_blocked": False,
            "age_s": None if age_s is None else round(age_s, 2),
            "cpu_s": stat.cpu_s,
            "cpu_share": round(stat.cpu_s / age_s, 4) if age_s else None,
            "memory_bytes": stat.memory_bytes,
            "memory_share": round(stat.memory_bytes / total, 6) if total else None,
            "parent": parent.name if parent else "",
        }
        if stat.is_kernel:
            yield {**row, "command": f"[{stat.name}]", "job_id": "", "responds": True}
        else:
            # A thread that waits for a disk or server may hold the lock of its memory, where the command line is.
            yield {**row, "responds": False}
            row |= {"command": _command(proc, stat.pid) or f"[{stat.name}]", "responds": True}
            row["job_id"] = _job_id(proc, stat.pid) or _job_of_ancestor(stat, stats, steps)
            yield row
        if stat.state == "D":
            waiting.append((row, _switches(proc, stat.pid)))
    for _ in range(_BLOCKED_S if waiting else 0):
        time.sleep(1)
        yield waiting[0][0]  # a sign of life: the time-out of one command line that hangs is to be short
    for row, switches in waiting:
        if switches is None or _switches(proc, row["pid"]) != switches:
            continue
        if (read_text(f"{proc}/{row['pid']}/wchan") or "").strip() not in _OF_VFORK:
            yield {**row, "is_blocked": True}


def _read_stat(proc: Path, pid: str) -> _Stat | None:
    """Return a process's facts; None if it has ended."""
    # The name stands in parentheses, and may have any byte in it, parentheses too.
    head, _, tail = (read_text(f"{proc}/{pid}/stat") or "").rpartition(")")
    fields = tail.split()
    try:
        return _Stat(
            pid=int(pid),
            name=head.partition("(")[2],
            state=fields[0],
            parent=int(fields[1]),
            is_kernel=bool(int(fields[6]) & _KERNEL_THREAD),
            cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
            started_s=int(fields[19]) / _TICKS,
            memory_bytes=int(fields[21]) * _PAGE_BYTES,
        )
    except (IndexError, ValueError):
        return None


def _owner(proc: Path, pid: int) -> Row:
    try:
        uid = os.stat(f"{proc}/{pid}").st_uid  # noqa: PTH116 - a Path for each of thousands costs as much as the call
    except OSError:
        return {"user": None, "uid": None}
    return {"user": _user_name(uid), "uid": uid}


def _command(proc: Path, pid: int) -> str:
    data = read_bytes(f"{proc}/{pid}/cmdline", limit=4096) or b""
    return data.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")[:_COMMAND_CHARACTERS]


def _job_id(proc: Path, pid: int) -> str:
    match = _SLURM_JOB.search(read_text(f"{proc}/{pid}/cgroup") or "")
    return match[1] if match else ""


def _job_of_step(proc: Path, stat: _Stat) -> str | None:
    match = _STEP.match(_command(proc, stat.pid)) if stat.state != "D" else None
    return match[1] if match else None


def _job_of_ancestor(stat: _Stat, stats: dict[int, _Stat], steps: dict[int, str | None]) -> str | None:
    """Return the job of the step that a process descends from, None if it is unknown; "" if it is of no step."""
    for _ in range(len(stats) if steps else 0):  # it ends, whatever pids were used anew meanwhile
        if stat.pid in steps or stat.parent not in stats:
            break
        stat = stats[stat.parent]
    return steps.get(stat.pid, "")


def _switches(proc: Path, pid: object) -> bytes | None:
    """Return how often a process in state D got and left a CPU: equal later, it has not run. None if it is not in D."""
    status = read_bytes(f"{proc}/{pid}/status") or b""
    return b"".join(status.partition(b"\nvoluntary_ctxt_switches:")[1:]) if b"\nState:\tD" in status else None
