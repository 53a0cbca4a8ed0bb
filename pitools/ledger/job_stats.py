"""Read the record that jobstats leaves in a job's AdminComment: `JS1:` and base64 of gzipped JSON."""

from __future__ import annotations

import base64
import binascii
import re
import zlib

import msgspec

from pitools.core.record import decode_json

_RECORD = re.compile(r"JS1:([A-Za-z0-9+/=]+)")
_MAX_COMMENT, _MAX_JSON = 1 << 20, 4 << 20  # bytes; a comment of 27 kB can hold 20 MB
_GZIP = 16 + zlib.MAX_WBITS


class _Node(msgspec.Struct):
    gpu_utilization: dict[str, float] = {}


class _JobStats(msgspec.Struct):
    nodes: dict[str, _Node] = {}


def gpu_utilization(admin_comment: str) -> list[float]:
    """Return the share of the job's time, 0 to 1, in which each GPU was busy; a GPU without a figure is left out.

    [] without a record (also `JS1:Short`, `JS1:None`), and for one that is damaged or too large.
    """
    match = _RECORD.search(admin_comment[:_MAX_COMMENT])
    try:
        packed = base64.b64decode(match[1], validate=True) if match else b""
        unpack = zlib.decompressobj(_GZIP)
        text = unpack.decompress(packed, _MAX_JSON)
        stats = decode_json(text, _JobStats) if unpack.eof else _JobStats()
    except (binascii.Error, zlib.error, msgspec.DecodeError):
        return []
    percents = [value for node in stats.nodes.values() for value in node.gpu_utilization.values()]
    return [value / 100 for value in percents if 0 <= value <= 100]
