"""The fetcher: fetches one version for all loaders of a node. The first loader starts it; it exits after the last.

A separate process, because the object store client has threads, which a forked loader would lose. One per node, so
that each shard is downloaded once. It exits without unwinding: the kernel then frees the lock and the reservation, and
the journal lists the files done.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from pitools.core.errors import TryLater
from pitools.core.record import decode_json
from pitools.loader.on_demand import ipc
from pitools.loader.on_demand.ipc import Greeting
from pitools.loader.on_demand.version_fetch import VersionFetch
from pitools.stage.cache.inventory import matches_sizes
from pitools.stage.cache.layout import create_root, staged_path, touch_lease, version_lock
from pitools.stage.cache.records import read_source_quarantine, record_quarantine
from pitools.stage.cache.space import RootLimits
from pitools.stage.sources.base import DatasetVersion
from pitools.stage.sources.find import find_source, load_version

# Time-out for another process, such as `pit-stage run`, to stage the version.
MAX_LOCK_WAIT_S = 3600.0
_POLL_S = 0.3
# Time without a connection before the fetcher exits: the next loader may start just after the last one.
_IDLE_EXIT_S = 1.0


class FetchRequest(msgspec.Struct, frozen=True):
    """url: of a version, or of a dataset with a single version. root: the cache's folder. limits: of the cache."""

    url: str
    root: str
    limits: RootLimits


def main() -> None:
    """Serve the FetchRequest in the first argument. Print a Greeting, as one line."""
    if os.fork():
        os._exit(0)  # the child is reparented to init: the loader need not wait for it
    # A job that is being terminated may read until its end: the fetcher exits after its last loader.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o022)
    request = decode_json(sys.argv[1], FetchRequest)
    try:
        _run(request, Path(request.root))
    except BaseException as error:  # noqa: BLE001 - the loader raises it
        _send_greeting(Greeting(failure=ipc.to_sent_error(error)))
    os._exit(0)


def _run(request: FetchRequest, root: Path) -> None:
    dataset = load_version(find_source(request.url))  # it runs in another process: this one may still fork workers
    greeting = Greeting(dataset.source.label, dataset.version)
    create_root(root)
    with ExitStack() as stack:
        deadline = time.monotonic() + MAX_LOCK_WAIT_S
        while True:
            if _needs_no_fetcher(dataset, root):
                return _send_greeting(greeting)
            try:
                report_progress = stack.enter_context(version_lock(root, dataset.version, timeout_s=_POLL_S))
                break
            except TryLater:
                if time.monotonic() > deadline or _is_parent_gone():
                    raise
        if _needs_no_fetcher(dataset, root):
            return _send_greeting(greeting)
        # Before any loader chooses its episodes.
        record_quarantine(root, dataset.version, read_source_quarantine(dataset.source))
        fetch = VersionFetch(dataset, root, request.limits, report_progress)
        if fetch.published:
            return _send_greeting(greeting)
        listener = ipc.listen(root, dataset.version)
        _send_greeting(greeting)
        _accept_loaders(listener, fetch)
        with contextlib.suppress(OSError), ipc.socket_address(root, dataset.version) as address:
            touch_lease(root, dataset.version)
            Path(address).unlink()
        # Without unwinding, which would release the lock while threads may still write.
        os._exit(0)


def _needs_no_fetcher(dataset: DatasetVersion, root: Path) -> bool:
    """Whether the version is complete, or another process serves it."""
    return matches_sizes(staged_path(root, dataset.version), dataset) or ipc.has_fetcher(root, dataset.version)


def _send_greeting(greeting: Greeting) -> None:
    """Print the greeting and redirect stdout and stderr to /dev/null: the loader reads until the pipe closes."""
    with contextlib.suppress(OSError):
        os.write(1, msgspec.json.encode(greeting) + b"\n")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _is_parent_gone() -> bool:
    """Whether the loader that started this process has exited, which closes the pipe at stdout."""
    poll = select.poll()
    poll.register(1, 0)
    return bool(poll.poll(0))


def _accept_loaders(listener: socket.socket, fetch: VersionFetch) -> None:
    """Serve loaders until the version is published, or no loader was connected for `_IDLE_EXIT_S`."""
    threads: set[threading.Thread] = set()
    last_connection_s = time.monotonic()
    listener.settimeout(0.1)
    while not fetch.published and (threads or time.monotonic() - last_connection_s < _IDLE_EXIT_S):
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.settimeout(None)
            thread = threading.Thread(target=_handle_loader, args=(connection, fetch), daemon=True)
            threads.add(thread)
            thread.start()
        if threads:
            last_connection_s = time.monotonic()
            threads = {thread for thread in threads if thread.is_alive()}
    listener.close()
    fetch.finish()


def _handle_loader(connection: socket.socket, fetch: VersionFetch) -> None:
    """Serve one connection until the loader closes it."""
    with contextlib.suppress(OSError), connection:
        while message := connection.recv(ipc.MESSAGE_BYTES):
            descriptor, error = -1, None
            try:
                descriptor = fetch.open_file(decode_json(message, str))
            except BaseException as failed:  # noqa: BLE001 - the loader raises it
                error = failed
            try:
                ipc.send_answer(connection, descriptor, error)
            finally:
                if descriptor >= 0:
                    os.close(descriptor)


if __name__ == "__main__":
    main()
