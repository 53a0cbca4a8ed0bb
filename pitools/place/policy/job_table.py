"""Waiting jobs as columns: one row a job, one column a pool."""

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
    """Jobs as numbers. submit_s, tier: (jobs,). The others (jobs, pools), where a job cannot run inf, or 0 for
    stage_s."""

    submit_s: Array
    tier: Array
    units: Array
    run_s: Array
    limit_s: Array
    stage_s: Array


class JobTableBuilder:
    """Makes tables of jobs; remembers the rows of jobs that it has seen, for whoever decides again and again.

    A job that changed is another record, and gets another row: with or without a memory, the table is the same.
    """

    def __init__(self) -> None:
        self.pools: tuple[str, ...] = ()
        self.rows: dict[str, tuple[PendingJob, Row]] = {}

    def build(self, jobs: Sequence[PendingJob], pools: Sequence[str]) -> JobTable:
        """The table of these jobs, in their order, in these pools, in theirs."""
        import numpy as np

        if tuple(pools) != self.pools or len(self.rows) > 4 * len(jobs) + 1000:
            self.pools, self.rows = tuple(pools), {}
        made = np.array([self._row(job) for job in jobs]).reshape(len(jobs), 2 + 4 * len(pools))
        return JobTable(made[:, 0], made[:, 1], *(made[:, 2 + n * len(pools) :][:, : len(pools)] for n in range(4)))

    def _row(self, job: PendingJob) -> Row:
        known = self.rows.get(job.job_id)
        if known and known[0] is job:
            return known[1]
        options = {option.pool: option for option in job.options}
        found = [options.get(pool) for pool in self.pools]
        row = (
            job.submit_s,
            float(job.tier),
            *(option.units if option else inf for option in found),
            *(option.run_s if option else inf for option in found),
            *(option.limit_s if option else inf for option in found),
            *(option.stage_s if option else 0.0 for option in found),
        )
        self.rows[job.job_id] = job, row
        return row


def runnable(jobs: Sequence[PendingJob], table: JobTable) -> tuple[Sequence[PendingJob], JobTable]:
    """The jobs that could run in any of the table's pools, and their rows."""
    import numpy as np

    can: Any = np.isfinite(table.run_s).any(axis=1)
    if can.all():
        return jobs, table
    return [job for job, is_able in zip(jobs, can, strict=True) if is_able], JobTable(
        *(column[can] for column in table)
    )
