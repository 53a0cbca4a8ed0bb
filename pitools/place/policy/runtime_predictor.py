"""How long a job will run, learnt from the jobs that ended before it.

What is learnt is run time ÷ time limit, a number in (0, 1], as a histogram over its powers of two: bounded, so that no
single job spoils a mean.
Histograms are kept for all jobs, for jobs of one limit, of one limit and size, and of one limit, size and kind; each
begins as a copy of the wider one before it, and leaves it as its own jobs end.
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
PRIOR_JOBS = 10.0  # with so many jobs of its own, a histogram counts as much as the wider one that it began with
MEMORY_JOBS = 1000.0  # so many jobs a histogram remembers; older ones fade


class JobFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a job before it runs.

    limit_s: the time limit it was submitted with. units: GPUs, or nodes. kind: jobs of one kind run alike: owner and
    job name, or a trace's own class; empty where nothing is known.
    """

    limit_s: float
    units: int = 1
    kind: str = ""


class RuntimePredictor:
    """Run times from `add_run` jobs, in the order in which they ended."""

    def __init__(self) -> None:
        import numpy as np

        self.counts: dict[Hashable, Histogram] = {}
        self.uppers = 2.0 ** -np.arange(BINS)
        self.middles = 0.72 * self.uppers  # the mean of a bin whose numbers are even on a log scale
        self.middles[-1] = 0.5 * self.uppers[-1]
        # Nothing has ended yet: a limit is a few times what is used of it.
        self.prior: Histogram = 0.5 ** np.arange(1.0, BINS + 1.0)
        self.prior /= self.prior.sum()

    def add_run(self, job: JobFeatures, run_s: float) -> None:
        """Learn from a job that ran so long, whatever made it end."""
        import numpy as np

        used = min(max(run_s / job.limit_s, 1e-9), 1.0)
        at = min(int(-log2(used)), BINS - 1)
        for key in _similarity_keys(job):
            counts = self.counts.get(key)
            if counts is None:
                counts = self.counts[key] = np.zeros(BINS)
            else:
                counts *= 1.0 - 1.0 / MEMORY_JOBS
            counts[at] += 1.0

    def mean_s(self, job: JobFeatures) -> float:
        """The mean run time, as this job's limit and kind have it; never above its limit."""
        return job.limit_s * float(self._shares(job) @ self.middles)

    def _shares(self, job: JobFeatures) -> Histogram:
        """What share of such jobs ended in each bin."""
        shares = self.prior
        for key in _similarity_keys(job):
            counts = self.counts.get(key)
            if counts is None:
                break
            shares = (counts + PRIOR_JOBS * shares) * (1.0 / float(counts.sum() + PRIOR_JOBS))
        return shares


def _similarity_keys(job: JobFeatures) -> Iterator[Hashable]:
    """From wide to narrow."""
    yield ()
    limit = round(log2(job.limit_s))
    yield (limit,)
    size = ceil(log2(max(job.units, 1)))
    yield (limit, size)
    if job.kind:
        yield (limit, size, job.kind)
