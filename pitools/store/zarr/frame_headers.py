"""Check the lengths in the headers of compressed bytes, which detects truncation and ranges of zeros.

Only headers are read: a flipped bit in the content between them is not detected.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

ReadRange = Callable[[int, int], bytes]  # (offset, count) → bytes, fewer at the end

_ZSTD, _ZSTD_SKIPPABLE = 0xFD2FB528, range(0x184D2A50, 0x184D2A60)
_BLOSC_FORMATS = range(1, 6)


def check_blosc(read_range: ReadRange, size: int, raw_bytes: int | None) -> str:
    """Return the problem of a Blosc buffer of `size` bytes that should decode to `raw_bytes`; "" if none."""
    header = read_range(0, 16)
    if size < 16 or header[0] not in _BLOSC_FORMATS:
        return "no Blosc header"
    content, _, length = struct.unpack_from("<III", header, 4)
    if length != size:
        return f"{size} bytes (expected {length} by the Blosc header)"
    return _check_length(content, raw_bytes)


def check_gzip(read_range: ReadRange, size: int, raw_bytes: int | None) -> str:
    """Return the problem of a gzip member, whose last four bytes are the length of its content; "" if none."""
    if size < 18 or read_range(0, 3) != b"\x1f\x8b\x08":
        return "no gzip header"
    content = int.from_bytes(read_range(size - 4, 4), "little")
    return _check_length(content, None if raw_bytes is None else raw_bytes & 0xFFFFFFFF)


def check_zstd(read_range: ReadRange, size: int, raw_bytes: int | None) -> str:
    """Return the problem of Zstandard frames, followed block by block (of up to 128 KiB) to the end; "" if none."""
    position, content = 0, 0
    counted = raw_bytes is not None
    while position < size or position == 0:
        magic = int.from_bytes(read_range(position, 4), "little")
        if magic in _ZSTD_SKIPPABLE:
            position += 8 + int.from_bytes(read_range(position + 4, 4), "little")
            continue
        if magic != _ZSTD:
            return f"no Zstandard frame at byte {position}"
        position, length, wrong = _zstd_frame(read_range, position + 4)
        if wrong:
            return wrong
        counted = counted and length is not None
        content += length or 0
    if position != size:
        return f"{size} bytes (expected {position} by the Zstandard frame)"
    return _check_length(content, raw_bytes) if counted else ""


def _zstd_frame(take: ReadRange, position: int) -> tuple[int, int | None, str]:
    """Return the end of the frame with its header at `position`, the length of its content, and its problem or ""."""
    head = take(position, 14)
    if not head:
        return position, None, "truncated in a Zstandard header"
    descriptor = head[0]
    single, checksum = descriptor >> 5 & 1, descriptor >> 2 & 1
    start = 1 + (not single) + (0, 1, 2, 4)[descriptor & 3]
    width = (single, 2, 4, 8)[descriptor >> 6]
    length = int.from_bytes(head[start : start + width], "little") + (256 if width == 2 else 0) if width else None
    position += start + width
    last = 0
    while not last:
        block = take(position, 3)
        number = int.from_bytes(block, "little")
        last, kind, size = number & 1, number >> 1 & 3, number >> 3
        # Writers emit an empty block only as the last one: other empty blocks are a range of zeros.
        if len(block) < 3 or kind == 3 or not (size or last):
            return position, None, f"no Zstandard block at byte {position}"
        position += 3 + (1 if kind == 1 else size)
    return position + 4 * checksum, length, ""


def _check_length(length: int, raw_bytes: int | None) -> str:
    if raw_bytes is None or length == raw_bytes:
        return ""
    return f"decodes to {length} bytes (expected {raw_bytes} by the array's chunk)"
