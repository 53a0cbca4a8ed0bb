"""What a small file costs `pit-stage run`, step by step: CPU time of one worker, from memory to memory.

python -m perf.stage.small_file_steps [--files 20000] [--rounds 5] [--memory /dev/shm]

Each pass does what the one before does and one step more, to every file; a step's cost is the difference of the two,
each the least of all rounds. The last pass is the worker itself; `cp -r` does the same set beside it.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from perf.harness.workspace import workspace
from perf.stage.stage_data import FileSet, make_file_set
from pitools.core.shared_progress import SharedProgress, WorkerSlot
from pitools.stage.copy.tasks import split_tasks
from pitools.stage.copy.worker import CREATE_FLAGS, FILE_MODE, CopyJob, CopyWorker
from pitools.stage.sources.local import DirDescriptors, LocalSource
from pitools.store import digest

STEPS = ("open, close", "fstat", "pread", "hash", "create, close", "pwrite", "fstat of the copy")
SIZE = 50_000
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def cpu_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def by_hand(made: FileSet, to: Path, steps: int) -> None:
    """The first so many steps of every file."""
    source, target, buffer = (
        DirDescriptors(made.folder),
        DirDescriptors(to, create=True),
        memoryview(mmap.mmap(-1, SIZE)),
    )
    for entry in made.files:
        within, _, name = entry.path.rpartition("/")
        file = os.open(name, FILE, dir_fd=source.open_dir(within))
        if steps > 1:
            os.fstat(file)
        if steps > 2:
            os.preadv(file, [buffer], 0)
        if steps > 3:
            digest.digest_bytes(buffer)
        if steps > 4:
            copy = os.open(name, CREATE_FLAGS, FILE_MODE, dir_fd=target.open_dir(within))
            if steps > 5:
                os.pwrite(copy, buffer, 0)
            if steps > 6:
                os.fstat(copy)
            os.close(copy)
        os.close(file)
    source.close()
    target.close()


def by_worker(made: FileSet, to: Path) -> None:
    work = CopyJob(LocalSource(folder=made.folder), made.files, str(to), False, False, False, False, 0)
    copier = CopyWorker(work, WorkerSlot(SharedProgress(1), 0))
    for task in split_tasks(made.files, range(len(made.files)), {}, ranged=True, in_order=False):
        copier(task)
    copier.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    least: dict[str, float] = {}

    def measure(name: str, run: Callable[[], object], who: int = resource.RUSAGE_SELF) -> None:
        before = cpu_s(who)
        run()
        least[name] = min(least.get(name, 1e9), (cpu_s(who) - before) / args.files * 1e6)

    with workspace(args.memory, needed=2 * args.files * SIZE) as here:
        created, to = make_file_set(here / "sets", [SIZE] * args.files), here / "copy"
        gc.disable()  # as in a worker
        for _ in range(args.rounds):
            for steps, name in enumerate((*STEPS, "worker"), start=1):
                shutil.copytree(
                    created.folder, to, ignore=lambda at, names: [n for n in names if Path(at, n).is_file()]
                )
                measure(name, lambda: by_worker(created, to) if name == "worker" else by_hand(created, to, steps))  # noqa: B023
                shutil.rmtree(to)
            measure(
                "cp -r", lambda: subprocess.run(["cp", "-r", created.folder, to], check=True), resource.RUSAGE_CHILDREN
            )
            shutil.rmtree(to)
    passes = [0.0, *(least[name] for name in (*STEPS, "worker"))]
    for name, before, after in zip((*STEPS, "the worker around it"), passes, passes[1:], strict=False):
        print(f"{name:24} {after - before:5.1f} µs a file")
    print(f"{'sum':24} {least['worker']:5.1f} µs a file\n{'cp -r':24} {least['cp -r']:5.1f} µs a file")


if __name__ == "__main__":
    main()
