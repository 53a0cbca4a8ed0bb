"""Read a trace of PyTorch's profiler (kineto's JSON, also gzipped), slice by slice, in bounded memory.

Events are cut into slices where one object of `traceEvents` ends; a slice that decodes as a whole was cut between two
events, never inside one, so no tokenizer of ours is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pitools.core.errors import DataError
from pitools.core.record import decode_json
from pitools.perf.read.classify import device_kind, host_kind
from pitools.perf.read.files import read_chunks
from pitools.perf.spans import (
    Ints,
    Kind,
    Names,
    RankSpans,
    Spans,
    finish_rank,
    make_spans,
    make_windows,
    without_nested,
)

_MAX_EVENT = 32 << 20  # bytes without the end of an event
_CUT_TAIL = 256 << 10  # bytes from a slice's end in which its last event must end
_CUT_TRIES = 8
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH = ("cuda_runtime", "cuda_driver")
_HOST = ("cpu_op", "user_annotation", *_LAUNCH)
_MAX_US = 3e15  # of the Unix clock, the year 2065; base, start and duration then sum within an int64


class _Args(msgspec.Struct, gc=False):
    group: Any = msgspec.field(default=None, name="Process Group Name")
    sequence: Any = msgspec.field(default=None, name="Seq")
    correlation: Any = None


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    name: str = ""
    cat: str | None = None
    ts: float = 0.0
    dur: float = 0.0
    pid: Any = 0
    tid: Any = 0
    args: _Args | None = None


class _Frame(msgspec.Struct):
    """What is before and after the events, and the last of them."""

    traceEvents: list[_Event] = []  # noqa: N815 (kineto's names)
    distributedInfo: dict[str, Any] | None = None  # noqa: N815
    baseTimeNanoseconds: int = 0  # noqa: N815


def read_kineto(path: Path, names: Names) -> RankSpans:
    """Return the spans of a trace. Of a damaged one what precedes the damage, said in its notes. Raises DataError."""
    notes: list[str] = []
    trace, base = _Trace(names, str(path)), 0
    info: dict[str, Any] = {}
    for item in _slices(path, notes):
        if isinstance(item, list):
            trace.add(item)
        else:  # what stands before the events, and then what stands after them
            base, info = base or item.baseTimeNanoseconds, info or item.distributedInfo or {}
    if not trace.count:
        raise DataError("; ".join(notes) or "no events (expected traceEvents)", where=str(path))
    if not 0 <= base < _MAX_US * 1000:
        raise DataError("baseTimeNanoseconds is out of range (expected the Unix clock)", where=str(path))
    spans = Spans.join(trace.parts)
    trace.parts.clear()
    spans = _without_inner(spans)
    if not len(spans):
        raise DataError(f"{trace.count} events, none of work (expected kernels or operators)", where=str(path))
    rank = info.get("rank")
    steps = trace.whole_steps(spans) if notes else trace.steps
    if not steps and (trace.steps or (notes and trace.launches and not trace.has_device)):
        raise DataError(f"{notes[0]}: no step has its work", where=str(path), hint="export the trace again")
    if left := len(trace.steps) - len(steps):
        notes.append(f"{path.name}: the last {left} of {len(trace.steps)} steps are left out: their work is cut off")
    return finish_rank(
        RankSpans(
            path,
            rank if isinstance(rank, int) else None,
            replace(spans, start_ns=spans.start_ns + base, end_ns=spans.end_ns + base),
            make_windows([(number, start + base, end + base) for number, start, end in steps]),
            step_stream=max(set(trace.threads), key=trace.threads.count) if trace.threads else -1,
            world_size=_count(info.get("world_size")),
            has_device=trace.has_device,
            is_unix=bool(base) or int(spans.start_ns[0]) > 10**18,
            notes=tuple(notes),
        ),
        trace.device_end_ns(max((end for _, _, end in steps), default=0)) + base,
    )


class _Trace:
    """Spans and steps of the events so far, with times from the trace's base.

    threads: of each step. launches, device_ends: correlation → when a call of the device's runtime began, and when the
    work that it launched ended.
    """

    def __init__(self, names: Names, where: str) -> None:
        self.names, self.where = names, where
        self.count = 0
        self.parts: list[Spans] = []
        self.steps: list[tuple[int, int, int]] = []
        self.threads: list[int] = []
        self.has_device = False
        self.launches: dict[int, int] = {}
        self.device_ends: dict[int, int] = {}
        # There are few names and threads, and many events.
        self._kinds: dict[tuple[str | None, str], tuple[int, int]] = {}
        self._streams: dict[tuple[bool, str, str], int] = {}

    def add(self, events: Sequence[_Event]) -> None:
        """Add the spans and steps among some events. Raises DataError for an impossible time."""
        self.count += len(events)
        kinds = [self._kind(event.cat, event.name) if event.ph == "X" else (-1, -1) for event in events]
        rows = [event for event, (kind, _) in zip(events, kinds, strict=True) if kind >= 0]
        marks = [event for event in events if event.cat == "user_annotation" and event.name.startswith("ProfilerStep#")]
        for mark, start, end in zip(marks, *_times(marks, self.where), strict=True):
            number = mark.name.partition("#")[2]
            if number.isdecimal() and len(number) < 18:
                self.steps.append((int(number), int(start), int(end)))
                self.threads.append(self._stream(mark))
        kind = np.array([kind for kind, _ in kinds if kind >= 0], np.uint8)
        group, sequence = (np.full(len(rows), -1, np.int64) for _ in range(2))
        for i in np.flatnonzero(kind == Kind.COMMUNICATION):
            if (args := rows[i].args) is not None:
                group[i] = -1 if args.group is None else self.names.index(f"group {args.group}")
                sequence[i] = -1 if args.sequence is None else _count(args.sequence)
        start_ns, end_ns = _times(rows, self.where)
        for event, start, end in zip(rows, start_ns.tolist(), end_ns.tolist(), strict=True):
            if event.args is not None and (correlation := _count(event.args.correlation)):
                if event.cat in _LAUNCH:
                    self.launches[correlation] = start
                elif event.cat in _DEVICE:
                    self.device_ends[correlation] = max(end, self.device_ends.get(correlation, 0))
        spans = make_spans(
            kind=kind,
            stream=[self._stream(event) for event in rows],
            name=[name for kind, name in kinds if kind >= 0],
            start_ns=start_ns,
            end_ns=end_ns,
            group=group,
            sequence=sequence,
        )
        self.parts.append(_without_inner(spans))

    def device_end_ns(self, until: int) -> int:
        """Return when the device's work ended that was launched before a time; 0 if unknown."""
        launched = (end for number, end in self.device_ends.items() if self.launches.get(number, until) < until)
        return max(launched, default=0)

    def whole_steps(self, spans: Spans) -> list[tuple[int, int, int]]:
        """Return the steps that a cut file has whole: work is written in the order of its time, a device's at last."""
        work = (Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY) if self.has_device else (Kind.OP,)
        last = spans.end_ns[np.isin(spans.kind, work)].max(initial=0)
        return [step for step in self.steps if step[2] <= last and (self.has_device or not self.launches)]

    def _kind(self, cat: str | None, name: str) -> tuple[int, int]:
        """Return the kind of an event, -1 for none, and its name's index."""
        if (found := self._kinds.get((cat, name))) is None:
            kind: Kind | None = None
            if cat in _DEVICE:
                kind, self.has_device = device_kind(name, is_copy=cat == "gpu_memcpy"), True
            elif cat in _HOST:
                kind = host_kind(name, is_annotation=cat == "user_annotation")
            found = self._kinds[cat, name] = (-1, -1) if kind is None else (kind, self.names.index(name))
        return found

    def _stream(self, event: _Event) -> int:
        """Return the index of the device's stream, or thread, that an event is on."""
        key = (event.cat in _DEVICE, str(event.pid), str(event.tid))
        if (found := self._streams.get(key)) is None:
            text = f"device {event.pid} stream {event.tid}" if key[0] else f"thread {event.tid}"
            found = self._streams[key] = self.names.index(text)
        return found


