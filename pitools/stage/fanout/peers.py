"""One thread's connections to the other nodes: authenticate, query, and back off from nodes that fail."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Iterator

from pitools.stage.fanout import protocol
from pitools.stage.fanout.group import Group, Timeouts
from pitools.stage.fanout.shared_state import SharedState

_MAX_CONNECTIONS = 4  # idle connections kept open: consecutive files come from a few nodes
_TICK_S = 1.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 1.0


class PeerNotFound(Exception):
    """No candidate port of a node accepted the handshake as that node."""


class PeerTooSlow(Exception):
    """A node sends nothing, or less than `min_bytes_per_s`."""


class PeerConnection:
    """An authenticated connection to one node. remaining_bytes: of the current reply, not yet read."""

    def __init__(self, connection: socket.socket, node: int, timeouts: Timeouts) -> None:
        self.node, self.remaining_bytes = node, 0
        self._socket, self._timeouts = connection, timeouts
        self._waited_s, self._received = 0.0, 0

    def request(self, request: protocol.PeerRequest) -> tuple[int, int]:
        """Send a request; return the kind and the number of the reply. Raises OSError, HandshakeRefused."""
        within_s = self._timeouts.long_poll_s + self._timeouts.stall_s
        kind, number = protocol.send_request(self._socket, request, time.monotonic() + within_s)
        if request.kind == protocol.GET and kind == protocol.AVAILABLE:
            if number != request.length:
                raise protocol.HandshakeRefused(f"the reply has {number} bytes (expected {request.length})")
            self.remaining_bytes, self._waited_s, self._received = number, 0.0, 0
            # One system call a block, which waits for all of it outside the GIL, and returns at least every second.
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_TICK_S), 0))
        return kind, number

    def read_into(self, view: memoryview) -> int:
        """Read into `view`, at most the rest of the reply; return the bytes read. Raises OSError, PeerTooSlow."""
        view = view[: self.remaining_bytes]
        filled, silent_s = 0, 0.0
        while filled < len(view):
            started_at = time.monotonic()
            try:
                count = self._socket.recv_into(view[filled:], 0, socket.MSG_WAITALL)
                if not count:
                    raise ConnectionResetError("the peer closed the connection within a file")
            except BlockingIOError:
                count = 0
            waited_s = time.monotonic() - started_at
            silent_s = 0.0 if count else silent_s + waited_s
            filled += count
            self._require_progress(count, waited_s, silent_s)
        self.remaining_bytes -= filled
        return filled

    def _require_progress(self, count: int, waited_s: float, silent_s: float) -> None:
        # Only time spent waiting counts: the slow part may be this node's own disk.
        self._waited_s += waited_s
        self._received += count
        if silent_s >= self._timeouts.stall_s:
            raise PeerTooSlow
        if self._waited_s >= self._timeouts.stall_s:
            if self._received < self._waited_s * self._timeouts.min_bytes_per_s:
                raise PeerTooSlow
            self._waited_s, self._received = 0.0, 0

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Peers:
    """One thread's connections to the nodes of a group."""

    def __init__(self, group: Group, version: str, state: SharedState, timeouts: Timeouts) -> None:
        self.group, self.state, self.timeouts = group, state, timeouts
        self._version, self._key = version, group.proof_key(version)
        self._idle: list[PeerConnection] = []
        self._last_received, self._last_received_at = -1, 0.0

    def request_file(
        self, node: int, index: int, offset: int, length: int, *, is_retry: bool = False
    ) -> PeerConnection | None:
        """Return a connection that delivers this range of a file; wait while the node is still reading the file.

        Returns None when the node has no such file and makes no progress, is lost, too slow or distrusted; all threads
        of this node then back off from it. is_retry: an earlier node of the file's chain has already failed.
        """
        watch = _ProgressWatch(self.timeouts)
        pauses = _retry_pauses_s()
        while self.state.is_usable(node):
            # Also when the peer reports progress: this node must not idle until its own time-out, and the file may be
            # readable from the source.
            if self._idle_s() >= self.timeouts.idle_s * (1.5 if is_retry else 1):
                return None
            try:
                answer = self._query(node, protocol.PeerRequest(protocol.GET, index, offset, length))
            except (PeerNotFound, protocol.PeerBusy) as error:
                if self._is_lost(node) if isinstance(error, PeerNotFound) else watch.is_period_over():
                    self.state.back_off(node, self.timeouts.back_off_s)
                    return None
                time.sleep(next(pauses))
                continue
            if isinstance(answer, PeerConnection):
                return answer
            kind, received = answer
            if kind == protocol.NOT_PRESENT:
                return None
            if watch.is_stuck(received):
                self.state.back_off(node, self.timeouts.back_off_s)
        return None

    def exchange_state(self, node: int, *, finished: bool) -> bool:
        """Report to a node whether this node has finished; return whether that node has. Raises PeerNotFound,
        PeerBusy.
        """
        answer = self._query(node, protocol.PeerRequest(protocol.STATE, int(finished)))
        assert not isinstance(answer, PeerConnection)
        return answer[1] == 1

    def put_back(self, connection: PeerConnection) -> None:
        """Keep a connection for later; close it if its reply was not read to the end."""
        if connection.remaining_bytes:
            connection.close()
            return
        self._idle.append(connection)
        if len(self._idle) > _MAX_CONNECTIONS:
            self._idle.pop(0).close()

    def close(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _idle_s(self) -> float:
        """Return the seconds for which this node as a whole has received nothing."""
        received, now = self.state.received_bytes(), time.monotonic()
        if received != self._last_received:
            self._last_received, self._last_received_at = received, now
        return now - self._last_received_at

    def _is_lost(self, node: int) -> bool:
        """Whether a node that does not answer has answered before, or should have started by now."""
        return bool(self.state.contacted[node]) or time.monotonic() > self.state.started_at + self.timeouts.startup_s

    def _query(self, node: int, request: protocol.PeerRequest) -> PeerConnection | tuple[int, int]:
        """Send a request; return the reply, or for a file's bytes the connection that delivers them.

        Raises PeerNotFound, PeerBusy.
        """
        while True:
            connection, is_new = self._get_connection(node)
            try:
                answer = connection.request(request)
            except (OSError, protocol.HandshakeRefused) as error:
                connection.close()
                if is_new:
                    raise PeerNotFound from error
                continue  # the node closes idle connections: retry with a new one
            if connection.remaining_bytes:
                return connection
            self.put_back(connection)
            return answer

    def _get_connection(self, node: int) -> tuple[PeerConnection, bool]:
        for connection in self._idle:
            if connection.node == node:
                self._idle.remove(connection)
                return connection, False
        return PeerConnection(self._connect(node), node, self.timeouts), True

    def _connect(self, node: int) -> socket.socket:
        """Return an authenticated socket, at the node's last known port or one of its candidate ports."""
        last_port = self.state.port[node]
        ports = [port for port in self.group.candidate_ports(node, self._version) if port != last_port]
        for port in [last_port, *ports] if last_port else ports:
            try:
                connection = socket.create_connection(
                    (self.group.addresses[node], port), timeout=self.timeouts.answer_s
                )
            except TimeoutError:
                break  # the host does not answer, so its other ports will not either
            except OSError:
                continue
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                deadline = time.monotonic() + self.timeouts.answer_s
                protocol.client_handshake(connection, self._key, self.group.rank, node, deadline)
            except BaseException as error:
                connection.close()
                if isinstance(error, ConnectionError) and port == last_port:
                    raise protocol.PeerBusy from error  # the server is alive, and rejects connections above its limit
                if not isinstance(error, OSError | protocol.HandshakeRefused):
                    raise
                continue
            self.state.port[node], self.state.contacted[node] = port, 1
            return connection
        raise PeerNotFound


class _ProgressWatch:
    """The progress of a node that this one waits for."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts, self._period_start, self._received = timeouts, time.monotonic(), -1

    def is_period_over(self) -> bool:
        """Whether `peer_timeout_s` has passed since the last check of progress."""
        return time.monotonic() - self._period_start >= self._timeouts.peer_timeout_s

    def is_stuck(self, received: int) -> bool:
        """Whether the node received less than `min_bytes_per_s` in the last period. received: its total, in bytes."""
        if self._received < 0:
            self._received = received
        if not self.is_period_over():
            return False
        now = time.monotonic()
        is_too_slow = received - self._received < (now - self._period_start) * self._timeouts.min_bytes_per_s
        self._period_start, self._received = now, received
        return is_too_slow


def _retry_pauses_s() -> Iterator[float]:
    """Yield seconds to wait between retries, doubling; the jitter spreads nodes that start together."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)  # noqa: S311 (nothing secret)
        pause_s = min(pause_s * 2, _LAST_PAUSE_S)
