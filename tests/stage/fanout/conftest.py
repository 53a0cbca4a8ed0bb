from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pitools.stage.fanout.group import Group, find_group
from pitools.stage.sources.find import load_version

NODE = Path(__file__).with_name("fanout_node.py")
# Nodes of a test fail fast; the rates are of a machine that runs all of them on two cores.
TIMEOUTS = {
    "answer_s": 1.0,
    "long_poll_s": 0.2,
    "stall_s": 1.0,
    "startup_s": 3.0,
    "peer_timeout_s": 2.0,
    "back_off_s": 30.0,
    "linger_s": 20.0,
    "min_bytes_per_s": 1 << 10,
}
# The product's own, which a busy machine does not exhaust: for tests in which no node fails.
UNHURRIED: dict[str, float] = {}


class Origin(socketserver.ThreadingTCPServer):
    """A source behind one slow link: all connections share a token bucket. served: bytes it has given."""

    daemon_threads, allow_reuse_address, request_queue_size = True, True, 128

    def __init__(self, folder: Path, bytes_per_s: float) -> None:
        self.folder, self.rate = folder, bytes_per_s
        self.served, self.by_file = 0, dict[str, int]()
        self._due, self._lock = time.monotonic(), threading.Lock()
        super().__init__(("127.0.0.1", 0), _Answer)

    def take(self, path: str, count: int) -> None:
        with self._lock:
            self.served += count
            self.by_file[path] = self.by_file.get(path, 0) + count
            self._due = max(self._due, time.monotonic()) + count / self.rate
            due = self._due
        time.sleep(max(0.0, due - time.monotonic()))


class _Answer(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            for line in self.rfile:
                path, offset, length = json.loads(line)
                file = self.server.folder / path
                if not length:
                    self.wfile.write(b"%d\n" % (file.stat().st_size if file.exists() else -1))
                    continue
                with file.open("rb") as opened:
                    opened.seek(offset)
                    data = opened.read(length)
                self.server.take(path, len(data))
                self.wfile.write(b"%d\n" % len(data) + data)


class Nodes:
    """Real processes, one a node, each with a root of its own."""

    def __init__(self, tmp_path: Path, data: Path, origin: Origin, count: int) -> None:
        self.tmp_path, self.data, self.origin, self.count = tmp_path, data, origin, count
        self.names = [f"n{number}" for number in range(count)]
        self.timeouts = dict(TIMEOUTS)
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PIT_", "SLURM_"))},
            "PIT_JOB_SECRET": secrets.token_hex(16),
            "PIT_FANOUT_JOB": secrets.token_hex(4),
            "PIT_FANOUT_NODES": ",".join(f"{name}=127.0.0.1" for name in self.names),
        }
        self.processes: dict[str, subprocess.Popen] = {}

    def root(self, name: str) -> Path:
        return self.tmp_path / "nodes" / name

    def start(
        self, *names: str, env: dict[str, str] | None = None, through: tuple[str, ...] = (), **settings: object
    ) -> None:
        """through: the words of a program that runs the node's."""
        for name in names:
            values = {
                "data": str(self.data),
                "root": str(self.root(name)),
                "origin": self.origin.server_address[1],
                "workers": 1,
                "threads": 3,
                "block": 1 << 18,
                "lies": False,
                "timeouts": self.timeouts,
                **settings,
            }
            file = self.tmp_path / f"{name}.json"
            file.write_text(json.dumps(values))
            self.processes[name] = subprocess.Popen(
                [*through, sys.executable, str(NODE), str(file)],
                env={**self.env, **(env or {}), "PIT_FANOUT_NODE": name},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Kill a node's parent; its children die with it."""
        self.processes[name].kill()

    def stop(self, name: str) -> None:
        """Halt all of a node's processes where they are: its ports still accept."""
        os.killpg(self.processes[name].pid, signal.SIGSTOP)

    def group(self, name: str) -> Group:
        return find_group({**self.env, "PIT_FANOUT_NODE": name})

    def finish(self, *names: str, timeout_s: float = 60) -> dict[str, dict]:
        """What each node received, once it has ended well."""
        actual = {}
        for name in names or self.names:
            out, err = self.processes[name].communicate(timeout=timeout_s)
            assert (self.processes[name].returncode, err) == (0, ""), f"{name}: {err}"
            actual[name] = json.loads(out)
        return actual

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 20) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.005)

    def is_right(self, name: str) -> bool:
        """Whether a node has every file, byte for byte."""
        dataset = load_version(self.data)
        place = self.root(name) / "objects" / dataset.version
        return all(
            (place / entry.path).read_bytes() == (self.data / entry.path).read_bytes()
            for entry in dataset.manifest.files
        )

    def close(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def nodes(tmp_path: Path, make_dataset) -> Iterator[Callable[..., Nodes]]:
    """Makes a set, an origin that serves it at a rate, and nodes that are not started yet."""
    with contextlib.ExitStack() as stack:

        def make(files: dict[str, bytes], *, count: int = 4, bytes_per_s: float = 50e6) -> Nodes:
            data = make_dataset(files)
            origin = stack.enter_context(Origin(data, bytes_per_s))
            stack.callback(origin.shutdown)
            threading.Thread(target=origin.serve_forever, args=(0.01,), daemon=True).start()
            created = Nodes(tmp_path, data, origin, count)
            stack.callback(created.close)
            return created

        yield make


@pytest.fixture
def free_port() -> Callable[[], int]:
    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return find
