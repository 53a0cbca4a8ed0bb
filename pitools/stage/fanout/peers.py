"""The other nodes as one thread sees them: found by their proof, asked, and left alone when they fail."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Iterator

from pitools.stage.fanout import protocol
from pitools.stage.fanout.group import Group, Patience
from pitools.stage.fanout.shared_state import Board

_POOL = 4  # idle connections kept: files are asked of a few nodes in turn
_TICK_S = 1.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 1.0


class Absent(Exception):
    """No port of a node answered as that node."""


class Slow(Exception):
    """A node sends nothing, or next to nothing."""


class Connection:
    """A greeted connection to one node; `left` bytes of an answer are still to come."""

    def __init__(self, connection: socket.socket, node: int, patience: Patience) -> None:
        self.node, self.left = node, 0
        self._socket, self._patience = connection, patience
        self._waited_s, self._received = 0.0, 0

    def ask(self, request: protocol.Request) -> tuple[int, int]:
        """Kind and number of the answer. Raises OSError, Refused."""
        within_s = self._patience.hold_s + self._patience.stall_s
        kind, number = protocol.ask(self._socket, request, time.monotonic() + within_s)
        if request.kind == protocol.GET and kind == protocol.HERE:
            if number != request.length:
                raise protocol.Refused("another length than was asked for")
            self.left, self._waited_s, self._received = number, 0.0, 0
            # One system call a block, which waits for all of it outside the GIL, and looks up every second.
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_TICK_S), 0))
        return kind, number

    def read_into(self, view: memoryview) -> int:
        """Fill `view` as far as the answer goes; bytes read. Raises OSError, Slow."""
        view = view[: self.left]
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
            self._judge(count, waited_s, silent_s)
        self.left -= got
        return got

    def _judge(self, count: int, waited_s: float, silent_s: float) -> None:
        # Only time spent waiting counts: the reader's own disk may be what is slow.
        self._waited_s += waited_s
        self._received += count
        if silent_s >= self._patience.stall_s:
            raise Slow
        if self._waited_s >= self._patience.stall_s:
            if self._received < self._waited_s * self._patience.floor:
                raise Slow
            self._waited_s, self._received = 0.0, 0

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class Peers:
    """Connections of one thread to the nodes of a group."""

    def __init__(self, group: Group, version: str, board: Board, patience: Patience) -> None:
        self.group, self.board, self.patience = group, board, patience
        self._version, self._key = version, group.proof_key(version)
        self._idle: list[Connection] = []
        self._arrived, self._arrived_at = -1, 0.0

    def get(self, node: int, index: int, offset: int, length: int, *, passed: bool = False) -> Connection | None:
        """A connection on which these bytes of a file arrive; waits while the node works on it.

        None when the node has not got it and does not get on, is gone, is slow or is not to be believed: it is then
        left alone for a while by all threads of this node. passed: another node was waited for in vain before.
        """
        watch = _Watch(self.patience)
        pauses = _pauses()
        while self.board.usable(node):
            # Also one that says it gets on: a node that only waits ends, and what it waits for may be in the source.
            if self._idle_s() >= self.patience.idle_s * (1.5 if passed else 1):
                return None
            try:
                answer = self._ask(node, protocol.Request(protocol.GET, index, offset, length))
            except (Absent, protocol.Busy) as error:
                if self._is_lost(node) if isinstance(error, Absent) else watch.is_over():
                    self.board.shun(node, self.patience.shun_s)
                    return None
                time.sleep(next(pauses))
                continue
            if isinstance(answer, Connection):
                return answer
            kind, arrived = answer
            if kind == protocol.GONE:
                return None
            if watch.is_stuck(arrived):
                self.board.shun(node, self.patience.shun_s)
        return None

    def tell(self, node: int, *, finished: bool) -> bool:
        """Tell a node whether this one has all it wants; whether that node has. Raises Absent, Busy."""
        answer = self._ask(node, protocol.Request(protocol.STATE, int(finished)))
        assert not isinstance(answer, Connection)
        return answer[1] == 1

    def keep(self, connection: Connection) -> None:
        """Take back a connection; one whose answer was not read to its end is closed."""
        if connection.left:
            connection.close()
            return
        self._idle.append(connection)
        if len(self._idle) > _POOL:
            self._idle.pop(0).close()

    def close(self) -> None:
        """Hang up on all."""
        while self._idle:
            self._idle.pop().close()

    def _idle_s(self) -> float:
        """Seconds for which this whole node has been seen to receive nothing."""
        arrived, now = self.board.arrived(), time.monotonic()
        if arrived != self._arrived:
            self._arrived, self._arrived_at = arrived, now
        return now - self._arrived_at

    def _is_lost(self, node: int) -> bool:
        """Of a node that is not there: whether it has been, or should have been by now."""
        return bool(self.board.seen[node]) or time.monotonic() > self.board.began + self.patience.appear_s

    def _ask(self, node: int, request: protocol.Request) -> Connection | tuple[int, int]:
        """The answer, or for bytes of a file the connection they arrive on. Raises Absent, Busy."""
        while True:
            connection, is_new = self._connection(node)
            try:
                answer = connection.ask(request)
            except (OSError, protocol.Refused) as error:
                connection.close()
                if is_new:
                    raise Absent from error
                continue  # the node hangs up on those who say nothing for long: once more, with a new one
            if connection.left:
                return connection
            self.keep(connection)
            return answer

    def _connection(self, node: int) -> tuple[Connection, bool]:
        for connection in self._idle:
            if connection.node == node:
                self._idle.remove(connection)
                return connection, False
        return Connection(self._found(node), node, self.patience), True

    def _found(self, node: int) -> socket.socket:
        """A greeted connection, at the port where the node was last found or one of its candidates."""
        known = self.board.port[node]
        ports = [port for port in self.group.candidates(node, self._version) if port != known]
        for port in [known, *ports] if known else ports:
            try:
                connection = socket.create_connection(
                    (self.group.addresses[node], port), timeout=self.patience.answer_s
                )
            except TimeoutError:
                break  # the host is silent: its other ports will be as well
            except OSError:
                continue
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                deadline = time.monotonic() + self.patience.answer_s
                protocol.greet(connection, self._key, self.group.me, node, deadline)
            except BaseException as error:
                connection.close()
                if isinstance(error, ConnectionError) and port == known:
                    raise protocol.Busy from error  # it is there, and hangs up on what is too much for it
                if not isinstance(error, OSError | protocol.Refused):
                    raise
                continue
            self.board.port[node], self.board.seen[node] = port, 1
            return connection
        raise Absent


class _Watch:
    """Whether a node that is waited for gets on."""

    def __init__(self, patience: Patience) -> None:
        self._patience, self._since, self._before = patience, time.monotonic(), -1

    def is_over(self) -> bool:
        """Whether patience with it has ended, whatever it does."""
        return time.monotonic() - self._since >= self._patience.patience_s

    def is_stuck(self, arrived: int) -> bool:
        """Whether of late it has received next to nothing, by the count of bytes that it gives."""
        if self._before < 0:
            self._before = arrived
        if not self.is_over():
            return False
        now = time.monotonic()
        too_few = arrived - self._before < (now - self._since) * self._patience.floor
        self._since, self._before = now, arrived
        return too_few


def _pauses() -> Iterator[float]:
    """Seconds between tries, longer each time; the jitter spreads nodes that start together."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)  # noqa: S311 (nothing secret)
        pause_s = min(pause_s * 2, _LAST_PAUSE_S)
