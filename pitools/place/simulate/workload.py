"""A trace as a scenario submits it: faster, and with limits and tiers where the trace has none."""

from __future__ import annotations

from array import array
from math import ceil
from random import Random

from pitools.place.simulate.model import DAY_S, Scenario, TimeLimits, Trace


class Workload:
    """The trace's jobs on the scenario's pools: eligible pools, units, run times and limits.

    left_s: remaining run time at speed 1, less after a failure.
    """

    def __init__(self, trace: Trace, scenario: Scenario) -> None:
        self.scenario = scenario
        self.submit_s = array("d", [moment / scenario.load for moment in trace.submit_s])
        self.left_s = array("d", trace.run_s)
        self.limit_s = draw_limits(trace, scenario.limits, scenario.seed)
        if scenario.max_limit_s:
            self.limit_s = array("d", [min(limit_s, scenario.max_limit_s) for limit_s in self.limit_s])
        self.tier = draw_tiers(trace, scenario)
        self.gpus, self.job_id = trace.gpus, trace.job_id
        self.speeds = [pool.speed for pool in scenario.pools]
        self._fits: dict[int, tuple[int, ...]] = {}

    def units_on(self, job: int, pool: int) -> int:
        """Return the units a job holds in a pool: GPUs, in whole nodes if it needs more than one node."""
        gpus, target = self.gpus[job], self.scenario.pools[pool]
        per_node = target.gpus_per_node
        return gpus if target.fabric is None or gpus <= per_node else ceil(gpus / per_node) * per_node

    def limit_on(self, job: int, pool: int) -> float:
        """Return a job's time limit in a pool: users scale it by the pool's speed."""
        return self.limit_s[job] / self.speeds[pool]

    def run_on(self, job: int, pool: int, leaves: int) -> float:
        """Return the remaining run time of a job on this number of leaf switches of a pool, in seconds."""
        return self.left_s[job] / self.speeds[pool] * (1.0 + self.scenario.extra_leaf * max(0, leaves - 1))

    def fits(self, job: int) -> tuple[int, ...]:
        """Return the pools that are large enough for a job."""
        gpus = self.gpus[job]
        if gpus not in self._fits:
            pools = self.scenario.pools
            self._fits[gpus] = tuple(n for n, pool in enumerate(pools) if self.units_on(job, n) <= pool.gpus)
        return self._fits[gpus]

    def fails_after(self, job: int, attempt: int, units: int) -> float:
        """Return the seconds until this attempt loses a node; independent of the policy, so that policies compare."""
        rate = self.scenario.failures.per_gpu_day * units / DAY_S
        return Random(f"{self.scenario.seed} {self.job_id[job]} {attempt}").expovariate(rate)  # noqa: S311  to be repeated

    def do_work(self, job: int, pool: int, ran_s: float, leaves: int) -> float:
        """Update a job that ran for ran_s, and continues later with the rest; return the work done."""
        done_s = self.left_s[job] * ran_s / self.run_on(job, pool, leaves)
        self.left_s[job] -= done_s
        return done_s

    def lose_work(self, job: int, pool: int, ran_s: float, leaves: int) -> float:
        """Update a job after an attempt failed at ran_s; return the work up to its last checkpoint, which is kept."""
        interval_s = self.scenario.failures.checkpoint_s
        return self.do_work(job, pool, ran_s // interval_s * interval_s, leaves) if interval_s else 0.0


def draw_limits(trace: Trace, limits: TimeLimits, seed: int) -> array[float]:
    """Return the trace's limits; if it has none, run time times a drawn factor, up to usual limits."""
    random = Random(seed)  # noqa: S311
    factors = range(limits.factors[0], limits.factors[1] + 1)
    drawn = array("d")
    for run_s, limit_s in zip(trace.run_s, trace.limit_s, strict=True):
        requested_s = run_s * random.choice(factors)
        drawn.append(max(run_s, limit_s or next((s for s in limits.steps_s if s >= requested_s), limits.steps_s[-1])))
    return drawn


def draw_tiers(trace: Trace, scenario: Scenario) -> array[int]:
    """Return a tier for each job: by its queue or QOS, else drawn by the shares, else 0."""
    random = Random(f"tiers {scenario.seed}")  # noqa: S311
    tiers = array("i")
    for queue in trace.queue:
        drawn, tier = random.random(), scenario.tiers.get(queue)
        if tier is None:
            tier = 0
            for candidate, share in scenario.tier_shares.items():
                if (drawn := drawn - share) < 0:
                    tier = candidate
                    break
        tiers.append(tier)
    return tiers
