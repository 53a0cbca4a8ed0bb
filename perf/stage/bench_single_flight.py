"""Eight jobs on one node ask for one set in the same moment: one copies it, the others wait. The peer: eight rsyncs.

perf/run stage_single_flight [--quick] [--rounds 5] [--disk /var/tmp] [--memory /dev/shm]

Bytes read from the source are counted twice: by the eight records, and by the kernel for all eight process trees, from
which the same on a set of 16-byte shards is taken off: that reads as many modules and manifests.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from perf.harness.harness import Case, compare, from_ratios, interleave, report
from perf.harness.workspace import (
    arguments,
    execute_all,
    format_spread,
    print_progress,
    sync_file_system,
    wait_until_idle,
    workspace,
)
from perf.stage.process_usage import bytes_read
from perf.stage.stage_data import MIB, FileSet, make_file_set, record_in, require_same, stage, stage_argv
from perf.stage.stage_peers import install, version

JOBS = 8
ONE, EIGHT, PEER = "pit-stage run", f"{JOBS} pit-stage run", f"{JOBS} rsync -a"
WALL = 1.2  # times one stage
SOURCE = 0.995  # set ÷ bytes read: once, but for what waiting reads of locks and clocks
AGAINST_RSYNC = 5.0  # as for one copy in bench_copy.py


class Flight:
    """One set, asked for by several processes at once, at one place. recorded, counted: source bytes in each run."""

    def __init__(self, made: FileSet, tiny: FileSet, home: Path) -> None:
        self.made, self.tiny, self.home = made, tiny, home
        self.dest = home / "dest"
        self.recorded: list[int] = []
        self.counted: list[int] = []

    def one(self) -> None:
        """One job alone."""
        stage(self.made, self.dest)

    def ours(self) -> None:
        """All jobs at once; exactly one of them is to copy."""
        count, records = bytes_read(lambda: self._ask(self.made))
        states = sorted(str(record["state"]) for record in records)
        if states != ["present"] * (JOBS - 1) + ["staged"]:
            sys.exit(f"not one copy: {records}")
        self.recorded.append(sum(int(str(record["copied_bytes"])) for record in records))
        self.counted.append(count)

    def theirs(self) -> None:
        """As many rsyncs at once, each to its own folder, durable at the end."""
        execute_all([["rsync", "-a", f"{self.made.folder}/", f"{self.dest}/{job}"] for job in range(JOBS)])
        sync_file_system(self.home)

    def _ask(self, made: FileSet) -> list[dict[str, object]]:
        return [record_in(out) for out in execute_all([stage_argv(made, self.dest)] * JOBS)]

    @contextmanager
    def setting(self, name: str) -> Iterator[None]:
        """Nothing is there before, nor after."""
        self.dest.mkdir()
        wait_until_idle(self.home)
        yield
        if name == EIGHT:
            self.counted[-1] -= bytes_read(lambda: self._ask(self.tiny))[0]
        for folder in [self.dest / f"{job}" for job in range(JOBS)] if name == PEER else [self.staged]:
            require_same(self.made, folder, content=name != PEER)
        shutil.rmtree(self.dest)

    @property
    def staged(self) -> Path:
        """Where ours publishes the set."""
        return self.dest / "objects" / self.made.version


def cases(flight: Flight, what: str, rounds: int) -> list[Case]:
    print_progress(what)
    runs = {ONE: flight.one, EIGHT: flight.ours, PEER: flight.theirs}
    times = interleave(rounds, runs, around_each=flight.setting, rotate=True)
    for name, seconds in times.items():
        print_progress(f"  {name}: {format_spread(seconds)}")
    command = "rsync -a SRC/ DEST/<job>"
    return [
        compare(what, PEER, version("rsync"), times[EIGHT], times[PEER], target=AGAINST_RSYNC, command=command),
        compare(f"{what}: one stage ÷ {JOBS} at once", ONE, "", times[EIGHT], times[ONE], target=1 / WALL),
        once(f"{what}: set ÷ source bytes, by our records", flight.made, flight.recorded[1:], target=1.0),
        once(f"{what}: set ÷ source bytes, by the kernel's count", flight.made, flight.counted[1:], target=SOURCE),
    ]


def once(case: str, made: FileSet, counts: Sequence[int], *, target: float) -> Case:
    print_progress(f"  {case}: {', '.join(f'{made.bytes / count:.4f}' for count in counts)}")
    return from_ratios(case, f"{JOBS} copies", "", [made.bytes / count for count in counts], target=target)


def main() -> int:
    args = arguments(__doc__)
    install()
    # Large enough that eight starts of Python on a few cores are not what is measured.
    count, size = (10, 8 * MIB) if args.quick else (100, 32 * MIB)
    case, total = f"{JOBS} jobs at once, {count} shards of {size // MIB} MiB, memory to disk, with sync", count * size
    with workspace(args.memory, needed=total) as memory, workspace(args.disk, needed=JOBS * total) as disk:
        created, tiny = make_file_set(memory / "full", [size] * count), make_file_set(memory / "tiny", [16] * count)
        return report(cases(Flight(created, tiny, disk), case, args.rounds))


if __name__ == "__main__":
    sys.exit(main())
