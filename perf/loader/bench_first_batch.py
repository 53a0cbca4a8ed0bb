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

from perf.harness.harness import Case, compare, interleave, report
from perf.harness.workspace import arguments, format_spread, print_progress, workspace
from perf.loader.loader_data import IMAGE, LENGTH, SIDE, ingest_recording, record
from perf.loader.loader_peers import enter_peer_venv, peer_version
from perf.loader.our_loader import OurLoader

BATCH = 16
REACH = 1 / 0.3
OURS, WINDOWS, WHOLE = "ours", "DataLoader over zarr", "DataLoader over zarr, whole batches"


def first_batch(path: Path, *, rounds: int) -> list[Case]:
    """Ours, and the DataLoader both with a window and a batch a call."""
    from perf.loader.torch_workers import WindowSet, WorkerLoader

    random = np.random.default_rng(0)
    steps = (
        OurLoader(path, batch=BATCH).samples.draw(np.arange(256)).locations.anchor
    )  # which also fills the page cache

    def ours() -> None:
        loader = OurLoader(path, batch=BATCH, warm=False)
        loader.read(1)
        loader.close()

    def theirs(*, whole: bool) -> Callable[[], None]:
        def run() -> None:
            windows = WindowSet("zarr", 1, path / IMAGE, LENGTH, (SIDE, SIDE, 3), "uint8")
            workers = WorkerLoader(windows, whole=whole, start="fork")
            workers.first(random.choice(steps, (4, BATCH)).tolist())
            workers.close()

        return run

    times = interleave(rounds, {OURS: ours, WINDOWS: theirs(whole=False), WHOLE: theirs(whole=True)}, rotate=True)
    for name, seconds in times.items():
        print_progress(f"first batch: {name} {format_spread(seconds)}")
    return [
        compare(
            "first batch",
            peer,
            peer_version(peer),
            times[OURS],
            times[peer],
            target=REACH,
            command="num_workers=2, fork, get_basic_selection(out=)",
        )
        for peer in (WINDOWS, WHOLE)
    ]


def main() -> int:
    args = arguments(__doc__)
    enter_peer_venv()
    with workspace(args.disk, needed=2 << 30) as home:
        created = record(home, "rendered", episodes=8 if args.quick else 40)
        return report(first_batch(ingest_recording(created, home / "datasets", "lz4"), rounds=2 * args.rounds))


if __name__ == "__main__":
    sys.exit(main())
