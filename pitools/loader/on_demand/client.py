"""The loader's side of on-demand fetching: open a version's files, fetching them into the node's cache if missing."""

from __future__ import annotations

import math
import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock

import msgspec

from pitools.core import subprocesses
from pitools.core.errors import ClusterError, PitError, Unreachable
from pitools.core.record import decode_json
from pitools.loader.on_demand import ipc
from pitools.loader.on_demand.fetcher import MAX_LOCK_WAIT_S, FetchRequest
from pitools.loader.on_demand.ipc import Greeting
from pitools.stage.cache.inventory import matches_sizes
from pitools.stage.cache.layout import staged_path
from pitools.stage.cache.lease import acquire
from pitools.stage.cache.space import RootLimits
from pitools.stage.sources.find import load_version
from pitools.stage.sources.object_store.client import parse_url
from pitools.store.reader.array_reader import open_below
from pitools.store.version_list import is_version

# Time-out of a shard's fetch; the object store's own time-outs are shorter.
_ANSWER_TIMEOUT_S = 600.0
# After this long of repeated starts and exits of the fetcher, the loader raises.
_START_TIMEOUT_S = 30.0
_READ_BYTES = 64 << 10


class ObjectStoreOpener:
    """Opens files of one version in an object store. Safe for threads and across forks.

    version: its name. path: its folder in the cache, once complete.
    """

    def __init__(self, url: str, root: Path, limits: RootLimits) -> None:
        """Raises UsageError for an invalid URL. Without a version in the URL, starts the fetcher, and raises its
        error."""
        self._url, self._root, self._limits = parse_url(url).url, root.absolute(), limits
        self._lease: _OwnedDescriptor | None = None
        self._connection: _OwnedDescriptor | None = None
        # By process id: a lock that another thread held during a fork is never released in the child.
        self._starting: dict[int, Lock] = {}
        name = self._url.rpartition("/")[2]
        self.version = name if is_version(name) else ""
        if not self.version:
            self._start()
        self.path = staged_path(self._root, self.version)

    def __reduce__(self) -> tuple[Callable[..., ObjectStoreOpener], tuple[str, Path, RootLimits]]:
        return ObjectStoreOpener, (self._url, self._root, self._limits)

    def __call__(self, path: str) -> int:
        """Return a descriptor of a verified file of the version; path "": of its folder.

        Raises OSError for a missing file, DataError, NoSpace, and Unreachable if the store does not respond. A later
        call tries again.
        """
        deadline = math.inf
        while True:
            if self.is_complete():
                return open_below(self.path, path)
            if (descriptor := self._request_file(path)) is not None:
                return descriptor
            deadline = min(
                deadline, time.monotonic() + _START_TIMEOUT_S
            )  # from its first exit: a shard may take longer
            if time.monotonic() > deadline:
                raise Unreachable(f"fetcher: kept exiting for {_START_TIMEOUT_S:.0f} s", where=self._url)
            with self._starting.setdefault(os.getpid(), Lock()):
                if not self.is_complete() and not ipc.has_fetcher(self._root, self.version):
                    self._start()

    def is_complete(self) -> bool:
        """Whether the version is complete in the cache; if so, this process acquires a lease on it."""
        if self._lease:
            return True
        if not os.path.lexists(self.path):
            return False
        try:
            if not matches_sizes(self.path, load_version(self.path)):
                return False
            self._lease = _OwnedDescriptor(acquire(self.path))
        except PitError:
            return False
        return True

    def _request_file(self, path: str) -> int | None:
        """Request a file from the fetcher, and return its descriptor; None if no fetcher runs or it just exited."""
        connection = ipc.connect(self._root, self.version)
        if not connection:
            return None
        connection.settimeout(_ANSWER_TIMEOUT_S)
        try:
            return ipc.request_file(connection, path)
        except TimeoutError as error:
            message = f"fetcher: no response within {_ANSWER_TIMEOUT_S:.0f} s"
            raise Unreachable(message, where=f"{self._url}/{path}") from error
        finally:
            self._connection = _OwnedDescriptor(connection.detach())  # the open connection keeps the fetcher running

    def _start(self) -> None:
        """Start the fetcher, which exits if another one serves the version. Raises the error in its greeting."""
        request = msgspec.json.encode(FetchRequest(self._url, str(self._root), self._limits)).decode()
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                argv = [sys.executable, "-m", "pitools.loader.on_demand.fetcher", request]
                process = subprocesses.start_detached(
                    argv, env=dict(os.environ), log=Path(f"/proc/self/fd/{write_fd}"), session=True
                )
            finally:
                os.close(write_fd)
            process.wait()
            greeting = _read_greeting(read_fd)
        finally:
            os.close(read_fd)
        if greeting.failure:
            raise greeting.failure.error()
        self._url, self.version = greeting.url, greeting.version


class _OwnedDescriptor:
    """A descriptor that is closed with the last reference to this object."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit, the module's names may be gone
        close(self._descriptor)


def _read_greeting(read_fd: int) -> Greeting:
    """Return the fetcher's greeting. Raises ClusterError if the fetcher exited without one, Unreachable at the
    time-out."""
    deadline, output = time.monotonic() + MAX_LOCK_WAIT_S + 60, b""
    while True:
        if not select.select([read_fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise Unreachable(f"fetcher: no greeting within {MAX_LOCK_WAIT_S + 60:.0f} s")
        block = os.read(read_fd, _READ_BYTES)
        output += block
        *lines, rest = output.split(b"\n")
        for line in lines:
            try:
                return decode_json(line, Greeting)
            except msgspec.DecodeError:
                continue  # a library's warning
        if not block:
            text = (rest or b"".join(lines[-1:])).decode(errors="replace")[:200]
            raise ClusterError(f"fetcher: exited at its start: {text or 'no output'}")
