"""Processes that have JAX or torch imported from their first instant: forks of a server that did so once.

The imports cost a process seconds, and a test of ranks starts many. The server has one thread and no backend, so that a
fork of it is what a fresh process is after its imports; it ends as any does, or by the signal that it is sent.
The loops' own imports, in processes of their own, are those of tests/train/test_readme.py.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

IMPORTS = {
    "jax": ("pitools.train.jax_bc", "pitools.checkpoint.adapters.orbax_adapter", "jax.experimental.multihost_utils"),
    "torch": (
        "pitools.train.torch_bc",
        "pitools.checkpoint.adapters.dcp_adapter",
        "torch.distributed.tensor",
        "torch._dynamo",
    ),
}
FOREIGN = ("PIT_", "SLURM_", "JAX_", "XLA_", "CUDA_", "MASTER_", "OMP_", "NPROC", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def environment() -> dict[str, str]:
    """This environment without what a launcher sets, and of the machine one thread.

    torch's C++ part, which warns where a host has no name, says errors alone: it reads that as it is imported.
    """
    retained = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    one = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**retained, **one, "TORCH_CPP_LOG_LEVEL": "ERROR"}


class Fork:
    """One process of a server's, with subprocess.Popen's methods."""

    def __init__(self, server: Server, pid: int) -> None:
        self.pid, self._server = pid, server
        self.returncode: int | None = None
        self._end = os.pidfd_open(pid)  # until it is reaped the number is no other's

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or minus the signal's number. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(self._server.ask(reap=self.pid))
            os.close(self._end)
        return self.returncode

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._end, number)

    def kill(self) -> None:
        """With SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Server:
    """A process that forks; it ends with its last owner."""

    def __init__(self, framework: str) -> None:
        argv = [sys.executable, __file__, *IMPORTS[framework]]
        self._process = subprocess.Popen(argv, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, **request: object) -> int:
        """Its answer to one request."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, code: str, env: Mapping[str, str], out: Path) -> Fork:
        """A process that runs `code` as its main module in this environment; what it prints goes to `out`."""
        return Fork(self, self.ask(code=code, env=dict(env), out=str(out)))

    def end(self) -> None:
        """The server's end, which is not that of its forks."""
        with self._process as process:
            process.kill()


_running: dict[str, Server] = {}
_asking: list[object] = []


def servers() -> Iterator[Callable[[str], Server]]:
    """The body of a fixture for the session: gives the one server of a framework, and ends all after the last such."""

    def server(framework: str) -> Server:
        return _running.get(framework) or _running.setdefault(framework, Server(framework))

    _asking.append(server)
    yield server
    _asking.remove(server)
    while _running and not _asking:
        _running.popitem()[1].end()


def _serve() -> str:
    """Answer requests until one asks for a fork; return in that, with the code that it is to run."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    while line := requests.readline():
        request = json.loads(line)
        if "reap" in request:
            answer = os.waitpid(request["reap"], 0)[1]
        elif not (answer := os.fork()):
            break
        os.write(answers, b"%d\n" % answer)
    else:
        os._exit(0)
    requests.close()
    os.close(answers)
    for place, fd in ((os.devnull, 0), (request["out"], 1), (request["out"], 2)):
        own_part = os.open(place, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(own_part, fd)
        os.close(own_part)
    os.environ.clear()
    os.environ.update(request["env"])
    return str(request["code"])


if __name__ == "__main__":
    for _name in sys.argv[1:]:
        importlib.import_module(_name)
    assert len(os.listdir("/proc/self/task")) == 1
    exec(_serve(), {"__name__": "__main__"})
