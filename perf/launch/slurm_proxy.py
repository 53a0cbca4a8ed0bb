"""A TCP proxy between Slurm's commands and slurmctld on loopback, which loses, delays and repeats what it carries.

Only submissions meet faults; everything else passes. A frame is 4 bytes of length and a header that begins with
version, flags and message type, 2 bytes each (Slurm 22.05 and later).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

SUBMIT = 4003
FAULTS = {
    "": "none",
    "drop": "the controller takes the job, and its answer is lost",
    "late": "the controller takes the job, and its answer comes when sbatch has given up",
    "slow": "the request reaches the controller when sbatch has given up",
    "twice": "the answer comes twice",
    "half": "the controller takes the job, and half of its answer comes",
    "cut": "the connection breaks in the middle of the request",
    "refuse": "connections are refused for a while",
}


class SlurmProxy:
    """A proxy that runs until it is closed. fault: asked for each submission, with its number from 0; a key of FAULTS.

    late_s: how long an answer or a request is held back. refuse_s: how long nobody is let in.
    """

    def __init__(
        self, upstream: int, fault: Callable[[int], str], *, late_s: float = 4.0, refuse_s: float = 2.0
    ) -> None:
        self.upstream, self.fault, self.late_s, self.refuse_s = upstream, fault, late_s, refuse_s
        self.calls: Counter[int] = Counter()  # by message type
        self.struck: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._is_open = True
        self._server = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = int(self._server.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def conf(self, real: Path, path: Path, **changes: object) -> Path:
        """Write a slurm.conf for clients of this proxy: another's, less what `changes` says."""
        changes = {"SlurmctldPort": self.port, **changes}
        lines = [line for line in real.read_text().splitlines() if line.split("=")[0] not in changes]
        path.write_text("\n".join([*(f"{key}={value}" for key, value in changes.items()), *lines]) + "\n")
        return path

    def close(self) -> None:
        """Let nobody in any more. What is under way ends by itself."""
        self._is_open = False
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(10)

    def __enter__(self) -> SlurmProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while self._is_open:
            try:
                client, _ = self._server.accept()
            except OSError:
                time.sleep(0.01)
                continue
            threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _refuse(self) -> None:
        """Have nobody listen on the port for a while."""
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        time.sleep(self.refuse_s)
        while self._is_open:
            with contextlib.suppress(OSError):
                server.bind(("127.0.0.1", self.port))
                server.listen(256)
                self._server = server
                return
            time.sleep(0.01)

    def _forward(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, EOFError):
            request = _frame(client)
            kind = struct.unpack_from("!HHH", request, 4)[2]
            with self._lock:
                number = self.calls[kind]
                self.calls[kind] += 1
                fault = self.fault(number) if kind == SUBMIT else ""
                self.struck[fault] += kind == SUBMIT
            if fault == "refuse":
                _reset(client)
                with self._lock:
                    self._refuse()
                return
            if fault == "slow":
                time.sleep(self.late_s)
            with socket.create_connection(("127.0.0.1", self.upstream)) as server:
                if fault == "cut":
                    server.sendall(request[: len(request) // 2])
                    _reset(client)
                    return
                server.sendall(request)
                self._answer(client, server, fault)

    def _answer(self, client: socket.socket, server: socket.socket, fault: str) -> None:
        if fault in ("", "slow"):
            for piece in _pieces(server):
                client.sendall(piece)
            return
        answer = _frame(server)
        if fault == "late":
            time.sleep(self.late_s)
        if fault != "drop":
            client.sendall({"twice": answer * 2, "half": answer[: len(answer) // 2]}.get(fault, answer))


def _reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def _frame(stream: socket.socket) -> bytes:
    head = _exactly(stream, 4)
    return head + _exactly(stream, struct.unpack("!I", head)[0])


def _exactly(stream: socket.socket, count: int) -> bytes:
    actual = b""
    while len(actual) < count:
        piece = stream.recv(count - len(actual))
        if not piece:
            raise EOFError
        actual += piece
    return actual


def _pieces(stream: socket.socket) -> Iterator[bytes]:
    while piece := stream.recv(1 << 16):
        yield piece