def _without_inner(spans: Spans) -> Spans:
    """Return spans without operators inside of operators: slice by slice, as they are most of a trace; then of all."""
    return without_nested(spans, np.isin(spans.kind, (Kind.OP, Kind.HOST)))


def _times(events: Sequence[_Event], where: str) -> tuple[Ints, Ints]:
    """Return starts and ends in nanoseconds; whole microseconds stay exact, also those since 1970."""
    ts = np.array([event.ts for event in events])
    duration = np.maximum(np.array([event.dur for event in events]), 0.0)
    if len(ts) and not (np.abs(ts).max() < _MAX_US and duration.max() < _MAX_US):
        raise DataError("an event's time is out of range (expected microseconds, below 3e15)", where=where)
    whole = np.floor(ts)
    start = whole.astype(np.int64) * 1000 + np.rint((ts - whole) * 1000).astype(np.int64)
    return start, start + np.rint(duration * 1000).astype(np.int64)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 60 else 0


def _slices(path: Path, notes: list[str]) -> Iterator[list[_Event] | _Frame]:
    """Yield the events, and what is around them. Appends to the notes where the file is damaged or cut."""
    where, buffer, offset, begin = str(path), b"", 0, None
    for chunk in read_chunks(path, notes):
        buffer += chunk
        if begin is None:
            if (begin := re.search(rb'"traceEvents"\s*:\s*\[', buffer)) is None:
                if len(buffer) > _MAX_EVENT:
                    break
                continue
            if frame := _decode(buffer[: begin.start()].rstrip().rstrip(b",") + b"}", _Frame, where):
                yield frame
            buffer, offset = buffer[begin.end() :], begin.end()
        while (cut := _cut(buffer, where))[1]:
            yield cut[0]
            buffer, offset = buffer[cut[1] :], offset + cut[1]
        if len(buffer) > _MAX_EVENT:
            break
    if begin is None:
        raise DataError("no traceEvents (expected a trace of PyTorch's profiler)", where=where)
    if frame := _decode(b'{"traceEvents":[' + buffer, _Frame, where):
        yield frame.traceEvents
        yield frame
        return
    notes.append(f"{path.name}: no valid JSON after byte {offset}: only the events before are used")


