from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from pitools.core.errors import DataError
from pitools.stage.fanout import peers, protocol, server
from pitools.stage.fanout.group import Group, Timeouts
from pitools.stage.fanout.peer_source import PeerReader, PeerSource
from pitools.stage.fanout.shared_state import FROM_ORIGIN, SharedState
from pitools.stage.sources.local import LocalSource
from pitools.store.manifest import FileEntry

SIZE = 600_000
# Far more than a slow machine needs: where it is to end, the test lets the time pass.
TIMEOUTS = Timeouts(
    answer_s=20.0,
    long_poll_s=20.0,
    stall_s=20.0,
    startup_s=20.0,
    peer_timeout_s=20.0,
    back_off_s=600.0,
    min_bytes_per_s=100_000,
)


class Clock:
    """Time as it is, and what passed in no time: by the test's word, or asleep."""

    passed_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed_s

    def sleep(self, seconds: float) -> None:
        self.passed_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of whoever waits for a node."""
    clock = Clock()
    monkeypatch.setattr(peers, "time", clock)
    return clock


class Fake:
    """Node 0 as this test plays it: `behave` answers GET, the rest of the protocol is ours."""

    def __init__(self, group: Group, behave: Callable[[socket.socket, protocol.PeerRequest, int], None]) -> None:
        self.gets = 0
        self._group, self._behave = group, behave
        self.listener = server.listen(Group(group.names, group.addresses, 0, group.key, group.ports, b"s"), "v")
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                protocol.server_handshake(
                    connection, self._group.proof_key("v"), 0, len(self._group), time.monotonic() + 20
                )
                protocol.finish_handshake(connection, time.monotonic() + 20, busy=False)
                while request := protocol.receive_request(connection, 60, 20):
                    self.gets += 1
                    self._behave(connection, request, self.gets)
            except (OSError, protocol.HandshakeRefused):
                return


class World:
    """Node 1 of two, whose file "a" is node 0's share, and "b" its own."""

    def __init__(self, tmp_path: Path, port: int) -> None:
        self.content = os.urandom(SIZE)
        for name in ("a", "b"):
            (tmp_path / name).write_bytes(self.content)
        files = [FileEntry(path=name, bytes=SIZE, digest="") for name in ("a", "b")]
        self.group = Group("xy", ["127.0.0.1"] * 2, 1, "job", (port, port), b"s")
        self.state = SharedState(2, 2)
        self.source = PeerSource(LocalSource(folder=tmp_path), files, "v", self.group, self.state, TIMEOUTS)
        assert list(self.source.owners) == [0, 1]
        self.fakes: list[Fake] = []

    def node_0(self, behave: Callable[[socket.socket, protocol.PeerRequest, int], None]) -> Fake:
        self.fakes.append(Fake(self.group, behave))
        return self.fakes[-1]

    def read(self, path: str, block: int = 100_000) -> bytes:
        """The whole file."""
        reader = self.source.connect()
        try:
            return read(reader, path, block)
        finally:
            reader.close()

    def give(self, connection: socket.socket, request: protocol.PeerRequest, count: int = -1) -> None:
        protocol.send_answer(connection, protocol.AVAILABLE, request.length, time.monotonic() + 20)
        end = request.offset + (request.length if count < 0 else count)
        connection.sendall(self.content[request.offset : end])


def read(reader: PeerReader, path: str, block: int) -> bytes:
    file = reader.open(path)
    buffer = bytearray(block)
    data = b""
    while count := file.read_into(memoryview(buffer), len(data)):
        data += buffer[:count]
    file.close()
    return data


@pytest.fixture
def world(tmp_path: Path, free_port) -> Iterator[World]:
    created = World(tmp_path, free_port())
    yield created
    for fake in created.fakes:
        fake.listener.shutdown(socket.SHUT_RDWR)
        fake.listener.close()
    created.state.close()


def test_a_file_of_another_nodes_share_comes_from_there(world: World):
    """In one request, whatever the reader's block, and written down as that node's."""
    fake = world.node_0(lambda connection, request, _: world.give(connection, request))
    assert world.read("a", block=77_777) == world.content
    assert fake.gets == 1
    assert world.state.bytes_by_sender() == {0: SIZE}
    assert world.state.senders(0) == {0}


def test_its_own_share_comes_from_the_origin(world: World):
    """Nobody is asked."""
    assert world.read("b") == world.content
    assert world.state.bytes_by_sender() == {FROM_ORIGIN: SIZE}


