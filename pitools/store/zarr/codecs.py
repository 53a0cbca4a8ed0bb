"""From a chunk's encoded bytes to its items, in place; of a Blosc chunk, no more blocks than hold what is wanted.

Blosc frame: header │ where each block begins │ block │ block │ …        blocks of about 128 KiB, each by itself
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pitools.store.zarr.chunk_layout import Codec

Decode = Callable[[memoryview, memoryview], None]

_BLOSC_HEADER, _BLOSC_STORED = struct.Struct("<BBBBIII"), 0x02
_ZSTD_MAGIC, _ZSTD_BLOCK = b"\x28\xb5\x2f\xfd", 128 << 10


class Decoder(NamedTuple):
    """How to decode one codec's chunks. Both release the GIL, and raise ValueError or RuntimeError for bytes that are
    not of the codec, or of another size.

    whole(encoded, target): fill `target`, of exactly the decoded size. part(encoded, start, target, room): fill it
    with what begins at byte `start`; `room` is memory of exactly the decoded size. It may change `encoded`.
    """

    whole: Decode
    partial: Callable[[memoryview, int, memoryview, memoryview], None]


def decoder_for(codec: Codec) -> Decoder:
    """How to decode chunks of this codec."""
    if codec == "raw":
        return Decoder(_copy, lambda encoded, start, target, _: _copy(encoded[start : start + len(target)], target))
    return _blosc() if codec == "blosc" else _zstd()


def _blosc() -> Decoder:
    from numcodecs import blosc

    def whole(encoded: memoryview, target: memoryview) -> None:
        _require_size(_blosc_header(encoded)[1], len(target))
        blosc.decompress(encoded, target)

    def part(encoded: memoryview, start: int, target: memoryview, room: memoryview) -> None:
        stop = start + len(target)
        flags, size, block = _blosc_header(encoded)
        _require_size(size, len(room))
        if flags & _BLOSC_STORED:
            if len(encoded) != _BLOSC_HEADER.size + size:
                raise ValueError("a Blosc frame that is cut short")
            _copy(encoded[_BLOSC_HEADER.size :][start:stop], target)
            return
        low, high = _strip_blocks(encoded, size, block, start, stop)
        blosc.decompress(encoded, room[: high - low])
        _copy(room[start - low : stop - low], target)

    return Decoder(whole, part)


def _blosc_header(encoded: memoryview) -> tuple[int, int, int]:
    """Flags, decoded size, and decoded size of a block."""
    if len(encoded) < _BLOSC_HEADER.size:
        raise ValueError("no Blosc header")
    _, _, flags, _, size, block, length = _BLOSC_HEADER.unpack_from(encoded)
    if length != len(encoded):  # the library believes it, and would read on
        raise ValueError(f"{len(encoded)} bytes, where its Blosc header says {length}")
    return flags, size, block


def _strip_blocks(encoded: memoryview, size: int, block: int, start: int, stop: int) -> tuple[int, int]:
    """Make it a frame of only the blocks that hold bytes [start, stop), and return which bytes these decode to."""
    head = _BLOSC_HEADER.size
    if not block or head + 4 * -(-size // block) > len(encoded):
        raise ValueError("no Blosc header")
    # Never the last block alone: it may be a short one, and a frame has at least one that is not.
    first, last = min(start // block, max(0, size // block - 1)), -(-stop // block)
    low, high = first * block, min(last * block, size)
    encoded[head : head + 4 * (last - first)] = bytes(encoded[head + 4 * first : head + 4 * last])
    encoded[4:8] = (high - low).to_bytes(4, "little")
    return low, high


def _zstd() -> Decoder:
    from numcodecs import zstd

    def whole(encoded: memoryview, target: memoryview) -> None:
        header = _zstd_header(encoded)
        if header.width:
            _require_size(header.size, len(target))
            zstd.decompress(encoded, target)
        else:  # its writer did not know
            data = zstd.decompress(encoded)
            _require_size(len(data), len(target))
            target[:] = data

    def part(encoded: memoryview, start: int, target: memoryview, room: memoryview) -> None:
        stop = start + len(target)
        header = _zstd_header(encoded)
        _require_size(header.size if header.width else len(room), len(room))
        blocks = -(-stop // _ZSTD_BLOCK)
        last = _zstd_block(encoded, header, blocks) if blocks * _ZSTD_BLOCK < len(room) else 0
        if not (last and _decode_zstd_prefix(zstd.decompress, encoded, header, last, room[: blocks * _ZSTD_BLOCK])):
            whole(encoded, room)
        _copy(room[start:stop], target)

    return Decoder(whole, part)


class _Header(NamedTuple):
    """Of a Zstandard frame. size: what it decodes to, in `width` bytes at `offset`; end: where its first block begins.

    simple: its window is its size, and it has no checksum of its own.
    """

    offset: int
    width: int
    size: int
    simple: bool

    @property
    def end(self) -> int:
        return self.offset + self.width


def _zstd_header(encoded: memoryview) -> _Header:
    if len(encoded) < 6 or encoded[:4] != _ZSTD_MAGIC:
        raise ValueError("no Zstandard frame")
    kind = encoded[4]
    single = kind >> 5 & 1
    width = (single, 2, 4, 8)[kind >> 6]
    at = 6 - single + (0, 1, 2, 4)[kind & 3]
    size = int.from_bytes(encoded[at : at + width], "little") + (256 if width == 2 else 0)
    return _Header(at, width, size, simple=bool(single) and not kind & 4)


def _zstd_block(encoded: memoryview, header: _Header, number: int) -> int:
    """Where a frame's block of this number, from 1, begins; 0 where it is not to be found, or not to be the last."""
    if not (header.simple and header.width in (4, 8)):
        return 0
    at, block = header.end, 0
    for _ in range(number):
        at += block
        head = int.from_bytes(encoded[at : at + 3], "little")
        if head & 1 or at + 3 > len(encoded):
            return 0
        block = 3 + (1 if head >> 1 & 3 == 1 else head >> 3)
    return at


def _decode_zstd_prefix(
    decompress: Callable[[memoryview, memoryview], object],
    encoded: memoryview,
    header: _Header,
    last: int,
    target: memoryview,
) -> bool:
    """Decode only the blocks up to the one at `last`, if they are as large as blocks can be, which they mostly are.

    The frame says for that time that it ends there. Its blocks decode to its first bytes, and if to as many as it now
    claims is compared in decoding it.
    """
    size, field = encoded[header.offset : header.end], encoded[last : last + 3]
    before, head = bytes(size), int.from_bytes(field, "little")
    end = last + 3 + (1 if head >> 1 & 3 == 1 else head >> 3)
    size[:] = len(target).to_bytes(header.width, "little")
    field[:] = (head | 1).to_bytes(3, "little")
    try:
        decompress(encoded[:end], target)
    except RuntimeError:
        return False
    finally:
        size[:] = before
        field[:] = head.to_bytes(3, "little")
    return True


def _require_size(size: int, wanted: int) -> None:
    if size != wanted:
        raise ValueError(f"it holds {size} bytes, not {wanted}")


def _copy(source: memoryview, target: memoryview) -> None:
    _require_size(len(source), len(target))  # NumPy would repeat a single byte
    # By NumPy, since a memoryview would copy under the GIL.
    np.frombuffer(target, np.uint8)[:] = np.frombuffer(source, np.uint8)
