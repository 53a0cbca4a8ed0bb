"""The step log: one JSON line per step and rank; and a summary of its times.

<attempt>/steps/<rank>.jsonl        pit.step/1
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

import msgspec

from pitools.core import timestamps
from pitools.core.errors import DataError
from pitools.core.fs import open_0644, open_regular
from pitools.core.record import Record, decode_json
from pitools.run import run_folder
from pitools.run.trace_capture import TraceCapture

# The longest time that a save or another piece of work between two steps may take.
SAVE_TIMEOUT_S = 1800.0


class Step(Record, frozen=True, kw_only=True, tag="pit.step/1"):
    """One step of one rank. Times are wall-clock seconds; `wall_s` is the whole step.

    input_s: waiting for the batch. compute_s: forward, backward and update. comm_s: collectives. checkpoint_s: blocked
    by a save. The rest of `wall_s` is everything else. rank_samples: of this rank's part of the batch. bytes_read: from
    files, by this rank. metrics: the program's own, such as a success rate. loss and metrics: None for NaN and
    infinity, which JSON cannot encode.
    """

    t: str
    rank: int
    step: int
    loss: float | None
    wall_s: float
    input_s: float
    compute_s: float
    comm_s: float
    rank_samples: int
    bytes_read: int = 0
    metrics: dict[str, float | None] = {}
    checkpoint_s: float = 0.0


class StepSummary(Record, frozen=True, kw_only=True, tag="pit.steps/1"):
    """Summary of the step logs of all ranks.

    steps: the last step number + 1. first_loss, last_loss: rank 0's. *_share: of rank 0's summed `wall_s`, 0 to 1.
    step_s: median `wall_s` of rank 0 without its first (compiling) step.
    """

    ranks: int
    steps: int
    first_loss: float | None
    last_loss: float | None
    step_s: float
    input_share: float
    compute_share: float
    comm_share: float
    other_share: float


class StepLog:
    """Append steps to one rank's file, unbuffered: a killed rank loses at most its current step.

    `pit perf trace` has it record a trace of some steps.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        self.rank = rank
        self._file: IO[bytes] = open(  # noqa: SIM115
            folder / f"{rank}.jsonl", "ab", buffering=0, opener=open_0644
        )
        self._capture = TraceCapture(folder.parent, rank)

    def write(
        self,
        *,
        step: int,
        loss: float,
        wall_s: float,
        input_s: float,
        compute_s: float,
        comm_s: float,
        rank_samples: int,
        bytes_read: int = 0,
        metrics: Mapping[str, float] | None = None,
        checkpoint_s: float = 0.0,
    ) -> None:
        """Append one step. metrics: values that `pit launch sweep` compares runs by, at the steps that have them."""
        record = Step(
            t=timestamps.now_rfc3339(),
            rank=self.rank,
            step=step,
            loss=loss,
            wall_s=wall_s,
            input_s=input_s,
            compute_s=compute_s,
            comm_s=comm_s,
            rank_samples=rank_samples,
            bytes_read=bytes_read,
            metrics={name: float(value) for name, value in (metrics or {}).items()},
            checkpoint_s=checkpoint_s,
        )
        line = msgspec.json.encode(record) + b"\n"
        if self._file.write(line) != len(line):  # the rest of the line would be glued to the next
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        self._capture.end_step(step, wall_s)

    def heartbeat(self, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Report that this rank works on something other than a step, such as an evaluation or a checkpoint.

        The hang watch measures from the latest step or heartbeat of any rank. timeout_s: seconds from now without
        another step or heartbeat that do not count as a hang; the next step ends this. Costs one system call.
        """
        # Stored as the file's mtime: a line of its own would burden each reader of the log.
        mtime = time.time() + timeout_s
        os.utime(self._file.fileno(), (mtime, mtime))

    def close(self) -> None:
        """Close the file. Work after the last step, such as the last checkpoint, counts as a hang after
        SAVE_TIMEOUT_S."""
        if not self._file.closed:
            self._capture.close()
            self.heartbeat()
        self._file.close()


class Stopwatch:
    """A clock of laps in seconds."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last lap, or since the start."""
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed


def read_step_log(path: Path) -> list[Step]:
    """Return the steps of one rank's file; a last line truncated by a kill is left out. Raises DataError."""
    lines = path.read_bytes().split(b"\n")[:-1]
    try:
        return [decode_json(line, Step) for line in lines]
    except msgspec.DecodeError as error:
        raise DataError(f"not a step log: {error}", where=str(path)) from error


def read_run_steps(run_dir: Path) -> dict[int, Step]:
    """Return step number → rank 0's record of it, over all attempts; of a repeated step, the last.

    Other lines are left out.
    """
    logged: dict[int, Step] = {}
    for attempt in run_folder.attempt_dirs(run_dir):
        read, _ = read_steps_after(attempt / "steps" / "0.jsonl", 0)
        logged |= {step.step: step for step in read}
    return logged


def last_metrics(logged: Mapping[int, Step]) -> dict[str, float | None]:
    """Return the last logged value of each metric of a run's steps."""
    metrics: dict[str, float | None] = {}
    for number in sorted(logged):
        metrics |= logged[number].metrics
    return metrics


def read_steps_after(path: Path, offset: int, *, at_line_start: bool = True) -> tuple[list[Step], int]:
    """Return the steps of the complete lines after an offset, and the offset after them.

    at_line_start: whether a line begins at the offset; if not, the rest of that line is skipped.
    """
    try:
        with open_regular(path) as file:
            file.seek(offset)
            data = file.read()
    except OSError:
        return [], offset
    if not at_line_start and offset:
        offset += data.find(b"\n") + 1
        data = data[data.find(b"\n") + 1 :]
    data = data[: data.rfind(b"\n") + 1]
    steps = []
    for line in data.splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            steps.append(decode_json(line, Step))
    return steps, offset + len(data)


def summarize_steps(logs: Iterable[list[Step]]) -> StepSummary | None:
    """Summarize the steps of these ranks; None without a step."""
    by_rank = {log[0].rank: log for log in logs if log}
    if not by_rank:
        return None
    lead = by_rank[min(by_rank)]
    wall = sum(step.wall_s for step in lead) or 1.0
    shares = [sum(getattr(step, name) for step in lead) / wall for name in ("input_s", "compute_s", "comm_s")]
    step_times = sorted(step.wall_s for step in (lead[1:] or lead))
    return StepSummary(
        ranks=len(by_rank),
        steps=lead[-1].step + 1,
        first_loss=lead[0].loss,
        last_loss=lead[-1].loss,
        step_s=step_times[len(step_times) // 2],
        input_share=shares[0],
        compute_share=shares[1],
        comm_share=shares[2],
        other_share=max(0.0, 1.0 - sum(shares)),
    )
