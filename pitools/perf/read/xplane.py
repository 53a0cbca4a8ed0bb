"""Read an XLA profile, `<host>.xplane.pb`, with a reader of protobuf's wire format for these messages alone.

XSpace: planes=1. XPlane: name=2, lines=3, event_metadata=4, stat_metadata=5, stats=6. XLine: name=2, timestamp_ns=3,
events=4, display_name=11. XEvent: metadata_id=1, offset_ps=2, duration_ps=3, stats=4. XStat: metadata_id=1, double=2,
uint64=3, int64=4, str=5, bytes=6, ref=7. XEventMetadata: id=1, name=2, stats=5. XStatMetadata: id=1, name=2. A map's
entry: key=1, value=2. Times are relative to `profile_start_time` of the plane "Task Environment".

Devices: GPU streams (lines `Stream #…`), and TPU lines `XLA Ops`, of which no real profile was at hand. Without device,
XLA's operations on the host compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pitools.core.errors import DataError
from pitools.perf.read.classify import device_kind, hlo_kind, host_kind
from pitools.perf.read.files import read_chunks
from pitools.perf.spans import Kind, Names, RankSpans, finish_rank, make_spans, make_windows, without_nested

_MAX_BYTES = 2 << 30  # protobuf's own limit of a message
_DEVICE_LINES = ("Stream #", "XLA Ops", "Async XLA Ops")
_NS_LIMIT = 1 << 62


class _Bad(Exception):
    """The bytes are no message."""


class _Plane(NamedTuple):
    name: str
    lines: list[bytes]
    events: dict[int, tuple[str, str]]  # metadata id → name, hlo_op
    stats: dict[int, str]  # metadata id → name
    values: dict[str, Any]


def read_xplane(path: Path, names: Names) -> RankSpans:
    """Return the spans of a profile. Of a cut one its whole planes, said in the notes. Raises DataError."""
    notes: list[str] = []
    data = bytearray()
    for chunk in read_chunks(path, notes):
        data += chunk
        if len(data) > _MAX_BYTES:
            raise DataError("more than 2 GiB (expected an XLA profile)", where=str(path))
    planes: list[_Plane] = []
    try:
        for number, value in _fields(bytes(data)):
            if number == 1:
                planes.append(_plane(_bytes(value)))
    except _Bad as error:
        notes.append(f"{path.name}: {error}: {len(planes)} whole planes are used")
    columns = _Columns(names)
    origin = next((int(plane.values.get("profile_start_time", 0)) for plane in planes if plane.values), 0)
    for plane in planes:
        origin = int(plane.values.get("profile_start_time", origin))
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
    kind, stream, name, start, end = map(list, zip(*columns.rows, strict=True))
    spans = make_spans(
        kind=kind, stream=stream, name=name, start_ns=[at + origin for at in start], end_ns=[at + origin for at in end]
    )
    has_device = columns.has_device
    if has_device:  # what the host says of XLA's operations is then their launch
        spans = spans.where((spans.kind != Kind.OP) | (spans.stream == columns.step_stream))
    return finish_rank(
        RankSpans(
            path,
            None,
            without_nested(spans, (spans.kind == Kind.OP) | (spans.kind == Kind.HOST)),
            make_windows([(number, at + origin, end + origin) for number, at, end in columns.steps]),
            step_stream=columns.step_stream,
            has_device=has_device,
            is_unix=bool(origin),
            notes=tuple(notes),
        )
    )


class _Columns:
    """Rows of spans and steps, with times from the profile's start."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.steps: list[tuple[int, int, int]] = []
        self.step_stream = -1
        self.has_device = False

    def add_line(self, plane: _Plane, line: bytes) -> None:
        """Add the spans of a line. Raises _Bad."""
        title, base, events = "", 0, []
        for number, value in _fields(line):
            if number == 2 or (number == 11 and not title):
                title = _text(value)
            elif number == 3:
                base = _int(value)
            elif number == 4:
                events.append(_bytes(value))
        on_device = plane.name.startswith("/device:")
        if on_device and not title.startswith(_DEVICE_LINES):
            return
        stream = self.names.index(f"{plane.name} {title}" if on_device else f"thread {title}")
        is_copy = on_device and "Memcpy" in title
        has_python = not on_device and title.startswith("python")
        for event in events:
            name, start, end, hlo_op, step = self._event(plane, event, base)
            if step is not None and not on_device:
                self.steps.append((step, start, end))
                self.step_stream = stream
                continue
            if on_device:
                kind: Kind | None = device_kind(name, is_copy=is_copy)
                if kind is Kind.COMPUTE and hlo_op:
                    kind = hlo_kind(hlo_op)
                self.has_device = True
            elif hlo_op and not has_python:
                kind = hlo_kind(hlo_op)
                kind = Kind.OP if kind is Kind.COMPUTE else kind
            else:
                kind = host_kind(name, is_annotation=True)
                if kind is Kind.HOST and not has_python:
                    kind = None
            if kind is not None and end > start:
                self.rows.append((kind, stream, self.names.index(name), start, end))

    @staticmethod
    def _event(plane: _Plane, data: bytes, base: int) -> tuple[str, int, int, str, int | None]:
        """Return an event's name, start and end in ns, operation of XLA, and step."""
        key = offset = duration = 0
        hlo_op, step = "", None
        for number, value in _fields(data):
            if number == 1:
                key = _int(value)
            elif number == 2:
                offset = _int(value)
            elif number == 3:
                duration = _int(value)
            elif number == 4:
                stat, content = _stat(plane.stats, _bytes(value))
                if stat == "hlo_op":
                    hlo_op = str(content)
                elif stat == "step_num" and isinstance(content, int):
                    step = content
        name, own_op = plane.events.get(key, ("", ""))
        start, end = base + offset // 1000, base + (offset + duration) // 1000
        if not 0 <= start <= end < _NS_LIMIT or (step or 0) >= _NS_LIMIT:
            raise _Bad(f"event {name!r} has no possible time")
        return name, start, end, hlo_op or own_op, step


