"""Find the processes that belong to one root and have no record there: job steps, tasks, set-up tools."""

from __future__ import annotations

import os
from pathlib import Path

from devcluster_parts.process import Identity, identify, stat_fields

SETUP_MARK = "PIT_DEVCLUSTER_SETUP"
"""In the environment of the programs that `up` runs and waits for, so that an interrupted `up` can be cleared up."""


def job_processes(root: Path) -> list[Identity]:
    """The slurmstepds under this root, their tasks, and what those tasks started.

    A slurmstepd is nobody's child (slurmd forks twice), so the tree of processes does not lead to it.
    """
    parents = _parents()
    steps = {pid for pid in parents if _is_step(pid, root)}
    tasks = {pid for pid in parents if _is_task(pid, root)}
    return _identities(_with_descendants(steps | tasks, parents) - _own_processes(parents))


def setup_processes(root: Path) -> list[Identity]:
    """The set-up programs of an `up` that was interrupted, and their children."""
    parents = _parents()
    mark = f"{SETUP_MARK}={root}".encode()
    found = {pid for pid in parents if mark in _environment(pid)}
    return _identities(_with_descendants(found, parents) - _own_processes(parents))


def _parents() -> dict[int, int]:
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := stat_fields(int(name))) is not None:
            found[int(name)] = int(fields[1])
    return found


def _is_step(pid: int, root: Path) -> bool:
    try:
        if Path(f"/proc/{pid}/comm").read_bytes().strip() != b"slurmstepd":
            return False
        fds = Path(f"/proc/{pid}/fd")
        # Its log is the slurmd's, below the root; its title may have overwritten its environment.
        return any(_link(fds / name).startswith(f"{root}/") for name in os.listdir(fds))
    except OSError:
        return False


def _is_task(pid: int, root: Path) -> bool:
    # A user's own shell may name this slurm.conf too; only processes of slurmd also name the node that they run on.
    env = _environment(pid)
    on_node = any(item.startswith(b"SLURMD_NODENAME=") for item in env)
    return on_node and any(item.startswith(f"SLURM_CONF={root}/".encode()) for item in env)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _with_descendants(found: set[int], parents: dict[int, int]) -> set[int]:
    everyone = set(found)
    while new := {pid for pid, parent in parents.items() if parent in everyone} - everyone:
        everyone |= new
    return everyone


def _own_processes(parents: dict[int, int]) -> set[int]:
    """This process and its ancestors, which must live to finish the work."""
    mine = {os.getpid(), 1}
    pid = os.getppid()
    while pid in parents and pid not in mine:
        mine.add(pid)
        pid = parents[pid]
    return mine


def _identities(pids: set[int]) -> list[Identity]:
    return [who for pid in sorted(pids) if (who := identify(pid)) is not None]
