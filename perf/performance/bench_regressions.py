"""Steps in healthy and in slower series, and in a real history: the share of false alarms and of those found.

perf/run performance_regressions [--quick]      needs the network once, to install apache-otava and asv in .venv-otava,
beside us: they need another numpy. Otava and asv judge the same series as we do, all with their defaults: a step counts
for us if it is certain, from 2 %, for asv from 5 %, for Otava from nothing; how often we say inconclusive is beside it.
A ratio is the limit over our rate, or our rate over a least. The first four kinds of noise are promised. Our method
was improved on the noise of `KNOWN`; on `NEW` nothing was chosen, and falling short there stays a result. The real
history is TigerBeetle's, of Otava's own tests (shared/data): two steps are expected there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from perf.harness.harness import Case, from_ratios, report
from perf.performance import noise
from perf.performance.null_table import simulate
from pitools.perf.regression.change_points import find_changes, find_changes_of_each
from pitools.perf.regression.store import Point, Series
from pitools.perf.regression.watch import judge_series

REPO = Path(__file__).resolve().parents[2]
VENV = REPO / ".venv-otava"
HISTORY = REPO.parent / "shared/data/perf/series/otava/tigerbeetle.csv"
FALSE, POWER, SECONDS = 0.01, 0.85, 60.0
KNOWN = {
    "gauss": lambda rng, count, n: 1 + 0.02 * rng.standard_normal((count, n)),
    "lognormal": lambda rng, count, n: np.exp(0.3 * rng.standard_normal((count, n))),
    "ar1": lambda rng, count, n: 1 + 0.02 * simulate(rng, count, n, 0.5),
    "spikes": lambda rng, count, n: 1 + 0.02 * rng.standard_normal((count, n)) + 0.3 * (rng.random((count, n)) < 0.05),
    "garch": lambda rng, count, n: 1 + 0.02 * noise.garch(rng, count, n),
    "growing": lambda rng, count, n: 1 + 0.02 * noise.growing(rng, count, n),
    "every 7th point 6 % higher": lambda rng, count, n: 1 + 0.02 * noise.periodic(rng, count, n, 7, 3.0),
    "drifts of up to 2 %": lambda rng, count, n: 1 + 0.02 * noise.drift(rng, count, n, 1.0),
    "one of two levels, 5 % apart, each point": lambda rng, count, n: 1 + 0.02 * noise.regimes(rng, count, n, 0.5, 2.5),
    "two regimes of 10 points, 3 % apart": lambda rng, count, n: 1 + 0.02 * noise.regimes(rng, count, n, 0.1, 1.5),
    "long memory": lambda rng, count, n: 1 + 0.02 * noise.long_memory(rng, count, n),
}
NEW = {
    "volatile": lambda rng, count, n: 1 + 0.02 * noise.volatile(rng, count, n),
    "twice as noisy from a point on": lambda rng, count, n: 1 + 0.02 * noise.noisier(rng, count, n),
    "waves of 40 points, 2 % high": lambda rng, count, n: 1 + 0.02 * noise.waves(rng, count, n, 40.0, 1.0),
    "a random walk of 0.2 % a point": lambda rng, count, n: 1 + 0.02 * noise.walk(rng, count, n, 0.1),
    "warming by up to 4 %": lambda rng, count, n: 1 + 0.02 * noise.warming(rng, count, n, 2.0),
    "two regimes of 25 points, 3 % apart": lambda rng, count, n: 1 + 0.02 * noise.regimes(rng, count, n, 0.04, 1.5),
    "longer memory": lambda rng, count, n: 1 + 0.02 * noise.long_memory(rng, count, n, 0.4),
}
# Reads a list of series, and writes the indices of their steps, for each peer.
PEERS = """
import json, sys
from asv import step_detect
from otava.series import AnalysisOptions, Metric, Series
def otava(x):
    series = Series("t", None, list(range(len(x))), {"m": Metric(1, 1.0)}, {"m": x}, {})
    return [int(point.index) for point in series.analyze(AnalysisOptions()).change_points["m"]]
def asv(x):
    steps = step_detect.detect_steps(x, None)
    pairs = zip(steps, steps[1:])
    return [int(b[0]) for a, b in pairs if abs(b[2] - a[2]) > 0.05 * abs(a[2])]
