"""What a decision over several sites sees: jobs, pools and tickets, as numbers.

The live dispatcher and the simulator make these records, each from its own world; `policy.decide` knows no other. Times
are seconds on one clock, Unix time or a trace's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pitools.core.record import Record


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One pool where a job could run.

    units: what it would hold there: GPUs, or nodes where the pool has none. run_s: expected, topology and risk of
    failure included. limit_s: the time limit it is submitted with. stage_s: copying the data that is not there yet,
    which overlaps with the wait.
    """

    pool: str
    units: int
    run_s: float
    limit_s: float
    stage_s: float = 0.0


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One job in the queue over all sites. tier: the higher goes first."""

    job_id: str
    submit_s: float
    options: tuple[Option, ...]
    tier: int = 0


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """One partition of one site, as last seen.

    units: that could run jobs, in use or not. free: idle now, and not promised to a pending job that is not ours.
    running: (end by its time limit, units) of whatever runs there, ours and others', ascending. waiting: units that
    others' jobs ask for in its queue. tickets: the most of ours that may wait there. is_dark: it does not answer:
    nothing is sent to it, and what is there is as last seen. closed: windows (from, to) in which nothing may run: a job
    whose limit reaches into one starts when it is over.
    """

    pool: str
    units: int
    free: int
    running: Sequence[tuple[float, int]] = ()
    waiting: int = 0
    tickets: int = 4
    is_dark: bool = False
    closed: Sequence[tuple[float, float]] = ()

    def opens_s(self, start_s: float, limit_s: float) -> float:
        """The first moment from start_s on at which a job of this limit reaches into no closed window."""
        for from_s, to_s in sorted(self.closed):
            if start_s < to_s and start_s + limit_s > from_s:
                start_s = to_s
        return start_s


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """A job of ours in a pool's queue, not started. placed_s: when it was put there.

    A job has one at a time, which runs as soon as Slurm starts it.
    """

    job_id: str
    pool: str
    placed_s: float


class Place(Record, frozen=True, kw_only=True, tag="pit.place/1"):
    """Decision: put a ticket for this job into this pool's queue. why: for people."""

    job_id: str
    pool: str
    why: str = ""


class Withdraw(Record, frozen=True, kw_only=True, tag="pit.withdraw/1"):
    """Decision: take this ticket back; a ticket that has started meanwhile stays."""

    job_id: str
    pool: str
    why: str = ""
