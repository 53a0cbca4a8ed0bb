"""Memory that a stager, its workers and its server share; made before they fork, and gone with the last of them.

What is here of the dataset (`done`), what this node has learned about the others, and what came from whom. Each value
is written whole, and by one process or with any writer right; nobody ever waits for a lock that a dead process holds.
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

FROM_ORIGIN = 0xFFFF  # the origin, where a node's number would stand
_ENTRY = struct.Struct("=IHxxQ")  # file, node, bytes
_RECEIPT_SLOTS = 64
_READ = 1 << 16


class SharedState:
    """Shared state of `files` files and `nodes` nodes. Times are CLOCK_MONOTONIC, one clock for all processes."""

    def __init__(self, files: int, nodes: int) -> None:
        self.files, self.nodes = files, nodes
        self.began = time.monotonic()
        self._memory = mmap(-1, 8 * _RECEIPT_SLOTS + (8 + 2 + 3) * nodes + 2 * files + 1)
        self._whole = memoryview(self._memory)
        self._at = 0
        self._arrived = self._next(8 * _RECEIPT_SLOTS).cast("Q")
        self._shunned = self._next(8 * nodes).cast("Q")
        self.port = self._next(2 * nodes).cast("H")  # where a node was last found; 0: not yet
        self.contacted, self.untrusted, self.finished = (self._next(nodes) for _ in range(3))
        self.done, self.source_only = (self._next(files) for _ in range(2))
        self.whole = self._next(1)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        self._ledger = os.memfd_create("pit-fanout", os.MFD_CLOEXEC)
        self.descriptors = (self._bell, self._ledger)
        fcntl.fcntl(self._ledger, fcntl.F_SETFL, os.O_APPEND)  # the kernel keeps the processes' entries apart

    def _next(self, size: int) -> memoryview:
        self._at += size
        return self._whole[self._at - size : self._at]

    def mark_done(self, index: int) -> None:
        """File `index` is verified and written: the server may give it away, and whoever waits for it is told."""
        self.done[index] = 1
        os.eventfd_write(self._bell, 1)

    def mark_all_done(self) -> None:
        """All files are here, and published."""
        self.whole[0] = 1
        self.done[:] = b"\1" * self.files
        os.eventfd_write(self._bell, 1)

    def wait_mark(self) -> None:
        """Sleep until something has been marked since the last call; for one thread of one process."""
        os.eventfd_read(self._bell)

    def add_received(self, count: int) -> None:
        """Count bytes that have come in, from anywhere. Others judge by it whether this node gets on."""
        # A slot a process: threads of one may lose an addition to each other, which is near enough.
        self._arrived[os.getpid() % _RECEIPT_SLOTS] += count

    def received_bytes(self) -> int:
        """Bytes that have come in, about."""
        return sum(self._arrived)

    def back_off(self, node: int, seconds: float) -> None:
        """Leave a node alone for a while."""
        self._shunned[node] = int((time.monotonic() + seconds) * 1e9)

    def is_usable(self, node: int) -> bool:
        """Whether a node may be asked now."""
        return not self.untrusted[node] and self._shunned[node] <= time.monotonic_ns()

    def distrust(self, index: int, nodes: set[int]) -> None:
        """File `index` was wrong though its manifest is right: these nodes are asked no more, and not for this file."""
        self.source_only[index] = 1
        for node in nodes:
            self.untrusted[node] = 1

    def record_receipt(self, index: int, node: int, count: int) -> None:
        """Write down that `count` bytes of a file came from a node, or from SOURCE."""
        os.write(self._ledger, _ENTRY.pack(index, node, count))

    def bytes_by_sender(self) -> Counter[int]:
        """Bytes received by giver: a node's number, or SOURCE."""
        counts: Counter[int] = Counter()
        for _, node, count in self._notes():
            counts[node] += count
        return counts

    def senders(self, index: int) -> set[int]:
        """The nodes that any part of a file came from."""
        return {node for file, node, _ in self._notes() if file == index and node != FROM_ORIGIN}

    def _notes(self) -> Iterator[tuple[int, int, int]]:
        offset = 0
        while data := os.pread(self._ledger, _READ * _ENTRY.size, offset):
            offset += len(data)
            yield from _ENTRY.iter_unpack(data)

    def close(self) -> None:
        """Let the memory go, in this process."""
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
