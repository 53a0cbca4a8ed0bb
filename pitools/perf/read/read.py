"""Read profiles and logs of a job's ranks into one span table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pitools.core.errors import DataError, UsageError
from pitools.perf.read.files import UNREADABLE, Found
from pitools.perf.read.inspector import read_inspector
from pitools.perf.read.kineto import read_kineto
from pitools.perf.read.step_log import read_step_log
from pitools.perf.read.xplane import read_xplane
from pitools.perf.spans import Names, RankSpans, Spans, SpanTable, Windows
from pitools.perf.statistics import excess_of_few
from pitools.run.run_folder import read_or_none
from pitools.run.steps import read_steps_after
from pitools.run.traces import RankTrace

READERS: dict[str, Callable[[Path, Names], RankSpans]] = {
    "kineto": read_kineto,
    "xplane": read_xplane,
    "inspector": read_inspector,
    "steps": read_step_log,
}
# The more detailed first: one job's ranks are read of one form.
PREFERENCE = ("kineto", "xplane", "steps", "inspector")
_TITLE = {
    "kineto": "PyTorch's traces",
    "xplane": "XLA's profiles",
    "steps": "step logs",
    "inspector": "NCCL Inspector's dumps",
}
_MIN_SLOWDOWN = 0.05
_COMPARED, _MIN_COMPARED = 20, 5  # steps on each side of the traced ones


def read_table(found: Sequence[Found]) -> SpanTable:
    """Return the spans of all ranks: of profiles if there are any, else of step logs, else of NCCL Inspector.

    Ranks that files do not name are numbered in the files' order, which is said. Raises DataError, and UsageError
    where two files are of one rank.
    """
    form = next((each for each in PREFERENCE if any(item.form == each for item in found)), "")
    if not form:
        raise UsageError("no profile or log of steps among these files", where=str(found[0].path) if found else "")
    names, notes = Names(), []
    reads: list[RankSpans] = []
    errors: list[Exception] = []
    for item in found:
        try:
            if item.form == form:
                reads.append(_with_status(READERS[form](item.path, names)))
        except (DataError, FileNotFoundError) as error:
            errors.append(error)
    if not reads:
        raise errors[0]
    notes += [f"not used: {error}" for error in errors]
    notes += [f"not used: {item.path}: unreadable" for item in found if item.form == UNREADABLE]
    if any(read.rank is None for read in reads):
        if len(reads) > 1:
            _require_one_capture(reads)
            notes.append("ranks are numbered in the order of the files, which do not name them all")
        reads = [read.numbered(number) for number, read in enumerate(reads)]
    ranks: dict[int, RankSpans] = {}
    for read in reads:
        if not read.is_timed:
            problem = "NCCL Inspector's records say how long, not when (expected event_trace_ts)"
            raise UsageError(problem, where=str(read.path), hint="record them with NCCL_INSPECTOR_DUMP_VERBOSE=1")
        if not 0 <= (rank := read.rank or 0) < 1 << 31:
            raise DataError(f"rank {rank} (expected 0 or more)", where=str(read.path))
        if rank in ranks:
            problem = f"rank {rank} is also in {ranks[rank].path} (expected one file a rank)"
            raise UsageError(problem, where=str(read.path), hint="name the files of one capture")
        ranks[rank] = read.numbered(rank)
        notes += read.notes
    size = max(read.world_size for read in reads)
    if size > len(ranks):
        notes.append(f"{len(ranks)} of {size} ranks are here")
    unmarked = [rank for rank, read in ranks.items() if not (read.windows.step >= 0).any()]
    if 0 < len(unmarked) < len(ranks):
        notes.append(f"ranks without steps are left out: {', '.join(map(str, sorted(unmarked)))}")
        ranks = {rank: read for rank, read in ranks.items() if rank not in unmarked}
    if left := sorted({item.form for item in found} & set(PREFERENCE) - {form}):
        notes.append(f"also there, and not used beside {_TITLE[form]}: {', '.join(_TITLE[each] for each in left)}")
    slowest = max(ranks.values(), key=lambda read: read.slowdown)
    if slowest.slowdown > _MIN_SLOWDOWN and (note := _describe_slowdown(slowest)):
        notes.append(note)
    ordered = [ranks[rank] for rank in sorted(ranks)]
    return SpanTable(
        Spans.join([read.spans for read in ordered]),
        Windows.join([read.windows for read in ordered]),
        names.texts(),
        {read.rank or 0: read for read in ordered},
        tuple(dict.fromkeys(notes)),
    )


def _with_status(read: RankSpans) -> RankSpans:
    """Return a rank's trace with what `pit perf trace` has written beside it: its steps' waits for a CPU, how much it
    slowed them, and which steps are whole; the loop's end cuts one, whose mark lasts until the log is closed."""
    status = read_or_none(_status_path(read.path), RankTrace)
    if status is None or status.file != read.path.name or status.first_step is None:
        return read
    waits_s = dict(enumerate(status.cpu_wait_s, status.first_step))
    windows = read.windows
    if status.last_step is not None and (whole := windows.step <= status.last_step).any():
        windows = windows.where(whole)
    length_ns = windows.end_ns - windows.start_ns
    waits_ns = [min(max(waits_s.get(step, 0.0), 0.0), 1e8) * 1e9 for step in windows.step.tolist()]
    waits = np.minimum(np.array(waits_ns, np.int64), length_ns)
    notes = (*read.notes, f"the trace has {status.error}") if status.error else read.notes
    windows = replace(windows, cpu_wait_ns=waits)
    return replace(read, windows=windows, slowdown=status.slowdown or 0.0, notes=notes)


