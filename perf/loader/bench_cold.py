"""Windows of 64 frames of 96x96x3 that no cache holds, from the disk, raw: as in the first epoch.

perf/run loader_cold [--quick] [--rounds 5] [--disk /var/tmp]

Before each run the page cache is dropped (as root; else by posix_fadvise, file by file). A run is a sixth of an epoch
of windows that do not overlap, in random order, for ours and for every peer: as where the data are larger than memory,
what was read beside a window is of no use later. Ours compares every chunk's checksum, since it has seen none before.
fio says what the device gives: random reads of a window's size, by as many threads, around the page cache; against it
counts what the kernel says that we had it read from the device. What a memory map takes depends on the device's
read_ahead_kb, which is told with its case.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from perf.harness.harness import Case, compare, from_ratios, interleave, report
from perf.harness.workspace import arguments, execute, format_spread, print_progress, workspace
from perf.loader.loader_data import IMAGE, LENGTH, SIDE, Recording, ingest_recording, record
from perf.loader.loader_peers import (
    Variant,
    copies,
    enter_peer_venv,
    fastest_variant,
    peer_version,
    tensorstore_ways,
    zarr_ways,
    zarrs_ways,
)
from perf.loader.our_loader import OurLoader
from perf.stage.stage_peers import version as program_version

BATCH, THREADS = 32, 8
WINDOW = LENGTH * SIDE * SIDE * 3
OURS, FIO = "ours", "fio"
DEVICE = 0.95


def device_bytes() -> int:
    """Bytes that this process had read from devices, as the kernel counts them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def memmap(threads: int) -> str:
    """What a case is called."""
    return f"memmap, {threads} thread" + "s" * (threads > 1)


REACH = {"tensorstore": 1.3, "zarrs": 0.0, "zarr": 0.0, memmap(1): 3.0, memmap(THREADS): 0.0}
_DROP = Path("/proc/sys/vm/drop_caches")


class Cold:
    """One raw version on a disk. taken: bytes from the device in each run of ours; device: bytes/s of each fio."""

    def __init__(self, made: Recording, path: Path, *, batches: int) -> None:
        self.made, self.path, self.batches = made, path, batches
        self.out = np.empty((BATCH, LENGTH, SIDE, SIDE, 3), np.uint8)
        self.ours = self._open()
        self.order = self._open()  # of the peers
        self.taken: list[int] = []
        self.device: list[float] = []
        self.about: dict[str, str] = {}

    @contextmanager
    def setting(self, name: str) -> Iterator[None]:
        """Nothing in the page cache, and for us nothing known of any chunk."""
        self._drop()
        if name == OURS:
            self.ours = self._open()
        yield
        if name == OURS:
            self.ours.close()

    def read(self) -> None:
        """Ours."""
        before = device_bytes()
        self.ours.read(self.batches)
        self.taken.append(device_bytes() - before)

    def fill(self, way: Variant) -> None:
        """A peer's."""
        for starts in self.order.windows(self.batches):
            way.fill(starts, self.out)

    def fio(self) -> None:
        """What the device gives."""
        size = self.batches * BATCH * WINDOW // THREADS
        out = execute(
            "fio",
            "--name=window",
            f"--filename={self.made.frames}",
            "--rw=randread",
            f"--bs={WINDOW}",
            "--direct=1",
            "--ioengine=psync",
            "--thread",
            f"--numjobs={THREADS}",
            f"--io_size={size}",
            "--group_reporting",
            "--norandommap",
            "--randrepeat=0",
            "--output-format=json",
        )
        self.device.append(msgspec.json.decode(out)["jobs"][0]["read"]["bw_bytes"])

    def runs(self, *, tune: bool) -> dict[str, Callable[[], object]]:
        """What is run in turn; the peers each by their fastest way, tried cold."""
        array = self.path / IMAGE
        ways = {
            "tensorstore": tensorstore_ways(array, LENGTH, threads=THREADS),
            "zarrs": zarrs_ways(array, LENGTH),
            "zarr": zarr_ways(array, LENGTH),
        }
        runs: dict[str, Callable[[], object]] = {OURS: self.read, FIO: self.fio}
        for peer, tried in ways.items():
            way = fastest_variant(tried, self._cold, tune=tune)
            self.about[peer] = way.description
            runs[peer] = lambda way=way: self.fill(way)
        for threads in (1, THREADS):
            self.about[memmap(threads)] = self.read_ahead()
            runs[memmap(threads)] = lambda threads=threads: self.map(threads)
        return runs

    def read_ahead(self) -> str:
        """What the kernel reads beside a page of a memory map that is asked for."""
        device = self.path.stat().st_dev
        queue = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/queue/read_ahead_kb")
        return f"out[i] = memmap[a:b], read_ahead_kb {queue.read_text().strip() if queue.is_file() else 'unknown'}"

    def map(self, threads: int) -> None:
        """A memory map's, a new one: the page cache does not let go of what is mapped."""
        self.fill(copies(self.made.map(self.made.frames), LENGTH, threads))

    def _cold(self, way: Variant) -> None:
        self._drop()
        way.fill(self.order.windows(1)[0], self.out)

    def _open(self) -> OurLoader:
        return OurLoader(self.path, batch=BATCH, threads=THREADS, ahead=2, stride=LENGTH, warm=False)

    def _drop(self) -> None:
        os.sync()
        if os.access(_DROP, os.W_OK):
            _DROP.write_text("1\n")
            return
        for file in [self.made.frames, *(file for file in self.path.rglob("*") if file.is_file())]:
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def cases(cold: Cold, times: dict[str, list[float]]) -> list[Case]:
    """Against the readers by time; against the device by bytes read in a second."""
    # The first run of each is not counted.
    rates = [taken / seconds for taken, seconds in zip(cold.taken[1:], times[OURS], strict=True)]
    ratios = [rate / device for rate, device in zip(rates, cold.device[1:], strict=True)]
    expected = cold.batches * BATCH * WINDOW
    print_progress(f"cold: {expected >> 20} MiB of windows, for which the device gave {cold.taken[-1] >> 20} MiB")
    for name, each in (("fio", cold.device[1:]), ("ours", rates)):
        print_progress(f"cold: {name} {[int(rate / 1e6) for rate in each]} MB/s")
    for name, seconds in times.items():
        print_progress(f"cold: {name} {format_spread(seconds)}")
    how = f"randread, direct, psync, {THREADS} threads, {WINDOW} bytes each"
    return [
        from_ratios(
            "cold windows, raw: bytes from the device in a second",
            "fio",
            program_version("fio"),
            ratios,
            target=DEVICE,
            command=how,
        ),
        *(
            compare(
                "cold windows, raw",
                peer,
                peer_version(peer),
                times[OURS],
                times[peer],
                target=target,
                command=cold.about.get(peer, ""),
            )
            for peer, target in REACH.items()
        ),
    ]


def main() -> int:
    args = arguments(__doc__)
    enter_peer_venv()
    with workspace(args.disk, needed=(1 if args.quick else 7) << 30) as home:
        created = record(home, "rendered", episodes=16 if args.quick else 160)
        cold = Cold(created, ingest_recording(created, home / "datasets", "raw"), batches=1 if args.quick else 6)
        times = interleave(args.rounds, cold.runs(tune=not args.quick), rotate=True, around_each=cold.setting)
        return report(cases(cold, times))


if __name__ == "__main__":
    sys.exit(main())
