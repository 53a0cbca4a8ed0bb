"""The protocol between two nodes: handshake and messages. Sizes are fixed, integers are in network byte order; no file
path is sent.

    client                                    server
    HELLO  magic, its rank, the server's,     CHALLENGE  server's nonce, the server's proof
           client's nonce
    PROOF  the client's proof                 WELCOME or BUSY
    then any number of requests:
    GET    file, offset, length               AVAILABLE n, then n bytes | NOT_YET bytes it has received | NOT_PRESENT
    STATE  1 finished, 0 not                  AVAILABLE 1 finished, 0 not

A proof is an HMAC over both ranks and both nonces. Its key is known to this group only, and valid for one dataset
version. Nonces are new for each connection, so a recorded proof cannot be replayed; the two directions differ, so a
proof cannot be reflected. A proof authenticates the peer, not the later packets: the receiver compares every file with
the manifest.
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
    """The peer failed authentication, or speaks another protocol."""


class PeerBusy(Exception):
    """The peer is authentic, and has no free slot for another connection."""


class PeerRequest(NamedTuple):
    """A client's request: `GET` with file, offset and length, or `STATE` with 1 or 0 as the file."""

    kind: int
    file: int
    offset: int = 0
    length: int = 0


def client_handshake(connection: socket.socket, key: bytes, rank: int, node: int, deadline: float) -> None:
    """Authenticate the server as rank `node` of this group, and this client as `rank`.

    Raises HandshakeRefused, PeerBusy, OSError.
    """
    client_nonce = secrets.token_bytes(_NONCE)
    send_all(connection, _HELLO.pack(MAGIC, rank, node, client_nonce), deadline)
    server_nonce, proof = _CHALLENGE.unpack(receive_exactly(connection, _CHALLENGE.size, deadline))
    if not hmac.compare_digest(proof, _proof(key, b"server", rank, node, client_nonce, server_nonce)):
        raise HandshakeRefused(f"the peer did not prove to be rank {node}")
    send_all(connection, _proof(key, b"client", rank, node, client_nonce, server_nonce), deadline)
    if (answer := receive_exactly(connection, 1, deadline)) == _BUSY:
        raise PeerBusy
    if answer != _WELCOME:
        raise HandshakeRefused(f"unexpected reply to the handshake: {answer!r}")


def server_handshake(connection: socket.socket, key: bytes, rank: int, nodes: int, deadline: float) -> int:
    """Authenticate a client and return its rank; call `finish_handshake` next. Raises HandshakeRefused, OSError."""
    magic, client, server, client_nonce = _HELLO.unpack(receive_exactly(connection, _HELLO.size, deadline))
    if magic != MAGIC or server != rank or client >= nodes or client == rank:
        raise HandshakeRefused(f"rank {client} asks for rank {server}: not a client of rank {rank}")
    server_nonce = secrets.token_bytes(_NONCE)
    send_all(
        connection,
        _CHALLENGE.pack(server_nonce, _proof(key, b"server", client, rank, client_nonce, server_nonce)),
        deadline,
    )
    proof = receive_exactly(connection, _PROOF, deadline)
    if not hmac.compare_digest(proof, _proof(key, b"client", client, rank, client_nonce, server_nonce)):
        raise HandshakeRefused(f"the client did not prove to be rank {client}")
    return int(client)


def finish_handshake(connection: socket.socket, deadline: float, *, busy: bool) -> None:
    """Send the client the result of its handshake. Raises OSError."""
    send_all(connection, _BUSY if busy else _WELCOME, deadline)


def send_request(connection: socket.socket, request: PeerRequest, deadline: float) -> tuple[int, int]:
    """Send a request; return the kind and the number of the reply. Raises OSError, and HandshakeRefused for an unknown
    kind.
    """
    send_all(connection, _REQUEST.pack(*request), deadline)
    kind, number = _ANSWER.unpack(receive_exactly(connection, _ANSWER.size, deadline))
    if kind not in (AVAILABLE, NOT_YET, NOT_PRESENT):
        raise HandshakeRefused(f"unknown kind of reply: {kind}")
    return kind, number


def receive_request(connection: socket.socket, idle_s: float, rest_s: float) -> PeerRequest | None:
    """Receive the next request; None when the client has closed.

    idle_s: seconds until its first byte. rest_s: seconds from then until it is complete. Raises OSError.
    """
    connection.settimeout(idle_s)
    if not (head := connection.recv(1)):
        return None
    rest = receive_exactly(connection, _REQUEST.size - 1, time.monotonic() + rest_s)
    return PeerRequest(*_REQUEST.unpack(head + rest))


def send_answer(connection: socket.socket, kind: int, number: int, deadline: float) -> None:
    """Send the head of a reply. Raises OSError."""
    send_all(connection, _ANSWER.pack(kind, number), deadline)


def send_all(connection: socket.socket, data: bytes, deadline: float) -> None:
    """Send all of `data` by the deadline. Raises OSError."""
    connection.settimeout(_remaining_s(deadline))
    connection.sendall(data)


def receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Receive exactly `size` bytes by the deadline. Raises OSError."""
    data = b""
    while len(data) < size:
        connection.settimeout(_remaining_s(deadline))
        if not (part := connection.recv(size - len(data))):
            raise ConnectionResetError("the peer closed the connection")
        data += part
    return data


def _proof(key: bytes, role: bytes, client: int, server: int, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(key, role + struct.pack("!HH", client, server) + client_nonce + server_nonce, "sha256")


def _remaining_s(deadline: float) -> float:
    if (remaining_s := deadline - time.monotonic()) <= 0:
        raise TimeoutError("the peer's deadline has passed")
    return remaining_s
