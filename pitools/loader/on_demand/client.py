"""A loader's side: opens a version's files, which are brought to the node's cache where they are not there yet."""

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
from pitools.loader.on_demand.ipc import Greeting
from pitools.loader.on_demand.serve import MAX_LOCK_WAIT_S, FetchRequest
from pitools.stage.cache.disk_quota import QuotaLimits
from pitools.stage.cache.inventory import matches_sizes
from pitools.stage.cache.layout import set_path
from pitools.stage.cache.lease import acquire
from pitools.stage.sources.object_store.client import parse_url
from pitools.stage.sources.open import load_dataset
from pitools.store.reader.array_reader import open_below
from pitools.store.version_list import is_version

# Within which a shard has to come; the store's own time-outs are shorter.
_ANSWER_TIMEOUT_S = 600.0
# In which a process that fetches has been started, and has ended again, over and over.
_START_TIMEOUT_S = 30.0
_READ_BYTES = 64 << 10


class RemoteOpener:
    """Opens the files of one version of an object store, by any threads, also of processes forked meanwhile.

    version: its name. path: where it stands in the cache once all of it is there.
    """

    def __init__(self, url: str, root: Path, limits: QuotaLimits) -> None:
        """Raises UsageError for what is no URL, and what the process that fetches says; nothing where it stands."""
        self._url, self._root, self._limits = parse_url(url).url, root.absolute(), limits
        self._lease: _OwnedDescriptor | None = None
        self._talk: _OwnedDescriptor | None = None
        # By process: a lock that another thread held while this process was forked is never given back here.
        self._starting: dict[int, Lock] = {}
        name = self._url.rpartition("/")[2]
        self.version = name if is_version(name) else ""
        if not self.version:
            self._start()
        self.path = set_path(self._root, self.version)

    def __reduce__(self) -> tuple[Callable[..., RemoteOpener], tuple[str, Path, QuotaLimits]]:
        return RemoteOpener, (self._url, self._root, self._limits)

    def __call__(self, path: str) -> int:
        """A descriptor of a file of the version, verified; "" is its folder.

        Raises OSError for one that is not there, DataError, NoSpace, Unreachable where the store does not answer;
        asked again later it tries again.
        """
        until = math.inf
        while True:
            if self.is_complete():
                return open_below(self.path, path)
            if (descriptor := self._request_file(path)) is not None:
                return descriptor
            until = min(until, time.monotonic() + _START_TIMEOUT_S)  # from its first end on: a shard may take longer
            if time.monotonic() > until:
                raise Unreachable("the process that fetches ends again and again", where=self._url)
            with self._starting.setdefault(os.getpid(), Lock()):
                if not self.is_complete() and not self._has_server():
                    self._start()

    def is_complete(self) -> bool:
        """Whether all of the version is in the cache, and held there by a lease of this process."""
        if self._lease:
            return True
        if not os.path.lexists(self.path):
            return False
        try:
            if not matches_sizes(self.path, load_dataset(self.path)):
                return False
            self._lease = _OwnedDescriptor(acquire(self.path))
        except PitError:
            return False
        return True

    def _request_file(self, path: str) -> int | None:
        """What the process that fetches answers; None when there is none, or it has just ended."""
        talk = ipc.connect(self._root, self.version)
        if not talk:
            return None
        talk.settimeout(_ANSWER_TIMEOUT_S)
        try:
            return ipc.request_file(talk, path)
        except TimeoutError as error:
            raise Unreachable(f"no answer for {_ANSWER_TIMEOUT_S:.0f} s", where=f"{self._url}/{path}") from error
        finally:
            self._talk = _OwnedDescriptor(talk.detach())  # by which it is seen that there is somebody to fetch for

    def _has_server(self) -> bool:
        talk = ipc.connect(self._root, self.version)
        if talk:
            talk.close()
        return talk is not None

    def _start(self) -> None:
        """Start the process that fetches, or find that another one does. Raises what it says."""
        order = msgspec.json.encode(FetchRequest(self._url, str(self._root), self._limits)).decode()
        reads, writes = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                argv = [sys.executable, "-m", "pitools.loader.on_demand.serve", order]
                process = subprocesses.start_detached(
                    argv, env=dict(os.environ), log=Path(f"/proc/self/fd/{writes}"), session=True
                )
            finally:
                os.close(writes)
            process.wait()
            greeting = _read_greeting(reads)
        finally:
            os.close(reads)
        if greeting.failure:
            raise greeting.failure.error()
        self._url, self.version = greeting.url, greeting.version


class _OwnedDescriptor:
    """A descriptor that is closed with the last that refers to this."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)


def _read_greeting(reads: int) -> Greeting:
    """The first line that is a greeting. Raises ClusterError when there is none, Unreachable when none comes."""
    until, said = time.monotonic() + MAX_LOCK_WAIT_S + 60, b""
    while True:
        if not select.select([reads], [], [], max(0.0, until - time.monotonic()))[0]:
            raise Unreachable("the process that fetches does not answer")
        block = os.read(reads, _READ_BYTES)
        said += block
        *lines, rest = said.split(b"\n")
        for line in lines:
            try:
                return decode_json(line, Greeting)
            except msgspec.DecodeError:
                continue  # a warning of some library's
        if not block:
            words = (rest or b"".join(lines[-1:])).decode(errors="replace")[:200]
            raise ClusterError(f"the process that fetches ended at its start: {words or 'without a word'}")
