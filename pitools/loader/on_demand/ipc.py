"""How loaders of a node and the process that fetches for them talk: a socket in the cache's own folder.

    loader:   path of a file, "" for the version's folder        one message each way, of a connection that then stays
    fetcher:  an open descriptor of it, or an error               open, so that who is read for is seen to live

A descriptor and not a path: what was verified is what is read, whatever is renamed, published or evicted meanwhile.
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

# An error's text, or the longest path.
MESSAGE_BYTES = 64 << 10
_PEER = struct.Struct("iII")  # process, user and group at the other end


class SentError(msgspec.Struct, frozen=True):
    """An error, by the name of its class."""

    kind: str
    message: str
    where: str
    hint: str

    def error(self) -> PitError:
        """The error that this tells of."""
        kind: Any = getattr(errors, self.kind, ClusterError)
        error: PitError = kind(self.message, where=self.where, hint=self.hint)
        return error


class Greeting(msgspec.Struct, frozen=True):
    """What a fetcher says once, at its start: which version the URL means, or why it cannot serve it."""

    url: str = ""
    version: str = ""
    failure: SentError | None = None


def to_sent_error(error: BaseException) -> SentError:
    """An error to be sent; of one that is not ours only the kind, for its words may hold anything."""
    if isinstance(error, PitError):
        return SentError(type(error).__name__, error.message, error.where, error.hint)
    return SentError("ClusterError", f"the process that fetches failed: {type(error).__name__}", "", "")


@contextmanager
def socket_address(root: Path, version: str) -> Iterator[str]:
    """What to bind or connect to. Through a descriptor, because a socket's path may have 107 characters only."""
    folder = os.open(root / LOCKS, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{version}.socket"
    finally:
        os.close(folder)


def connect(root: Path, version: str) -> socket.socket | None:
    """A connection to the process that fetches this version; None when there is none.

    Raises ClusterError where it is another user's, who could answer with anything.
    """
    talk = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        with socket_address(root, version) as place:
            talk.connect(place)
        user = _PEER.unpack(talk.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1]
    except OSError:
        talk.close()
        return None
    if user not in (os.geteuid(), 0):
        talk.close()
        what, hint = f"the process that fetches there is that of another user (uid {user})", "choose another cache"
        raise ClusterError(what, where=str(root), hint=hint)
    return talk


def listen(root: Path, version: str) -> socket.socket:
    """Where loaders connect to. Call with the version's lock held. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    with socket_address(root, version) as place:
        Path(place).unlink(missing_ok=True)  # of one that was killed
        listener.bind(place)
    listener.listen(256)
    return listener


def send_answer(talk: socket.socket, descriptor: int, error: BaseException | None) -> None:
    """Send a descriptor, or why there is none."""
    if error:
        talk.send(msgspec.json.encode(to_sent_error(error)))
    else:
        socket.send_fds(talk, [b"{}"], [descriptor])


def request_file(talk: socket.socket, path: str) -> int | None:
    """A descriptor of a file; None when the other side has ended. Raises PitError it answers, and TimeoutError."""
    try:
        talk.send(msgspec.json.encode(path))
        message, descriptors, _, _ = socket.recv_fds(talk, MESSAGE_BYTES, 1)
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
