"""Read the record that jobstats keeps in a job's AdminComment: `JS1:` and gzipped JSON in base64."""

from __future__ import annotations

import binascii
import zlib

import msgspec

from pitools.core.record import decode_json

_MARK = "JS1:"
_MAX_BYTES = 1 << 20  # of the JSON; a comment of 27 kB can hold 20 MB


class _Node(msgspec.Struct):
    gpu_utilization: dict[str, float] = {}


class _Summary(msgspec.Struct):
    nodes: dict[str, _Node] = {}


def gpu_utilization(admin_comment: str) -> float | None:
    """Return the mean utilization of a job's GPUs, 0 to 1; None if the comment does not say it."""
    if not admin_comment.startswith(_MARK):
        return None
    try:
        packed = binascii.a2b_base64(admin_comment[len(_MARK) :])
        summary = decode_json(zlib.decompressobj(wbits=31).decompress(packed, _MAX_BYTES), _Summary)
    except (ValueError, zlib.error, msgspec.DecodeError):  # JS1:None and JS1:Short, which jobstats writes too
        return None
    values = [value for node in summary.nodes.values() for value in node.gpu_utilization.values()]
    return min(1.0, max(0.0, sum(values) / len(values) / 100)) if values else None
