"""Find rank 0 of this job from its other ranks, and never rank 0 of another job.

Every rank has its number from Slurm and rank 0's address from the job script; only the port is uncertain. Two jobs on
one node may choose the same port; gRPC listens with SO_REUSEPORT, so both succeed, and ranks of one job join the other.
So rank 0 first binds a *guard* port, exclusively, until it ends, and answers there only ranks that prove possession of
the job's secret. The framework's own port is the next one; the guard's answer contains it.

    candidates   at most 64 pairs of ports (guard, framework); job id, step and restart determine the first pair
    rank 0       takes the first pair with both ports free
    other ranks  try the same pairs until a guard proves the secret, at a falling rate: first 4 pairs, 8 after 0.1 s,
                 and so on to 64 pairs every 1 to 2 s, so that waiting ranks cause little load

Every message is one line. Both sides prove the secret by an HMAC over the other's challenge, the guard's also over
its answer; the secret is never sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import random
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from pitools.core.errors import ClusterError, Unreachable

_LINE_LIMIT = 1024
_ANSWER_TIMEOUT_S = 5.0  # for one guard's complete answer; another program's port may accept and never answer
_MAX_PORT_PAIRS = 64  # more than the jobs of one node
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0


class NoFreePorts(ClusterError):
    """No pair of the site's ports is free on rank 0's node."""


class JobIdentity(NamedTuple):
    """The identity of one start of one job, shared by its ranks and no other job's.

    key: text that is unique per job, step and restart. secret: in hex. ports: first and last port to use.
    """

    key: str
    secret: str
    world_size: int
    ports: tuple[int, int]


def candidate_ports(job: JobIdentity) -> Iterator[tuple[int, int]]:
    """Yield at most 64 different pairs (guard port, framework port); a hash of the job's key selects the first."""
    first, last = job.ports
    pairs = (last - first + 1) // 2
    start = int.from_bytes(hashlib.sha256(job.key.encode()).digest()[:8], "big") % pairs
    for step in range(min(pairs, _MAX_PORT_PAIRS)):
        guard = first + 2 * ((start + step) % pairs)
        yield guard, guard + 1


class RendezvousServer:
    """Hold the guard port on rank 0 until `close`, and answer the other ranks in threads. Raises NoFreePorts."""

    def __init__(self, job: JobIdentity, address: str) -> None:
        self._job = job
        self._listener, self.port, self.framework_port = _bind_ports(job, address)
        self.coordinator = _join_address(address, self.framework_port)
        self._joined: set[int] = set()
        self._all_joined = threading.Event()
        threading.Thread(target=self._serve, name="pit-guard", daemon=True).start()

    def wait_for_ranks(self, timeout_s: float) -> None:
        """Wait until every other rank has connected. Raises Unreachable naming the missing ranks."""
        if self._job.world_size > 1 and not self._all_joined.wait(timeout_s):
            missing = sorted(set(range(1, self._job.world_size)) - self._joined)
            problem = f"rendezvous timed out ({timeout_s:g} s); missing ranks: {missing}"
            raise Unreachable(problem, where=f"rank 0, port {self.port}", hint="see the logs of those ranks")

    def close(self) -> None:
        """Release the port."""
        # A thread in accept() keeps a closed socket listening; shutdown wakes the thread.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            # One thread per connection, so that a silent foreign client delays no rank.
            threading.Thread(target=self._handle_connection, args=(connection,), daemon=True).start()

    def _handle_connection(self, connection: socket.socket) -> None:
        # A foreign client, a port scanner or a rank that disconnects must not fail this job.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), connection:
            self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        challenge = secrets.token_hex(16)
        _send(connection, {"challenge": challenge}, deadline)
        hello = _receive(connection, deadline)
        rank = int(hello["rank"])
        if not _is_proof(self._job.secret, f"rank {rank} {challenge}", hello["proof"]):
            return
        proof = _hmac_proof(self._job.secret, f"guard {rank} {hello['challenge']} {self.coordinator}")
        _send(connection, {"proof": proof, "coordinator": self.coordinator}, deadline)
        self._joined.add(rank)
        if len(self._joined) >= self._job.world_size - 1:
            self._all_joined.set()


