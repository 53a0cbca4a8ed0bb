from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import pytest

from pitools.stage.fanout import protocol

KEY, OTHER = b"k" * 32, b"o" * 32


def soon(seconds: float = 1.0) -> float:
    return time.monotonic() + seconds


def served(action: Callable[[socket.socket], object]) -> tuple[socket.socket, list, threading.Thread]:
    """The client's end of a connection whose other end a thread serves; what that returned or raised."""
    client, server = socket.socketpair()
    actual: list = []

    def run() -> None:
        with server:
            try:
                actual.append(action(server))
            except (OSError, protocol.HandshakeRefused) as error:
                actual.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return client, actual, thread


def meeting(key: bytes = KEY, *, busy: bool = False) -> Callable[[socket.socket], int]:
    def action(server: socket.socket) -> int:
        node = protocol.server_handshake(server, key, 1, 4, soon())
        protocol.finish_handshake(server, soon(), busy=busy)
        return node

    return action


def test_two_nodes_of_a_group_know_each_other():
    """Both prove themselves, and the server learns which node it is."""
    client, result, thread = served(meeting())
    with client:
        protocol.client_handshake(client, KEY, 3, 1, soon())
        thread.join()
    assert result == [3]


@pytest.mark.parametrize("wrong", ["key", "server", "client", "itself"])
def test_a_stranger_is_refused_by_both_sides(wrong: str):
    """Another job's or version's key, and numbers that cannot be, end the greeting."""
    client, result, thread = served(meeting(OTHER if wrong == "key" else KEY))
    me = {"client": 4, "itself": 1}.get(wrong, 3)
    with client, pytest.raises((protocol.HandshakeRefused, OSError)):
        protocol.client_handshake(client, KEY, me, 2 if wrong == "server" else 1, soon())
    thread.join()
    # Of a greeting that cannot be the server refuses to give even a proof; of another key it hears nothing more.
    assert isinstance(result[0], OSError if wrong == "key" else protocol.HandshakeRefused)


def test_a_client_that_skips_its_proof_is_refused():
    """The server's own proof, sent back to it, is none: the directions differ."""
    client, result, thread = served(meeting())
    with client:
        client.sendall(protocol._HELLO.pack(protocol.MAGIC, 3, 1, b"n" * 16))
        _, proof = protocol._CHALLENGE.unpack(protocol.receive_exactly(client, protocol._CHALLENGE.size, soon()))
        client.sendall(proof)
        thread.join()
    assert isinstance(result[0], protocol.HandshakeRefused)


def test_a_replayed_greeting_is_refused():
    """Every byte of a greeting that went well, sent again, proves nothing: the server's nonce is another."""
    sent: list[bytes] = []

    class Spy:
        def __init__(self, real: socket.socket) -> None:
            self.real = real
            self.recv, self.settimeout = real.recv, real.settimeout

        def sendall(self, data: bytes) -> None:
            sent.append(data)
            self.real.sendall(data)

    client, result, thread = served(meeting())
    with client:
        protocol.client_handshake(Spy(client), KEY, 3, 1, soon())
        thread.join()
    assert result == [3]
    client, result, thread = served(meeting())
    with client:
        client.sendall(b"".join(sent))
        thread.join()
    assert isinstance(result[0], protocol.HandshakeRefused)


def test_a_server_without_the_secret_learns_nothing():
    """It gets a hello with a fresh nonce, and no proof."""

    def action(server: socket.socket) -> bytes:
        protocol.receive_exactly(server, protocol._HELLO.size, soon())
        server.sendall(bytes(protocol._CHALLENGE.size))
        return server.recv(100)

    client, result, thread = served(action)
    with client, pytest.raises(protocol.HandshakeRefused):
        protocol.client_handshake(client, KEY, 3, 1, soon())
    thread.join()
    assert result == [b""]


def test_a_node_without_room_says_so_after_its_proof():
    """That is not a stranger's silence: it may be asked again."""
    client, _, thread = served(meeting(busy=True))
    with client, pytest.raises(protocol.PeerBusy):
        protocol.client_handshake(client, KEY, 3, 1, soon())
    thread.join()


def test_an_answer_of_no_known_kind_is_refused():
    """Whatever number comes with it."""

    def action(server: socket.socket) -> None:
        protocol.receive_exactly(server, protocol._REQUEST.size, soon())  # not gone before it was asked
        protocol.send_answer(server, 7, 2**64 - 1, soon())

    client, _, thread = served(action)
    with client, pytest.raises(protocol.HandshakeRefused):
        protocol.send_request(client, protocol.PeerRequest(protocol.GET, 0, 0, 1), soon())
    thread.join()


def test_bytes_that_trickle_do_not_gain_time():
    """The time is the whole message's, not the byte's."""
    client, result, thread = served(lambda server: protocol.server_handshake(server, KEY, 1, 4, soon(0.3)))
    with client, contextlib.suppress(BrokenPipeError):
        for _ in range(20):
            client.sendall(b"p")
            time.sleep(0.05)
    thread.join()
    assert isinstance(result[0], TimeoutError)
