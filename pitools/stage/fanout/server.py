"""The server of a node: a child process that gives verified files to the nodes of this group, and to nobody else.

It holds no lock, writes nothing, and dies with the process that started it. Strangers cost a connection for a few
seconds at most; a file is named by its number in the manifest.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pitools.core.errors import ClusterError, PitError
from pitools.stage.fanout import protocol
from pitools.stage.fanout.group import Group, Timeouts
from pitools.stage.fanout.shared_state import SharedState
from pitools.stage.sources.local import LocalFile, LocalReader
from pitools.store.manifest import FileEntry

MAX_RANGE_BYTES = 64 << 20  # the most that one request may ask for
_IDLE_S = 120.0  # a connection without a request
_SEND_BYTES = 4 << 20
_STACK = 256 << 10
_PR_SET_PDEATHSIG = 1


def hold_port(group: Group, version: str) -> socket.socket:
    """Listen at the first of this node's candidate ports that is free, on its own address. Raises ClusterError."""
    address = group.addresses[group.me]
    reason = ""
    for port in group.candidate_ports(group.me, version):
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            # No SO_REUSEADDR and no SO_REUSEPORT: binding fails if anybody at all is there.
            listener.bind((address, port))
            listener.listen(1024)
        except OSError as error:
            reason = error.strerror or str(error)
            listener.close()
            continue
        return listener
    where = f"{address}, ports {group.ports[0]}-{group.ports[1]}"
    raise ClusterError(f"no port to serve other nodes at: {reason}", where=where, hint="see network.ports of the site")


def start_server(server: FanoutServer) -> int:
    """Serve in a child process, which ends with the calling thread; its process id. Call before threads start."""
    parent = os.getpid()
    child = os.fork()
    if not child:
        _server_main(server, parent)
    server.listener.close()
    return child


def _server_main(server: FanoutServer, parent: int) -> NoReturn:
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before the kernel knew of our wish
        _close_descriptors({0, 1, 2, server.listener.fileno(), *server.state.descriptors})
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        server.run()
    finally:
        os._exit(1)  # never back into what the parent was doing


def _close_descriptors(kept: set[int]) -> None:
    """Close what the parent has open: its locks and reservations are not the server's to hold."""
    # What the parent left to be collected would close descriptors of the same numbers, which are others by then.
    gc.freeze()
    numbers = [*sorted(kept), os.sysconf("SC_OPEN_MAX")]
    for number, following in itertools.pairwise(numbers):
        os.closerange(number + 1, following)


def stop_server(child: int) -> None:
    """End a server. One that hangs in its disk is left to the kernel."""
    os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while not os.waitpid(child, os.WNOHANG)[0] and time.monotonic() < deadline:
        time.sleep(0.005)


