"""Dump the stacks of all threads of every rank to `<attempt>/stacks/<rank>.txt`.

    python -m pitools.launch.probes.stacks ATTEMPT     on each node, in a step beside the ranks': the node's own ranks

Two methods, because each can fail. py-spy, if installed, reads a process from outside, and needs the right to trace it.
faulthandler writes from inside: every rank registers it for SIGQUIT (`register_handler`). The JVM and Go dump their
stacks at SIGQUIT too; Slurm, NCCL, JAX and torch use other signals. It is sent only to processes that catch it.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pitools.core import subprocesses, timestamps
from pitools.core.errors import PitError
from pitools.core.fs import open_0644
from pitools.launch.probes.node_step import run_on_nodes
from pitools.run import run_folder
from pitools.run.attempt_records import ranks_on_node

DUMP_SIGNAL = signal.SIGQUIT
_ALL_NODES_S = 20.0
_PY_SPY_TIMEOUT_S = 6.0
_FAULTHANDLER_S = 0.3  # time for faulthandler to write


def register_handler(attempt: Path, rank: int) -> None:
    """Let this process write its stacks to the attempt's folder at DUMP_SIGNAL, and to its log on a fatal error."""
    try:
        faulthandler.enable()
        (attempt / "stacks").mkdir(mode=0o755, exist_ok=True)
        # Open until the process ends: the handler, in C, writes to the descriptor without Python.
        file = open(attempt / "stacks" / f"{rank}.txt", "ab", buffering=0, opener=open_0644)  # noqa: SIM115
        faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True, chain=False)
        _OPEN_FILES.append(file)
    except (OSError, ValueError, AttributeError) as error:  # stderr closed, or a platform without it
        print(f"pit: stack dumps are not available for this rank: {error}", file=sys.stderr)


_OPEN_FILES: list[object] = []  # keeps the files open: nothing else refers to them


def dump_all_nodes(attempt: Path, node_list: str) -> None:
    """Dump the stacks of all ranks of this job, on all its nodes. Time-out: 20 s."""
    python = os.environ.get("PIT_PYTHON", sys.executable)
    try:
        run_on_nodes([python, "-m", "pitools.launch.probes.stacks", str(attempt)], node_list, _ALL_NODES_S)
    except PitError as error:
        print(f"pit: stack dump incomplete: {error}", file=sys.stderr)


def dump_here(attempt: Path, node: str) -> list[int]:
    """Dump the stacks of this node's ranks, and return the ranks."""
    pids = {rank.rank: rank.pid for rank in ranks_on_node(attempt, node) if _is_rank_process(rank, attempt)}
    (attempt / "stacks").mkdir(mode=0o755, exist_ok=True)
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(lambda rank: _dump_rank(attempt, rank, pids[rank]), pids))
    return sorted(pids)


def _is_rank_process(rank: run_folder.RankRecord, attempt: Path) -> bool:
    """Return whether the process with the rank's pid is still that rank: the pid may have been reused."""
    import psutil  # here, so that ranks, which import this module for `register_handler`, do not load it

    try:
        environ = psutil.Process(rank.pid).environ()
    except (psutil.Error, OSError):
        return False
    return (environ.get("PIT_ATTEMPT_DIR"), environ.get("SLURM_PROCID")) == (str(attempt), str(rank.rank))


def _dump_rank(attempt: Path, rank: int, pid: int) -> None:
    path = attempt / "stacks" / f"{rank}.txt"
    py_spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    for process in _process_tree(pid):
        head = f"\n== rank {rank}, process {process}, {timestamps.now_rfc3339()}\n"
        python = _is_python(process)
        stacks, problem = _py_spy_dump(py_spy, process) if py_spy and python else ("", "")
        with open(path, "a", opener=open_0644) as file:
            file.write(head + (stacks or problem + _process_state(process)))
        # A program started by a command has no handler. With PYTHONFAULTHANDLER, SIGABRT writes the stacks to its log
        # and ends it, which happens next anyway.
        _ = _send_if_caught(process, DUMP_SIGNAL) or (
            python and not stacks and _send_if_caught(process, signal.SIGABRT)
        )
    time.sleep(_FAULTHANDLER_S)


def _py_spy_dump(py_spy: str, pid: int) -> tuple[str, str]:
    """Return the stacks and "", or "" and why there are none."""
    try:
        done = subprocesses.run([py_spy, "dump", "--pid", str(pid)], timeout_s=_PY_SPY_TIMEOUT_S)
    except PitError as error:
        return "", f"py-spy: {error}\n"
    return (done.stdout, "") if done.code == 0 else ("", f"py-spy: {done.stderr.strip()}\n")


def _process_state(pid: int) -> str:
    """Return a process's state and wait channel, all that is known of a process blocked in the kernel."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return "\n".join(line for line in lines if line.startswith("State:")) + f" in {_wchan(pid)}\n"
    except OSError:
        return "the process has ended\n"


def _wchan(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/wchan").read_text() or "?"
    except OSError:
        return "?"


def _is_python(pid: int) -> bool:
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False


def _send_if_caught(pid: int, number: int) -> bool:
    """Send a signal to a process that catches it. Return False if it does not."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
        if not int(caught, 16) >> (number - 1) & 1:
            return False
        os.kill(pid, number)
    except OSError:
        return False
    return True


def _process_tree(pid: int) -> list[int]:
    """Return a process and all its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            children.setdefault(parent, []).append(int(path.name))
    pids = [pid]
    for parent in pids:
        pids += sorted(children.get(parent, []))
    return pids


if __name__ == "__main__":
    dump_here(Path(sys.argv[1]), os.environ.get("SLURMD_NODENAME", os.uname().nodename))
