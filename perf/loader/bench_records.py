"""Windows of 64 frames of 96x96x3 from the page cache, and the same frames kept as records, one a frame.

perf/run loader_records [--quick] [--rounds 5] [--disk /var/tmp]

Ours reads our raw version by the whole loader (two threads), the peers in one thread what their users call: MDS (mosaic
streaming), ArrayRecord (grain) and HDF5 files by episode, of frames that nobody compressed. LeRobot's own loader on its
mp4 is reported where PIT_BENCH_LEROBOT names a Python that has lerobot.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

import msgspec
import numpy as np

from perf.harness.harness import Case, compare, from_ratios, interleave, report
from perf.harness.workspace import arguments, execute, format_spread, print_progress, workspace
from perf.loader.loader_data import LENGTH, SIDE, Recording, ingest_recording, record
from perf.loader.loader_peers import Variant, enter_peer_venv, fastest_variant, peer_version
from perf.loader.our_loader import OurLoader

BATCH = 16
OURS = "ours"
REACH = {"mosaicml-streaming": 4.0, "array_record": 4.0, "h5py, opened each time": 2.0, "h5py, kept open": 0.0}


def records(made: Recording, home: Path, *, batches: int, rounds: int, tune: bool) -> tuple[list[Case], float]:
    """Ours and each format's own reader, in turn; and our seconds a window."""
    from perf.loader.record_formats import array_record, hdf5, mds

    our_loader = OurLoader(ingest_recording(made, home / "datasets", "raw"), batch=BATCH)
    out = np.empty((BATCH, LENGTH, SIDE, SIDE, 3), np.uint8)
    made_ways = [
        mds(made, home / "mds"),
        array_record(made, home / "array_record"),
        hdf5(made, home / "opened", kept_open=False),
        hdf5(made, home / "kept", kept_open=True),
    ]
    frames = made.map(made.frames)

    def fill(way: Variant) -> None:
        for starts in our_loader.windows(batches):
            way.fill(starts, out)

    best = {}
    for peer, ways in zip(REACH, made_ways, strict=True):
        for way in ways:
            (starts,) = our_loader.windows(1)
            way.fill(starts, out)
            if not all(
                np.array_equal(frames[position : position + LENGTH], actual)
                for position, actual in zip(starts, out, strict=True)
            ):
                sys.exit(f"{peer}, {way.description}: not what was recorded")
        best[peer] = fastest_variant(ways, fill, tune=tune)
    runs = {OURS: lambda: our_loader.read(batches), **{peer: lambda way=way: fill(way) for peer, way in best.items()}}
    times = interleave(rounds, runs, rotate=True, around_each=our_loader.setting)
    our_loader.close()
    for name, seconds in times.items():
        print_progress(f"records: {name} {format_spread(seconds)} for {batches * BATCH} windows")
    ours_s = statistics.median(times[OURS]) / (batches * BATCH)
    return [
        compare(
            "windows of frames kept as records",
            peer,
            peer_version(peer),
            times[OURS],
            times[peer],
            target=target,
            command=best[peer].description,
        )
        for peer, target in REACH.items()
    ], ours_s


def lerobot(made: Recording, home: Path, python: str, ours_s: float, *, windows: int) -> list[Case]:
    """LeRobot's loader on its own mp4, in its own interpreter, against our seconds a window. Reported, not raced."""
    program = (python, "-m", "perf.loader.lerobot_loader")
    decoded = msgspec.json.decode(execute(*program, made.frames, home / "lerobot", f"{windows}").splitlines()[-1])
    ratios = [seconds / ours_s for seconds in decoded["seconds"]]
    return [
        from_ratios(
            "windows of video frames", "lerobot", decoded["version"], ratios, target=0.0, command=decoded["how"]
        )
    ]


def main() -> int:
    args = arguments(__doc__)
    enter_peer_venv()
    batches = 1 if args.quick else 6
    with workspace(args.disk, needed=4 << 30) as home:
        created = record(home, "rendered", episodes=8 if args.quick else 40)
        cases, ours_s = records(created, home, batches=batches, rounds=args.rounds, tune=not args.quick)
        code = report(cases)
        if python := os.environ.get("PIT_BENCH_LEROBOT"):
            code |= report(lerobot(created, home, python, ours_s, windows=2 if args.quick else 16))
        else:
            print_progress("no LeRobot: PIT_BENCH_LEROBOT names no Python that has it")
        return code


if __name__ == "__main__":
    sys.exit(main())
