"""A node's server: a child process that sends verified files to the nodes of this group, and to no other client.

It holds no lock, writes nothing, and dies with its parent. An unauthenticated client holds a connection for a few
seconds at most. A file is requested by its index in the manifest.
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

MAX_RANGE_BYTES = 64 << 20  # of one request
_IDLE_S = 120.0  # a connection without a request
_SEND_BYTES = 4 << 20
_STACK_BYTES = 256 << 10
_PR_SET_PDEATHSIG = 1


def listen(group: Group, version: str) -> socket.socket:
    """Listen at the first free one of this node's candidate ports, on its own address. Raises ClusterError."""
    address = group.addresses[group.rank]
    reason = ""
    for port in group.candidate_ports(group.rank, version):
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            # No SO_REUSEADDR and no SO_REUSEPORT: bind fails if any process uses the port.
            listener.bind((address, port))
            listener.listen(1024)
        except OSError as error:
            reason = error.strerror or str(error)
            listener.close()
            continue
        return listener
    where = f"{address}, ports {group.ports[0]}-{group.ports[1]}"
    raise ClusterError(
        f"no free port to serve files: {reason}",
        where=where,
        hint="export PIT_PORTS=FIRST-LAST, in a site file network.ports",
    )


def start_server(server: FanoutServer) -> int:
    """Fork the server process, which ends with the calling thread; return its pid. Call it before threads start."""
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
            os._exit(1)  # the parent died before prctl took effect
        _close_descriptors({0, 1, 2, server.listener.fileno(), *server.state.descriptors})
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group; the parent decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        server.run()
    finally:
        os._exit(1)  # never return into the parent's code


def _close_descriptors(keep: set[int]) -> None:
    """Close the parent's other descriptors: the server must not hold its locks and reservations."""
    # Without this, garbage of the parent could be collected later and close reused descriptor numbers.
    gc.freeze()
    numbers = [*sorted(keep), os.sysconf("SC_OPEN_MAX")]
    for number, following in itertools.pairwise(numbers):
        os.closerange(number + 1, following)


def stop_server(child: int) -> None:
    """Kill a server. One that hangs in disk I/O is left to the kernel after 5 s."""
    os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while not os.waitpid(child, os.WNOHANG)[0] and time.monotonic() < deadline:
        time.sleep(0.005)