def _cut(buffer: bytes, where: str) -> tuple[list[_Event], int]:
    """Return the events of a long slice that ends between two events, and its bytes; none, 0 if none ends.

    Where none of the last cuts gives JSON, of half the buffer, and so on: that is how the place of a damage is found.
    """
    size = len(buffer)
    while size:
        tail = max(0, size - _CUT_TAIL)
        cuts = [match.start() + 1 for match in re.finditer(rb"\}\s*,\s*\{", buffer[tail:size])]
        for cut in reversed(cuts[-_CUT_TRIES:]):
            events = _decode(b"[" + buffer[: tail + cut] + b"]", list[_Event], where)
            if events is not None:
                return events, buffer.index(b",", tail + cut) + 1
        size //= 2
    return [], 0


def _decode(data: bytes, kind: Any, where: str) -> Any:
    """Return what JSON holds; None if it is no JSON. Names that are not UTF-8 get replacement characters.

    Raises DataError for JSON that is no trace's.
    """
    try:
        return decode_json(data, kind)
    except msgspec.ValidationError as error:
        raise DataError(f"no event of PyTorch's profiler: {error}", where=where) from error
    except msgspec.DecodeError as error:
        if not isinstance(error.__cause__, UnicodeDecodeError):
            return None
    return _decode(data.decode(errors="replace").encode(), kind, where)
