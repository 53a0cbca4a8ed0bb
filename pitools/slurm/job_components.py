"""Combine the states of array tasks and het components into states of their jobs. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pitools.slurm.states import combined_state, is_final


class JobPart(NamedTuple):
    """Job id, raw id and state: `6_1`, `14`, `RUNNING`. reason, start: pending reason and expected start, else ""."""

    job_id: str
    raw_id: str
    state: str
    reason: str = ""
    start: str = ""


def pending_by_id(rows: Iterable[JobPart]) -> dict[str, JobPart]:
    """Return id → row of pending jobs, for each of their ids; for an array, its first pending part."""
    rows_by_id: dict[str, JobPart] = {}
    for row in rows:
        if row.state == "PENDING":
            for name in (row.job_id, row.raw_id, parent_job_id(row.job_id)):
                rows_by_id.setdefault(name, row)
    return rows_by_id


def states_from_squeue(rows: Iterable[JobPart]) -> dict[str, str]:
    """Return id → state of squeue's rows; an array or het job is included only while a part is unfinished.

    slurmctld forgets parts of an array one by one, so the array may have unlisted parts that did not complete.
    """
    row_list = list(rows)
    parents = {parent_job_id(row.job_id) for row in row_list if parent_job_id(row.job_id) != row.job_id}
    return {
        job_id: combined_state(states)
        for job_id, states in _states_by_id(row_list).items()
        if job_id not in parents or not all(map(is_final, states))
    }


def states_from_accounting(rows: Iterable[JobPart]) -> dict[str, str]:
    """Return id → state of accounting's rows, which include all parts of a job."""
    return {job_id: combined_state(states) for job_id, states in _states_by_id(rows).items()}


def parent_job_id(job_id: str) -> str:
    """Return the id of the array or het job of `6_0`, `6_[3-9]`, `11+1`."""
    return job_id.replace("+", "_").partition("_")[0]


def _states_by_id(rows: Iterable[JobPart]) -> dict[str, list[str]]:
    """Return id → states, for the id of each row, its raw id, and its array's or het job's id."""
    states_by_id: dict[str, list[str]] = {}
    for row in rows:
        for name in dict.fromkeys((row.job_id, row.raw_id, parent_job_id(row.job_id))):
            states_by_id.setdefault(name, []).append(row.state)
    return states_by_id
