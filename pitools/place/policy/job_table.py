"""Pending jobs as arrays: a row for each job, a column for each pool."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from pitools.place.types import PendingJob

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

Row = tuple[float, ...]


class JobTable(NamedTuple):
    """The arrays. submit_s, tier: (jobs,). The others: (jobs, pools); where a job cannot run, inf, and 0 in copy_s."""

    submit_s: Array
    tier: Array
    units: Array
    run_s: Array
    limit_s: Array
    copy_s: Array


class JobTableBuilder:
    """Builds tables of jobs, and caches their rows for the next decision. A changed job is a new record: a new row."""

    def __init__(self) -> None:
        self.pools: tuple[str, ...] = ()
        self.rows: dict[str, tuple[PendingJob, Row]] = {}

    def build(self, jobs: Sequence[PendingJob], pools: Sequence[str]) -> JobTable:
        """Return the table of these jobs in these pools, both in the given order."""
        import numpy as np

        if tuple(pools) != self.pools or len(self.rows) > 4 * len(jobs) + 1000:
            self.pools, self.rows = tuple(pools), {}
        rows = np.array([self._row(job) for job in jobs]).reshape(len(jobs), 2 + 4 * len(pools))
        return JobTable(rows[:, 0], rows[:, 1], *(rows[:, 2 + n * len(pools) :][:, : len(pools)] for n in range(4)))

    def _row(self, job: PendingJob) -> Row:
        cached = self.rows.get(job.job_id)
        if cached and cached[0] is job:
            return cached[1]
        by_pool = {option.pool: option for option in job.options}
        options = [by_pool.get(pool) for pool in self.pools]
        row = (
            job.submit_s,
            float(job.tier),
            *(option.units if option else inf for option in options),
            *(option.run_s if option else inf for option in options),
            *(option.limit_s if option else inf for option in options),
            *(option.copy_s if option else 0.0 for option in options),
        )
        self.rows[job.job_id] = job, row
        return row


def runnable(jobs: Sequence[PendingJob], table: JobTable) -> tuple[Sequence[PendingJob], JobTable]:
    """Return the jobs that can run in at least one of the table's pools, and their rows."""
    import numpy as np

    can: Any = np.isfinite(table.run_s).any(axis=1)
    if can.all():
        return jobs, table
    return [job for job, is_able in zip(jobs, can, strict=True) if is_able], JobTable(
        *(column[can] for column in table)
    )
