"""Predict a job's run time from the jobs that ended before it.

The predicted quantity is run time ÷ time limit, in (0, 1], as a histogram over powers of two; being bounded, no single
job distorts the mean. There are histograms of all jobs, of jobs of one limit, of one limit and size, and of one limit,
size and kind. Each has the wider one before it as its prior.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from math import ceil, log2
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np

    Histogram = np.ndarray[Any, np.dtype[np.float64]]

BINS = 18  # 2^-18 of a week's limit is two seconds
PRIOR_JOBS = 10.0  # weight of the wider histogram, in jobs
MEMORY_JOBS = 1000.0  # older jobs fade exponentially beyond this number


class JobFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a job before its run.

    limit_s: time limit at submission. units: GPUs, or nodes. kind: class of similar jobs, as owner and job name, or a
    trace's own class; empty if unknown.
    """

    limit_s: float
    units: int = 1
    kind: str = ""


class RuntimePredictor:
    """Predicts run times from the jobs passed to `add_run`, in the order in which they ended."""

    def __init__(self) -> None:
        import numpy as np

        self.counts: dict[Hashable, Histogram] = {}
        self.uppers = 2.0 ** -np.arange(BINS)
        self.middles = 0.72 * self.uppers  # the mean of a bin with a log-uniform density
        self.middles[-1] = 0.5 * self.uppers[-1]
        # Before the first job has ended: limits are assumed to be a few times the run time.
        self.prior: Histogram = 0.5 ** np.arange(1.0, BINS + 1.0)
        self.prior /= self.prior.sum()

    def add_run(self, job: JobFeatures, run_s: float) -> None:
        """Add the run time of a job that ended for any reason."""
        import numpy as np

        used = min(max(run_s / job.limit_s, 1e-9), 1.0)
        bin_index = min(int(-log2(used)), BINS - 1)
        for key in _similarity_keys(job):
            counts = self.counts.get(key)
            if counts is None:
                counts = self.counts[key] = np.zeros(BINS)
            else:
                counts *= 1.0 - 1.0 / MEMORY_JOBS
            counts[bin_index] += 1.0

    def mean_s(self, job: JobFeatures) -> float:
        """Return the mean run time for this job's limit, size and kind; at most its limit."""
        return job.limit_s * float(self._shares(job) @ self.middles)

    def _shares(self, job: JobFeatures) -> Histogram:
        """Return the share of similar jobs that ended in each bin."""
        shares = self.prior
        for key in _similarity_keys(job):
            counts = self.counts.get(key)
            if counts is None:
                break
            shares = (counts + PRIOR_JOBS * shares) * (1.0 / float(counts.sum() + PRIOR_JOBS))
        return shares


def _similarity_keys(job: JobFeatures) -> Iterator[Hashable]:
    """Yield the histogram keys of a job, from wide to narrow."""
    yield ()
    limit = round(log2(job.limit_s))
    yield (limit,)
    size = ceil(log2(max(job.units, 1)))
    yield (limit, size)
    if job.kind:
        yield (limit, size, job.kind)
