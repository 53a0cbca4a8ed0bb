from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from pitools.core.errors import ClusterError
from pitools.stage.fanout import protocol, server
from pitools.stage.fanout.group import Group, Timeouts
from pitools.stage.fanout.shared_state import SharedState
from pitools.store.manifest import FileEntry

CONTENT = bytes(range(256)) * 1000
TIMEOUTS = Timeouts(answer_s=1.0, long_poll_s=0.2, stall_s=0.05)
LIMIT = server.MAX_RANGE_BYTES


class Served:
    """A real server child of node 1, and node 0's connections to it."""

    def __init__(self, tmp_path: Path, port: int, timeouts: Timeouts = TIMEOUTS) -> None:
        self.partial, self.final = tmp_path / "partial", tmp_path / "final"
        self.partial.mkdir()
        for name in ("a", "b"):
            (self.partial / name).write_bytes(CONTENT)
        (self.partial / "c").touch()
        os.truncate(self.partial / "c", LIMIT + 1)
        self.files = [FileEntry(path=name, bytes=len(CONTENT), digest="") for name in ("a", "b")]
        self.files.append(FileEntry(path="c", bytes=LIMIT + 1, digest=""))
        self.group = Group("xyz", ["127.0.0.1"] * 3, 1, "job", (port, port), b"s")
        self.state = SharedState(3, 3)
        self.port = port
        self.listener = server.listen(self.group, "v")
        sender = server.FanoutServer(
            self.listener, self.group, "v", self.files, [self.partial, self.final], self.state, timeouts
        )
        self.child = server.start_server(sender)

    @contextlib.contextmanager
    def raw(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            yield connection

    @contextlib.contextmanager
    def greeted(self) -> Iterator[socket.socket]:
        with self.raw() as connection:
            protocol.client_handshake(connection, self.group.proof_key("v"), 0, 1, time.monotonic() + 20)
            yield connection

    def get(self, file: int, offset: int = 0, length: int = len(CONTENT)) -> tuple[int, int, bytes]:
        with self.greeted() as connection:
            return ask(connection, protocol.PeerRequest(protocol.GET, file, offset, length))


def threads(served: Served) -> int:
    return len(os.listdir(f"/proc/{served.child}/task"))


def await_threads(served: Served, few: int) -> None:
    """Two are always there: one accepts, one wakes those that wait."""
    deadline = time.monotonic() + 10
    while threads(served) > few:
        assert time.monotonic() < deadline, f"{threads(served)} threads are still there"
        time.sleep(0.05)


def ask(connection: socket.socket, request: protocol.PeerRequest) -> tuple[int, int, bytes]:
    kind, number = protocol.send_request(connection, request, time.monotonic() + 20)
    here = kind == protocol.AVAILABLE and request.kind == protocol.GET
    return kind, number, protocol.receive_exactly(connection, number, time.monotonic() + 20) if here else b""


@pytest.fixture
def served(tmp_path: Path, free_port, request: pytest.FixtureRequest) -> Iterator[Served]:
    created = Served(tmp_path, free_port(), getattr(request, "param", TIMEOUTS))
    try:
        yield created
    finally:
        server.stop_server(created.child)
        created.state.close()


def test_ranges_of_finished_files_are_given(served: Served):
    """Any range, several on one connection, byte for byte."""
    served.state.mark_done(0)
    with served.greeted() as connection:
        for offset, length in ((0, len(CONTENT)), (0, 1), (777, 100_000), (len(CONTENT) - 1, 1)):
            actual = ask(connection, protocol.PeerRequest(protocol.GET, 0, offset, length))
            assert actual == (protocol.AVAILABLE, length, CONTENT[offset : offset + length])


def test_a_file_that_is_not_finished_is_not_given(served: Served):
    """Though it lies there whole: the answer is "not yet", with how many bytes have come in."""
    served.state.add_received(4711)
    assert served.get(0) == (protocol.NOT_YET, 4711, b"")


@pytest.mark.parametrize("served", [structs.replace(TIMEOUTS, long_poll_s=10)], indirect=True)
def test_who_waits_is_woken_when_the_file_is_finished(served: Served):
    """Not only at the end of the time that a request is held for."""
    with served.greeted() as connection:
        connection.sendall(struct.pack("!BIQQ", protocol.GET, 1, 0, 10))
        time.sleep(0.05)
        served.state.mark_done(1)
        assert protocol.receive_exactly(connection, 19, time.monotonic() + 5)[9:] == CONTENT[:10]


def test_a_file_is_found_across_the_rename_that_publishes_it(served: Served):
    """On a connection that had read from the old folder, and on a new one."""
    served.state.mark_done(0)
    with served.greeted() as connection:
        request = protocol.PeerRequest(protocol.GET, 0, 0, 5)
        assert ask(connection, request)[2] == CONTENT[:5]
        served.partial.rename(served.final)
        assert ask(connection, request)[2] == CONTENT[:5]
    assert served.get(0)[2] == CONTENT
    served.state.mark_all_done()
    assert served.get(1)[2] == CONTENT


def test_what_a_repair_left_is_not_given_in_place_of_the_published(served: Served):
    """Once the whole version stands, files are read from there."""
    served.final.mkdir()
    (served.final / "a").write_bytes(CONTENT[::-1])
    served.state.mark_all_done()
    assert served.get(0)[2] == CONTENT[::-1]


def test_a_file_that_is_gone_or_cut_is_not_given(served: Served):
    """The answer is "gone", and the connection serves on."""
    served.state.mark_all_done()
    (served.partial / "a").unlink()
    os.truncate(served.partial / "b", 10)
    with served.greeted() as connection:
        for file in (0, 1):
            assert ask(connection, protocol.PeerRequest(protocol.GET, file, 0, 5))[0] == protocol.NOT_PRESENT


def test_nothing_outside_the_folder_is_given(served: Served):
    """A link in a file's place is not followed, and a request has no room for a path."""
    served.state.mark_all_done()
    (served.partial / "a").rename(served.partial.parent / "out")
    (served.partial / "a").symlink_to("../out")
    assert served.get(0)[0] == protocol.NOT_PRESENT


def test_a_folder_that_became_a_link_is_not_followed(tmp_path: Path):
    """Nor one on the way to the file: what lies behind it is not the dataset's."""
    for folder in ("partial", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "elsewhere" / "a").write_bytes(CONTENT)
    (tmp_path / "partial" / "c").symlink_to("../elsewhere")
    state = SharedState(1, 1)
    shelf = server._OpenFiles([tmp_path / "partial"], state)
    assert shelf.open(FileEntry(path="c/a", bytes=len(CONTENT), digest="")) is None
    shelf.close()
    state.close()


@pytest.mark.parametrize(
    ("kind", "file", "offset", "length"),
    [
        (protocol.GET, 3, 0, 1),
        (protocol.GET, 2**32 - 1, 0, 1),
        (protocol.GET, 0, 0, 0),
        (protocol.GET, 0, 0, len(CONTENT) + 1),
        (protocol.GET, 0, 2**64 - 1, 1),
        (protocol.GET, 0, 1, 2**64 - 1),
        (protocol.GET, 2, 0, LIMIT + 1),
        (0, 0, 0, 1),
        (255, 0, 0, 1),
    ],
)
def test_a_request_that_cannot_be_is_refused(served: Served, kind: int, file: int, offset: int, length: int):
    """The connection ends without an answer, and others are served."""
    served.state.mark_all_done()
    with served.greeted() as connection:
        connection.sendall(struct.pack("!BIQQ", kind, file, offset, length))
        assert connection.recv(100) == b""
    assert served.get(0)[2] == CONTENT


def test_half_a_request_is_not_waited_for(served: Served):
    """Once begun, a request has little time to be complete."""
    with served.greeted() as connection:
        connection.sendall(b"\1\0\0")
        connection.settimeout(60)  # to begin, a request has longer
        assert connection.recv(100) == b""


def test_strangers_cost_a_moment_each(served: Served):
    """Silent, talkative and hasty ones are all gone soon, and friends are served meanwhile."""
    served.state.mark_all_done()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(served.raw()) for _ in range(60)]
        for connection in silent[:20]:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        assert served.get(0)[2] == CONTENT
        for connection in silent:
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(1000):
                    pass


