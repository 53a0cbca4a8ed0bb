"""Ask a running attempt for a trace of some steps, and say when it will be there, or why it will not.

The ranks see the request at the end of a step, at most a second after it is written, and later where a network file
system caches attributes. So the first step is some seconds ahead, for all ranks to record the same steps.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from pitools.core import timestamps
from pitools.core.errors import TryLater, UsageError
from pitools.run import run_folder, traces
from pitools.run.steps import Step, read_steps_after
from pitools.run.traces import RankTrace, TraceRequest, read_traces

_AHEAD_S = 3.0
_TAIL_BYTES = 16 << 10
_STEADY_STEPS = 8
_SILENT_S = 10.0
_ROOM_BYTES = 64 << 10
HOW_TO_LOG = """\
add to the program, and run it again:
    log = StepLog(Path(os.environ["PIT_ATTEMPT_DIR"]) / "steps", rank)  # from pitools.run.steps import StepLog
    log.write(step=step, loss=loss, wall_s=wall_s, …)                   # at the end of each step"""


@dataclass(frozen=True)
class Position:
    """Where a rank is: its last logged step, -1 before the first, and how long ago it was logged, silent_s.

    wall_s: of a fast step, among the last `count`.
    """

    step: int = -1
    wall_s: float = 0.0
    count: int = 0
    silent_s: float = 0.0

    @property
    def is_steady(self) -> bool:
        """Whether its speed is known: the first steps are slow."""
        return self.count >= _STEADY_STEPS or self.wall_s > _AHEAD_S


def position(attempt: Path, rank: int) -> Position:
    """Return where a rank is, by its step log."""
    path = attempt / "steps" / f"{rank}.jsonl"
    try:
        offset = max(0, path.stat().st_size - _TAIL_BYTES)
    except OSError:
        return Position()
    steps: list[Step] = read_steps_after(path, offset, at_line_start=not offset)[0]
    if not steps:
        return Position()
    walls = sorted(step.wall_s for step in steps)
    silent_s = 0.0
    with contextlib.suppress(ValueError):  # a time that is none
        silent_s = time.time() - datetime.fromisoformat(steps[-1].t).timestamp()
    return Position(steps[-1].step, walls[len(walls) // 4], len(walls), silent_s)


def first_possible(now: Position) -> int:
    """Return the first step that all ranks can record: they are in the step after `now`, see the request by the end of
    it or some seconds later, and start the profiler one step early."""
    return max(now.step + 3 + int(_AHEAD_S / max(now.wall_s, 1e-3)), traces.FIRST_STEP)


def ask(attempt: Path, now: Position, *, steps: int, ranks: str, after: int | None) -> TraceRequest:
    """Write a request of `steps` steps into an attempt. after: a step; None for as soon as all ranks can.

    Raises UsageError for a step that is over, TryLater while an earlier request is carried out.
    """
    first = first_possible(now)
    if after is not None and after + 1 < first:
        problem = f"step {after + 1} is too early: the run is at step {now.step} (expected {first - 1} or more)"
        raise UsageError(problem, where="--after", hint="leave it out to trace as soon as possible")
    if (earlier := pending(attempt)) is not None:
        problem = f"a trace of steps {earlier.window} is going on, asked for at {earlier.t}"
        hint = f"wait for it, or withdraw it: rm -f {' '.join(map(str, _request_files(attempt)))}"
        raise TryLater(problem, where=str(attempt), hint=hint)
    first = first if after is None else after + 1
    request = TraceRequest(
        t=timestamps.now_rfc3339(), first_step=first, last_step=first + steps - 1, ranks=ranks
    )  # fmt: skip
    (attempt / "traces" / request.window).mkdir(mode=0o755, parents=True, exist_ok=True)
    run_folder.write_record(attempt / "traces" / traces.REQUEST_FILE, request)
    return request


def pending(attempt: Path) -> TraceRequest | None:
    """Return the newest request that some logging rank has not finished; None without one."""
    for path in _request_files(attempt):
        request = run_folder.read_or_none(path, TraceRequest)
        if request is not None and unfinished(attempt, request, logging_ranks(attempt)):
            return request
    return None


def _request_files(attempt: Path) -> tuple[Path, Path]:
    return attempt / "traces" / traces.REQUEST_FILE, attempt.parent.parent / traces.RUN_REQUEST_FILE


def withdraw(attempt: Path) -> None:
    """Withdraw the requests of an attempt, and its run's own. Ranks that record already write their trace; a folder
    that none has begun to fill goes with its request."""
    for path in _request_files(attempt):
        request = run_folder.read_or_none(path, TraceRequest)
        path.unlink(missing_ok=True)
        if request is not None:
            with contextlib.suppress(OSError):  # it is not there, or a rank has begun
                (attempt / "traces" / request.window).rmdir()


def logging_ranks(attempt: Path) -> list[int]:
    """Return the ranks that write a step log."""
    return sorted(int(path.stem) for path in (attempt / "steps").glob("*.jsonl") if path.stem.isdecimal())


def unfinished(attempt: Path, request: TraceRequest, ranks: Sequence[int]) -> list[int]:
    """Return which of some ranks are asked, and have neither written their trace nor failed."""
    known = read_traces(attempt / "traces" / request.window)
    ended = {rank for rank, each in known.items() if each.state != "recording"}
    return [rank for rank in ranks if request.includes(rank) and rank not in ended]


def describe(attempt: Path, request: TraceRequest, left: Sequence[int]) -> str:
    """Return what a request waits for: its first step, its last, or the files. left: ranks that are unfinished."""
    now = position(attempt, left[0])
    steps, at = f"steps {request.first_step} to {request.last_step}", f"the run is at step {now.step}"
    if now.silent_s > max(_SILENT_S, 3 * now.wall_s):  # it saves, or hangs
        at += f", and has logged no step for {now.silent_s:.0f} s"
    if now.step < request.first_step - 1:
        about = (request.first_step - 1 - now.step) * now.wall_s
        return f"waits for {steps}: {at}, {about:.0f} s before them"
    who = f"rank {left[0]}" if len(left) == 1 else f"{len(left)} ranks, first rank {left[0]}"
    known = read_traces(attempt / "traces" / request.window).get(left[0])
    if known is None:
        return f"waits for {who} to see the request: {at}"
    return f"waits for {who}, which {'is' if len(left) == 1 else 'are'} recording or writing {steps}: {at}"


def is_disk_full(run_dir: Path) -> bool:
    """Return whether the file system of a run has no room for its records."""
    room = os.statvfs(run_dir)
    blocks = room.f_bavail if os.geteuid() else room.f_bfree
    return blocks * room.f_frsize < _ROOM_BYTES or 0 == room.f_favail < room.f_files


def results(attempt: Path, request: TraceRequest, ranks: Sequence[int], why: str) -> list[RankTrace]:
    """Return what each asked rank recorded, with the path of its file. why: the reason where a rank that logs steps has
    no result."""
    folder = attempt / "traces" / request.window
    known, logging = read_traces(folder), logging_ranks(attempt)
    found = []
    for rank in filter(request.includes, ranks):
        error = why if rank in logging else "it writes no step log"
        each = known.get(rank)
        if each is None or each.state == "recording":
            each = RankTrace(rank=rank, state="failed", error=error)
        found.append(msgspec.structs.replace(each, file=str(folder / each.file) if each.file else ""))
    return found
