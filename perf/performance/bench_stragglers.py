"""Slow ranks in healthy runs, and in those with a rank that is 5 % slower, of 50 steps: false alarms and power.

perf/run performance_stragglers [--quick]      needs the network once, to install the peers in .venv-peers. They judge
the first of the same runs, each with its defaults (`straggler_peers.py` says which parts of them run without a GPU):
nvidia-resiliency-ext calls a rank slow if the least median ÷ its median is below 0.75; HolisticTraceAnalysis names as
many ranks as it is asked for, two by default. A ratio is the limit over our rate, or our rate over the least. Our
method was improved on the noise of `KNOWN`, so its figures tell how well it fits that; on `NEW` nothing was chosen, and
falling short there is a result that stays. Where we fall short, the best of any threshold is beside it: chosen
on that noise itself, for each number of ranks, so that 1 in 100 healthy runs has a mean or median excess above it.
Profiles of two ranks are judged, too: a rank that is slower throughout these few steps is slow in them, so noise whose
levels last as long gives some.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np

from perf.harness.harness import Case, from_ratios, report
from perf.harness.workspace import PEERS
from perf.performance import noise
from perf.performance.null_table import simulate
from pitools.perf.stragglers import _median_of_others, find_slow_ranks

FALSE, POWER, SURE, STEPS = 0.01, 0.9, 0.99, 50
RANKS = (4, 8, 32)
LOCKED = Path(__file__).resolve().parents[2] / "scripts/locks/pinned.txt"


def _moving_sum(values: np.ndarray, count: int) -> np.ndarray:
    return sum(values[start : start + STEPS] for start in range(count))


Family = Callable[[np.random.Generator, int], np.ndarray]
KNOWN: dict[str, Family] = {
    "gauss 2 %": lambda rng, ranks: 0.02 * rng.standard_normal((STEPS, ranks)),
    "gauss 5 %": lambda rng, ranks: 0.05 * rng.standard_normal((STEPS, ranks)),
    "moving average of 4": lambda rng, ranks: 0.01 * _moving_sum(rng.standard_normal((STEPS + 3, ranks)), 4),
    "ar1 0.6": lambda rng, ranks: 0.015 * simulate(rng, ranks, STEPS, 0.6).T,
    "t, 3 degrees": lambda rng, ranks: 0.02 * rng.standard_t(3, (STEPS, ranks)),
    "lognormal": lambda rng, ranks: np.exp(0.03 * rng.standard_normal((STEPS, ranks))) - 1,
    "common slow steps": lambda rng, ranks: (
        0.02 * rng.standard_normal((STEPS, ranks)) + rng.exponential(0.2, (STEPS, 1))
    ),
    "stalls of single ranks": lambda rng, ranks: (
        0.02 * rng.standard_normal((STEPS, ranks)) + (rng.random((STEPS, ranks)) < 0.03)
    ),
    "nodes that differ by 1 %": lambda rng, ranks: (
        0.02 * rng.standard_normal((STEPS, ranks)) + rng.uniform(-0.01, 0.01, (1, ranks))
    ),
    "garch": lambda rng, ranks: 0.02 * noise.garch(rng, ranks, STEPS).T,
    "growing": lambda rng, ranks: 0.02 * noise.growing(rng, ranks, STEPS).T,
    "each rank's every 10th step 20 % longer": lambda rng, ranks: 0.02 * noise.periodic(rng, ranks, STEPS, 10, 10.0).T,
    "drifts of up to 2 %": lambda rng, ranks: 0.02 * noise.drift(rng, ranks, STEPS, 1.0).T,
    "two regimes of 20 steps, 4 % apart": lambda rng, ranks: 0.02 * noise.regimes(rng, ranks, STEPS, 0.05, 2.0).T,
    "long memory": lambda rng, ranks: 0.02 * noise.long_memory(rng, ranks, STEPS).T,
    "nodes that differ by 2 %": lambda rng, ranks: (
        0.02 * rng.standard_normal((STEPS, ranks)) + rng.uniform(-0.02, 0.02, (1, ranks))
    ),
}
NEW: dict[str, Family] = {
    "volatile": lambda rng, ranks: 0.02 * noise.volatile(rng, ranks, STEPS).T,
    "twice as noisy from a step on": lambda rng, ranks: 0.02 * noise.noisier(rng, ranks, STEPS).T,
    "waves of 25 steps, 2 % high": lambda rng, ranks: 0.02 * noise.waves(rng, ranks, STEPS, 25.0, 1.0).T,
    "random walks of 0.2 % a step": lambda rng, ranks: 0.02 * noise.walk(rng, ranks, STEPS, 0.1).T,
    "warming by up to 4 %": lambda rng, ranks: 0.02 * noise.warming(rng, ranks, STEPS, 2.0).T,
    "two regimes of 8 steps, 4 % apart": lambda rng, ranks: 0.02 * noise.regimes(rng, ranks, STEPS, 0.12, 2.0).T,
    "nodes with a deviation of 1 %": lambda rng, ranks: (
        0.02 * rng.standard_normal((STEPS, ranks)) + 0.01 * rng.standard_normal((1, ranks))
    ),
}


def install_peers() -> str:
    """Install the peers where they are not; return their versions."""
    python = PEERS / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", PEERS], check=True)
    names = ("nvidia-resiliency-ext", "HolisticTraceAnalysis")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--constraint", LOCKED, *names], check=True)
    show = (
        f"from importlib.metadata import version; print(*[f'{{name}} {{version(name)}}' for name in {names}], sep=', ')"
    )
    return subprocess.run([python, "-c", show], capture_output=True, text=True, check=True).stdout.strip()


def judged_by_peers(runs: dict[str, list[np.ndarray]]) -> dict[str, list[set[int]]]:
    """Return the ranks that each peer names in each of its runs."""
    asked = json.dumps({peer: [run.tolist() for run in each] for peer, each in runs.items()})
    command = [PEERS / "bin" / "python", Path(__file__).with_name("straggler_peers.py")]
    done = subprocess.run(command, input=asked, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return {peer: [set(named) for named in each] for peer, each in json.loads(done.stdout).items()}


def ours(times: np.ndarray) -> set[int]:
    return {slow.column for slow in find_slow_ranks(times, float(np.median(times)))}


def best_power(family: Family, runs: int) -> float:
    """Return the largest share of slow ranks that a threshold on an excess finds, with 1 in 100 healthy runs above."""
    rng = np.random.default_rng(22)
    shares = []
    for middle in (np.mean, np.median):
        found = []
        for ranks in RANKS:
            healthy, slow = [], []
            for _ in range(runs):
                times = 1 + family(rng, ranks)
                healthy.append(middle(times - _median_of_others(times), axis=0).max())
                times[:, 2] *= 1.05
                slow.append(middle(times - _median_of_others(times), axis=0)[2])
            found.append(np.mean(slow > np.quantile(healthy, 1 - FALSE)))
        shares.append(float(np.mean(found)))
    return max(shares)


def cases_of_two(runs: int) -> list[Case]:
    """Judge profiles of two ranks, of few steps, on all noise: where false alarms are most, and finds fewest."""
    cases: list[Case] = []
    for steps in (10, 20):
        shares: list[tuple[float, float, str]] = []
        for name, family in (KNOWN | NEW).items():
            rng = np.random.default_rng([len(name), steps])
            healthy = [1 + family(rng, 2)[:steps] for _ in range(runs)]
            false, found = (
                [
                    [each.column for each in find_slow_ranks(times * (1, factor), 1.0, of_profile=True)]
                    for times in healthy
                ]
                for factor in (1.0, 1.15)
            )
            shares.append((float(np.mean([bool(each) for each in false])), found.count([1]) / runs, name))
        at = f"2 ranks, {steps} steps of a profile"
        false_share, _, name = max(shares)
        case = (
            f"{at}: false alarms, at most {false_share:.3f} ({name}), mean {np.mean([each[0] for each in shares]):.4f}"
        )
        cases.append(from_ratios(case, "the limit", f"{FALSE}", [FALSE / max(false_share, 1e-4)], target=1))
        for name in ("gauss 2 %", "gauss 5 %", "ar1 0.6"):
            found_share = next(each[1] for each in shares if each[2] == name)
            case = f"{at}: 15 % slower, {name}: {found_share:.3f}"
            cases.append(from_ratios(case, "the least", f"{SURE}", [found_share / SURE], target=1))
        _, found_share, name = min(shares, key=lambda each: each[1])
        case = f"{at}: 15 % slower, where fewest are found, {name}: {found_share:.3f}"
        cases.append(from_ratios(case, "the least", f"{SURE}", [found_share / SURE], target=1))
    return cases


def main(runs: int, few: int) -> int:
    """few: runs that HTA judges; nvidia-resiliency-ext judges ten times as many."""
    peers = install_peers()
    drawn: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}
    for name, family in (KNOWN | NEW).items():
        rng = np.random.default_rng([len(name), 21])
        healthy = [1 + family(rng, RANKS[number % 3]) for number in range(runs)]
        drawn[name] = healthy, [times * np.where(np.arange(times.shape[1]) == 2, 1.05, 1.0) for times in healthy]
    counts = {"nvrx": 10 * few, "hta": few}
    first = {peer: [run for pair in drawn.values() for each in pair for run in each[:n]] for peer, n in counts.items()}
    named = {peer: iter(each) for peer, each in judged_by_peers(first).items()}  # all at once: their imports take long
    cases: list[Case] = []
    for name, (healthy, slow) in drawn.items():
        false = float(np.mean([bool(ours(times)) for times in healthy]))
        found = float(np.mean([ours(times) == {2} for times in slow]))
        texts = []
        for is_right in (bool, {2}.__eq__):
            shares = {peer: np.mean([is_right(each) for each in islice(named[peer], n)]) for peer, n in counts.items()}
            texts.append(", ".join(f"{peer} {share:.2f} of {counts[peer]}" for peer, share in shares.items()))
        false_text, found_text = texts
        if false > FALSE or found < POWER:
            found_text += f"; any threshold at most {best_power((KNOWN | NEW)[name], runs // 2):.3f}"
        kind = name + " (new)" * (name in NEW)
        case = f"false alarms, {kind}: ours {false:.3f}, {false_text}"
        cases.append(from_ratios(case, peers, "", [FALSE / max(false, 1e-4)], target=1))
        case = f"5 % slower, alone named, {kind}: ours {found:.3f}, {found_text}"
        cases.append(from_ratios(case, peers, "", [found / POWER], target=1))
    return report(cases + cases_of_two(runs))


if __name__ == "__main__":
    sys.exit(main(150, 1) if "--quick" in sys.argv else main(600, 2))