@pytest.mark.parametrize("served", [structs.replace(TIMEOUTS, answer_s=20.0)], indirect=True)
def test_more_strangers_than_there_is_room_for_are_turned_away(served: Served):
    """Their number has a limit; once they have gone friends get in again."""
    served.state.mark_all_done()
    room, end = 64 + 16 * 3, select.poll()
    with contextlib.ExitStack() as stack:
        for _ in range(room + 50):
            end.register(stack.enter_context(served.raw()), select.POLLIN)
        deadline = time.monotonic() + 10
        while len(end.poll(0)) < 50:
            assert time.monotonic() < deadline, "nobody is turned away"
            time.sleep(0.02)
        assert (len(end.poll(0)), threads(served)) == (50, room + 2)
    await_threads(served, 2)
    assert served.get(0)[2] == CONTENT


def test_a_client_that_takes_nothing_is_left(served: Served):
    """Whoever asks for much and reads nothing does not hold a thread for ever; others are served meanwhile."""
    served.state.mark_all_done()
    with served.greeted() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(struct.pack("!BIQQ", protocol.GET, 2, 0, LIMIT))
        assert served.get(1)[2] == CONTENT
        await_threads(served, 2)


def test_nodes_tell_each_other_that_they_have_finished(served: Served):
    """Both directions in one exchange."""
    with served.greeted() as connection:
        assert ask(connection, protocol.PeerRequest(protocol.STATE, 0))[:2] == (protocol.AVAILABLE, 0)
        assert served.state.finished[0] == 0
        served.state.finished[1] = 1
        assert ask(connection, protocol.PeerRequest(protocol.STATE, 1))[:2] == (protocol.AVAILABLE, 1)
        assert served.state.finished[0] == 1


