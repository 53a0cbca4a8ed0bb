"""Digests of file content: XXH3-128, which is as fast as memory, tagged by name so that another may follow."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import xxhash

ALGORITHM = "xxh3_128"
BLOCK = 128 << 10


class Hasher:
    """A running digest. `update` releases the GIL; the digest is not a defence against a forger, the transport is."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, block: bytes | memoryview) -> None:
        """Add bytes, in order."""
        self._state.update(block)

    def text(self) -> str:
        """`xxh3_128:<32 hex digits>` of all bytes so far."""
        return f"{ALGORITHM}:{self._state.hexdigest()}"


def of_file(path: Path, advance: Callable[[int], None] = lambda _: None) -> tuple[int, str]:
    """Size in bytes and digest of a file, read once. Raises OSError."""
    hasher, total = Hasher(), 0
    # A page-aligned buffer: reading into malloc's large ones, which begin inside a page, is several times slower.
    with path.open("rb", buffering=0) as file, mmap.mmap(-1, BLOCK) as buffer, memoryview(buffer) as view:
        while count := file.readinto(view):
            hasher.update(view[:count])
            total += count
            advance(count)
    return total, hasher.text()
