"""A job and its parts: states of arrays and heterogeneous jobs from those of their tasks and components. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from pitools.slurm.states import is_finished, joint

Row = tuple[str, str, str]
"""Job id, its number, its state: `6_1`, `14`, `RUNNING`."""


def queued(rows: Iterable[Row]) -> dict[str, str]:
    """State by every id that squeue's rows answer for; a whole array or het job only while a part is unfinished.

    slurmctld forgets the parts of an array one by one: that all which it still knows have ended decides nothing.
    """
    told = list(rows)
    wholes = {whole(job_id) for job_id, _, _ in told if whole(job_id) != job_id}
    return {
        job_id: joint(states)
        for job_id, states in _by_id(told).items()
        if job_id not in wholes or not all(map(is_finished, states))
    }


def accounted(rows: Iterable[Row]) -> dict[str, str]:
    """State by every id that accounting's rows answer for: accounting knows all parts."""
    return {job_id: joint(states) for job_id, states in _by_id(rows).items()}


def whole(job_id: str) -> str:
    """The array or het job of `6_0`, `6_[3-9]`, `11+1`."""
    return job_id.replace("+", "_").partition("_")[0]


def _by_id(rows: Iterable[Row]) -> dict[str, list[str]]:
    """States by every id that a job answers to: its own, its number, and its array's or het job's."""
    found: dict[str, list[str]] = {}
    for job_id, raw_id, state in rows:
        for name in dict.fromkeys((job_id, raw_id, whole(job_id))):
            found.setdefault(name, []).append(state)
    return found
