"""Decode chunks into the caller's memory; of a partial read, only the needed blocks of a Blosc or Zstandard chunk.

Blosc frame: header │ offset of each block │ block │ block │ …        independent blocks of about 128 KiB
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
    """The functions of one codec. They release the GIL, and raise ValueError or RuntimeError for bytes of another
    codec or of another decoded size.

    whole(encoded, target): fill `target`, which has the decoded size. partial(encoded, start, target, room): fill
    `target` with decoded bytes from `start` on; `room` is scratch memory of the decoded size; may change `encoded`.
    """

    whole: Decode
    partial: Callable[[memoryview, int, memoryview, memoryview], None]


def decoder_for(codec: Codec) -> Decoder:
    """Return the decoder of a codec."""
    if codec == "raw":
        return Decoder(_copy, lambda encoded, start, target, _: _copy(encoded[start : start + len(target)], target))
    return _blosc() if codec == "blosc" else _zstd()


def _blosc() -> Decoder:
    from numcodecs import blosc

    def decode_all(encoded: memoryview, target: memoryview) -> None:
        _require_size(_blosc_header(encoded)[1], len(target))
        blosc.decompress(encoded, target)

    def part(encoded: memoryview, start: int, target: memoryview, room: memoryview) -> None:
        stop = start + len(target)
        flags, size, block = _blosc_header(encoded)
        _require_size(size, len(room))
        if flags & _BLOSC_STORED:
            if len(encoded) != _BLOSC_HEADER.size + size:
                raise ValueError(f"Blosc frame: truncated to {len(encoded)} bytes")
            _copy(encoded[_BLOSC_HEADER.size :][start:stop], target)
            return
        low, high = _strip_blocks(encoded, size, block, start, stop)
        blosc.decompress(encoded, room[: high - low])
        _copy(room[start - low : stop - low], target)

    return Decoder(decode_all, part)


def _blosc_header(encoded: memoryview) -> tuple[int, int, int]:
    """Return flags, decoded size, and decoded size of a block."""
    if len(encoded) < _BLOSC_HEADER.size:
        raise ValueError("no Blosc header")
    _, _, flags, _, size, block, length = _BLOSC_HEADER.unpack_from(encoded)
    if length != len(encoded):  # the library does not check, and would read beyond the buffer
        raise ValueError(f"Blosc frame: wrong size (expected {length} bytes by its header, got {len(encoded)})")
    return flags, size, block


def _strip_blocks(encoded: memoryview, size: int, block: int, start: int, stop: int) -> tuple[int, int]:
    """Change `encoded` to a frame of only the blocks with bytes [start, stop); return the range that it decodes to."""
    head = _BLOSC_HEADER.size
    if not block or head + 4 * -(-size // block) > len(encoded):
        raise ValueError("no Blosc header")
    # Never the last block alone: it may be shorter, and a frame needs at least one full block.
    first, last = min(start // block, max(0, size // block - 1)), -(-stop // block)
    low, high = first * block, min(last * block, size)
    encoded[head : head + 4 * (last - first)] = bytes(encoded[head + 4 * first : head + 4 * last])
    encoded[4:8] = (high - low).to_bytes(4, "little")
    return low, high


def _zstd() -> Decoder:
    from numcodecs import zstd

    def decode_all(encoded: memoryview, target: memoryview) -> None:
        header = _zstd_header(encoded)
        if header.width:
            _require_size(header.size, len(target))
            zstd.decompress(encoded, target)
        else:  # the frame does not state its size
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
            decode_all(encoded, room)
        _copy(room[start:stop], target)

    return Decoder(decode_all, part)


class _Header(NamedTuple):
    """A Zstandard frame header. size: decoded size, stored in `width` bytes at `offset`. end: of the header.

    simple: a single segment without a checksum.
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
    position = 6 - single + (0, 1, 2, 4)[kind & 3]
    size = int.from_bytes(encoded[position : position + width], "little") + (256 if width == 2 else 0)
    return _Header(position, width, size, simple=bool(single) and not kind & 4)


def _zstd_block(encoded: memoryview, header: _Header, number: int) -> int:
    """Return the offset of a frame's block by number, from 1; 0 if `_decode_zstd_prefix` does not apply."""
    if not (header.simple and header.width in (4, 8)):
        return 0
    position, block = header.end, 0
    for _ in range(number):
        position += block
        head = int.from_bytes(encoded[position : position + 3], "little")
        if head & 1 or position + 3 > len(encoded):
            return 0
        block = 3 + (1 if head >> 1 & 3 == 1 else head >> 3)
    return position


def _decode_zstd_prefix(
    decompress: Callable[[memoryview, memoryview], object],
    encoded: memoryview,
    header: _Header,
    last: int,
    target: memoryview,
) -> bool:
    """Decode only the blocks up to the one at `last`. Return False unless all of them have the maximal size.

    Size field and last-block flag of the frame are changed meanwhile, so that the frame ends with that block. The
    decoder compares the decoded size with the changed field.
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
        raise ValueError(f"wrong decoded size (expected {wanted} bytes, got {size})")


def _copy(source: memoryview, target: memoryview) -> None:
    _require_size(len(source), len(target))  # NumPy would broadcast a single byte
    # By NumPy, which releases the GIL; a memoryview does not.
    np.frombuffer(target, np.uint8)[:] = np.frombuffer(source, np.uint8)