def find_coordinator(job: JobIdentity, address: str, rank: int, *, timeout_s: float) -> str:
    """Return the coordinator's `address:port` from the guard on rank 0 that proves this job's secret.

    For every rank but 0. Each round tries more candidate ports, after a longer pause. Raises Unreachable on time-out.
    """
    deadline = time.monotonic() + timeout_s
    pairs = list(candidate_ports(job))
    count, pause_s = 4, _FIRST_PAUSE_S
    while time.monotonic() < deadline:
        for guard_port, _ in pairs[:count]:
            coordinator = _query_server(
                job, address, guard_port, rank, min(deadline, time.monotonic() + _ANSWER_TIMEOUT_S)
            )
            if coordinator:
                return coordinator
        count = min(count * 2, len(pairs))
        # Ranks start together: the jitter spreads their requests to rank 0.
        jittered_s = pause_s * random.uniform(0.5, 1.0)  # noqa: S311 (nothing secret)
        time.sleep(max(0.0, min(jittered_s, deadline - time.monotonic())))
        pause_s = min(pause_s * 2, _MAX_PAUSE_S)
    problem = f"rendezvous timed out ({timeout_s:g} s): rank {rank} found no guard of its job at {address}"
    raise Unreachable(problem, where=f"ports {job.ports[0]}-{job.ports[1]}", hint="see the log of rank 0")


def _bind_ports(job: JobIdentity, address: str) -> tuple[socket.socket, int, int]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for guard_port, framework_port in candidate_ports(job):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # On every interface, without SO_REUSEADDR and SO_REUSEPORT: binding fails if any process has the port.
            listener.bind(("", guard_port))
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(("", framework_port))
            listener.listen(256)
        except OSError:
            listener.close()
            continue
        return listener, guard_port, framework_port
    where = f"ports {job.ports[0]}-{job.ports[1]}"
    raise NoFreePorts("no free pair of ports", where=where, hint="widen network.ports in the site file")


def _query_server(job: JobIdentity, address: str, port: int, rank: int, deadline: float) -> str:
    """Return the coordinator from the guard at this port; "" if it does not answer in time, or is of another job."""
    try:
        with socket.create_connection((address, port), timeout=_seconds_left(deadline)) as connection:
            greeting = _receive(connection, deadline)
            challenge = secrets.token_hex(16)
            proof = _hmac_proof(job.secret, f"rank {rank} {greeting['challenge']}")
            _send(connection, {"rank": rank, "challenge": challenge, "proof": proof}, deadline)
            answer = _receive(connection, deadline)
            coordinator = str(answer["coordinator"])
            is_same_job = _is_proof(job.secret, f"guard {rank} {challenge} {coordinator}", answer["proof"])
            return coordinator if is_same_job else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _hmac_proof(secret: str, text: str) -> str:
    return hmac.new(bytes.fromhex(secret), text.encode(), hashlib.sha256).hexdigest()


def _is_proof(secret: str, text: str, proof: object) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(_hmac_proof(secret, text).encode(), proof.encode())


def _seconds_left(deadline: float) -> float:
    """Return the seconds until a deadline. Raises TimeoutError if it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("no complete answer within the time-out")
    return seconds


def _send(connection: socket.socket, message: dict[str, Any], deadline: float) -> None:
    connection.settimeout(_seconds_left(deadline))
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, deadline: float) -> dict[str, Any]:
    data = b""
    while not data.endswith(b"\n"):
        # The deadline is for the complete line: a peer that sends single bytes gets no more time.
        connection.settimeout(_seconds_left(deadline))
        part = connection.recv(_LINE_LIMIT)
        if not part or len(data) > _LINE_LIMIT:
            raise ValueError("not a line of the rendezvous protocol")
        data += part
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("not a message of the rendezvous protocol")
    return message


def _join_address(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
