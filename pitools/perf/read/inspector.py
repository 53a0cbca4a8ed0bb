"""Read the dumps of NCCL Inspector, JSON Lines: of 4.0 each record has its header; from 4.3, a marker line
(`dump_stats`) has it for the records that follow, and counts those that were dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pitools.core.errors import DataError
from pitools.core.record import decode_json
from pitools.perf.read.files import read_lines
from pitools.perf.spans import Kind, Names, RankSpans, make_spans, make_windows

_LIMIT = 1 << 62


class _Collective(msgspec.Struct):
    coll: str
    coll_sn: int
    coll_exec_time_us: float
    event_trace_ts: dict[str, Any] = {}


class _Line(msgspec.Struct):
    header: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    coll_perf: _Collective | None = None
    dump_stats: dict[str, Any] = {}


def read_inspector(path: Path, names: Names) -> RankSpans:
    """Return the collectives of a dump. Dropped, missing and unreadable records are counted in the notes.

    Without the verbose event trace a record has no start: it gets the dump's time, and the result is not timed. The
    rank is that in the largest communicator. Raises DataError.
    """
    notes: list[str] = []
    header: dict[str, Any] = {}
    rows: list[tuple[int, int, int, int, int]] = []
    ranks: dict[int, int] = {}
    unreadable = dropped = missing = dump_us = 0
    is_timed = True
    for data in read_lines(path, notes):
        try:
            line = decode_json(data, _Line)
        except msgspec.DecodeError:
            unreadable += 1
            continue
        if line.header:
            header = line.header
            ranks.setdefault(_count(header, "n_ranks"), _count(header, "rank"))
        dump_us = _count(line.metadata, "dump_timestamp_us") or dump_us
        dropped = max(dropped, _count(line.dump_stats, "coll_dropped_total"))
        missing += _count(line.dump_stats, "coll_records")
        if (record := line.coll_perf) is None:
            continue
        missing -= not line.header
        start, end, has_time = _interval(record, dump_us)
        is_timed &= has_time
        if 0 <= start <= end < _LIMIT and 0 <= record.coll_sn < _LIMIT:
            group = names.index(f"group {header.get('id')}")
            rows.append((names.index(record.coll), start, end, group, record.coll_sn))
        else:
            unreadable += 1
    if not rows:
        raise DataError(f"no record of a collective ({unreadable} unreadable lines)", where=str(path))
    for count, what in (
        (dropped, "collectives were dropped by NCCL Inspector"),
        (missing, "announced records are missing"),
        (unreadable, "lines are unreadable"),
    ):
        if count > 0:
            notes.append(f"{path.name}: {count} {what}")
    columns = dict(zip(("name", "start_ns", "end_ns", "group", "sequence"), zip(*rows, strict=True), strict=True))
    spans = make_spans(kind=Kind.COMMUNICATION, stream=names.index("nccl"), **columns)
    windows = make_windows([(-1, int(spans.start_ns.min()), int(spans.end_ns.max()))] if is_timed else [])
    world_size = max(ranks, default=0)
    return RankSpans(
        path,
        ranks.get(world_size),
        spans,
        windows,
        world_size=world_size,
        has_device=True,
        is_timed=is_timed,
        notes=tuple(notes),
    )


def _interval(record: _Collective, dump_us: int) -> tuple[int, int, bool]:
    """Return start and end in ns, and whether they are known: of the kernels if traced, else of the dump."""
    events = record.event_trace_ts.get("kernel_events")
    events = [each for each in events if isinstance(each, dict)] if isinstance(events, list) else []
    starts = [start for each in events if (start := _count(each, "kernel_start_ts"))]
    ends = [end for each in events if (end := _count(each, "kernel_stop_ts"))]
    if starts and ends:
        return min(starts) * 1000, max(ends) * 1000, True
    return dump_us * 1000 - round(min(record.coll_exec_time_us, 1e15) * 1000), dump_us * 1000, False


def _count(values: dict[str, Any], key: str) -> int:
    """Return a number of 0 or more; 0 for anything else."""
    value = values.get(key)
    return value if isinstance(value, int) and 0 <= value < 1 << 52 else 0