class FanoutServer:
    """What the child runs. folders: where a file may be while not all is here; then first in the last of them."""

    def __init__(
        self,
        listener: socket.socket,
        group: Group,
        version: str,
        files: Sequence[FileEntry],
        folders: Sequence[Path],
        state: SharedState,
        timeouts: Timeouts,
    ) -> None:
        self.listener, self.state, self.timeouts = listener, state, timeouts
        self._files, self._folders = files, folders
        self._me, self._nodes, self._key = group.me, len(group), group.proof_key(version)
        # Connections in the middle of their greeting, and after it.
        self._strangers = threading.BoundedSemaphore(min(512, 64 + 16 * len(group)))
        self._friends = threading.BoundedSemaphore(min(1024, 64 + 32 * len(group)))
        self._waiting: dict[int, tuple[threading.Event, int]] = {}
        self._lock = threading.Lock()

    def run(self) -> NoReturn:
        """Serve for ever."""
        threading.stack_size(_STACK)
        threading.Thread(target=self._wake, name="pit-fanout-wake", daemon=True).start()
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                time.sleep(0.05)  # out of descriptors, or the caller has gone already
                continue
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError:  # no more threads
                self._strangers.release()
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        # Whatever a stranger sends, or a node that has gone, ends its own connection and nothing else.
        with connection, contextlib.suppress(OSError, protocol.HandshakeRefused, PitError):
            try:
                deadline = time.monotonic() + self.timeouts.answer_s
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                client = protocol.server_handshake(connection, self._key, self._me, self._nodes, deadline)
                admitted = self._friends.acquire(blocking=False)
                protocol.finish_handshake(connection, deadline, busy=not admitted)
            finally:
                self._strangers.release()
            if admitted:
                try:
                    self._handle_client(connection, client)
                finally:
                    self._friends.release()

    def _handle_client(self, connection: socket.socket, client: int) -> None:
        self.state.contacted[client] = 1
        shelf = _OpenFiles(self._folders, self.state)
        try:
            self._handle_requests(connection, client, shelf)
        finally:
            shelf.close()

    def _handle_requests(self, connection: socket.socket, client: int, shelf: _OpenFiles) -> None:
        while request := protocol.receive_request(connection, _IDLE_S, self.timeouts.answer_s):
            if request.kind == protocol.STATE:
                self.state.finished[client] = int(request.file == 1)
                self._answer(connection, protocol.AVAILABLE, self.state.finished[self._me])
            elif self._is_valid(request):
                self._send_range(connection, request, shelf)
            else:
                raise protocol.HandshakeRefused("no request of ours")

    def _is_valid(self, request: protocol.PeerRequest) -> bool:
        if request.kind != protocol.GET or request.file >= len(self._files):
            return False
        return (
            0 < request.length <= MAX_RANGE_BYTES and request.offset + request.length <= self._files[request.file].bytes
        )

    def _send_range(self, connection: socket.socket, request: protocol.PeerRequest, shelf: _OpenFiles) -> None:
        if not self.state.done[request.file] and not self._wait_for_file(request.file):
            self._answer(connection, protocol.NOT_YET, self.state.received_bytes())
            return
        file = shelf.open(self._files[request.file])
        if not file:
            self._answer(connection, protocol.NOT_PRESENT, 0)
            return
        try:
            self._answer(connection, protocol.AVAILABLE, request.length)
            self._send(connection, file.fileno(), request.offset, request.length)
        finally:
            file.close()

    def _answer(self, connection: socket.socket, kind: int, number: int) -> None:
        protocol.send_answer(connection, kind, number, time.monotonic() + self.timeouts.answer_s)

    def _send(self, connection: socket.socket, descriptor: int, offset: int, count: int) -> None:
        """The kernel copies from file to socket. A client that takes nothing for long is left. Raises OSError."""
        end = offset + count
        connection.settimeout(0)
        ready = select.poll()
        ready.register(connection, select.POLLOUT)
        while offset < end:
            try:
                sent = os.sendfile(connection.fileno(), descriptor, offset, min(_SEND_BYTES, end - offset))
            except BlockingIOError:
                if not ready.poll(1000 * self._slowest_s):
                    raise TimeoutError("the other side takes nothing") from None
                continue
            if not sent:
                raise ConnectionAbortedError("the file became shorter")  # the promised bytes cannot come
            offset += sent

    @property
    def _slowest_s(self) -> float:
        # Generous: a client that holds its bandwidth down, or waits for its disk, takes nothing for a while.
        return 12 * self.timeouts.stall_s

    def _wait_for_file(self, index: int) -> bool:
        """Wait a little for a file; whether it came."""
        with self._lock:
            event, count = self._waiting.get(index) or (threading.Event(), 0)
            self._waiting[index] = event, count + 1
        # Looked at again only now: a mark before this line has perhaps rung for others.
        came = bool(self.state.done[index]) or event.wait(self.timeouts.hold_s)
        with self._lock:
            event, count = self._waiting[index]
            if count > 1:
                self._waiting[index] = event, count - 1
            else:
                del self._waiting[index]
        return came or bool(self.state.done[index])

    def _wake(self) -> NoReturn:
        while True:
            self.state.wait_mark()
            with self._lock:
                for index, (event, _) in self._waiting.items():
                    if self.state.done[index]:
                        event.set()


class _OpenFiles:
    """The files of one connection's thread, found in one folder or the other."""

    def __init__(self, folders: Sequence[Path], state: SharedState) -> None:
        self._state = state
        self._readers: dict[Path, LocalReader | None] = dict.fromkeys(folders)

    def open(self, entry: FileEntry) -> LocalFile | None:
        """A file that is done, or None where it is no longer, or not as long as it should be."""
        # Beside a version that stands, a folder for filling is what an interrupted repair has left.
        folders = reversed(self._readers) if self._state.whole[0] else self._readers
        for folder in list(folders):
            try:
                # Of a folder that has been renamed meanwhile the reader still holds the right one.
                reader = self._readers[folder] = self._readers[folder] or LocalReader(folder)
                file = reader.open(entry.path)
            except PitError:
                self._drop(folder)
                continue
            if file.size == entry.bytes:
                return file
            file.close()
        return None

    def close(self) -> None:
        """Let go of the folders."""
        for folder in self._readers:
            self._drop(folder)

    def _drop(self, folder: Path) -> None:
        if reader := self._readers[folder]:
            reader.close()
        self._readers[folder] = None
