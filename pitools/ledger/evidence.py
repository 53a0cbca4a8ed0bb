"""Read what a run's folder says about the times of its attempts. What is missing or damaged is left out."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pitools.core.fs import open_regular
from pitools.core.record import decode_json
from pitools.core.timestamps import rfc3339_to_unix
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
T = TypeVar("T")

_MAX_LOG_BYTES = 128 << 20  # that are read of a run's step logs
_CHUNK_BYTES = 4 << 20
_MAX_LINE_BYTES = 1 << 16
_MAX_BAD_LINES = 1000  # of a chunk: its rest is no log
_MAX_RECEIPT_BYTES = 1 << 20
_MAX_S = 1e6  # that a step or a copy takes
_CLOCKS_S = 60.0  # that a node's clock may be ahead of others, and of itself when it ended
_MAX_SET_BACK_S = 7200.0  # by which clocks are set back
_MANIFEST_HEAD = 4096  # bytes that contain the time
_MANIFEST_TIME = re.compile(rb'"t":\s*"([^"]{1,40})"')


class StepTimes(NamedTuple):
    """The steps of one rank, in the order of its log. end: Unix time, s, never decreasing; others: durations, s.

    bad_lines: of its log, that are no steps of its attempt.
    """

    bad_lines: int
    number: Ints
    end: Floats
    wall: Floats
    input: Floats
    checkpoint: Floats
    comm: Floats


class Attempt(NamedTuple):
    """The times of one attempt, Unix time in seconds.

    job_id, start: which allocation; start counts Slurm's starts of the job. task: of an array, "" for none. ended: None
    without a record of it. staged: when the first node began to stage and the last had ended. ranks_began: when the
    last rank's program began, if that logs no steps. saved_at: when the save after its last step was complete.
    first_step: the step that it resumed from, None if unknown. steps: of each rank with a step in its log. bad_logs:
    logs with other lines, or at its end without a step.
    """

    job_number: int
    job_id: str
    start: int
    task: str
    nodes: int
    started: float
    ended: float | None
    time_limit_at: float | None
    staged: tuple[float, float] | None
    ranks_began: float | None
    saved_at: float | None
    first_step: int | None
    steps: tuple[StepTimes, ...]
    bad_logs: tuple[str, ...] = ()

    @property
    def last_evidence(self) -> float:
        """The latest time at which something of the attempt is known."""
        known = [self.started, self.ended, self.ranks_began, self.saved_at, *(times.end[-1] for times in self.steps)]
        return max(float(moment) for moment in known if moment is not None)

    def later(self, seconds: float) -> Attempt:
        """Return the attempt as if it had been so much later."""

        def moved(moment: float | None) -> float | None:
            return None if moment is None else moment + seconds

        return self._replace(
            started=self.started + seconds,
            ended=moved(self.ended),
            staged=(self.staged[0] + seconds, self.staged[1] + seconds) if self.staged else None,
            ranks_began=moved(self.ranks_began),
            saved_at=moved(self.saved_at),
            steps=tuple(times._replace(end=times.end + seconds) for times in self.steps),
        )


class _Line(msgspec.Struct):
    """What is needed of pit.step/1."""

    t: str
    step: int
    wall_s: float
    input_s: float = 0.0
    comm_s: float = 0.0
    checkpoint_s: float = 0.0


class _Receipt(msgspec.Struct):
    """What is needed of pit.stage-run/1."""

    wall_s: float


def submitted(run_dir: Path) -> dict[str, float]:
    """Return job id → when it was submitted, Unix time, s, of the run's known jobs."""
    paths = [*run_dir.glob("jobs/*/job.json"), run_dir / "job.json"]
    refs = (run_folder.read_or_none(path, run_folder.JobRef) for path in paths)
    return {ref.job_id: t for ref in refs if ref and (t := rfc3339_to_unix(ref.submitted)) is not None}


def possible_times(run_dir: Path, now: float) -> tuple[float, float]:
    """Return the first and the last time that a run's records can have at present, now; Unix times, s."""
    return max(min(submitted(run_dir).values(), default=0.0), 0.0) - _MAX_SET_BACK_S, now + _CLOCKS_S


