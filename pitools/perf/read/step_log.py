"""Read a rank's step log (`pit.step/1`), whose steps tell how long they waited for input, computed, communicated."""

from __future__ import annotations

import contextlib
from datetime import datetime
from pathlib import Path

import msgspec

from pitools.core.errors import DataError
from pitools.core.record import decode_json
from pitools.perf.read.files import read_lines
from pitools.perf.spans import Kind, Names, RankSpans, make_spans, make_windows
from pitools.run.steps import Step


def read_step_log(path: Path, names: Names) -> RankSpans:
    """Return the spans of a step log: in each step, what is not logged, then a save, input, compute, communication.

    That order is a convention; so is that communication ends when the step does, on all ranks at once: by it, ranks
    that wait for another are told from slow transfers. The first step, which compiles, is left out, unless it is the
    only one. Of a step logged twice, the last counts. Raises DataError.
    """
    notes: list[str] = []
    logged = []
    for line in read_lines(path, notes):
        with contextlib.suppress(msgspec.DecodeError):  # another line, or one that a kill has cut
            logged.append(decode_json(line, Step))
    steps = {step.step: step for step in logged}
    if not steps:
        raise DataError("no step (expected lines of pit.step/1)", where=str(path))
    if len(steps) > 1:
        first = steps.pop(logged[0].step)
        notes.append(f"step {first.step} is left out: a run's first step compiles and warms up")
    kinds, starts, ends, sequences, windows, before = [], [], [], [], [], 0
    for step in sorted(steps.values(), key=lambda step: step.t):
        try:
            moment = datetime.fromisoformat(step.t).timestamp()
        except (ValueError, OverflowError) as error:
            raise DataError(f"step {step.step}: {error}", where=str(path)) from error
        parts = [
            (Kind.CHECKPOINT, step.checkpoint_s),
            (Kind.INPUT, step.input_s),
            (Kind.COMPUTE, step.compute_s),
            (Kind.COMMUNICATION, step.comm_s),
        ]
        if not all(0 <= value < 1e8 for value in (step.wall_s, *(value for _, value in parts))):
            raise DataError(f"step {step.step}: a time is out of range (expected seconds, 0 or more)", where=str(path))
        wall = round(step.wall_s * 1e9)
        start = max(before, round(moment * 1e3) * 1_000_000 - wall)  # times of the log are whole milliseconds
        before = end = start + wall
        if not (abs(step.step) < 1 << 62 and 0 <= start <= end < 1 << 63):
            raise DataError(f"step {step.step} at {step.t}: out of range (expected 64 bits)", where=str(path))
        windows.append((step.step, start, end))
        for kind, value in reversed(parts):
            begin = max(start, end - round(value * 1e9))
            if begin == end and kind is not Kind.COMMUNICATION:  # a rank that others wait for has one of no length
                continue
            kinds.append(kind)
            starts.append(begin)
            ends.append(end)
            sequences.append(step.step if kind is Kind.COMMUNICATION else -1)
            end = begin
    stream = names.index("steps")
    spans = make_spans(
        kind=kinds, stream=stream, name=stream, start_ns=starts, end_ns=ends, group=stream, sequence=sequences
    )
    return RankSpans(path, logged[0].rank, spans, make_windows(windows), notes=tuple(notes))
