"""Read an XLA profile, `<host>.xplane.pb`, with a reader of protobuf's wire format for these messages alone.

XSpace: planes=1. XPlane: name=2, lines=3, event_metadata=4, stat_metadata=5, stats=6. XLine: name=2, timestamp_ns=3,
events=4, display_name=11. XEvent: metadata_id=1, offset_ps=2, duration_ps=3, stats=4. XStat: metadata_id=1, double=2,
uint64=3, int64=4, str=5, bytes=6, ref=7. XEventMetadata: id=1, name=2, stats=5. XStatMetadata: id=1, name=2. A map's
entry: key=1, value=2. Times are relative to `profile_start_time` of the plane "Task Environment".

Devices: GPU streams (lines `Stream #…`), and TPU lines `XLA Ops`, of which no real profile was at hand. Without device,
XLA's operations on the host compute.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pitools.core.errors import DataError
from pitools.perf.read.classify import device_kind, hlo_kind, host_kind
from pitools.perf.read.files import read_chunks
from pitools.perf.spans import Kind, Names, RankSpans, finish_rank, make_spans, make_windows, without_nested

_MAX_BYTES = 2 << 30  # protobuf's own limit of a message
_DEVICE_LINES = ("Stream #", "XLA Ops", "Async XLA Ops")
_MAX_NS = 1 << 61
_RANK = re.compile(r"(\d{1,9})\.xplane\.pb(?:\.gz)?")  # as `pit perf trace` names it


class _Bad(Exception):
    """The bytes are no message."""


@dataclass
class _Plane:
    """events: metadata id → name and operation of XLA. stats: metadata id → name."""

    name: str = ""
    lines: list[bytes] = field(default_factory=list)
    events: dict[int, tuple[str, str]] = field(default_factory=dict)
    stats: dict[int, str] = field(default_factory=dict)
    start_ns: int = 0


def read_xplane(path: Path, names: Names) -> RankSpans:
    """Return the spans of a profile. Of a cut one its whole planes, said in the notes. Raises DataError."""
    notes: list[str] = []
    data = bytearray()
    for chunk in read_chunks(path, notes):
        data += chunk
        if len(data) > _MAX_BYTES:
            raise DataError("more than 2 GiB (expected an XLA profile)", where=str(path))
    planes: list[_Plane] = []
    columns = _Columns(names)
    try:
        for number, _, content in _fields(bytes(data)):
            if number == 1:
                planes.append(_plane(content))
    except _Bad as error:
        notes.append(f"{path.name}: {error}: {len(planes)} whole planes are used")
    try:
        for plane in planes:
            if plane.name.startswith(("/device:", "/host:CPU")):
                for line in plane.lines:
                    columns.add_line(plane, line)
    except _Bad as error:
        raise DataError(f"not an XLA profile: {error}", where=str(path)) from error
    if not columns.rows:
        what = "; ".join(notes) or f"{len(planes)} planes"
        raise DataError(f"no event of a device or of XLA ({what})", where=str(path))
    origin = max(plane.start_ns for plane in planes)
    kind, stream, name, start, end = zip(*columns.rows, strict=True)
    spans = make_spans(
        kind=kind, stream=stream, name=name, start_ns=[at + origin for at in start], end_ns=[at + origin for at in end]
    )
    if columns.has_device:  # what other threads of the host say of XLA's operations is then their launch
        spans = spans.where((spans.kind != Kind.OP) | (spans.stream == columns.step_stream))
    return finish_rank(
        RankSpans(
            path,
            int(named[1]) if (named := _RANK.fullmatch(path.name)) else None,
            without_nested(spans, (spans.kind == Kind.OP) | (spans.kind == Kind.HOST)),
            make_windows([(number, at + origin, end + origin) for number, at, end in columns.steps]),
            step_stream=columns.step_stream,
            has_device=columns.has_device,
            is_unix=bool(origin),
            notes=tuple(notes),
        )
    )


class _Columns:
    """Rows of spans (kind, stream, name, start, end) and steps, with times from the profile's start, ns."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.steps: list[tuple[int, int, int]] = []
        self.step_stream = -1
        self.has_device = False

    def add_line(self, plane: _Plane, line: bytes) -> None:
        """Add the spans of a line. Raises _Bad."""
        title, base, events = "", 0, []
        for number, value, data in _fields(line):
            if number == 2 or (number == 11 and not title):
                title = data.decode(errors="replace")
            elif number == 3:
                base = value
            elif number == 4:
                events.append(data)
        on_device = plane.name.startswith("/device:")
        if on_device and not title.startswith(_DEVICE_LINES):
            return
        self.has_device |= on_device and bool(events)
        stream = self.names.index(f"{plane.name} {title}" if on_device else f"thread {title}")
        is_python = not on_device and title.startswith("python")
        for event in events:
            name, start, end, hlo_op, step = _event(plane, event, base)
            kind: Kind | None
            if step is not None and not on_device:
                self.steps.append((step, start, end))
                self.step_stream = stream
                continue
            if on_device:
                kind = device_kind(name, is_copy="Memcpy" in title)
                kind = hlo_kind(hlo_op) if kind is Kind.COMPUTE and hlo_op else kind
            elif hlo_op and not is_python:
                kind = hlo_kind(hlo_op)
                kind = Kind.OP if kind is Kind.COMPUTE else kind
            else:
                kind = host_kind(name, is_annotation=True)
                kind = None if kind is Kind.HOST and not is_python else kind
            if kind is not None and end > start:
                self.rows.append((kind, stream, self.names.index(name), start, end))