def read_attempts(run_dir: Path, now: float) -> list[Attempt]:
    """Return a run's attempts, oldest first. Raises OSError if the run's folder cannot be listed.

    now: Unix time, s. Times before the run's submission or after now are left out, and those of steps after their
    attempt's exit. An attempt that seems to begin before the end of the last in its job is so much later:
    the clock was set back.
    """
    folders = run_folder.attempt_dirs(run_dir)
    every, max_bytes = _choose_logs([folder / "steps" for folder in folders])
    span = possible_times(run_dir, now)
    attempts: list[Attempt] = []
    for folder in folders:
        if attempt := _read_attempt(folder, span, every, max_bytes, attempts[-1] if attempts else None):
            last = attempts[-1] if attempts else attempt
            is_same_job = (attempt.job_id, attempt.start) == (last.job_id, last.start)
            overlap_s = last.last_evidence - attempt.started if attempts and is_same_job else 0.0
            attempts.append(attempt.later(min(overlap_s, _MAX_SET_BACK_S)) if overlap_s > 0 else attempt)
    return attempts


def _read_attempt(
    folder: Path, span: tuple[float, float], every: int, max_bytes: int, previous: Attempt | None
) -> Attempt | None:
    """Return an attempt's times; None if nothing says when it was. previous: whose job it has without a record."""

    def known(moment: float | None) -> float | None:
        return moment if moment is not None and span[0] <= moment <= span[1] else None

    start = run_folder.read_or_none(folder / "start.json", AttemptStart)
    ended = run_folder.read_or_none(folder / "exit.json", run_folder.AttemptExit)
    ended_at = known(rfc3339_to_unix(ended.ended)) if ended else None
    started = known(rfc3339_to_unix(start.started)) if start else None
    # A clock that was set back has the exit before the begin.
    last = span[1] if ended_at is None else max(ended_at, started or 0.0) + _CLOCKS_S
    paths = _logs(folder / "steps")[::every]
    logs = [read_step_times(path, (span[0], last), max_bytes) for path in paths]
    steps = tuple(times for times in logs if len(times.number))
    if started is None:
        started = min((float(times.end[0] - times.wall[0]) for times in steps), default=ended_at)
    if started is None:
        return None
    saved = [known(_saved_at(folder.parent.parent, int(times.number[-1]) + 1)) for times in steps[:1]]
    saved_steps = start.saved_steps if start else 0
    record = start or ended
    return Attempt(
        job_number=start.job_number if start else previous.job_number if previous else 0,
        job_id=record.job_id if record else previous.job_id if previous else _only_job(folder),
        start=start.restart_count if start else previous.start if previous else 0,
        task=folder.name.rpartition(".")[0],
        nodes=start.nodes if start else previous.nodes if previous else 1,
        started=started,
        ended=ended_at,
        time_limit_at=rfc3339_to_unix(start.time_limit_at) if start else None,
        staged=_staged(folder),
        ranks_began=None if steps else known(_ranks_began(folder)),
        saved_at=saved[0] if saved else None,
        first_step=min((int(times.number.min()) for times in steps), default=saved_steps or None),
        steps=steps,
        bad_logs=tuple(
            f"rank {path.stem} of attempt {folder.name}: {f'{times.bad_lines} lines' if times.bad_lines else 'empty'}"
            for path, times in zip(paths, logs, strict=True)
            if times.bad_lines or (ended and not len(times.number))
        ),
    )


def _only_job(attempt: Path) -> str:
    """Return the id of the run's job if it has one, which is no array; else ""."""
    jobs = submitted(attempt.parent.parent)
    return next(iter(jobs)) if len(jobs) == 1 and "." not in attempt.name else ""


def _logs(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("*.jsonl") if path.stem.isdecimal()), key=lambda path: int(path.stem))


