"""Read the dumps of NCCL Inspector, JSON Lines: of 4.0 each record has its header; from 4.3, a marker line
(`dump_stats`) has it for the records that follow, and counts those that were dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pitools.core.errors import DataError
from pitools.core.record import decode_json
from pitools.perf.read.files import read_chunks
from pitools.perf.spans import Kind, Names, RankSpans, make_spans, make_windows

_MAX_LINE = 16 << 20


class _Header(msgspec.Struct):
    id: str = ""
    rank: int = 0
    n_ranks: int = 0


class _Metadata(msgspec.Struct):
    dump_timestamp_us: int = 0


class _Times(msgspec.Struct):
    coll_start_ts: int = 0
    kernel_events: list[dict[str, Any]] = []


class _Collective(msgspec.Struct):
    coll: str
    coll_sn: int
    coll_exec_time_us: float
    coll_msg_size_bytes: int = 0
    event_trace_ts: _Times | None = None


class _Line(msgspec.Struct):
    header: _Header | None = None
    metadata: _Metadata | None = None
    coll_perf: _Collective | None = None
    dump_stats: dict[str, Any] | None = None


def read_inspector(path: Path, names: Names) -> RankSpans:
    """Return the collectives of a dump. Dropped, missing and unreadable records are counted in the notes.

    Without the verbose event trace a record has no start: it gets the dump's time, and the result is not timed. The
    rank is that in the largest communicator. Raises DataError.
    """
    notes: list[str] = []
    header, metadata = _Header(), _Metadata()
    rows: list[tuple[int, int, int, int, int, int]] = []
    unreadable = dropped = expected = got = 0
    ranks: dict[int, int] = {}
    is_timed = True
    for text in _lines(path, notes):
        try:
            line = decode_json(text, _Line)
        except msgspec.DecodeError:
            unreadable += 1
            continue
        header, metadata = line.header or header, line.metadata or metadata
        if line.header:
            ranks.setdefault(header.n_ranks, header.rank)
        if line.dump_stats is not None:
            counts = {key: value for key, value in line.dump_stats.items() if isinstance(value, int)}
            dropped = max(dropped, counts.get("coll_dropped_total", 0))
            expected += counts.get("coll_records", 0)
        if (record := line.coll_perf) is None:
            continue
        got += line.header is None
        start, end, has_time = _interval(record, metadata)
        is_timed &= has_time
        if (
            not 0 <= start <= end < 1 << 62
            or not 0 <= record.coll_msg_size_bytes < 1 << 62
            or record.coll_sn >= 1 << 62
        ):
            unreadable += 1
            continue
        group, name = names.index(f"group {header.id}"), names.index(record.coll)
        rows.append((name, start, end, record.coll_msg_size_bytes, group, record.coll_sn))
    if not rows:
        raise DataError(f"no record of a collective ({unreadable} unreadable lines)", where=str(path))
    if dropped:
        notes.append(f"{path.name}: NCCL Inspector dropped {dropped} collectives")
    if got < expected:
        notes.append(f"{path.name}: {expected - got} of {expected} announced records are missing")
    if unreadable:
        notes.append(f"{path.name}: {unreadable} unreadable lines")
    name_ids, starts, ends, sizes, groups, sequences = map(list, zip(*rows, strict=True))
    spans = make_spans(
        kind=Kind.COMMUNICATION,
        stream=names.index("nccl"),
        name=name_ids,
        start_ns=starts,
        end_ns=ends,
        bytes=sizes,
        group=groups,
        sequence=sequences,
    )
    windows = make_windows([(-1, min(starts), max(ends))] if is_timed else [])
    rank = ranks[max(ranks)] if ranks else -1
    return RankSpans(
        path,
        rank if 0 <= rank < 1 << 31 else None,
        spans,
        windows,
        has_device=True,
        is_timed=is_timed,
        notes=tuple(notes),
    )


def _interval(record: _Collective, metadata: _Metadata) -> tuple[int, int, bool]:
    """Return start and end in ns, and whether they are known: of the kernels if traced, else of the dump."""
    events = record.event_trace_ts.kernel_events if record.event_trace_ts else []
    starts = [each["kernel_start_ts"] for each in events if isinstance(each.get("kernel_start_ts"), int)]
    ends = [each["kernel_stop_ts"] for each in events if isinstance(each.get("kernel_stop_ts"), int)]
    if starts and ends:
        return min(starts) * 1000, max(ends) * 1000, True
    end = metadata.dump_timestamp_us * 1000
    return end - round(record.coll_exec_time_us * 1000), end, False


def _lines(path: Path, notes: list[str]) -> list[bytes] | Any:
    """Yield the complete lines of a file; a last line without an end is one, too. Raises DataError for a huge one."""
    rest = b""
    for chunk in read_chunks(path, notes):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line for line in lines if line.strip())
        if len(rest) > _MAX_LINE:
            raise DataError(f"a line of more than {_MAX_LINE} bytes (expected JSON Lines)", where=str(path))
    if rest.strip():
        yield rest