def _event(plane: _Plane, event: bytes, base: int) -> tuple[str, int, int, str, int | None]:
    """Return an event's name, start and end in ns, operation of XLA, and step."""
    key = offset = duration = 0
    hlo_op, step = "", None
    for number, value, data in _fields(event):
        if number == 1:
            key = value
        elif number == 2:
            offset = value
        elif number == 3:
            duration = value
        elif number == 4:
            stat, integer, text = _stat(plane.stats, data)
            if stat == "hlo_op":
                hlo_op = text
            elif stat == "step_num":
                step = integer
    name, own_op = plane.events.get(key, ("", ""))
    start, end = base + offset // 1000, base + (offset + duration) // 1000
    if max(end, step or 0) >= _MAX_NS:
        raise _Bad(f"event {name!r} has an impossible time")
    return name, start, end, hlo_op or own_op, step


def _plane(content: bytes) -> _Plane:
    plane = _Plane()
    events, stats = [], []
    for number, _, data in _fields(content):
        if number == 2:
            plane.name = data.decode(errors="replace")
        elif number == 3:
            plane.lines.append(data)
        elif number == 4:
            events.append(data)
        elif number == 5:
            key, name, _ = _metadata(data)
            plane.stats[key] = name
        elif number == 6:
            stats.append(data)
    for data in stats:
        stat, value, _ = _stat(plane.stats, data)
        if stat == "profile_start_time" and value < _MAX_NS:
            plane.start_ns = value
    for data in events:
        key, name, own = _metadata(data)
        known = {stat: text for stat, _, text in (_stat(plane.stats, each) for each in own)}
        plane.events[key] = (name, known.get("hlo_op", ""))
    return plane


def _metadata(entry: bytes) -> tuple[int, str, list[bytes]]:
    """Return the id, name and statistics in the value of a map's entry."""
    key, name, stats = 0, "", []
    message = next((data for number, _, data in _fields(entry) if number == 2), b"")
    for number, value, data in _fields(message):
        if number == 1:
            key = value
        elif number == 2:
            name = data.decode(errors="replace")
        elif number == 5:
            stats.append(data)
    return key, name, stats


def _stat(stats: dict[int, str], content: bytes) -> tuple[str, int, str]:
    """Return a statistic's name, and its value as a number and as text, whichever it has."""
    key, integer, text = 0, 0, ""
    for number, value, data in _fields(content):
        if number == 1:
            key = value
        elif number == 5:
            text = data.decode(errors="replace")
        elif number == 7:
            text = stats.get(value, "")
        elif number in (3, 4):
            integer = value
    return stats.get(key, ""), integer, text


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield the fields of a message: number, value as an integer, or else bytes. Raises _Bad."""
    at, size = 0, len(data)
    while at < size:
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value, b""
            continue
        length = {1: 8, 5: 4}.get(wire, -1)
        if wire == 2:
            length, at = _varint(data, at)
        if length < 0:
            raise _Bad(f"wire type {wire}")
        if at + length > size:
            raise _Bad("the file is cut")
        yield tag >> 3, 0, data[at : at + length]
        at += length


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    value = 0
    for at, byte in enumerate(data[start : start + 10]):
        value |= (byte & 0x7F) << 7 * at
        if byte < 0x80:
            return value, start + at + 1
    raise _Bad("the file is cut")
