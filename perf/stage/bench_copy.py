"""40 shards of 32 MiB, verified by us: from memory to disk, durable at the end, and from memory to memory.

perf/run stage_copy [--quick] [--rounds 5] [--disk /var/tmp] [--memory /dev/shm]

Peers are installed where missing (apt-get as root; the current rclone by pip into .venv-peers). Each is first tried
with the tunings its manual names, and runs with the fastest. On the disk a peer's run ends with a syncfs, since none
makes its copy durable; ours has to have done so by itself. fio writes as many bytes from nowhere: what the disk takes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from perf.harness.harness import Case, report
from perf.harness.workspace import arguments, print_progress, workspace
from perf.stage.copy_runner import FIO, CopyRunner
from perf.stage.stage_data import MIB, FileSet, make_file_set
from perf.stage.stage_peers import copy_commands, fio_commands, install

# Peer → least ratio; the second of each pair is for every peer not named, so for the fastest of all.
TO_DISK, TO_DISK_ANY, TO_DISK_FIO = {"cp -r": 2.0, "rsync -a": 5.0}, 1.15, 0.9
TO_MEMORY, TO_MEMORY_ANY = {"cp -r": 1.3, "rsync -a": 5.0, "rclone copy": 10.0}, 1.0


def to_disk(made: FileSet, home: Path, what: str, *, rounds: int, tune: bool) -> list[Case]:
    case = f"{what}, memory to disk, with sync"
    print_progress(case)
    race = CopyRunner(made, home, sync=True)
    peers = race.tuned({**copy_commands(made), FIO: fio_commands(made)}, tune=tune)
    times = race.run(rounds, peers)
    return [
        *race.cases(case, times, peers, TO_DISK, least=TO_DISK_ANY),
        *race.fio(case, peers[FIO], times, target=TO_DISK_FIO),
        race.durable(case),
    ]


def to_memory(made: FileSet, home: Path, what: str, *, rounds: int, tune: bool) -> list[Case]:
    case = f"{what}, memory to memory"
    print_progress(case)
    race = CopyRunner(made, home, sync=False)
    peers = race.tuned(copy_commands(made), tune=tune)
    return race.cases(case, race.run(rounds, peers), peers, TO_MEMORY, least=TO_MEMORY_ANY)


def main() -> int:
    args = arguments(__doc__)
    install()
    count, size = (8, 8 * MIB) if args.quick else (40, 32 * MIB)
    case, total = f"{count} shards of {size // MIB} MiB", count * size
    with workspace(args.memory, needed=2 * total) as memory, workspace(args.disk, needed=total) as disk:
        file_set = make_file_set(memory / "sets", [size] * count)
        run = {"rounds": args.rounds, "tune": not args.quick}
        code = report(to_disk(file_set, disk, case, **run))
        (memory / "copies").mkdir()
        return code | report(to_memory(file_set, memory / "copies", case, **run))


if __name__ == "__main__":
    sys.exit(main())
