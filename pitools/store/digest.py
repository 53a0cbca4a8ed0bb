"""Digests of file content: XXH3-128, which is as fast as memory, tagged by name so that another may follow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import xxhash

ALGORITHM = "xxh3_128"
BLOCK = 4 << 20


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
    buffer = bytearray(BLOCK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(view[:count])
            total += count
            advance(count)
    return total, hasher.text()
