"""The process that fetches one version for all loaders of a node: started by the first, gone soon after the last.

It is a process of its own because the object stores' library has threads, which a loader that is forked would lose;
and one for the node, so that each shard is asked for once. It never unwinds: whatever its end, the kernel frees the
lock and the room, and the journal says what is done.
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
from pitools.loader.on_demand.cache_filler import CacheFiller
from pitools.loader.on_demand.ipc import Greeting
from pitools.stage.cache.disk_quota import QuotaLimits
from pitools.stage.cache.inventory import matches_sizes
from pitools.stage.cache.layout import create_root, set_path, touch_lease, version_lock
from pitools.stage.sources.base import Dataset
from pitools.stage.sources.open import find_source, load_dataset

# How long another process, such as `pit-stage run`, may take to stage the version.
MAX_LOCK_WAIT_S = 3600.0
_POLL_S = 0.3
# A loader that begins connects at once; one that ends may be followed by another.
_IDLE_EXIT_S = 1.0


class FetchRequest(msgspec.Struct, frozen=True):
    """What to serve: a version's URL, or of a dataset of one version; into which cache."""

    url: str
    root: str
    limits: QuotaLimits


def main() -> None:
    """Serve the order in the first argument. What is known at the start goes to stdout, as one line."""
    if os.fork():
        os._exit(0)  # nobody has to wait for the other one
    # A job that is told to end may read until it has: this one goes when nobody reads any more.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o022)
    order = decode_json(sys.argv[1], FetchRequest)
    try:
        _run(order, Path(order.root))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the loader raises it
        _send_greeting(Greeting(failure=ipc.to_sent_error(error)))
    os._exit(0)


def _run(order: FetchRequest, root: Path) -> None:
    dataset = load_dataset(find_source(order.url))  # in a process of its own: workers may still be forked from this one
    known = Greeting(dataset.source.label, dataset.version)
    create_root(root)
    with ExitStack() as stack:
        until = time.monotonic() + MAX_LOCK_WAIT_S
        while True:
            if _needs_no_server(dataset, root):
                return _send_greeting(known)
            try:
                tell = stack.enter_context(version_lock(root, dataset.version, timeout_s=_POLL_S))
                break
            except TryLater:
                if time.monotonic() > until or _is_parent_gone():
                    raise
        if _needs_no_server(dataset, root):
            return _send_greeting(known)
        fill = CacheFiller(dataset, root, order.limits, tell)
        if fill.published:
            return _send_greeting(known)
        listener = ipc.listen(root, dataset.version)
        _send_greeting(known)
        _accept_loaders(listener, fill)
        with contextlib.suppress(OSError), ipc.socket_address(root, dataset.version) as place:
            touch_lease(root, dataset.version)
            Path(place).unlink()
        # Not by unwinding, which would give the lock back while threads may still write.
        os._exit(0)


def _needs_no_server(dataset: Dataset, root: Path) -> bool:
    """Whether there is nothing to do: it stands, or another process serves it."""
    if matches_sizes(set_path(root, dataset.version), dataset):
        return True
    talk = ipc.connect(root, dataset.version)
    if talk:
        talk.close()
    return talk is not None


def _send_greeting(greeting: Greeting) -> None:
    """Say the one line, and close what it is said through: whoever started this waits for no more."""
    with contextlib.suppress(OSError):
        os.write(1, msgspec.json.encode(greeting) + b"\n")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _is_parent_gone() -> bool:
    """Whether the loader that started this is gone: then nobody reads what would be said."""
    asked = select.poll()
    asked.register(1, 0)
    return bool(asked.poll(0))


def _accept_loaders(listener: socket.socket, fill: CacheFiller) -> None:
    """Answer loaders until all is published, or none has been there for a while."""
    talks: set[threading.Thread] = set()
    seen = time.monotonic()
    listener.settimeout(0.1)
    while not fill.published and (talks or time.monotonic() - seen < _IDLE_EXIT_S):
        with contextlib.suppress(TimeoutError):
            talk, _ = listener.accept()
            talk.settimeout(None)
            thread = threading.Thread(target=_handle_loader, args=(talk, fill), daemon=True)
            talks.add(thread)
            thread.start()
        if talks:
            seen = time.monotonic()
            talks = {thread for thread in talks if thread.is_alive()}
    listener.close()
    fill.finish()


def _handle_loader(talk: socket.socket, fill: CacheFiller) -> None:
    """Answer one loader's thread until it hangs up."""
    with contextlib.suppress(OSError), talk:
        while message := talk.recv(ipc.MESSAGE_BYTES):
            descriptor, error = -1, None
            try:
                descriptor = fill.open_file(decode_json(message, str))
            except BaseException as failed:  # noqa: BLE001 - the loader raises it
                error = failed
            try:
                ipc.send_answer(talk, descriptor, error)
            finally:
                if descriptor >= 0:
                    os.close(descriptor)


if __name__ == "__main__":
    main()
