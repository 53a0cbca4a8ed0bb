"""The step log: one JSON line a step and rank, and what it adds up to.

<attempt>/steps/<rank>.jsonl        pit.step/1
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import msgspec

from pitools.core import timestamps
from pitools.core.errors import DataError
from pitools.core.fs import own
from pitools.core.record import Record, decode_json

CLOSING_TIMEOUT_S = 1800.0


class Step(Record, frozen=True, kw_only=True, tag="pit.step/1"):
    """One step of one rank. Times are wall-clock seconds; `wall_s` is the whole step.

    input_s: waiting for the batch. compute_s: forward, backward and update. comm_s: collectives.
    What is left of `wall_s` is everything else. bytes_read: from files, for this rank's share. loss: None where it was
    no finite number, which JSON cannot say.
    """

    t: str
    rank: int
    step: int
    loss: float | None
    wall_s: float
    input_s: float
    compute_s: float
    comm_s: float
    samples: int
    bytes_read: int = 0


class StepSummary(Record, frozen=True, kw_only=True, tag="pit.steps/1"):
    """What a step log adds up to over its ranks.

    steps: the last step number + 1. first_loss, last_loss: rank 0's. *_share: of rank 0's summed `wall_s`, 0 to 1.
    step_s: median `wall_s` of rank 0, its first (compiling) step left out.
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
    """Appends steps to one rank's file; each line is flushed, so a killed rank loses at most the step it was in."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        self.rank = rank
        self._file: IO[bytes] = open(  # noqa: SIM115
            folder / f"{rank}.jsonl", "ab", buffering=0, opener=own
        )

    def write(
        self,
        *,
        step: int,
        loss: float,
        wall_s: float,
        input_s: float,
        compute_s: float,
        comm_s: float,
        samples: int,
        bytes_read: int = 0,
    ) -> None:
        """Append one step."""
        record = Step(
            t=timestamps.now_rfc3339(),
            rank=self.rank,
            step=step,
            loss=loss,
            wall_s=wall_s,
            input_s=input_s,
            compute_s=compute_s,
            comm_s=comm_s,
            samples=samples,
            bytes_read=bytes_read,
        )
        self._file.write(msgspec.json.encode(record) + b"\n")

    def heartbeat(self, timeout_s: float = 0.0) -> None:
        """Say that this rank is at work on something long that is no step, such as an evaluation or a checkpoint.

        The watch takes ranks that make no step to hang; it counts from the latest word of any of them, and this is
        one. timeout_s: how long from now no other word is to be expected; the next step ends it. Costs one system call.
        """
        # The file's own time says it: no line that each reader of the log would have to know.
        moment = time.time() + timeout_s
        os.utime(self._file.fileno(), (moment, moment))

    def close(self) -> None:
        """Close the file. What comes after the last step, as a last checkpoint, has CLOSING_TIMEOUT_S until it is a
        hang."""
        if not self._file.closed:
            self.heartbeat(CLOSING_TIMEOUT_S)
        self._file.close()


class Stopwatch:
    """Laps in seconds: `lap()` is the time since the last lap, or since the start."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed


def read_step_log(path: Path) -> list[Step]:
    """The whole lines of one rank's file; a last line cut short by a kill is left out. Raises DataError."""
    lines = path.read_bytes().split(b"\n")[:-1]
    try:
        return [decode_json(line, Step) for line in lines]
    except msgspec.DecodeError as error:
        raise DataError(f"not a step log: {error}", where=str(path)) from error


def read_steps(path: Path, offset: int, *, at_line_start: bool = True) -> tuple[list[Step], int]:
    """The whole lines from an offset on, and the offset behind them; `at_line_start` says that a line begins at the
    offset."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except OSError:
        return [], offset
    if not at_line_start and offset:
        offset += data.find(b"\n") + 1
        data = data[data.find(b"\n") + 1 :]
    data = data[: data.rfind(b"\n") + 1]
    found = []
    for line in data.splitlines():
        try:
            found.append(decode_json(line, Step))
        except msgspec.DecodeError:
            continue
    return found, offset + len(data)


def summarize_steps(logs: Iterable[list[Step]]) -> StepSummary | None:
    """What these ranks' steps add up to; None where no step was made."""
    by_rank = {log[0].rank: log for log in logs if log}
    if not by_rank:
        return None
    lead = by_rank[min(by_rank)]
    wall = sum(step.wall_s for step in lead) or 1.0
    shares = [sum(getattr(step, name) for step in lead) / wall for name in ("input_s", "compute_s", "comm_s")]
    settled = sorted(step.wall_s for step in (lead[1:] or lead))
    return StepSummary(
        ranks=len(by_rank),
        steps=lead[-1].step + 1,
        first_loss=lead[0].loss,
        last_loss=lead[-1].loss,
        step_s=settled[len(settled) // 2],
        input_share=shares[0],
        compute_share=shares[1],
        comm_share=shares[2],
        other_share=max(0.0, 1.0 - sum(shares)),
    )
