"""Compute digests of file content by XXH3-128, which is as fast as memory. The prefix names the algorithm.

xxh3_128:<32 hex>      of a file's bytes: for files up to RANGE_BYTES, and in older manifests for larger ones
xxh3_128x64m:<32 hex>  of a larger file: XXH3-128 over the 16-byte XXH3-128 digests of its ranges of RANGE_BYTES, in
                       order, so that ranges can be read, copied, verified and resumed independently
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

ALGORITHM = "xxh3_128"
RANGED_ALGORITHM = "xxh3_128x64m"
RANGE_BYTES = 64 << 20
BLOCK_BYTES = 128 << 10


class Hasher:
    """A running digest. `update` releases the GIL. Not cryptographic: the transport protects against forgery.

    ranged: by ranges for a large file; older manifests have digests without them.
    """

    def __init__(self, *, ranged: bool = True) -> None:
        self._state = xxhash.xxh3_128()
        self._left = RANGE_BYTES if ranged else 1 << 63
        self._ranges: list[bytes] = []

    def update(self, block: bytes | memoryview) -> None:
        """Add bytes, in order."""
        if len(block) > self._left:
            view = memoryview(block)
            while len(view) > self._left:
                self._state.update(view[: self._left])
                view = view[self._left :]
                self._ranges.append(self._state.digest())
                self._state, self._left = xxhash.xxh3_128(), RANGE_BYTES
            block = view
        self._state.update(block)
        self._left -= len(block)

    def digest(self) -> str:
        """Return `<algorithm>:<32 hex digits>` of all bytes so far."""
        if not self._ranges:
            return f"{ALGORITHM}:{self._state.hexdigest()}"
        return digest_ranges([*self._ranges, self._state.digest()])


def hasher_for(digest: str) -> Hasher:
    """Return a hasher of the algorithm of `digest`; for "", of new manifests."""
    return Hasher(ranged=not digest.startswith(f"{ALGORITHM}:"))


def digest_bytes(block: bytes | memoryview) -> str:
    """Return the digest of at most RANGE_BYTES. Holds the GIL: for small files."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(block)}"


def digest_ranges(ranges: Iterable[bytes]) -> str:
    """Return the digest of a large file from the raw digests of its ranges, in order."""
    return f"{RANGED_ALGORITHM}:{xxhash.xxh3_128_hexdigest(b''.join(ranges))}"


def digest_file(path: Path, advance: Callable[[int], None] = lambda _: None) -> tuple[int, str]:
    """Return size in bytes and digest of a file. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return digest_descriptor(file.fileno(), advance=advance)


def digest_descriptor(
    descriptor: int, *, like_digest: str = "", advance: Callable[[int], None] = lambda _: None
) -> tuple[int, str]:
    """Return size in bytes and digest of an open file from its start; the file's position stays unchanged.

    like_digest: a digest of the algorithm to use. advance: called with each block's bytes. Raises OSError.
    """
    hasher, total = hasher_for(like_digest), 0
    # A page-aligned buffer: reading into a large malloc buffer, which starts inside a page, is several times slower.
    with mmap.mmap(-1, BLOCK_BYTES) as buffer, memoryview(buffer) as view:
        while count := os.preadv(descriptor, [view], total):
            hasher.update(view[:count])
            total += count
            advance(count)
    return total, hasher.digest()
