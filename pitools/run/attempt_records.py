"""What one attempt of a run leaves behind, beside its logs and step logs. `run/run_folder.py` draws the run's folder.

attempts/<n>/           n counts the starts of the run, over all its jobs; `<task>.<restart>` in an array
    start.json          pit.attempt-start/1: written first, by the job script
    signals.jsonl       pit.signal/1: what the job script was sent, and when
    failures/<rank>.json  pit.rank-failure/1: the last word of a rank that failed by itself
    first_failure       `<exit code> <rank> <node>` of the rank that failed first: whoever is first makes the file
    hang.json           pit.hang/1: the watch ended an attempt that had come to a standstill
    stacks/<rank>.txt   where each rank was then
    unreachable/<node>.json  pit.unreachable-node/1: a node that did not answer when the ranks were ended
    oom/<rank>.json     pit.oom/1: a rank that the kernel killed for want of memory
    decision.json       pit.decision/1: what was decided to follow
    exit.json           pit.attempt-exit/1: how the script saw it end; absent while it runs, and where the node failed
    succeeded           an empty file, made after exit.json where that says exit code 0: what a script can ask for
    cause.json          pit.cause/1: why it ended, with what that rests on
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Literal, NamedTuple

from pitools.core.errors import DataError
from pitools.core.fs import open_regular
from pitools.core.record import Record
from pitools.run import run_folder

CauseKind = Literal[
    "finished",
    "preempted",
    "time-limit",
    "node",
    "gpu",
    "network",
    "memory",
    "storage",
    "user",
    "hang",
    "cancelled",
    "unknown",
]
SUCCEEDED = "succeeded"
VerdictCode = Literal["finished", "failed", "cancelled", "moving", "moved"]


class AttemptStart(Record, frozen=True, kw_only=True, tag="pit.attempt-start/1"):
    """How one attempt began.

    submission: which submission of the run it belongs to, 0 for the first. job_id, cluster: Slurm's. restart: how often
    Slurm itself has restarted that job (SLURM_RESTART_COUNT). node_list: folded. time_limit_at: the job's time limit as
    a moment, "" where there is none. saved_steps: steps that were safe when it began, of the newest whole checkpoint; 0
    for none.
    """

    attempt: str
    submission: int
    job_id: str
    cluster: str
    restart: int
    node_list: str
    nodes: int
    started: str
    time_limit_at: str = ""
    saved_steps: int = 0


class SignalRecord(Record, frozen=True, kw_only=True, tag="pit.signal/1"):
    """A signal that the job script was sent. seconds_to_limit: seconds to the time limit at that moment, None without
    one."""

    t: str
    signal: str
    seconds_to_limit: float | None = None


class RankFailure(Record, frozen=True, kw_only=True, tag="pit.rank-failure/1"):
    """The last word of a rank whose program raised, or ended with a code.

    error: the exception's qualified name, "" for a program that only gave a code. message: its first line. fingerprint:
    the same for the same failure at the same place, however often; "" where there is no trace. trace: the last lines.
    """

    t: str
    rank: int
    node: str
    exit_code: int
    error: str = ""
    message: str = ""
    fingerprint: str = ""
    trace: str = ""


class FirstFailure(NamedTuple):
    """The rank of an attempt that failed first."""

    exit_code: int
    rank: int
    node: str


class HangReport(Record, frozen=True, kw_only=True, tag="pit.hang/1"):
    """A standstill that the watch ended.

    step: the last that any rank wrote. stalled_s: since then; median_step_s: median of a step before. slow_ranks: ranks
    that had written fewer steps than the others.
    """

    t: str
    step: int
    stalled_s: float
    median_step_s: float
    slow_ranks: tuple[int, ...] = ()


class Evidence(Record, frozen=True, kw_only=True, tag="pit.evidence/1"):
    """One thing that was seen.

    t: when, "" where that is not known. source: the file, relative to the run's folder, or the command that said it.
    text: the line, or the fact. kind: what it speaks for. rank, node: None and "" where it is of no single one. role:
    "fault" can be the beginning of an end; "slurm-statement" is Slurm's own; "cascade" is a complaint
    of ranks because another has gone, "end" how they are ended, "warning" what they were sent before: these never are.
    rule: the rule of the table that matched.
    """

    t: str
    source: str
    text: str
    kind: CauseKind
    rank: int | None = None
    node: str = ""
    role: Literal["fault", "slurm-statement", "cascade", "end", "warning"] = "fault"
    rule: str = ""


class Cause(Record, frozen=True, kw_only=True, tag="pit.cause/1"):
    """Why an attempt ended.

    kind: see Kind; "unknown" is not "finished". confidence: "certain" (Slurm or the program itself says so), "likely",
    "guess". progressed: whether a newer checkpoint is safe than when it began. steps: the last step reached + 1.
    saved_steps: steps that were safe at its end. state: Slurm's word, "" where it was not asked. signal: that ended the
    first failure, 0 for none. nodes: those at fault, never all of them for want of better knowledge. fingerprint: of
    the first failure, to tell whether the same happens again. evidence: what decided, then the rest by time.
    """

    attempt: str
    kind: CauseKind
    confidence: Literal["certain", "likely", "guess"]
    reason: str
    progressed: bool = False
    steps: int = 0
    saved_steps: int = 0
    state: str = ""
    exit_code: int | None = None
    signal: int = 0
    rank: int | None = None
    nodes: tuple[str, ...] = ()
    fingerprint: str = ""
    evidence: tuple[Evidence, ...] = ()


class Decision(Record, frozen=True, kw_only=True, tag="pit.decision/1"):
    """What follows from a cause.

    action: "done" (finished), "retry" (another attempt in the same allocation), "resubmit" (a fresh job), "wait"
    (Slurm itself restarts the job), "stop". exclude: nodes that the next attempt must not get. reason: one sentence.
    wait_s: how long to wait first, as where storage has to come back.
    """

    attempt: str
    action: Literal["done", "retry", "resubmit", "wait", "stop"]
    kind: CauseKind
    reason: str
    exclude: tuple[str, ...] = ()
    wait_s: float = 0.0


class Verdict(Record, frozen=True, kw_only=True, tag="pit.verdict/1"):
    """How a run ended, once and for all: `<run>/verdict.json`. A run without one is to go on.

    code: what a program tells verdicts apart by; "moving" is not the last one, unless the move is given up. moved_to:
    the run that it goes on as, of "moving" and "moved"; "" of the others. reason: for people. attempts, submissions:
    how many there had been.
    """

    state: Literal["finished", "stopped"]
    code: VerdictCode
    kind: CauseKind
    reason: str
    t: str
    attempts: int
    exit_code: int | None = None
    submissions: int = 0
    moved_to: str = ""


def ranks_on_node(attempt: Path, node: str) -> list[run_folder.RankRecord]:
    """The ranks of an attempt that ran on a node, as far as they left their records."""
    found = []
    for path in (attempt / "ranks").glob("*.json"):
        with contextlib.suppress(OSError, DataError):
            found += (
                [rank] if (rank := run_folder.read_record(path, run_folder.RankRecord)) and rank.node == node else []
            )
    return found


def first_failure(attempt: Path) -> FirstFailure | None:
    """Return the rank that failed first; None where none has left word."""
    with contextlib.suppress(OSError), open_regular(attempt / "first_failure") as file:
        if found := re.fullmatch(r"(-?\d{1,6}) (\d{1,7}) (\S{1,255})\s*", file.read(1024).decode("utf-8", "replace")):
            return FirstFailure(int(found[1]), int(found[2]), found[3])
    return None