class FanoutServer:
    """The server's state. folders: where files may be while some are missing; after that the last is searched first."""

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
        self._rank, self._nodes, self._key = group.rank, len(group), group.proof_key(version)
        # Limits of connections during the handshake, and after it.
        self._handshake_slots = threading.BoundedSemaphore(min(512, 64 + 16 * len(group)))
        self._client_slots = threading.BoundedSemaphore(min(1024, 64 + 32 * len(group)))
        self._waiting_clients: dict[int, tuple[threading.Event, int]] = {}
        self._lock = threading.Lock()

    def run(self) -> NoReturn:
        """Accept connections for ever."""
        threading.stack_size(_STACK_BYTES)
        threading.Thread(target=self._wake_waiters, name="pit-fanout-wake", daemon=True).start()
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                time.sleep(0.05)  # out of descriptors, or the client has already closed
                continue
            if not self._handshake_slots.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError:  # no more threads
                self._handshake_slots.release()
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        # Bad input, or a lost node, ends its own connection only.
        with connection, contextlib.suppress(OSError, protocol.HandshakeRefused, PitError):
            try:
                deadline = time.monotonic() + self.timeouts.answer_s
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                client = protocol.server_handshake(connection, self._key, self._rank, self._nodes, deadline)
                admitted = self._client_slots.acquire(blocking=False)
                protocol.finish_handshake(connection, deadline, busy=not admitted)
            finally:
                self._handshake_slots.release()
            if admitted:
                try:
                    self._handle_client(connection, client)
                finally:
                    self._client_slots.release()

    def _handle_client(self, connection: socket.socket, client: int) -> None:
        self.state.contacted[client] = 1
        open_files = _OpenFiles(self._folders, self.state)
        try:
            self._handle_requests(connection, client, open_files)
        finally:
            open_files.close()

    def _handle_requests(self, connection: socket.socket, client: int, open_files: _OpenFiles) -> None:
        while request := protocol.receive_request(connection, _IDLE_S, self.timeouts.answer_s):
            if request.kind == protocol.STATE:
                self.state.finished[client] = int(request.file == 1)
                self._answer(connection, protocol.AVAILABLE, self.state.finished[self._rank])
            elif self._is_valid(request):
                self._send_range(connection, request, open_files)
            else:
                raise protocol.HandshakeRefused(f"invalid request: {request}")

    def _is_valid(self, request: protocol.PeerRequest) -> bool:
        if request.kind != protocol.GET or request.file >= len(self._files):
            return False
        return (
            0 < request.length <= MAX_RANGE_BYTES and request.offset + request.length <= self._files[request.file].bytes
        )

    def _send_range(self, connection: socket.socket, request: protocol.PeerRequest, open_files: _OpenFiles) -> None:
        if not self.state.done[request.file] and not self._wait_for_file(request.file):
            self._answer(connection, protocol.NOT_YET, self.state.received_bytes())
            return
        file = open_files.open(self._files[request.file])
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
        """Send a range of a file by sendfile. A client that reads nothing for too long is dropped. Raises OSError."""
        end = offset + count
        connection.settimeout(0)
        ready = select.poll()
        ready.register(connection, select.POLLOUT)
        while offset < end:
            try:
                sent = os.sendfile(connection.fileno(), descriptor, offset, min(_SEND_BYTES, end - offset))
            except BlockingIOError:
                if not ready.poll(1000 * self._send_timeout_s):
                    raise TimeoutError(f"the client reads nothing for {self._send_timeout_s:g} s") from None
                continue
            if not sent:
                raise ConnectionAbortedError(f"the file is shorter than {end} bytes")
            offset += sent

    @property
    def _send_timeout_s(self) -> float:
        # Generous: a client that limits its bandwidth, or waits for its disk, reads nothing for a while.
        return 12 * self.timeouts.stall_s

    def _wait_for_file(self, index: int) -> bool:
        """Wait up to `long_poll_s` for a file; return whether it is done."""
        with self._lock:
            event, count = self._waiting_clients.get(index) or (threading.Event(), 0)
            self._waiting_clients[index] = event, count + 1
        # Read after registering: an earlier mark has not set this event.
        is_done = bool(self.state.done[index]) or event.wait(self.timeouts.long_poll_s)
        with self._lock:
            event, count = self._waiting_clients[index]
            if count > 1:
                self._waiting_clients[index] = event, count - 1
            else:
                del self._waiting_clients[index]
        return is_done or bool(self.state.done[index])

    def _wake_waiters(self) -> NoReturn:
        while True:
            self.state.wait_for_mark()
            with self._lock:
                for index, (event, _) in self._waiting_clients.items():
                    if self.state.done[index]:
                        event.set()


class _OpenFiles:
    """The files of one connection's thread, opened in either folder."""

    def __init__(self, folders: Sequence[Path], state: SharedState) -> None:
        self._state = state
        self._readers: dict[Path, LocalReader | None] = dict.fromkeys(folders)

    def open(self, entry: FileEntry) -> LocalFile | None:
        """Open a file that is done; None when it is missing or its size is wrong."""
        # Once the version is complete, the folder being filled can only be left over from an interrupted repair.
        folders = reversed(self._readers) if self._state.published[0] else self._readers
        for folder in list(folders):
            try:
                # The reader's descriptor stays valid when its folder is renamed.
                reader = self._readers[folder] = self._readers[folder] or LocalReader(folder)
                file = reader.open(entry.path)
            except PitError:
                self._close_reader(folder)
                continue
            if file.size == entry.bytes:
                return file
            file.close()
        return None

    def close(self) -> None:
        """Close the folders."""
        for folder in self._readers:
            self._close_reader(folder)

    def _close_reader(self, folder: Path) -> None:
        if reader := self._readers[folder]:
            reader.close()
        self._readers[folder] = None