def _describe_slowdown(read: RankSpans) -> str:
    """Return by how much the traced steps surely took longer than those before and after; "" for no more than 5 %.

    The log of steps has both. The step in which the profiler starts is none of these, nor those while it writes.
    """
    status = read_or_none(_status_path(read.path), RankTrace)
    attempt = read.path.absolute().parent.parent.parent
    logged = read_steps_after(attempt / "steps" / f"{read.rank}.jsonl", 0)[0][1:]
    if status is None or status.first_step is None or status.last_step is None or any(s.wall_s <= 0 for s in logged):
        return ""
    before = [step.wall_s for step in logged if step.step < status.first_step - 1][-_COMPARED:]
    traced = [step.wall_s for step in logged if status.first_step <= step.step <= status.last_step]
    later = np.array([step.wall_s for step in logged if step.step > status.last_step])
    after = later[np.cumsum(later) > 2 * status.blocked_s][:_COMPARED].tolist()  # it is compressed beside them, too
    if not traced or len(before) < _MIN_COMPARED:
        return ""
    sides = [before, after] if len(after) >= _MIN_COMPARED else [before]
    excess, least = (min(each) for each in zip(*(excess_of_few(traced, side) for side in sides), strict=True))
    if excess <= _MIN_SLOWDOWN or least <= 0:
        return ""
    than = f"{excess:.0%} longer than those before{' and after' * (len(sides) > 1)}, surely {least:.0%}"
    return f"the traced steps took {than}: by tracing, or by load; the times here are with it"


def _status_path(trace: Path) -> Path:
    return trace.with_name(trace.name.partition(".")[0] + ".status.json")


def _require_one_capture(reads: Sequence[RankSpans]) -> None:
    """Raise UsageError for files without ranks whose times do not overlap: one rank's captures, one after the other."""
    times = [read.windows for read in reads if read.is_unix and len(read.windows)]
    if times and max(each.start_ns.min() for each in times) >= min(each.end_ns.max() for each in times):
        problem = f"{len(reads)} files without ranks, of different times (expected one capture)"
        raise UsageError(problem, where=str(reads[0].path), hint="name the files of one capture")
