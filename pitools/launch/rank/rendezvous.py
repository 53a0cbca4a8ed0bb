"""Find rank 0 of this job from its other ranks, and never rank 0 of another job.

Slurm gives every rank its number and we give it rank 0's address; the port is what can go wrong. Two jobs on one node
may choose the same port, gRPC listens with SO_REUSEPORT so that both succeed, and the ranks of two jobs then join one
another. So rank 0 first holds a *guard* port, exclusively, for as long as it lives, and answers there to ranks that
prove they know the job's nonce. The framework's own port is the guard's neighbour, named in the guard's answer.

    candidates   64 pairs of ports (guard, framework) at most; job id, step and restart say where in the range
    rank 0       takes the first pair of which nobody else holds either port
    other ranks  walk the same pairs until a guard proves that it knows the nonce, at a falling rate: 4 connections at
                 once, 8 after 0.1 s, and so on to 64 every 1 to 2 s, so that ranks that wait load nobody

Every message is one line. Both sides prove the nonce by HMAC over the other's challenge; it never travels.
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
_ANSWER_TIMEOUT_S = 5.0  # one guard's whole answer; a port that accepts and then says nothing is not ours
_MAX_PORT_PAIRS = 64  # pairs: more than one node runs jobs that could be on them
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0


class NoFreePorts(ClusterError):
    """Every pair of the site's ports is taken where rank 0 runs."""


class JobIdentity(NamedTuple):
    """What all ranks of one start of one job know, and no other job does.

    key: text that differs per job, step and restart. nonce: hex secret. ports: first and last port that may be used.
    """

    key: str
    nonce: str
    world_size: int
    ports: tuple[int, int]


def candidate_ports(job: JobIdentity) -> Iterator[tuple[int, int]]:
    """Pairs (guard port, framework port) of the range, each once, 64 at most, starting where the job's key falls."""
    first, last = job.ports
    pairs = (last - first + 1) // 2
    start = int.from_bytes(hashlib.sha256(job.key.encode()).digest()[:8], "big") % pairs
    for step in range(min(pairs, _MAX_PORT_PAIRS)):
        guard = first + 2 * ((start + step) % pairs)
        yield guard, guard + 1


class RendezvousServer:
    """Hold the guard port on rank 0 until `close`, and answer the other ranks from a thread."""

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
            what = f"ranks {missing} did not reach rank 0 within {timeout_s:g} s"
            raise Unreachable(what, where=f"rank 0, port {self.port}", hint="see the logs of those ranks")

    def close(self) -> None:
        """Release the port."""
        # A thread that waits in accept() keeps a closed socket listening; shutting it down wakes the thread.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            # A thread each, so that a stranger who connects and says nothing delays nobody.
            threading.Thread(target=self._handle_connection, args=(connection,), daemon=True).start()

    def _handle_connection(self, connection: socket.socket) -> None:
        # A stranger, a port scanner, or a rank that went away is not this job's failure.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), connection:
            self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        challenge = secrets.token_hex(16)
        _send(connection, {"challenge": challenge}, deadline)
        hello = _receive(connection, deadline)
        rank = int(hello["rank"])
        if not _is_proof(self._job.nonce, f"rank {rank} {challenge}", hello["proof"]):
            return
        proof = _hmac_proof(self._job.nonce, f"guard {rank} {hello['challenge']}")
        _send(connection, {"proof": proof, "coordinator": self.coordinator}, deadline)
        self._joined.add(rank)
        if len(self._joined) >= self._job.world_size - 1:
            self._all_joined.set()


def find_coordinator(job: JobIdentity, address: str, rank: int, *, timeout_s: float) -> str:
    """Another rank's side: the coordinator's `address:port`, from the one guard that knows this job's nonce.

    Walks the candidate ports, more and after a longer pause each round, until the time is up. Raises Unreachable.
    """
    deadline = time.monotonic() + timeout_s
    pairs = list(candidate_ports(job))
    reach, pause_s = 4, _FIRST_PAUSE_S
    while time.monotonic() < deadline:
        for guard_port, _ in pairs[:reach]:
            coordinator = _query_server(
                job, address, guard_port, rank, min(deadline, time.monotonic() + _ANSWER_TIMEOUT_S)
            )
            if coordinator:
                return coordinator
        reach = min(reach * 2, len(pairs))
        # Ranks start together; the jitter spreads them, so that rank 0 is not asked by all at once.
        jittered_s = pause_s * random.uniform(0.5, 1.0)  # noqa: S311 (nothing secret)
        time.sleep(max(0.0, min(jittered_s, deadline - time.monotonic())))
        pause_s = min(pause_s * 2, _MAX_PAUSE_S)
    what = f"rank {rank} found no rank 0 of its own job at {address} within {timeout_s:g} s"
    raise Unreachable(what, where=f"ports {job.ports[0]}-{job.ports[1]}", hint="see the log of rank 0")


def _bind_ports(job: JobIdentity, address: str) -> tuple[socket.socket, int, int]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for guard_port, framework_port in candidate_ports(job):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # No SO_REUSEADDR and no SO_REUSEPORT, on every interface: binding fails if anybody at all is there.
            listener.bind(("", guard_port))
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(("", framework_port))
            listener.listen(256)
        except OSError:
            listener.close()
            continue
        return listener, guard_port, framework_port
    where = f"ports {job.ports[0]}-{job.ports[1]}"
    raise NoFreePorts("no free pair of ports", where=where, hint="widen network.ports of the site")


def _query_server(job: JobIdentity, address: str, port: int, rank: int, deadline: float) -> str:
    """What the guard at this port answers by the deadline, or "" when it is not this job's."""
    try:
        with socket.create_connection((address, port), timeout=_seconds_left(deadline)) as connection:
            greeting = _receive(connection, deadline)
            challenge = secrets.token_hex(16)
            proof = _hmac_proof(job.nonce, f"rank {rank} {greeting['challenge']}")
            _send(connection, {"rank": rank, "challenge": challenge, "proof": proof}, deadline)
            answer = _receive(connection, deadline)
            ours = _is_proof(job.nonce, f"guard {rank} {challenge}", answer["proof"])
            return str(answer["coordinator"]) if ours else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _hmac_proof(nonce: str, text: str) -> str:
    return hmac.new(bytes.fromhex(nonce), text.encode(), hashlib.sha256).hexdigest()


def _is_proof(nonce: str, text: str, proof: object) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(_hmac_proof(nonce, text).encode(), proof.encode())


def _seconds_left(deadline: float) -> float:
    """Seconds until a deadline. Raises TimeoutError when it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the whole answer did not come in time")
    return left


def _send(connection: socket.socket, message: dict[str, Any], deadline: float) -> None:
    connection.settimeout(_seconds_left(deadline))
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, deadline: float) -> dict[str, Any]:
    data = b""
    while not data.endswith(b"\n"):
        # The time is the whole line's: a peer that sends a byte now and then does not get more of it.
        connection.settimeout(_seconds_left(deadline))
        part = connection.recv(_LINE_LIMIT)
        if not part or len(data) > _LINE_LIMIT:
            raise ValueError("not a line of ours")
        data += part
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("not a message of ours")
    return message


def _join_address(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
