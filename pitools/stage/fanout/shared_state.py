"""Memory shared by a stager, its workers and its server: created before they fork, freed with the last of them.

It holds the files that are done, this node's state of the other nodes, and the bytes received from each. Every
store is one aligned word, and a word has one writer, or all its writers store the same value; no process waits for a
lock of a dead one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections import Counter
from collections.abc import Iterator
from mmap import mmap

FROM_ORIGIN = 0xFFFF  # in place of a node's number
_ENTRY = struct.Struct("=IHxxQ")  # file, node, bytes
_RECEIPT_SLOTS = 64
_READ_ENTRIES = 1 << 16


class SharedState:
    """Shared state of `files` files and `nodes` nodes. Times are CLOCK_MONOTONIC, the same clock for all processes."""

    def __init__(self, files: int, nodes: int) -> None:
        self.files, self.nodes = files, nodes
        self.started_at = time.monotonic()
        self._memory = mmap(-1, 8 * _RECEIPT_SLOTS + (8 + 2 + 3) * nodes + 2 * files + 1)
        self._view = memoryview(self._memory)
        self._used = 0
        self._received = self._take_bytes(8 * _RECEIPT_SLOTS).cast("Q")
        self._backed_off_until = self._take_bytes(8 * nodes).cast("Q")
        self.port = self._take_bytes(2 * nodes).cast("H")  # a node's last known port; 0: none
        self.contacted, self.untrusted, self.finished = (self._take_bytes(nodes) for _ in range(3))
        self.done, self.source_only = (self._take_bytes(files) for _ in range(2))
        self.published = self._take_bytes(1)
        self._wake_descriptor = os.eventfd(0, os.EFD_CLOEXEC)
        self._senders_descriptor = os.memfd_create("pit-fanout", os.MFD_CLOEXEC)
        self.descriptors = (self._wake_descriptor, self._senders_descriptor)
        fcntl.fcntl(
            self._senders_descriptor, fcntl.F_SETFL, os.O_APPEND
        )  # appends of several processes do not interleave

    def _take_bytes(self, size: int) -> memoryview:
        self._used += size
        return self._view[self._used - size : self._used]

    def mark_done(self, index: int) -> None:
        """Mark file `index` as verified and written: the server may send it, and clients waiting for it wake up."""
        self.done[index] = 1
        os.eventfd_write(self._wake_descriptor, 1)

    def mark_all_done(self) -> None:
        """Mark all files as done and the version as published."""
        self.published[0] = 1
        self.done[:] = b"\1" * self.files
        os.eventfd_write(self._wake_descriptor, 1)

    def wait_for_mark(self) -> None:
        """Block until a file was marked since the last call; for one thread of one process."""
        os.eventfd_read(self._wake_descriptor)

    def add_received(self, count: int) -> None:
        """Count bytes received from any sender. Other nodes judge this node's progress by the sum."""
        # A slot per process: threads of a process may lose an update, so the sum is approximate.
        self._received[os.getpid() % _RECEIPT_SLOTS] += count

    def received_bytes(self) -> int:
        """Return the approximate number of bytes received."""
        return sum(self._received)

    def back_off(self, node: int, seconds: float) -> None:
        """Do not use a node for some seconds."""
        self._backed_off_until[node] = int((time.monotonic() + seconds) * 1e9)

    def is_usable(self, node: int) -> bool:
        """Whether a node may be queried now."""
        return not self.untrusted[node] and self._backed_off_until[node] <= time.monotonic_ns()

    def distrust(self, index: int, nodes: set[int]) -> None:
        """Record that file `index` was wrong: read it from the source only, and do not query these nodes again."""
        self.source_only[index] = 1
        for node in nodes:
            self.untrusted[node] = 1

    def record_sender(self, index: int, node: int, count: int) -> None:
        """Record that `count` bytes of a file were received from a node, or FROM_ORIGIN."""
        os.write(self._senders_descriptor, _ENTRY.pack(index, node, count))

    def bytes_by_sender(self) -> Counter[int]:
        """Return the bytes received from each node, and FROM_ORIGIN."""
        counts: Counter[int] = Counter()
        for _, node, count in self._sender_entries():
            counts[node] += count
        return counts

    def senders(self, index: int) -> set[int]:
        """Return the nodes that sent any part of a file."""
        return {node for file, node, _ in self._sender_entries() if file == index and node != FROM_ORIGIN}

    def _sender_entries(self) -> Iterator[tuple[int, int, int]]:
        offset = 0
        while data := os.pread(self._senders_descriptor, _READ_ENTRIES * _ENTRY.size, offset):
            offset += len(data)
            yield from _ENTRY.iter_unpack(data)

    def close(self) -> None:
        """Close this process's descriptors of the shared memory."""
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