def _choose_logs(folders: Sequence[Path]) -> tuple[int, int]:
    """Return n, and a size in bytes: so much of each n-th rank's log is read."""
    logs = [[_size(path) for path in _logs(folder)] for folder in folders]
    total = sum(min(size, _MAX_LOG_BYTES) for sizes in logs for size in sizes)
    every, left = max(1, -(-total // _MAX_LOG_BYTES)), _MAX_LOG_BYTES
    chosen = sorted(size for sizes in logs for size in sizes[::every])
    for index, size in enumerate(chosen):
        share = left // (len(chosen) - index)
        if size > share:
            return every, share
        left -= size
    return every, _MAX_LOG_BYTES


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_step_times(path: Path, span: tuple[float, float], max_bytes: int) -> StepTimes:
    """Return the steps of one rank's log; lines that are no steps, and an unreadable rest, are left out.

    span: Unix times, s; steps that do not end in it are left out. max_bytes: of a longer log its two ends are read.
    """
    blocks, bad_lines = [np.zeros((0, 6))], 0
    with contextlib.suppress(OSError), open_regular(path) as file:
        for lines in _read_lines(file, max_bytes):
            rows = [
                (line.step, t, line.wall_s, line.input_s, line.checkpoint_s, line.comm_s)
                for line in _decode(lines)
                if (t := rfc3339_to_unix(line.t)) is not None and span[0] <= t <= span[1] and abs(line.step) < 1 << 62
            ]
            bad_lines += lines.count(b"\n") + 1 - len(rows) if lines else 0
            blocks.append(np.array(rows, np.float64).reshape(-1, 6))
    columns = np.concatenate(blocks).T
    durations = np.clip(np.nan_to_num(columns[2:]), 0.0, _MAX_S)
    end = _never_decreasing(columns[1], durations[0])
    return StepTimes(bad_lines, columns[0].astype(np.int64), end, *durations)


def _read_lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file, many at a time."""
    size, half = os.fstat(file.fileno()).st_size, max_bytes // 2
    for begin, end in [(0, size)] if size <= max_bytes else [(0, half), (size - half, size)]:
        at, rest = file.seek(begin), b""
        at += len(file.readline(_MAX_LINE_BYTES)) if begin else 0  # the rest of a line
        while chunk := file.read(min(_CHUNK_BYTES, end - at)):
            at += len(chunk)
            lines, _, rest = (rest + chunk).rpartition(b"\n")
            yield lines
            rest = rest if len(rest) <= _MAX_LINE_BYTES else b""


def _decode(lines: bytes) -> Iterator[_Line]:
    if not lines:
        return
    try:
        yield from decode_json(b"[" + lines.replace(b"\n", b",") + b"]", list[_Line])
    except msgspec.DecodeError:
        bad = 0
        for line in filter(None, lines.split(b"\n")):
            try:
                yield decode_json(line, _Line)
            except msgspec.DecodeError:
                bad += 1
                if bad > _MAX_BAD_LINES:
                    return


def _never_decreasing(end: Floats, wall: Floats) -> Floats:
    """Return the ends of steps without the times by which the clock was set back: a step then follows the last.

    A pause after that, up to its length, is the clock being set right.
    """
    gap = np.append(end[:1] * 0.0, end[1:] - wall[1:] - end[:-1])
    is_set = (gap > 0) | (np.diff(end, prepend=end[:1]) < 0)
    shift = np.cumsum(np.where(is_set, np.minimum(-gap, _MAX_SET_BACK_S), 0.0))
    shift -= np.minimum.accumulate(np.minimum(shift, 0.0))
    shifted: Floats = np.maximum.accumulate(end + np.minimum(shift, _MAX_SET_BACK_S))
    return shifted


def _staged(attempt: Path) -> tuple[float, float] | None:
    """Return when staging began and ended. A receipt is written at the end of one dataset on one node."""
    spans = []
    for path in attempt.glob("nodes/*/*.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError), open_regular(path) as file:
            took_s = min(max(decode_json(file.read(_MAX_RECEIPT_BYTES), _Receipt).wall_s, 0.0), _MAX_S)
            end = path.stat().st_mtime
            spans.append((end - took_s, end))
    return (min(begin for begin, _ in spans), max(end for _, end in spans)) if spans else None


def _ranks_began(attempt: Path) -> float | None:
    records = (run_folder.read_or_none(path, run_folder.RankRecord) for path in attempt.glob("ranks/*.json"))
    moments = (rfc3339_to_unix(record.t) for record in records if record)
    return max((moment for moment in moments if moment is not None), default=None)


def _saved_at(run_dir: Path, steps: int) -> float | None:
    """Return when the checkpoint after so many steps was complete."""
    path = run_dir / "checkpoints" / f"step_{steps}" / "manifest.json"
    with contextlib.suppress(OSError), open_regular(path) as file:
        if match := _MANIFEST_TIME.search(file.read(_MANIFEST_HEAD)):
            return rfc3339_to_unix(match[1].decode("ascii", "replace"))
    return None
