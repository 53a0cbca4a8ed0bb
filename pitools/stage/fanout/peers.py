"""The other nodes as one thread sees them: found by their proof, asked, and left alone when they fail."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Iterator

from pitools.stage.fanout import protocol
from pitools.stage.fanout.group import Group, Timeouts
from pitools.stage.fanout.shared_state import SharedState

_MAX_CONNECTIONS = 4  # idle connections kept: files are asked of a few nodes in turn
_TICK_S = 1.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 1.0


class PeerNotFound(Exception):
    """No port of a node answered as that node."""


class PeerTooSlow(Exception):
    """A node sends nothing, or next to nothing."""


class PeerConnection:
    """A greeted connection to one node; `left` bytes of an answer are still to come."""

    def __init__(self, connection: socket.socket, node: int, timeouts: Timeouts) -> None:
        self.node, self.remaining_bytes = node, 0
        self._socket, self._timeouts = connection, timeouts
        self._waited_s, self._received = 0.0, 0

    def request(self, request: protocol.PeerRequest) -> tuple[int, int]:
        """Kind and number of the answer. Raises OSError, Refused."""
        within_s = self._timeouts.hold_s + self._timeouts.stall_s
        kind, number = protocol.send_request(self._socket, request, time.monotonic() + within_s)
        if request.kind == protocol.GET and kind == protocol.AVAILABLE:
            if number != request.length:
                raise protocol.HandshakeRefused("another length than was asked for")
            self.remaining_bytes, self._waited_s, self._received = number, 0.0, 0
            # One system call a block, which waits for all of it outside the GIL, and looks up every second.
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_TICK_S), 0))
        return kind, number

    def read_into(self, view: memoryview) -> int:
        """Fill `view` as far as the answer goes; bytes read. Raises OSError, Slow."""
        view = view[: self.remaining_bytes]
        got, silent_s = 0, 0.0
        while got < len(view):
            began = time.monotonic()
            try:
                count = self._socket.recv_into(view[got:], 0, socket.MSG_WAITALL)
                if not count:
                    raise ConnectionResetError("closed in the middle of a file")
            except BlockingIOError:
                count = 0
            waited_s = time.monotonic() - began
            silent_s = 0.0 if count else silent_s + waited_s
            got += count
            self._require_progress(count, waited_s, silent_s)
        self.remaining_bytes -= got
        return got

    def _require_progress(self, count: int, waited_s: float, silent_s: float) -> None:
        # Only time spent waiting counts: the reader's own disk may be what is slow.
        self._waited_s += waited_s
        self._received += count
        if silent_s >= self._timeouts.stall_s:
            raise PeerTooSlow
        if self._waited_s >= self._timeouts.stall_s:
            if self._received < self._waited_s * self._timeouts.min_bytes_per_s:
                raise PeerTooSlow
            self._waited_s, self._received = 0.0, 0

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class Peers:
    """Connections of one thread to the nodes of a group."""

    def __init__(self, group: Group, version: str, state: SharedState, timeouts: Timeouts) -> None:
        self.group, self.state, self.timeouts = group, state, timeouts
        self._version, self._key = version, group.proof_key(version)
        self._idle: list[PeerConnection] = []
        self._arrived, self._arrived_at = -1, 0.0

    def request_file(
        self, node: int, index: int, offset: int, length: int, *, passed: bool = False
    ) -> PeerConnection | None:
        """A connection on which these bytes of a file arrive; waits while the node works on it.

        None when the node has not got it and does not get on, is gone, is slow or is not to be believed: it is then
        left alone for a while by all threads of this node. passed: another node was waited for in vain before.
        """
        watch = _ProgressWatch(self.timeouts)
        pauses = _pauses()
        while self.state.is_usable(node):
            # Also one that says it gets on: a node that only waits ends, and what it waits for may be in the source.
            if self._idle_s() >= self.timeouts.idle_s * (1.5 if passed else 1):
                return None
            try:
                answer = self._ask(node, protocol.PeerRequest(protocol.GET, index, offset, length))
            except (PeerNotFound, protocol.PeerBusy) as error:
                if self._is_lost(node) if isinstance(error, PeerNotFound) else watch.is_over():
                    self.state.back_off(node, self.timeouts.back_off_s)
                    return None
                time.sleep(next(pauses))
                continue
            if isinstance(answer, PeerConnection):
                return answer
            kind, arrived = answer
            if kind == protocol.NOT_PRESENT:
                return None
            if watch.is_stuck(arrived):
                self.state.back_off(node, self.timeouts.back_off_s)
        return None

    def exchange_state(self, node: int, *, finished: bool) -> bool:
        """Tell a node whether this one has all it wants; whether that node has. Raises Absent, Busy."""
        answer = self._ask(node, protocol.PeerRequest(protocol.STATE, int(finished)))
        assert not isinstance(answer, PeerConnection)
        return answer[1] == 1

    def put_back(self, connection: PeerConnection) -> None:
        """Take back a connection; one whose answer was not read to its end is closed."""
        if connection.remaining_bytes:
            connection.close()
            return
        self._idle.append(connection)
        if len(self._idle) > _MAX_CONNECTIONS:
            self._idle.pop(0).close()

    def close(self) -> None:
        """Hang up on all."""
        while self._idle:
            self._idle.pop().close()

    def _idle_s(self) -> float:
        """Seconds for which this whole node has been seen to receive nothing."""
        arrived, now = self.state.received_bytes(), time.monotonic()
        if arrived != self._arrived:
            self._arrived, self._arrived_at = arrived, now
        return now - self._arrived_at

    def _is_lost(self, node: int) -> bool:
        """Of a node that is not there: whether it has been, or should have been by now."""
        return bool(self.state.contacted[node]) or time.monotonic() > self.state.began + self.timeouts.startup_s

    def _ask(self, node: int, request: protocol.PeerRequest) -> PeerConnection | tuple[int, int]:
        """The answer, or for bytes of a file the connection they arrive on. Raises Absent, Busy."""
        while True:
            connection, is_new = self._connection(node)
            try:
                answer = connection.request(request)
            except (OSError, protocol.HandshakeRefused) as error:
                connection.close()
                if is_new:
                    raise PeerNotFound from error
                continue  # the node hangs up on those who say nothing for long: once more, with a new one
            if connection.remaining_bytes:
                return connection
            self.put_back(connection)
            return answer

    def _connection(self, node: int) -> tuple[PeerConnection, bool]:
        for connection in self._idle:
            if connection.node == node:
                self._idle.remove(connection)
                return connection, False
        return PeerConnection(self._connect(node), node, self.timeouts), True

    def _connect(self, node: int) -> socket.socket:
        """A greeted connection, at the port where the node was last found or one of its candidates."""
        known = self.state.port[node]
        ports = [port for port in self.group.candidate_ports(node, self._version) if port != known]
        for port in [known, *ports] if known else ports:
            try:
                connection = socket.create_connection(
                    (self.group.addresses[node], port), timeout=self.timeouts.answer_s
                )
            except TimeoutError:
                break  # the host is silent: its other ports will be as well
            except OSError:
                continue
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                deadline = time.monotonic() + self.timeouts.answer_s
                protocol.client_handshake(connection, self._key, self.group.me, node, deadline)
            except BaseException as error:
                connection.close()
                if isinstance(error, ConnectionError) and port == known:
                    raise protocol.PeerBusy from error  # it is there, and hangs up on what is too much for it
                if not isinstance(error, OSError | protocol.HandshakeRefused):
                    raise
                continue
            self.state.port[node], self.state.contacted[node] = port, 1
            return connection
        raise PeerNotFound


class _ProgressWatch:
    """Whether a node that is waited for gets on."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts, self._since, self._before = timeouts, time.monotonic(), -1

    def is_over(self) -> bool:
        """Whether time for it has run out, whatever it does."""
        return time.monotonic() - self._since >= self._timeouts.peer_timeout_s

    def is_stuck(self, arrived: int) -> bool:
        """Whether of late it has received next to nothing, by the count of bytes that it gives."""
        if self._before < 0:
            self._before = arrived
        if not self.is_over():
            return False
        now = time.monotonic()
        too_few = arrived - self._before < (now - self._since) * self._timeouts.min_bytes_per_s
        self._since, self._before = now, arrived
        return too_few


def _pauses() -> Iterator[float]:
    """Seconds between tries, longer each time; the jitter spreads nodes that start together."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)  # noqa: S311 (nothing secret)
        pause_s = min(pause_s * 2, _LAST_PAUSE_S)
