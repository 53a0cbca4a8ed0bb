"""Traces of centres that never were: another mix of sizes, run times and limits than Helios', for no tuning at all."""

from __future__ import annotations

from math import exp, log
from random import Random
from typing import NamedTuple

from pitools.place.simulate.model import DAY_S, HOUR_S, Trace

DAYS = 30


class Centre(NamedTuple):
    """A mix of jobs. sizes: GPUs or nodes → weight. middle_s, spread: median and log deviation of the run times.

    burst: mean number of like jobs submitted together. has_limits: the trace has time limits of its own.
    """

    name: str
    jobs: int
    sizes: dict[int, int]
    middle_s: float
    spread: float
    burst: float
    has_limits: bool


CENTRES = (
    Centre("one-gpu", 20_000, {1: 780, 2: 60, 4: 70, 8: 70, 16: 15, 32: 5}, 900.0, 2.2, 2.0, False),
    Centre("mpi", 8_000, {1: 30, 2: 10, 4: 12, 8: 14, 16: 14, 32: 12, 64: 6, 128: 2}, 2 * HOUR_S, 1.4, 1.5, True),
)


def make_trace(centre: Centre, seed: int = 1) -> Trace:
    """Return a month of a centre: more jobs by day than by night and at weekends, the same for the same seed."""
    random = Random(f"{centre.name} {seed}")
    jobs: list[tuple[float, int, float, float, str]] = []
    while len(jobs) < centre.jobs:
        at_s = random.uniform(0, DAYS * DAY_S)
        is_busy = 8 <= at_s % DAY_S / HOUR_S < 20 and at_s // DAY_S % 7 < 5
        if random.random() > (1.0 if is_busy else 0.35):
            continue
        size = random.choices(list(centre.sizes), list(centre.sizes.values()))[0]
        typical_s, owner = random.lognormvariate(log(centre.middle_s), centre.spread), f"u{random.randrange(150)}"
        for _ in range(1 + int(random.expovariate(1.0 / centre.burst))):
            run_s = min(max(typical_s * exp(random.gauss(0.0, 0.3)), 10.0), 2 * DAY_S)
            limit_s = min(run_s * random.choice((1.1, 2, 4, 10)), 7 * DAY_S) if centre.has_limits else 0.0
            jobs.append((at_s, size, run_s, limit_s, owner))
            at_s += random.expovariate(1 / 20.0)
    jobs.sort()
    return Trace(
        name=centre.name,
        job_id=[str(number) for number in range(len(jobs))],
        submit_s=[job[0] - jobs[0][0] for job in jobs],
        gpus=[job[1] for job in jobs],
        run_s=[job[2] for job in jobs],
        limit_s=[job[3] for job in jobs],
        owner=[job[4] for job in jobs],
        job_name=[""] * len(jobs),
        queue=[""] * len(jobs),
        rank_score=[0.0] * len(jobs),
    )
