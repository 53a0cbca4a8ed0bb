"""From nothing but a path to the first batch: 16 windows of 64 frames of 96x96x3, lz4, in the page cache.

perf/run loader_first_batch [--quick] [--rounds 5] [--disk /var/tmp]

Ours opens the version, computes the order, starts two threads and gives a batch. The peer is torch's DataLoader with
two workers over zarr, which fork (faster to start than spawn, and safe with zarr). Modules are imported before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from perf.harness.harness import Case, compare, in_turn, report
from perf.harness.workspace import arguments, say, spread, workspace
from perf.loader.loader_data import IMAGE, LENGTH, SIDE, ingest, record
from perf.loader.loader_peers import enter, named
from perf.loader.our_loader import Ours

BATCH = 16
REACH = 1 / 0.3
OURS, WINDOWS, WHOLE = "ours", "DataLoader over zarr", "DataLoader over zarr, whole batches"


def first_batch(path: Path, *, rounds: int) -> list[Case]:
    """Ours, and the DataLoader both with a window and a batch a call."""
    from perf.loader.torch_workers import WindowSet, Workers

    random = np.random.default_rng(0)
    steps = Ours(path, batch=BATCH).samples.at(np.arange(256)).places.anchor  # which also fills the page cache

    def ours() -> None:
        loader = Ours(path, batch=BATCH, warm=False)
        loader.read(1)
        loader.close()

    def theirs(*, whole: bool) -> Callable[[], None]:
        def run() -> None:
            windows = WindowSet("zarr", 1, path / IMAGE, LENGTH, (SIDE, SIDE, 3), "uint8")
            workers = Workers(windows, whole=whole, start="fork")
            workers.first(random.choice(steps, (4, BATCH)).tolist())
            workers.close()

        return run

    times = in_turn(rounds, {OURS: ours, WINDOWS: theirs(whole=False), WHOLE: theirs(whole=True)}, rotate=True)
    for name, seconds in times.items():
        say(f"first batch: {name} {spread(seconds)}")
    return [
        compare(
            "first batch",
            peer,
            named(peer),
            times[OURS],
            times[peer],
            reach=REACH,
            command="num_workers=2, fork, get_basic_selection(out=)",
        )
        for peer in (WINDOWS, WHOLE)
    ]


def main() -> int:
    args = arguments(__doc__)
    enter()
    with workspace(args.disk, needed=2 << 30) as home:
        made = record(home, "rendered", episodes=8 if args.quick else 40)
        return report(first_batch(ingest(made, home / "datasets", "lz4"), rounds=2 * args.rounds))


if __name__ == "__main__":
    sys.exit(main())
