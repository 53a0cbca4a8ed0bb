"""A job and its parts: states of arrays and heterogeneous jobs from those of their tasks and components. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pitools.slurm.states import combined_state, is_finished


class SqueueRow(NamedTuple):
    """Job id, its number, its state: `6_1`, `14`, `RUNNING`. reason, start: of one that waits, why and until when."""

    job_id: str
    raw_id: str
    state: str
    reason: str = ""
    start: str = ""


def pending_by_id(rows: Iterable[SqueueRow]) -> dict[str, SqueueRow]:
    """The row of a waiting job by every id that it answers to; of an array the first part's that waits."""
    found: dict[str, SqueueRow] = {}
    for row in rows:
        if row.state == "PENDING":
            for name in (row.job_id, row.raw_id, parent_job_id(row.job_id)):
                found.setdefault(name, row)
    return found


def states_from_squeue(rows: Iterable[SqueueRow]) -> dict[str, str]:
    """State by every id that squeue's rows answer for; a whole array or het job only while a part is unfinished.

    slurmctld forgets the parts of an array one by one: that all which it still knows have ended decides nothing.
    """
    told = list(rows)
    wholes = {parent_job_id(row.job_id) for row in told if parent_job_id(row.job_id) != row.job_id}
    return {
        job_id: combined_state(states)
        for job_id, states in _states_by_id(told).items()
        if job_id not in wholes or not all(map(is_finished, states))
    }


def states_from_accounting(rows: Iterable[SqueueRow]) -> dict[str, str]:
    """State by every id that accounting's rows answer for: accounting knows all parts."""
    return {job_id: combined_state(states) for job_id, states in _states_by_id(rows).items()}


def parent_job_id(job_id: str) -> str:
    """The array or het job of `6_0`, `6_[3-9]`, `11+1`."""
    return job_id.replace("+", "_").partition("_")[0]


def _states_by_id(rows: Iterable[SqueueRow]) -> dict[str, list[str]]:
    """States by every id that a job answers to: its own, its number, and its array's or het job's."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for name in dict.fromkeys((row.job_id, row.raw_id, parent_job_id(row.job_id))):
            found.setdefault(name, []).append(row.state)
    return found