json.dump({"otava": list(map(otava, series := json.load(sys.stdin))), "asv": list(map(asv, series))}, sys.stdout)
"""


def peers(series: np.ndarray) -> dict[str, list[list[int]]]:
    """Return the steps that each peer finds in each series."""
    python = VENV / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "apache-otava==0.8.0", "asv==0.6.6"], check=True)
    done = subprocess.run([python, "-c", PEERS], input=json.dumps(series.tolist()), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, list[list[int]]] = json.loads(done.stdout)
    return found


def own_steps(series: np.ndarray) -> tuple[list[list[int]], float]:
    """Return our certain steps in each series, and the share of series that have only others."""
    found = [changes for changes, _ in find_changes_of_each(series.tolist())]
    certain = [[change.at for change in changes if change.is_certain] for changes in found]
    return certain, sum(bool(each) and not sure for each, sure in zip(found, certain, strict=True)) / len(found)


def main(quick: bool) -> int:
    count, few = (2000, 30) if quick else (20_000, 200)
    cases: list[Case] = []
    for name, family in (KNOWN | NEW).items():
        for n in (30, 100):
            series = family(np.random.default_rng([n, 11]), count, n)
            steps, unsure = own_steps(series)
            ours = sum(map(bool, steps)) / count
            theirs = {peer: np.mean([bool(steps) for steps in found]) for peer, found in peers(series[:few]).items()}
            said = ", ".join(f"{peer} {share:.3f} of {few}" for peer, share in theirs.items())
            case = f"false alarms, {name}{' (new)' * (name in NEW)}, n = {n}: ours {ours:.4f}"
            case += f" (and inconclusive {unsure:.4f}), {said}"
            cases.append(from_ratios(case, "the limit", f"{FALSE}", [FALSE / max(ours, 1e-4)], target=1))
    for percent, after in ((5, 5), (5, 8), (5, 20), (3, 20)):
        series = KNOWN["gauss"](np.random.default_rng([after, 12]), max(count, 6000), 60 + after)
        series[:, 60:] *= 1 + percent / 100
        steps, unsure = own_steps(series)
        said = [
            f"{who} {np.mean([bool(steps) for steps in each]):.3f}"
            f" ({np.mean([any(abs(step - 60) <= 3 for step in steps) for steps in each]):.2f} within 3 points of it)"
            for who, each in ({"ours": steps} | peers(series[:few])).items()
        ]
        found = sum(map(bool, steps)) / len(steps)
        name = f"a step of {percent} % found, {after} points after, by {few} series for the peers: {', '.join(said)}"
        if percent == 3:  # of 1.5 deviations, about the least that is certain
            name += f", or else inconclusive ({unsure:.3f})"
            found += unsure
        cases.append(from_ratios(name, "the least", f"{POWER}", [found / POWER], target=1))
    cases += history_cases()
    cases.append(time_case(1000 if quick else 10_000))
    return report(cases)


def history_cases() -> list[Case]:
    if not HISTORY.exists():
        print(f"no {HISTORY}: the real history is left out", file=sys.stderr)
        return []
    values = np.loadtxt(HISTORY, delimiter=",", skiprows=1)[:, 1]
    ours = [change.at for change in find_changes(values)[0] if change.is_certain]
    otava = peers(values[None])["otava"][0]
    found, theirs = ({15, 71} & set(steps) for steps in (ours, otava))
    name = f"TigerBeetle: both steps, fewer alarms: ours {ours}, otava {otava}"
    better = found >= theirs and len(ours) < len(otava)
    return [from_ratios(name, "apache-otava", "0.8.0", [len(otava) / len(ours) * better], target=1)]


def time_case(count: int) -> Case:
    """Judge many series of different lengths, with the control over all of them, on one core."""
    rng = np.random.default_rng(13)
    series = [
        Series(tuple(Point(measure=f"m{number}", value=value, t=f"{day:04}") for day, value in enumerate(values)))
        for number in range(count)
        if len(values := (1 + 0.02 * rng.standard_normal(rng.integers(30, 120))).tolist())
    ]
    began = time.perf_counter()
    alarms = sum(verdict.verdict in ("regression", "improvement") for verdict in judge_series(series))
    took = time.perf_counter() - began
    name = f"{count} healthy series of 30 to 120 points: {took:.1f} s, {alarms} alarms"
    return from_ratios(name, "the limit", f"{SECONDS} s for 10,000", [SECONDS * count / 10_000 / took], target=1)


if __name__ == "__main__":
    sys.exit(main("--quick" in sys.argv))
