"""Where every rank is: the stack of each of its threads, in `<attempt>/stacks/<rank>.txt`.

    python -m pitools.launch.probes.stacks ATTEMPT     on each node, in a step beside the ranks': the node's own ranks

Two ways at once, because each can fail. py-spy, where it is installed, reads a process from outside, which needs the
right to trace it. faulthandler writes from inside: every rank registers it for SIGQUIT (`register_handler`), the signal
by which the JVM and Go tell their stacks too; Slurm, NCCL, JAX and torch use others, and it is sent only to processes
that catch it.
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
_FAULTHANDLER_S = 0.3  # in which faulthandler has written


def register_handler(attempt: Path, rank: int) -> None:
    """Let this process write its stacks to the attempt's folder at SIGNAL, and to its log when it dies of a fault."""
    try:
        faulthandler.enable()
        (attempt / "stacks").mkdir(mode=0o755, exist_ok=True)
        # Open for as long as the process lives: a handler in C writes to the descriptor, whatever Python is doing.
        file = open(attempt / "stacks" / f"{rank}.txt", "ab", buffering=0, opener=open_0644)  # noqa: SIM115
        faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True, chain=False)
        _OPEN_FILES.append(file)
    except (OSError, ValueError, AttributeError) as error:  # stderr closed, or a platform without it
        print(f"pit: no stacks of this rank: {error}", file=sys.stderr)


_OPEN_FILES: list[object] = []  # nobody else holds the file


def dump_all_nodes(attempt: Path, node_list: str) -> None:
    """Collect the stacks of all ranks of this job, on all its nodes, or give up after 20 s."""
    python = os.environ.get("PIT_PYTHON", sys.executable)
    try:
        run_on_nodes([python, "-m", "pitools.launch.probes.stacks", str(attempt)], node_list, _ALL_NODES_S)
    except PitError as error:
        print(f"pit: not all stacks: {error}", file=sys.stderr)


def dump_here(attempt: Path, node: str) -> list[int]:
    """Collect the stacks of this node's ranks; returns their numbers."""
    found = {rank.rank: rank.pid for rank in ranks_on_node(attempt, node) if _is_rank_process(rank, attempt)}
    (attempt / "stacks").mkdir(mode=0o755, exist_ok=True)
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(lambda rank: _dump_rank(attempt, rank, found[rank]), found))
    return sorted(found)


def _is_rank_process(rank: run_folder.RankRecord, attempt: Path) -> bool:
    """Whether the process of this number is that rank, and not another's that was given the number after it."""
    import psutil  # not wanted by a rank, which takes `register_handler` from here

    try:
        environ = psutil.Process(rank.pid).environ()
    except (psutil.Error, OSError):
        return False
    return (environ.get("PIT_ATTEMPT_DIR"), environ.get("SLURM_PROCID")) == (str(attempt), str(rank.rank))


def _dump_rank(attempt: Path, rank: int, pid: int) -> None:
    into = attempt / "stacks" / f"{rank}.txt"
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    for process in _process_tree(pid):
        head = f"\n== rank {rank}, process {process}, {timestamps.now_rfc3339()}\n"
        python = _is_python(process)
        text = _py_spy_dump(spy, process) if spy and python else ""
        with open(into, "a", opener=open_0644) as file:
            file.write(head + (text or _process_state(process)))
        # Of a program of a command's nobody registered a handler, but PYTHONFAULTHANDLER writes into its log, and then
        # ends it, which is about to be done anyway.
        _ = _send_if_caught(process, DUMP_SIGNAL) or (python and not text and _send_if_caught(process, signal.SIGABRT))
    time.sleep(_FAULTHANDLER_S)


def _py_spy_dump(spy: str, pid: int) -> str:
    try:
        done = subprocesses.run([spy, "dump", "--pid", str(pid)], timeout_s=_PY_SPY_TIMEOUT_S)
    except PitError as error:
        return f"py-spy: {error}\n"
    return done.stdout if done.code == 0 else f"py-spy: {done.stderr.strip()}\n"


def _process_state(pid: int) -> str:
    """What the kernel says of a process: of one that sleeps in a file system or a driver, this is all there is."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return "\n".join(line for line in lines if line.startswith("State:")) + f" in {_wchan(pid)}\n"
    except OSError:
        return "it has ended\n"


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
    """Send a signal to a process that catches it; whether it does."""
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
    """A process and all that it started, oldest first."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            children.setdefault(parent, []).append(int(path.name))
    found = [pid]
    for one in found:
        found += sorted(children.get(one, []))
    return found


if __name__ == "__main__":
    dump_here(Path(sys.argv[1]), os.environ.get("SLURMD_NODENAME", os.uname().nodename))
