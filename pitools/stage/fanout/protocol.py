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
HERE, NOT_YET, GONE = 1, 2, 3
_WELCOME, _BUSY = b"\1", b"\2"


class Refused(Exception):
    """The other side is not who it should be, or speaks another protocol."""


class Busy(Exception):
    """The other side is who it should be, and has no place for another connection."""


class Request(NamedTuple):
    """What a client asks: `GET` with file, offset and length, or `STATE` with 1 or 0 as the file."""

    kind: int
    file: int
    offset: int = 0
    length: int = 0


def greet(connection: socket.socket, key: bytes, me: int, node: int, deadline: float) -> None:
    """Client: make sure that this is `node` of our group, and prove to be `me`. Raises Refused, Busy, OSError."""
    ours = secrets.token_bytes(_NONCE)
    send(connection, _HELLO.pack(MAGIC, me, node, ours), deadline)
    theirs, proof = _CHALLENGE.unpack(receive(connection, _CHALLENGE.size, deadline))
    if not hmac.compare_digest(proof, _proof(key, b"server", me, node, ours, theirs)):
        raise Refused("not the node that was looked for")
    send(connection, _proof(key, b"client", me, node, ours, theirs), deadline)
    if (answer := receive(connection, 1, deadline)) == _BUSY:
        raise Busy
    if answer != _WELCOME:
        raise Refused("no welcome")


def meet(connection: socket.socket, key: bytes, me: int, nodes: int, deadline: float) -> int:
    """Server: the number of the node that has connected; `welcome` it then. Raises Refused, OSError."""
    magic, client, wanted, theirs = _HELLO.unpack(receive(connection, _HELLO.size, deadline))
    if magic != MAGIC or wanted != me or client >= nodes or client == me:
        raise Refused("not for us")
    ours = secrets.token_bytes(_NONCE)
    send(connection, _CHALLENGE.pack(ours, _proof(key, b"server", client, me, theirs, ours)), deadline)
    proof = receive(connection, _PROOF, deadline)
    if not hmac.compare_digest(proof, _proof(key, b"client", client, me, theirs, ours)):
        raise Refused("it does not know the secret")
    return int(client)


def welcome(connection: socket.socket, deadline: float, *, busy: bool) -> None:
    """Server: the last word of a greeting. Raises OSError."""
    send(connection, _BUSY if busy else _WELCOME, deadline)


def ask(connection: socket.socket, request: Request, deadline: float) -> tuple[int, int]:
    """Client: send a request; (kind of answer, its number). Raises OSError, and Refused for what is no answer."""
    send(connection, _REQUEST.pack(*request), deadline)
    kind, number = _ANSWER.unpack(receive(connection, _ANSWER.size, deadline))
    if kind not in (HERE, NOT_YET, GONE):
        raise Refused("no answer of ours")
    return kind, number


def next_request(connection: socket.socket, idle_s: float, rest_s: float) -> Request | None:
    """Server: the next request, or None at the end. It may take idle_s to begin, and rest_s to be complete."""
    connection.settimeout(idle_s)
    if not (first := connection.recv(1)):
        return None
    rest = receive(connection, _REQUEST.size - 1, time.monotonic() + rest_s)
    return Request(*_REQUEST.unpack(first + rest))


def answer(connection: socket.socket, kind: int, number: int, deadline: float) -> None:
    """Server: the head of an answer. Raises OSError."""
    send(connection, _ANSWER.pack(kind, number), deadline)


def send(connection: socket.socket, data: bytes, deadline: float) -> None:
    """Send all by the deadline. Raises OSError."""
    connection.settimeout(_left(deadline))
    connection.sendall(data)


def receive(connection: socket.socket, size: int, deadline: float) -> bytes:
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
