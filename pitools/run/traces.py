"""The traces of a run: which steps are asked for, and what each rank recorded.

<run>/trace.json                    pit.trace-request/1: of a run that is traced from its start
<attempt>/traces/
    request.json                    pit.trace-request/1: the newest request, which the ranks' step logs look for
    <first>-<last>/                 the steps that were asked for
        <rank>.json.gz              of PyTorch's profiler; or <rank>.xplane.pb, of JAX's
        <rank>.status.json          pit.rank-trace/1
"""

from __future__ import annotations

from pathlib import Path

from pitools.core.record import Record
from pitools.run import run_folder

FIRST_STEP = 2  # the earliest that can be recorded: the profiler starts one step before, and after the first step
REQUEST_FILE = "request.json"  # in the folder of an attempt's traces
RUN_REQUEST_FILE = "trace.json"  # in a run's folder, for all its attempts


class TraceRequest(Record, frozen=True, kw_only=True, tag="pit.trace-request/1"):
    """Steps to trace, both included. ranks: as `0-3,7`; "" for all. t: when it was asked."""

    t: str
    first_step: int
    last_step: int
    ranks: str = ""

    def __post_init__(self) -> None:
        self.includes(0)  # of a damaged file: a ValueError, which makes it no record

    @property
    def window(self) -> str:
        """The name of its folder."""
        return f"{self.first_step}-{self.last_step}"

    def includes(self, rank: int) -> bool:
        """Return whether a rank is to be traced."""
        parts = [part.partition("-") for part in self.ranks.split(",") if part]
        bounds = [(int(first), int(last or first)) for first, _, last in parts]
        return not bounds or any(first <= rank <= last for first, last in bounds)


class RankTrace(Record, frozen=True, kw_only=True, tag="pit.rank-trace/1"):
    """What a rank recorded, or why it did not.

    state: recording, done or failed. error: why, or why it has fewer steps than were asked for. framework: torch or
    jax. first_step, last_step: recorded; they are later than requested where the rank saw the request late. file: its
    trace. bytes: its size. blocked_s: for how long the profiler held the rank up, to start, stop and write. cpu_wait_s:
    of each recorded step, for how long the thread that waited longest was ready to run and had no CPU, of those that
    compute; 0 where the kernel does not say. slowdown: how much longer the median recorded step took than that of up to
    20 before them, by the step log, as a share; None for fewer than 5.
    """

    rank: int
    state: str
    framework: str = ""
    first_step: int | None = None
    last_step: int | None = None
    file: str = ""
    bytes: int = 0
    blocked_s: float = 0.0
    error: str = ""
    cpu_wait_s: list[float] = []
    slowdown: float | None = None


def read_traces(folder: Path) -> dict[int, RankTrace]:
    """Return rank → what it recorded, of a folder of one capture."""
    found = (run_folder.read_or_none(path, RankTrace) for path in folder.glob("*.status.json"))
    return {each.rank: each for each in found if each}
