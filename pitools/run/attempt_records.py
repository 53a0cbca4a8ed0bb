"""The records of one attempt of a run, beside its logs and step logs. `run/run_folder.py` draws the run's folder.

attempts/<n>/           n counts the starts of the run, over all its jobs; `<task>.<restart>` in an array
    start.json          pit.attempt-start/1: written first, by the job script
    signals.jsonl       pit.signal/1: the signals that the job script received, with their times
    failures/<rank>.json  pit.rank-failure/1: the exception or exit code of a rank's program
    first_failure       `<exit code> <rank> <node>` of the rank that failed first: only the first rank can make the file
    preflight.jsonl     pit.node-preflight/1: a line for each node that has made its checks before the ranks start
    preflight.json      pit.preflight/1: the result, and how long it took
    hang.json           pit.hang/1: the hang watch ended an attempt whose ranks made no more steps
    stacks/<rank>.txt   each rank's stack at that time
    bin/python          a link to the interpreter, where that has another name
    unreachable/<node>.json  pit.unreachable-node/1: a node that did not answer when the ranks were ended
    oom/<rank>.json     pit.oom/1: a rank that the kernel's OOM killer ended, or its child
    decision.json       pit.decision/1: the recovery decision
    exit.json           pit.attempt-exit/1: written at the end; absent while the script runs, and after a node failure
    succeeded           an empty file, made after an exit.json of exit code 0: shell scripts test for it
    cause.json          pit.cause/1: why the attempt ended, with the evidence
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pitools.core.fs import open_regular
from pitools.core.record import Record
from pitools.run import run_folder

CauseKind = Literal[
    "succeeded",
    "preempted",
    "time-limit",
    "node",
    "gpu",
    "preflight",
    "network",
    "memory",
    "storage",
    "program",
    "hang",
    "cancelled",
    "unknown",
]
Confidence = Literal["certain", "likely", "guess"]
DOUBT: dict[Confidence, int] = {"certain": 0, "likely": 1, "guess": 2}  # sorts the most certain first
SUCCEEDED = "succeeded"
VerdictKind = CauseKind | Literal["moved"]
VerdictCode = Literal["succeeded", "failed", "cancelled", "moving", "moved"]


class AttemptStart(Record, frozen=True, kw_only=True, tag="pit.attempt-start/1"):
    """How one attempt began.

    job_number: of the run's jobs, from 0. job_id, cluster: Slurm's. restart_count: how often Slurm itself
    has requeued that job (SLURM_RESTART_COUNT). node_list: Slurm's host list expression. time_limit_at: when the job's
    time limit ends, "" without a limit. saved_steps: steps in the newest complete checkpoint at the start; 0 for none.
    """

    attempt: str
    job_number: int
    job_id: str
    cluster: str
    restart_count: int
    node_list: str
    nodes: int
    started: str
    time_limit_at: str = ""
    saved_steps: int = 0


class SignalRecord(Record, frozen=True, kw_only=True, tag="pit.signal/1"):
    """A signal that the job script received. seconds_to_limit: from then to the time limit; None without a limit."""

    t: str
    signal: str
    seconds_to_limit: float | None = None


class RankFailure(Record, frozen=True, kw_only=True, tag="pit.rank-failure/1"):
    """The failure of a rank whose program raised an exception or exited with a code.

    error: the exception's qualified name, "" for an exit code alone. message: its first line. fingerprint: equal for
    equal failures at the same source line; "" without a traceback. trace: the traceback's last lines.
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
    """A hang for which the hang watch ended the attempt.

    step: the last step that any rank logged. stalled_s: seconds since then. median_step_s: median step time before.
    slow_ranks: ranks that had logged fewer steps than the others.
    """

    t: str
    step: int
    stalled_s: float
    median_step_s: float
    slow_ranks: tuple[int, ...] = ()


class PreflightFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A node that must not run the ranks. check: the name of the check that failed, "all-reduce", or "all-reduce-pair"
    for a node of a pair with wrong data, of which the other may be at fault.
    """

    node: str
    check: str
    message: str


class NodePreflight(Record, frozen=True, kw_only=True, tag="pit.node-preflight/1"):
    """The checks of one node before the ranks start. unknown: the number of checks whose facts it could not read."""

    node: str
    failures: tuple[PreflightFailure, ...] = ()
    unknown: int = 0


class Preflight(Record, frozen=True, kw_only=True, tag="pit.preflight/1"):
    """The test of an attempt's nodes before its ranks start.

    t: when it ended. wall_s: how long it took. nodes: their number; answered: of those that made their checks.
    failures: they ended the attempt. problem: what was not tested, and why; "" for nothing.
    """

    t: str
    wall_s: float
    nodes: int
    answered: int
    failures: tuple[PreflightFailure, ...] = ()
    problem: str = ""


class Evidence(Record, frozen=True, kw_only=True, tag="pit.evidence/1"):
    """One piece of evidence on why an attempt ended.

    t: its time, "" if unknown. source: the file, relative to the run's folder, or the command that printed it. text:
    the line, or the fact. kind: the cause that it supports. rank, node: None and "" where it concerns several. role:
    "fault": a possible root cause; "slurm-statement": Slurm's own; never root causes: "cascade" (a rank's error after
    another rank was lost), "end" (how ranks were ended), "warning" (a signal before that). rule: of the pattern table.
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

    kind: see CauseKind; "unknown" is not "succeeded". confidence: "certain" (Slurm or the program states it), "likely",
    "guess". progressed: whether a newer checkpoint exists than at the start. steps: the last logged step + 1.
    saved_steps: steps in the newest complete checkpoint at the end. state: Slurm's job state, "" if not queried.
    signal: the signal that ended the first rank to fail, 0 for none. nodes: the nodes at fault; empty, not all of them,
    if unknown. fingerprint: of the first failure, to recognize a repeated one. evidence: the decisive piece, then by
    time.
    """

    attempt: str
    kind: CauseKind
    confidence: Confidence
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
    """The recovery decision for a cause.

    action: "done" (finished), "retry" (another attempt in the same allocation), "resubmit" (a new job), "defer"
    (nothing now: Slurm, a newer job or `pit launch tick` continues the run), "stop". exclude: nodes that the next
    attempt must not get. reason: one sentence. wait_s: seconds to wait first, as for storage that is unreachable.
    """

    attempt: str
    action: Literal["done", "retry", "resubmit", "defer", "stop"]
    kind: CauseKind
    reason: str
    exclude: tuple[str, ...] = ()
    wait_s: float = 0.0


class Verdict(Record, frozen=True, kw_only=True, tag="pit.verdict/1"):
    """How a run ended: `<run>/verdict.json`. A run without a verdict is to be continued.

    code: for programs; "moving" becomes "moved", or is removed where the move fails. kind: with both, "moved".
    moved_to: with both, the id of the run that continues this one; else "". reason: for people. attempts, submissions:
    their numbers at the end.
    """

    state: Literal["succeeded", "stopped"]
    code: VerdictCode
    kind: VerdictKind
    reason: str
    t: str
    attempts: int
    exit_code: int | None = None
    submissions: int = 0
    moved_to: str = ""


def ranks_on_node(attempt: Path, node: str) -> list[run_folder.RankRecord]:
    """Return the records of an attempt's ranks on a node; a rank without a readable record is left out."""
    paths = (attempt / "ranks").glob("*.json")
    records = (run_folder.read_or_none(path, run_folder.RankRecord) for path in paths)
    return [record for record in records if record and record.node == node]


def first_failure(attempt: Path) -> FirstFailure | None:
    """Return the rank that failed first; None where no rank has recorded it, or the record is incomplete."""
    with contextlib.suppress(OSError), open_regular(attempt / "first_failure") as file:
        if match := re.fullmatch(r"(-?\d{1,6}) (\d{1,7}) (\S{1,255})\s*", file.read(1024).decode("utf-8", "replace")):
            return FirstFailure(int(match[1]), int(match[2]), match[3])
    return None