def test_the_server_dies_with_its_parent(tmp_path: Path, free_port):
    """kill -9 of the stager: its port is free again at once."""
    port = free_port()
    tell, reported = os.pipe()
    parent = os.fork()
    if not parent:
        Served(tmp_path, port)
        os.write(reported, b".")
        signal.pause()
    assert os.read(tell, 1) == b"."
    with pytest.raises(OSError, match="in use"), socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    deadline = time.monotonic() + 5
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return
        assert time.monotonic() < deadline, "the port is still held"
        time.sleep(0.01)


def test_the_server_holds_nothing_of_its_parents(served: Served):
    """Its parent's files, locks and reservations are not kept open by it."""
    with (served.partial / "a").open() as held, served.raw():
        assert served.get(1)[0] == protocol.NOT_YET  # it is past its beginnings
        of_server = Path(f"/proc/{served.child}/fd")
        open_files = []
        for path in of_server.iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile: a connection's
                open_files += [path.readlink()] if int(path.name) > 2 else []
    assert Path(held.name) not in open_files
    # Its port, the stranger, the state's two and the folders of one connection.
    assert len(open_files) <= 1 + 1 + 2 + 2 + 1


def test_it_listens_on_the_nodes_own_address_only(tmp_path: Path, free_port):
    """Not on every interface; and a range without a free port is an error that names it."""
    port = free_port()
    group = Group("ab", ["127.0.0.5", "127.0.0.6"], 0, "job", (port, port), b"s")
    with server.listen(group, "v") as listener:
        assert listener.getsockname() == ("127.0.0.5", port)
        with pytest.raises(ClusterError, match=str(port)):
            server.listen(group, "v")