def test_a_node_that_breaks_off_is_asked_again_where_it_stopped(world: World):
    """One broken connection costs neither the bytes that came nor the node's good name."""

    def behave(connection: socket.socket, request: protocol.PeerRequest, number: int) -> None:
        world.give(connection, request, 200_000 if number == 1 else -1)
        if number == 1:
            connection.shutdown(socket.SHUT_RDWR)

    fake = world.node_0(behave)
    assert world.read("a") == world.content
    assert (fake.gets, world.state.bytes_by_sender()) == (2, {0: SIZE})


def test_a_node_that_promises_and_never_gives_is_left(world: World):
    """The rest comes from the origin; what came is not fetched twice."""

    def behave(connection: socket.socket, request: protocol.PeerRequest, number: int) -> None:
        world.give(connection, request, 200_000 if number == 1 else 0)
        connection.shutdown(socket.SHUT_RDWR)

    world.node_0(behave)
    assert world.read("a") == world.content
    assert world.state.bytes_by_sender() == {0: 200_000, FROM_ORIGIN: SIZE - 200_000}
    assert not world.state.is_usable(0)


@pytest.mark.parametrize("rate", [0, 20_000])
def test_a_slow_node_is_left(world: World, rate: int):
    """Silence, or bytes below the floor, end after a bounded time; the origin goes on at the next byte."""

    def behave(connection: socket.socket, request: protocol.PeerRequest, _: int) -> None:
        world.give(connection, request, 100_000)
        for index in range(100_000, SIZE, 1000):
            time.sleep(1000 / rate if rate else 60)
            connection.sendall(world.content[index : index + 1000])

    world.source.timeouts = replace(TIMEOUTS, stall_s=2.0)
    fake = world.node_0(behave)
    assert world.read("a", block=50_000) == world.content
    assert SIZE - 200_000 < world.state.bytes_by_sender()[FROM_ORIGIN] <= SIZE - 100_000
    assert not world.state.is_usable(0)
    assert world.read("a") == world.content
    assert fake.gets == 1  # it is left alone for a while


def test_a_reader_with_a_slow_disk_does_not_blame_the_node(world: World):
    """Only time spent waiting for bytes counts."""
    world.source.timeouts = replace(TIMEOUTS, stall_s=1.0)
    world.node_0(lambda connection, request, _: world.give(connection, request))
    reader = world.source.connect()
    file = reader.open("a")
    buffer = memoryview(bytearray(20_000))
    for offset in range(0, SIZE, 20_000):
        assert file.read_into(buffer, offset) == 20_000
        time.sleep(0.05)
    file.close()
    reader.close()
    assert world.state.bytes_by_sender() == {0: SIZE}


def test_a_node_that_gets_on_is_waited_for(world: World, clock: Clock):
    """Far beyond the timeouts with one that does not."""

    def behave(connection: socket.socket, request: protocol.PeerRequest, number: int) -> None:
        if number < 15:
            clock.passed_s += 5
            protocol.send_answer(connection, protocol.NOT_YET, number * 10_000_000, time.monotonic() + 20)
        else:
            world.give(connection, request)

    world.node_0(behave)
    data = world.read("a")
    assert (data, world.state.bytes_by_sender()) == (world.content, {0: SIZE})
    assert clock.passed_s > 3 * TIMEOUTS.peer_timeout_s


def test_a_node_that_does_not_get_on_is_left(world: World, clock: Clock):
    """It answers, but receives next to nothing itself."""

    def behave(connection: socket.socket, request: protocol.PeerRequest, number: int) -> None:
        clock.passed_s += 5
        protocol.send_answer(connection, protocol.NOT_YET, number * 10, time.monotonic() + 20)

    fake = world.node_0(behave)
    data = world.read("a")
    assert (data, world.state.bytes_by_sender()) == (world.content, {FROM_ORIGIN: SIZE})
    assert 1 < fake.gets <= TIMEOUTS.peer_timeout_s / 5 + 1
    assert not world.state.is_usable(0)


@pytest.mark.parametrize("busy", [False, True])
def test_a_node_that_only_says_it_gets_on_is_not_waited_for_for_ever(world: World, clock: Clock, busy: bool):
    """Where nothing else arrives here either, the engine would soon give up; where something does, it is waited for."""

    def behave(connection: socket.socket, request: protocol.PeerRequest, number: int) -> None:
        clock.passed_s += 5
        if busy and number == 20:
            world.give(connection, request)
            return
        world.state.add_received(int(busy))
        protocol.send_answer(connection, protocol.NOT_YET, number * 10_000_000, time.monotonic() + 20)

    world.source.timeouts = replace(TIMEOUTS, idle_s=30.0)
    fake = world.node_0(behave)
    data = world.read("a")
    assert (data, world.state.bytes_by_sender()) == (world.content, {0 if busy else FROM_ORIGIN: SIZE})
    assert fake.gets == 20 if busy else 1 < fake.gets <= 30 / 5 + 1
    assert world.state.is_usable(0)


