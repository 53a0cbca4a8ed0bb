"""Mean completion time, longest wait and utilisation of our policy on Helios' September over three unequal sites.

perf/run place_policy [--quick] [--rounds 5] [--trace ../shared/data/traces/helios_venus_2020-09.csv]

Against each baseline of the simulator, at arrivals 1.4 and 1.7 times as fast; a round is a seed of the time limits, and
both sides get the same. The whole month is replayed, the predictor starting empty and learning from what ended; figures
are of the jobs submitted in its second half. Ratios: the baseline's mean completion over ours; 1.2 x federation's
longest wait over ours; our utilisation over the baseline's, as GPU time held while jobs of the second half arrive, and
as work delivered, where each GPU counts by its speed.

The constants are `PolicyParams`' defaults: max_slowdown 2, queue_weight 1, limit_usage 0.3, max_reserved_jobs 2,
starvation_s 9 h, starvation_share 1, starvation_tickets 2, short_job_s 10 min.
They were chosen on the first half alone, the second cut off, at both loads
and seeds 0 to 4 of the limits: one or two constants at a time from a coarse grid, taking the least mean completion
where the longest wait stayed within 1.2 x federation's there. Single seeds differ by a fifth, and neighbours in the
grid by as much (bursts of hundreds of brief 128-GPU jobs either find a pool drained or not), so nothing was tuned
finer.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

from perf.harness.harness import Case, from_ratios, report
from perf.harness.workspace import REPO
from pitools import __version__
from pitools.place import policy
from pitools.place.policy.runtime_predictor import RuntimePredictor
from pitools.place.simulate import engine, metrics, scenario, trace
from pitools.place.simulate.model import Trace

TRACE = REPO.parent / "shared" / "data" / "traces" / "helios_venus_2020-09.csv"
# Load → baseline → the most that our mean completion time may be of its; 1 where no more was set as a goal.
TARGET = {
    1.4: {"slurm-m": 0.55, "federation": 0.9, "most-free": 1.0, "random": 1.0},
    1.7: {"slurm-m": 0.45, "federation": 0.35, "most-free": 1.0, "random": 1.0},
}
WAIT = 1.2  # x federation's longest
DEPTHS = 200, 500


def replay(jobs: Trace, load: float, depth: int, seed: int, name: str) -> metrics.SimulationSummary:
    sites = scenario.three_unequal(load=load, seed=seed, depth=depth)
    began = time.perf_counter()
    if name == "ours":
        ours = partial(policy.decide, policy=policy.PolicyParams(), builder=policy.JobTableBuilder())
        result = engine.simulate(jobs, sites, ours, predictor=RuntimePredictor())
    else:
        result = engine.simulate(jobs, sites, name)
    summary = metrics.summarize(result, jobs, window="second-half", wall_s=time.perf_counter() - began)
    if summary.starved:
        sys.exit(f"{name} left {summary.starved} jobs unrun")
    print(
        f"  x{load} depth {depth} seed {seed} {name}: mean {summary.mean_jct_s / 3600:.2f} h, longest wait"
        f" {summary.max_wait_s / 3600:.1f} h, held {summary.utilisation:.3f}, delivered {summary.goodput:.3f},"
        f" in {summary.wall_s:.1f} s",
        file=sys.stderr,
    )
    return summary


def cases(jobs: Trace, load: float, depth: int, seeds: range) -> list[Case]:
    ours = [replay(jobs, load, depth, seed, "ours") for seed in seeds]
    created = []
    for name, target in TARGET[load].items():
        theirs = [replay(jobs, load, depth, seed, name) for seed in seeds]
        pairs = list(zip(ours, theirs, strict=True))
        case, output = (
            f"load x{load}, depth {depth}",
            partial(from_ratios, peer=name, version=f"pitools {__version__} simulator"),
        )
        created.append(
            output(
                f"{case}, mean completion time",
                ratios=[b.mean_jct_s / a.mean_jct_s for a, b in pairs],
                target=1 / target,
            )
        )
        if name in ("slurm-m", "federation"):
            created.append(
                output(f"{case}, GPU time held", ratios=[a.utilisation / b.utilisation for a, b in pairs], target=1.0)
            )
            created.append(
                output(f"{case}, work delivered", ratios=[a.goodput / b.goodput for a, b in pairs], target=1.0)
            )
        if name == "federation":
            created.append(
                output(
                    f"{case}, longest wait, at most 1.2 x",
                    target=1.0,
                    ratios=[WAIT * b.max_wait_s / a.max_wait_s for a, b in pairs],
                )
            )
    created.append(
        from_ratios(f"load x{load}, depth {depth}, replay", "limit 60 s", "", [60 / a.wall_s for a in ours], target=1.0)
    )
    return created


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--rounds", type=int, default=5, help="seeds of the limits")
    parser.add_argument("--trace", type=Path, default=TRACE)
    args = parser.parse_args()
    jobs = trace.read_trace(args.trace)
    seeds = range(1 if args.quick else args.rounds)
    return max(report(cases(jobs, load, depth, seeds)) for depth in DEPTHS for load in TARGET)


if __name__ == "__main__":
    sys.exit(main())
