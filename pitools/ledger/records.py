"""The record of a run's allocated time, and its states."""

from __future__ import annotations

from enum import StrEnum

from pitools.core.record import Record


class State(StrEnum):
    """What an allocated resource did. Names as on disk.

    start: until the first step begins: the job's script, the ranks' start, their imports, the restore. staging: of
    datasets, before that. compile: what the first step of an attempt takes over the median step. productive: the rest
    of steps. lost: steps that were made again after a restart. input: steps that waited for their batch. checkpoint:
    steps that a save blocked, and the last save. straggler: waiting in a collective for the slowest rank. recovery:
    from an attempt's last step to the first step of the next in the same allocation. idle: after the last step, until
    the allocation ends. unaccounted: nothing says what it did, such as the time between two steps.
    """

    START = "start"
    STAGING = "staging"
    COMPILE = "compile"
    PRODUCTIVE = "productive"
    LOST = "lost"
    INPUT = "input"
    CHECKPOINT = "checkpoint"
    STRAGGLER = "straggler"
    RECOVERY = "recovery"
    IDLE = "idle"
    UNACCOUNTED = "unaccounted"


class RunLedger(Record, frozen=True, kw_only=True, tag="pit.run-ledger/1"):
    """Where the allocated time of a run, or of a job of another program, went.

    site, user: "" if unknown. since, until: start of the first allocation and end of the last, or now. resource: gpu or
    node; count: of them a node, in the newest allocation; nodes: of that. attempts, allocations: their numbers; a
    requeued job has one allocation each time it starts. allocated_s: resource-seconds. queue_s: seconds in which a job
    of the run was queued, which are not allocated. seconds: state → resource-seconds, all states; their sum is
    allocated_s. goodput: productive ÷ allocated_s; calendar_goodput: productive ÷ resource-seconds between since and
    until, queued ones too; both 0 to 1, None without step log and GPU utilization. greatest_loss: the state with the
    most seconds but productive, "" without one. source: run (step logs, with sacct's times where it has the jobs),
    sacct (no evidence inside the job), sacct+js1 (jobstats' GPU utilization counts as productive: an upper bound).
    is_accounted: sacct's times are in it: of each job, and of its end if the run is over. bad_logs: the step logs with
    lines that are no steps, such as `rank 0 of attempt 1: 3 lines`, or `empty` at their attempt's end; "" without one.

    Of a running run seconds move between states: from unaccounted to a step's, from productive to lost.
    """

    run_id: str
    name: str
    site: str
    user: str
    source: str
    is_running: bool
    since: str
    until: str
    resource: str
    count: int
    nodes: int
    attempts: int
    allocations: int
    allocated_s: float
    queue_s: float
    seconds: dict[State, float]
    goodput: float | None
    calendar_goodput: float | None
    greatest_loss: str
    is_accounted: bool = False
    bad_logs: str = ""
