"""The protocol between two nodes: who may speak, and the messages. Fixed sizes, network order; no path travels.

    client                                    server
    HELLO  magic, its number, the server's,   CHALLENGE  server's nonce, proof that it is that server
           client's nonce
    PROOF  that it is that client             WELCOME or BUSY
    then as often as wanted
    GET    file, offset, length               HERE  n, then n bytes  |  NOT_YET  bytes it has received  |  GONE
    STATE  1 finished, 0 not                  HERE  1 finished, 0 not

A proof is an HMAC over both numbers and both nonces with a key that only this group has, for one dataset version. The
nonces are new for each connection, so that nothing that was overheard serves again; the two directions differ, so that
a proof cannot be sent back. It says who is there, not that nobody rewrites packets on the way: what files hold is
compared with the manifest by whoever receives them.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from typing import NamedTuple

MAGIC = b"pitfan/1"
_NONCE = 16
_HELLO = struct.Struct("!8sHH16s")
_CHALLENGE = struct.Struct("!16s32s")
_PROOF = 32
_REQUEST = struct.Struct("!BIQQ")
_ANSWER = struct.Struct("!BQ")
GET, STATE = 1, 2
AVAILABLE, NOT_YET, NOT_PRESENT = 1, 2, 3
_WELCOME, _BUSY = b"\1", b"\2"


class HandshakeRefused(Exception):
    """The other side is not who it should be, or speaks another protocol."""


class PeerBusy(Exception):
    """The other side is who it should be, and has no place for another connection."""


class PeerRequest(NamedTuple):
    """What a client asks: `GET` with file, offset and length, or `STATE` with 1 or 0 as the file."""

    kind: int
    file: int
    offset: int = 0
    length: int = 0


def client_handshake(connection: socket.socket, key: bytes, rank: int, node: int, deadline: float) -> None:
    """Client: make sure that this is `node` of our group, and prove to be `rank`. Raises Refused, Busy, OSError."""
    ours = secrets.token_bytes(_NONCE)
    send_all(connection, _HELLO.pack(MAGIC, rank, node, ours), deadline)
    theirs, proof = _CHALLENGE.unpack(receive_exactly(connection, _CHALLENGE.size, deadline))
    if not hmac.compare_digest(proof, _proof(key, b"server", rank, node, ours, theirs)):
        raise HandshakeRefused("not the node that was looked for")
    send_all(connection, _proof(key, b"client", rank, node, ours, theirs), deadline)
    if (answer := receive_exactly(connection, 1, deadline)) == _BUSY:
        raise PeerBusy
    if answer != _WELCOME:
        raise HandshakeRefused("no welcome")


def server_handshake(connection: socket.socket, key: bytes, rank: int, nodes: int, deadline: float) -> int:
    """Server: the number of the node that has connected; `finish_handshake` it then. Raises Refused, OSError."""
    magic, client, wanted, theirs = _HELLO.unpack(receive_exactly(connection, _HELLO.size, deadline))
    if magic != MAGIC or wanted != rank or client >= nodes or client == rank:
        raise HandshakeRefused("not for us")
    ours = secrets.token_bytes(_NONCE)
    send_all(connection, _CHALLENGE.pack(ours, _proof(key, b"server", client, rank, theirs, ours)), deadline)
    proof = receive_exactly(connection, _PROOF, deadline)
    if not hmac.compare_digest(proof, _proof(key, b"client", client, rank, theirs, ours)):
        raise HandshakeRefused("it does not know the secret")
    return int(client)


def finish_handshake(connection: socket.socket, deadline: float, *, busy: bool) -> None:
    """Server: the last word of a greeting. Raises OSError."""
    send_all(connection, _BUSY if busy else _WELCOME, deadline)


def send_request(connection: socket.socket, request: PeerRequest, deadline: float) -> tuple[int, int]:
    """Client: send a request; (kind of answer, its number). Raises OSError, and Refused for what is no answer."""
    send_all(connection, _REQUEST.pack(*request), deadline)
    kind, number = _ANSWER.unpack(receive_exactly(connection, _ANSWER.size, deadline))
    if kind not in (AVAILABLE, NOT_YET, NOT_PRESENT):
        raise HandshakeRefused("no answer of ours")
    return kind, number


def receive_request(connection: socket.socket, idle_s: float, rest_s: float) -> PeerRequest | None:
    """Server: the next request, or None at the end. It may take idle_s to begin, and rest_s to be complete."""
    connection.settimeout(idle_s)
    if not (first := connection.recv(1)):
        return None
    rest = receive_exactly(connection, _REQUEST.size - 1, time.monotonic() + rest_s)
    return PeerRequest(*_REQUEST.unpack(first + rest))


def send_answer(connection: socket.socket, kind: int, number: int, deadline: float) -> None:
    """Server: the head of an answer. Raises OSError."""
    send_all(connection, _ANSWER.pack(kind, number), deadline)


def send_all(connection: socket.socket, data: bytes, deadline: float) -> None:
    """Send all by the deadline. Raises OSError."""
    connection.settimeout(_left(deadline))
    connection.sendall(data)


def receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Exactly `size` bytes by the deadline, however they trickle in. Raises OSError."""
    data = b""
    while len(data) < size:
        connection.settimeout(_left(deadline))
        if not (part := connection.recv(size - len(data))):
            raise ConnectionResetError("closed by the other side")
        data += part
    return data


def _proof(key: bytes, role: bytes, client: int, server: int, clients: bytes, servers: bytes) -> bytes:
    return hmac.digest(key, role + struct.pack("!HH", client, server) + clients + servers, "sha256")


def _left(deadline: float) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("no answer in time")
    return left
