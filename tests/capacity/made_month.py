"""A trace with a shape."""

from __future__ import annotations

import math

import numpy as np

from pitools.place.simulate.model import DAY_S, HOUR_S, Trace

DAYS = 42


def month(seed: int, days: int = DAYS, per_day: float = 40.0, correlation: float = 0.8) -> Trace:
    """Jobs with office hours, calm weekends, sizes that differ by team, and busy days that follow busy days."""
    random = np.random.default_rng(seed)
    level, rows = 0.0, []
    for day in range(days):
        level = correlation * level + random.normal(0, 0.3)
        jobs = random.poisson(per_day * math.exp(level) * (0.3 if day % 7 > 4 else 1.0))
        hours = random.choice(24, jobs, p=np.array([1] * 9 + [6] * 9 + [2] * 6) / 75)
        for hour in hours:
            team = "vision" if random.random() < 0.3 else "robots"
            gpus = int(random.choice([1, 8, 64] if team == "robots" else [1, 4]))
            rows.append((day * DAY_S + (hour + random.random()) * HOUR_S, gpus, random.lognormal(7, 1.5), team))
    rows.sort()
    blank = [""] * len(rows)
    return Trace(
        name="made",
        job_id=[str(number) for number in range(len(rows))],
        submit_s=[row[0] for row in rows],
        gpus=[row[1] for row in rows],
        run_s=[row[2] for row in rows],
        limit_s=[0.0] * len(rows),
        owner=blank,
        job_name=blank,
        queue=blank,
        rank_score=[0.0] * len(rows),
        account=[row[3] for row in rows],
        began_s=4 * DAY_S,
    )
