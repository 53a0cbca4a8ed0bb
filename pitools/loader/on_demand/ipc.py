"""The protocol between the loaders of a node and their fetcher: a Unix socket in the cache's folder.

    loader:   path of a file, "" for the version's folder        one message each way; then the connection stays open,
    fetcher:  an open descriptor of the file, or an error        which shows the fetcher that the loader is alive

A descriptor, not a path: the loader reads the verified file even if its path is renamed, published or evicted.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from pitools.core import errors
from pitools.core.errors import ClusterError, PitError
from pitools.core.record import decode_json
from pitools.stage.cache.layout import LOCKS

# At least an error's text, and the longest path.
MESSAGE_BYTES = 64 << 10
_PEER = struct.Struct("iII")  # SO_PEERCRED: process, user, group


class SentError(msgspec.Struct, frozen=True):
    """A serialised PitError. kind: the name of its class."""

    kind: str
    message: str
    where: str
    hint: str

    def error(self) -> PitError:
        """Return the error."""
        kind: Any = getattr(errors, self.kind, ClusterError)
        error: PitError = kind(self.message, where=self.where, hint=self.hint)
        return error


class Greeting(msgspec.Struct, frozen=True):
    """A fetcher's single line of output, at its start: the version that the URL resolves to, or its failure."""

    url: str = ""
    version: str = ""
    failure: SentError | None = None


def to_sent_error(error: BaseException) -> SentError:
    """Serialise an error. Of a foreign exception only the class name: its text may contain secrets."""
    if isinstance(error, PitError):
        return SentError(type(error).__name__, error.message, error.where, error.hint)
    return SentError("ClusterError", f"fetcher: unexpected error: {type(error).__name__}", "", "")


@contextmanager
def socket_address(root: Path, version: str) -> Iterator[str]:
    """Yield the address to bind or connect to, by a descriptor: a socket's path is limited to 107 characters."""
    folder = os.open(root / LOCKS, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{version}.socket"
    finally:
        os.close(folder)


def connect(root: Path, version: str) -> socket.socket | None:
    """Connect to the fetcher of a version; None if none runs.

    Raises ClusterError for another user's fetcher, which could send any data.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        with socket_address(root, version) as address:
            connection.connect(address)
        user = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1]
    except OSError:
        connection.close()
        return None
    if user not in (os.geteuid(), 0):
        connection.close()
        message = f"fetcher: belongs to another user (expected uid {os.geteuid()}, got {user})"
        hint = "choose another cache"
        raise ClusterError(message, where=str(root), hint=hint)
    return connection


def has_fetcher(root: Path, version: str) -> bool:
    """Whether a fetcher of the version accepts connections. Raises as `connect`."""
    if connection := connect(root, version):
        connection.close()
    return connection is not None


def listen(root: Path, version: str) -> socket.socket:
    """Return the socket that loaders connect to. The caller holds the version's lock. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    with socket_address(root, version) as address:
        Path(address).unlink(missing_ok=True)  # of a killed fetcher
        listener.bind(address)
    listener.listen(256)
    return listener


def send_answer(connection: socket.socket, descriptor: int, error: BaseException | None) -> None:
    """Send a descriptor, or an error."""
    if error:
        connection.send(msgspec.json.encode(to_sent_error(error)))
    else:
        socket.send_fds(connection, [b"{}"], [descriptor])


def request_file(connection: socket.socket, path: str) -> int | None:
    """Request a file, and return its descriptor; None if the fetcher exited. Raises its PitError, and TimeoutError."""
    try:
        connection.send(msgspec.json.encode(path))
        message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
    except TimeoutError:
        raise
    except OSError:
        return None
    if descriptors:
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]
    if not message:
        return None
    raise decode_json(message, SentError).error()
