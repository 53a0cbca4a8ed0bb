"""20,000 small files, verified by us: memory to disk with sync, memory to memory; and our memory for 100,000 files.

Of 50 KB, 500 to a folder; memory to memory also of 4 kB and of 30 kB in a folder each, as zarr lays out chunks.

perf/run stage_small [--quick] [--rounds 5] [--disk /var/tmp] [--memory /dev/shm]

The same race as bench_copy.py. What each run wrote to the disk is emptied afterwards and removed at the end: on
an ext4 without a journal, removing it at once would slow the next run's new files several times.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from msgspec import structs

from perf.harness.harness import Case, from_ratios, report
from perf.harness.workspace import arguments, print_progress, wait_until_idle, workspace
from perf.stage.copy_runner import CopyRunner, delete_copies, wait_for_inode_reuse
from perf.stage.process_usage import peak_memory
from perf.stage.stage_data import FileSet, make_file_set, record_in, stage_argv
from perf.stage.stage_peers import copy_commands, install

TO_DISK, TO_MEMORY, IN_FOLDERS = 1.5, 1.2, 1.0  # against every peer, so against the fastest
LIMIT = 150_000_000


def race(made: FileSet, home: Path, case: str, *, sync: bool, least: float, rounds: int, tune: bool) -> list[Case]:
    print_progress(case)
    race = CopyRunner(made, home, sync=sync)
    peers = race.tuned(copy_commands(made), tune=tune)
    cases = race.cases(case, race.run(rounds, peers), peers, {}, least=least)
    return [*cases, race.durable(case)] if sync else cases


def memory(made: FileSet, home: Path, *, rounds: int) -> Case:
    """Limit over peak: the sum over the whole process tree, each page that several map counted once."""
    peaks = []
    for number in range(rounds):
        wait_until_idle(home)
        root = home / f"memory-{number}"
        peak, out = peak_memory(stage_argv(made, root))
        if record_in(out)["state"] != "staged":
            sys.exit(f"not staged: {out}")
        print_progress(
            f"  peak {peak.pss / 1e6:.0f} MB over {peak.processes} processes, the largest {peak.largest / 1e6:.0f} MB"
        )
        peaks.append(peak)
        delete_copies(root)
    worst, largest = max(peak.pss for peak in peaks) / 1e6, max(peak.largest for peak in peaks) / 1e6
    case = f"peak memory, {len(made.files):,} files: {LIMIT / 1e6:.0f} MB ÷ ours"
    case += f" (worst {worst:.0f} MB, its largest process {largest:.0f} MB resident)"
    judged = from_ratios(case, "limit", "", [LIMIT / peak.pss for peak in peaks], target=1.0)
    return structs.replace(judged, ok=judged.ratio_min >= judged.target)  # a limit is for every run


def main() -> int:
    args = arguments(__doc__)
    install()
    count, many = (2_000, 5_000) if args.quick else (20_000, 100_000)
    total, what = count * 50_000, f"{count:,} files of 50 KB"
    run = {"rounds": args.rounds, "tune": not args.quick}
    with workspace(args.memory, needed=2 * total) as here, workspace(args.disk, needed=2 * total) as disk:
        if not args.quick:
            wait_for_inode_reuse(disk)
        file_set = make_file_set(here / "sets", [50_000] * count)
        code = report(race(file_set, disk, f"{what}, memory to disk, with sync", sync=True, least=TO_DISK, **run))
        (here / "copies").mkdir()
        code |= report(race(file_set, here / "copies", f"{what}, memory to memory", sync=False, least=TO_MEMORY, **run))
        shutil.rmtree(file_set.folder)
        for size in (4_000, 30_000):
            case = f"{count:,} files of {size // 1000} kB, a folder each, memory to memory"
            file_set = make_file_set(here / f"sets-{size}", [size] * count, in_folder=1)
            code |= report(race(file_set, here / "copies", case, sync=False, least=IN_FOLDERS, **run))
            shutil.rmtree(file_set.folder)
        file_set = make_file_set(here / "many", [1000 + number % 3000 for number in range(many)])
        return code | report([memory(file_set, disk, rounds=3 if not args.quick else 1)])


if __name__ == "__main__":
    sys.exit(main())