def _plane(data: bytes) -> _Plane:
    plane = _Plane("", [], {}, {}, {})
    events, values = [], []
    for number, value in _fields(data):
        if number == 2:
            plane = plane._replace(name=_text(value))
        elif number == 3:
            plane.lines.append(_bytes(value))
        elif number == 4:
            events.append(dict(_fields(_bytes(value))).get(2, b""))
        elif number == 5:
            entry = dict(_fields(_bytes(dict(_fields(_bytes(value))).get(2, b""))))
            plane.stats[_int(entry.get(1, 0))] = _text(entry.get(2, b""))
        elif number == 6:
            values.append(_bytes(value))
    for each in values:
        name, content = _stat(plane.stats, each)
        plane.values[name] = content
    for event in events:
        key, name, hlo_op = 0, "", ""
        for number, value in _fields(_bytes(event)):
            if number == 1:
                key = _int(value)
            elif number == 2:
                name = _text(value)
            elif number == 5:
                stat, content = _stat(plane.stats, _bytes(value))
                hlo_op = str(content) if stat == "hlo_op" else hlo_op
        plane.events[key] = (name, hlo_op)
    return plane


def _stat(stats: dict[int, str], data: bytes) -> tuple[str, Any]:
    """Return a statistic's name and value: a number or text."""
    key = 0
    content: int | str | None = None
    for number, value in _fields(data):
        if number == 1:
            key = _int(value)
        elif number == 5:
            content = _text(value)
        elif number == 7:
            content = stats.get(_int(value), "")
        elif number in (3, 4):
            content = _int(value)
    return stats.get(key, ""), content


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message: number, and an int or bytes. Raises _Bad."""
    at, size = 0, len(data)
    while at < size:
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            number, at = _varint(data, at)
            yield tag >> 3, number
            continue
        length = {1: 8, 5: 4}.get(wire, -1)
        if wire == 2:
            length, at = _varint(data, at)
        if length < 0 or at + length > size:
            raise _Bad("the file is cut" if length > 0 else f"wire type {wire}")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for at in range(at, min(at + 10, len(data))):  # noqa: B020
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    raise _Bad("the file is cut" if shift < 70 else "no number")


def _int(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise _Bad("bytes where a number is expected")
    return value


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise _Bad("a number where bytes are expected")
    return value


def _text(value: int | bytes) -> str:
    return _bytes(value).decode(errors="replace")
