"""Random windows of 64 frames of 96x96x3 from the page cache, in batches of 16: raw, lz4 and zstd, all with crc32c.

perf/run loader_hot [--quick] [--rounds 5] [--disk /var/tmp]

Ours is the whole loader, two threads and its ring of buffers, with checksums compared at the first read of a chunk as
by default, which has happened before, and each time (`always`). Every peer reads the same windows into one buffer that
is used again; the memory maps into as many as ours has, one after another. Dataset and machine as in `loader_data.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from perf.harness.harness import Case, compare, interleave, report
from perf.harness.workspace import arguments, format_spread, print_progress, workspace
from perf.loader.loader_data import IMAGE, LENGTH, SIDE, Recording, ingest_recording, kinds, record
from perf.loader.loader_peers import WAYS, Variant, copies, enter_peer_venv, fastest_variant, peer_version
from perf.loader.our_loader import OurLoader
from pitools.loader.buffers import allocate_aligned

BATCH = 16
SHAPE = (BATCH, LENGTH, SIDE, SIDE, 3)
# Codec → peer → least ratio.
REACH = {
    "raw": {"zarr": 6.0, "zarrs": 2.3, "tensorstore": 1.5},
    "lz4": {"zarr": 5.0, "zarrs": 1.8, "tensorstore": 1.5},
    "zstd": {"zarr": 2.5, "zarrs": 1.3, "tensorstore": 1.0},
}
WORKERS, MEMMAP, ANY = 4.0, 0.95, 0.0
DEFAULT, ALWAYS = "ours", "ours, always"


class Hot:
    """One version, read by us and by every peer."""

    def __init__(self, made: Recording, path: Path, codec: str, *, batches: int, tune: bool) -> None:
        self.made, self.path, self.codec, self.batches, self.tune = made, path, codec, batches, tune
        self.ours = {DEFAULT: OurLoader(path, check="first"), ALWAYS: OurLoader(path, check="always")}
        self.outs = [allocate_aligned(SHAPE, np.dtype(np.uint8)) for _ in range(self.ours[DEFAULT].buffers)]
        self.workers: dict[str, Any] = {}
        self.about: dict[str, str] = {}

    def runs(self) -> dict[str, Callable[[], object]]:
        """What is run in turn, each name a case; all read the same windows, others in each round."""
        readers: dict[str, Callable[[], object]] = {
            name: lambda ours=ours: ours.read(self.batches) for name, ours in self.ours.items()
        }
        for peer, make in WAYS.items():
            ways = make(self.path / IMAGE, LENGTH)
            way = fastest_variant(ways, self._fill, tune=self.tune)
            self.about[peer] = way.description
            readers[peer] = lambda way=way: self._fill(way)
            self.workers[peer] = self._workers(peer, ways.index(way))
        if self.codec == "raw":
            frames = self.made.map(self.made.frames)
            for threads in (1, 2):
                way = copies(frames, LENGTH, threads)
                readers[f"memmap, {threads} thread{'s' * (threads > 1)}"] = lambda way=way: self._fill(way)
        for peer in WAYS:
            readers[f"DataLoader over {peer}"] = lambda peer=peer: self.workers[peer].read(self._windows())
        return readers

    @contextmanager
    def setting(self, name: str) -> Iterator[None]:
        """Nobody's run begins with batches that were read before it, nor ends with some still being read."""
        yield
        for ours in self.ours.values():
            ours.drain_prefetch()

    def check(self) -> None:
        """Exit unless each peer reads what we read."""
        starts = self._windows()[0]
        batch = self.ours[DEFAULT].read(1)
        for peer, ways in WAYS.items():
            for way in ways(self.path / IMAGE, LENGTH):
                way.fill(starts, self.outs[0])
                if not np.array_equal(batch, self.outs[0]):
                    sys.exit(f"{peer}, {way.description}: not what we read")

    def cases(self, kind: str, times: dict[str, list[float]]) -> list[Case]:
        """Our default against everybody, and our `always` against the readers."""
        return [
            *(self._case(kind, DEFAULT, name, times) for name in times if name not in self.ours),
            *(self._case(kind, ALWAYS, name, times) for name in WAYS),
        ]

    def close(self) -> None:
        """End threads and processes."""
        for workers in self.workers.values():
            workers.close()
        for ours in self.ours.values():
            ours.close()

    def _case(self, kind: str, ours: str, peer: str, times: dict[str, list[float]]) -> Case:
        target = REACH[self.codec].get(peer) or (MEMMAP if "memmap" in peer else WORKERS)
        if ours == ALWAYS:
            target = ANY
        case = f"hot windows, {kind} frames, {self.codec}" + ", checked each time" * (ours == ALWAYS)
        per_s = [BATCH * self.batches / seconds for seconds in sorted(times[ours])]
        print_progress(f"{case}: {per_s[len(per_s) // 2]:.0f} windows/s, {peer} {format_spread(times[peer])} a round")
        return compare(
            case, peer, peer_version(peer), times[ours], times[peer], target=target, command=self.about.get(peer, "")
        )

    def _windows(self) -> list[list[int]]:
        return self.ours[DEFAULT].windows(self.batches)

    def _fill(self, way: Variant) -> None:
        turn = self.outs if "memmap" in way.description else self.outs[:1]
        for number, starts in enumerate(self._windows()):
            way.fill(starts, turn[number % len(turn)])

    def _workers(self, peer: str, way: int) -> Any:
        """DataLoaders of both kinds, over the first way of the peer and its fastest here; the fastest of them."""
        from perf.loader.torch_workers import WindowSet, WorkerLoader

        tried = []
        for number in sorted({0, way}):
            windows = WindowSet(peer, number, self.path / IMAGE, LENGTH, SHAPE[2:], "uint8")
            for whole in (True, False) if self.tune else (True,):
                workers = WorkerLoader(windows, whole=whole)
                tried.append((workers.time(self._windows()), workers))
        best = min(tried, key=lambda pair: pair[0])[1]
        for _, workers in tried:
            if workers is not best:
                workers.close()
        self.about[f"DataLoader over {peer}"] = best.about
        return best


def main() -> int:
    args = arguments(__doc__)
    enter_peer_venv()
    code = 0
    for kind in kinds():
        with workspace(args.disk, needed=3 << 30) as home:
            created = record(home, kind, episodes=8 if args.quick else 40)
            for codec in REACH:
                hot = Hot(
                    created,
                    ingest_recording(created, home / "datasets", codec),
                    codec,
                    batches=2 if args.quick else 12,
                    tune=not args.quick,
                )
                hot.check()
                times = interleave(args.rounds, hot.runs(), rotate=True, around_each=hot.setting)
                code |= report(hot.cases(kind, times))
                hot.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
