"""Packing 100,000 sequences of log-normal length into rows of 2,048 steps: how full they get, and how long it takes.

perf/run loader_packing [--quick] [--rounds 5]

Ours plans all of them at once: from lengths to the sequence in every place of every row. First-fit has eight rows open
and takes sequences as they come: the first row that has room gets it, and where none has, the fullest is closed for a
new one. grain's FirstFitPackIterDataset closes all eight then; it also copies what it packs (here a byte a step), so
only its fill is compared. Lengths have a median of 300 and 0.6 of deviation of their logarithm, others in each round.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from perf.harness.harness import Case, compare, from_ratios, report
from perf.loader.loader_peers import enter_peer_venv
from pitools.loader.sampling.packing import PackingPlan
from pitools.loader.sampling.sequences import Sequences

LENGTH, OPEN = 2048, 8
FILL, TIME_S = 0.97, 1.0
MEDIAN, DEVIATION = 300, 0.6


def lengths(count: int, seed: int) -> NDArray[np.int64]:
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), DEVIATION, count)
    return np.clip(np.round(drawn).astype(np.int64), 1, LENGTH)


def ours(sizes: NDArray[np.int64]) -> int:
    """Rows, of a plan whose sequences are dealt."""
    ends = np.cumsum(sizes)
    plan = PackingPlan(Sequences(np.arange(len(sizes)), ends - sizes, ends), LENGTH)
    dealt = plan.sequences_of_epoch(0)
    rows = np.add.reduceat(sizes[dealt], plan.first[:-1])
    if rows.max() > LENGTH or not np.array_equal(np.sort(dealt), np.arange(len(sizes))):
        sys.exit("the plan is wrong")
    return plan.rows


def first_fit(sizes: NDArray[np.int64]) -> int:
    """Rows, of first-fit with eight open rows, the fullest of which is closed when none has room."""
    rooms, rows = [LENGTH] * OPEN, OPEN
    for size in sizes.tolist():
        for number, room in enumerate(rooms):
            if size <= room:
                rooms[number] -= size
                break
        else:
            rooms.remove(min(rooms))  # the others stay in the order in which they were opened
            rooms.append(LENGTH - size)
            rows += 1
    return rows - rooms.count(LENGTH)


def grains(sizes: NDArray[np.int64]) -> int:
    """Rows that grain makes."""
    import grain

    source = grain.MapDataset.source(sizes).map(lambda size: {"steps": np.ones(size, np.uint8)}).to_iter_dataset()
    packed = grain.experimental.FirstFitPackIterDataset(
        source, length_struct={"steps": LENGTH}, num_packing_bins=OPEN, shuffle_bins=False
    )
    return sum(1 for _ in packed)


def timed(run: Callable[[NDArray[np.int64]], int], sizes: NDArray[np.int64]) -> tuple[float, float]:
    """Fill, and seconds."""
    began = time.perf_counter()
    rows = run(sizes)
    return float(sizes.sum()) / (rows * LENGTH), time.perf_counter() - began


def cases(count: int, rounds: int) -> list[Case]:
    actual: dict[str, list[tuple[float, float]]] = {"ours": [], "first-fit": [], "grain": []}
    runs = {"ours": ours, "first-fit": first_fit, "grain": grains}
    for number in range(rounds + 1):
        for name, run in runs.items():
            got = timed(run, lengths(count, number))
            if number:  # after one round that is not counted
                actual[name].append(got)
    fills = {name: [fill for fill, _ in got] for name, got in actual.items()}
    seconds = {name: [took for _, took in got] for name, got in actual.items()}
    case = f"{count:,} log-normal lengths in rows of {LENGTH:,}"
    reported = ", ".join(f"{name} {np.median(fill):.4f}" for name, fill in fills.items())
    eight = f"first-fit of {OPEN} open rows"
    better = lambda peer: [mine / theirs for mine, theirs in zip(fills["ours"], fills[peer], strict=True)]  # noqa: E731
    return [
        from_ratios(
            f"{case}: fill ÷ {FILL} ({reported})", "limit", "", [fill / FILL for fill in fills["ours"]], target=1.0
        ),
        from_ratios(
            f"{case}: {TIME_S:g} s ÷ ours ({np.median(seconds['ours']):.3f} s)",
            "limit",
            "",
            [TIME_S / took for took in seconds["ours"]],
            target=1.0,
        ),
        from_ratios(f"{case}: fill, ours ÷ theirs", eight, "", better("first-fit"), target=1.0),
        from_ratios(
            f"{case}: fill, ours ÷ theirs",
            "grain FirstFitPackIterDataset",
            version("grain"),
            better("grain"),
            target=1.0,
            command=f"num_packing_bins={OPEN}",
        ),
        compare(f"{case}: time, told", f"{eight}, in Python", "", seconds["ours"], seconds["first-fit"], target=0.0),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds of 20,000 lengths")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    enter_peer_venv()
    return report(cases(20_000, 2) if args.quick else cases(100_000, args.rounds))


if __name__ == "__main__":
    sys.exit(main())
