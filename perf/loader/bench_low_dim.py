"""Random windows of 64 steps of 14 numbers (float32) in batches of 64, which is what actions and states are.

perf/run loader_low_dim [--quick] [--rounds 5] [--disk /var/tmp]

zarr reads window by window, and, a case of its own, all steps of a batch by one `oindex`. Ours is the whole loader,
which holds an array so small in memory. So could a user, by hand: that is the last case, an
index into a NumPy array with no order, no threads and no buffers about it, and it is reported, not raced.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from perf.harness.harness import Case, compare, interleave, report
from perf.harness.workspace import arguments, format_spread, print_progress, workspace
from perf.loader.loader_data import ACTION, LENGTH, ingest_recording, record_actions
from perf.loader.loader_peers import (
    Variant,
    enter_peer_venv,
    fastest_variant,
    peer_version,
    tensorstore_ways,
    zarr_ways,
)
from perf.loader.our_loader import OurLoader

BATCH = 64
REACH = {"zarr": 120.0, "zarr, oindex": 120.0, "tensorstore": 3.0, "numpy": 0.0}
OURS = "ours"


def low_dim(path: Path, actions: np.ndarray, codec: str, *, batches: int, rounds: int, tune: bool) -> list[Case]:
    """Batches of windows: ours, zarr's (a tenth as many), tensorstore's, and by an index into memory."""
    import zarr

    our_loader = OurLoader(path, array="action", batch=BATCH)
    out = np.empty((BATCH, LENGTH, ACTION), np.float32)
    window = np.arange(LENGTH)

    def index(starts: list[int], to: np.ndarray) -> None:
        np.take(actions, np.asarray(starts)[:, None] + window, axis=0, out=to, mode="clip")

    store = zarr.open_array(path / "action", mode="r", zarr_format=3)

    def oindex(starts: list[int], to: np.ndarray) -> None:
        to[:] = store.oindex[(np.asarray(starts)[:, None] + window).ravel()].reshape(to.shape)

    ways = {
        "zarr": zarr_ways(path / "action", LENGTH),
        "zarr, oindex": [Variant("oindex[] of all steps of a batch", oindex)],
        "tensorstore": tensorstore_ways(path / "action", LENGTH),
        "numpy": [Variant("np.take of the whole array, held in memory", index)],
    }
    counts = dict.fromkeys(("zarr", "zarr, oindex"), max(1, batches // 10))

    def fill(way: Variant, count: int) -> None:
        for starts in our_loader.windows(count):
            way.fill(starts, out)

    best = {}
    for peer, tried in ways.items():
        for way in tried:
            (starts,) = our_loader.windows(1)
            way.fill(starts, out)
            if not np.array_equal(out, actions[np.asarray(starts)[:, None] + window]):
                sys.exit(f"{peer}, {way.description}: not what was recorded")
        best[peer] = fastest_variant(tried, lambda way, peer=peer: fill(way, counts.get(peer, batches)), tune=tune)
    times = interleave(
        rounds,
        {
            OURS: lambda: our_loader.read(batches),
            **{peer: lambda way=way, peer=peer: fill(way, counts.get(peer, batches)) for peer, way in best.items()},
        },
        rotate=True,
        around_each=our_loader.setting,
    )
    our_loader.close()
    cases = []
    for peer, way in best.items():
        theirs = [seconds * batches / counts.get(peer, batches) for seconds in times[peer]]
        print_progress(
            f"low-dimensional, {codec}: {format_spread(times[OURS])} for {batches} batches, "
            f"{peer} {format_spread(theirs)}"
        )
        cases.append(
            compare(
                f"low-dimensional windows, {codec}",
                peer,
                peer_version(peer),
                times[OURS],
                theirs,
                target=REACH[peer],
                command=way.description,
            )
        )
    return cases


def main() -> int:
    args = arguments(__doc__)
    enter_peer_venv()
    code = 0
    with workspace(args.disk, needed=1 << 28) as home:
        created = record_actions(home, episodes=40 if args.quick else 400)
        for codec in ("raw", "lz4"):
            path = ingest_recording(created, home / "datasets", codec)
            actions = np.fromfile(created.actions, np.float32).reshape(-1, ACTION)
            code |= report(
                low_dim(
                    path, actions, codec, batches=20 if args.quick else 200, rounds=args.rounds, tune=not args.quick
                )
            )
    return code


if __name__ == "__main__":
    sys.exit(main())