def test_a_node_that_never_appears_is_not_waited_for_longer_than_that(world: World, clock: Clock):
    """Then the origin gives all, and later files are not waited for again."""
    data = world.read("a")
    assert (data, world.state.bytes_by_sender()) == (world.content, {FROM_ORIGIN: SIZE})
    assert clock.monotonic() - world.state.started_at > TIMEOUTS.startup_s
    assert (passed_s := clock.passed_s) < TIMEOUTS.startup_s + 1
    assert world.read("a") == world.content
    assert clock.passed_s == passed_s


def test_a_node_that_was_there_and_has_gone_is_not_waited_for(world: World, clock: Clock):
    """Not a moment: the origin gives all."""
    world.state.contacted[0] = 1
    assert world.read("a") == world.content
    assert (world.state.bytes_by_sender(), clock.passed_s) == ({FROM_ORIGIN: SIZE}, 0)


def test_a_node_that_no_longer_has_a_file_is_passed_over(world: World):
    """For this file only."""
    world.node_0(
        lambda connection, *_: protocol.send_answer(connection, protocol.NOT_PRESENT, 0, time.monotonic() + 20)
    )
    assert world.read("a") == world.content
    assert world.state.is_usable(0)


@pytest.mark.parametrize(
    "answer",
    [*(b"\1" + n.to_bytes(8) for n in (SIZE * 2, 2**64 - 1, 2**63, 1, 0)), b"\7" + bytes(8), b"", b"\1\0"],
)
def test_nonsense_from_a_node_is_survived(world: World, answer: bytes):
    """More or less than was asked for, an unknown kind, half an answer: it is left, and the file is read elsewhere."""

    def behave(connection: socket.socket, *_: object) -> None:
        connection.sendall(answer + (2 * world.content if len(answer) == 9 else b""))
        connection.shutdown(socket.SHUT_RDWR)

    world.node_0(behave)
    assert world.read("a") == world.content
    assert world.state.bytes_by_sender() == {FROM_ORIGIN: SIZE}


def test_a_distrusted_file_is_read_again_from_the_origin(world: World):
    """The node that gave it is asked no more; a wrong file of the origin's own cannot be helped."""
    world.node_0(lambda connection, request, _: world.give(connection, request))
    reader = world.source.connect()
    file = reader.open("a")
    buffer = memoryview(bytearray(SIZE))
    assert file.read_into(buffer[:1000], 0) == 1000
    assert file.distrust()
    actual = 0
    while actual < SIZE:
        actual += file.read_into(buffer[actual:], actual)
    assert bytes(buffer) == world.content
    assert not world.state.is_usable(0)
    assert world.state.untrusted[0]
    file.close()
    own = reader.open("b")
    own.read_into(buffer[:1000], 0)
    assert not own.distrust()
    own.close()
    reader.close()
    assert world.state.bytes_by_sender() == {0: 1000, FROM_ORIGIN: SIZE + 1000}


def test_a_file_that_was_wrong_once_is_asked_of_no_node(world: World):
    """Of nobody, also not of one that has given nothing wrong so far: two may have it from the same liar."""
    fake = world.node_0(lambda connection, request, _: world.give(connection, request))
    world.state.distrust(0, set())
    assert world.read("a") == world.content
    assert (fake.gets, world.state.bytes_by_sender()) == (0, {FROM_ORIGIN: SIZE})


def test_an_origin_that_is_wrong_as_well_is_the_culprit(world: World):
    """Nodes gave a part, and the origin's own bytes are wrong too: it is read again once, not for ever."""
    world.node_0(lambda connection, request, _: world.give(connection, request))
    reader = world.source.connect()
    file = reader.open("a")
    buffer = memoryview(bytearray(SIZE))
    assert file.read_into(buffer[:1000], 0) == 1000
    assert file.distrust()
    assert file.read_into(buffer, 0) > 0
    assert not file.distrust()
    file.close()
    reader.close()


def test_an_origin_of_another_size_is_refused(world: World, tmp_path: Path):
    """When its turn comes, also in the middle of a file; and what the manifest does not name is not asked for."""
    world.state.contacted[0] = 1  # and has gone
    os.truncate(tmp_path / "a", 5)
    with pytest.raises(DataError, match=rf"5 bytes \(expected {SIZE}"):
        world.read("a")
    with pytest.raises(DataError, match="does not name"):
        world.read("../a")
