"""Arguments, temporary folders, child processes and an idle disk, for all benchmarks.

A data set is on a tmpfs, so that every method reads it equally hot. A destination is new for each run, and all earlier
writes are on its disk by then, so that no run pays for the write-back of another.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PEERS = REPO / ".venv-peers"  # peers that would change our own dependencies
TIMEOUT_S = 900
# Without the variables by which this user configures pitools or a peer, and without PYTHONDONTWRITEBYTECODE, with which
# every run of ours compiles itself.
ENV = {name: text for name, text in os.environ.items() if not name.startswith(("PIT_", "RCLONE_", "RSYNC_", "PYTHON"))}
PREFIX = "pit-bench-"


def arguments(about: str | None) -> argparse.Namespace:
    """Parse --quick, --rounds, --memory (checked to be a tmpfs) and --disk (checked to be none)."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sets and two rounds, to see that it runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder on a tmpfs, for the sets")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a folder on the disk to copy to")
    args = parser.parse_args()
    args.rounds = 2 if args.quick else args.rounds
    for place, wanted in ((args.memory, True), (args.disk, False)):
        if (file_system(place) == "tmpfs") is not wanted:
            sys.exit(f"{place} is on {file_system(place)}: --memory wants a tmpfs, --disk a disk")
    # The sets are gigabytes of memory: `finally` must also run at SIGTERM.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    return args


def file_system(place: Path) -> str:
    """Return the type of a folder's file system, such as `ext4`."""
    return execute("stat", "--file-system", "--format=%T", place).strip()


@contextmanager
def workspace(parent: Path, *, needed: int) -> Iterator[Path]:
    """Make a temporary folder in `parent`, removed at the end. Exits without `needed` bytes of room."""
    free = shutil.disk_usage(parent).free
    if file_system(parent) == "tmpfs":
        free = min(free, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if free < needed * 1.1:
        hint = f"an earlier run that was killed may have left {PREFIX}* there"
        sys.exit(f"{parent} has {free >> 20} MiB free, this needs {int(needed * 1.1) >> 20} MiB; {hint}")
    home = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        yield home
    finally:
        shutil.rmtree(home)


def execute(*argv: str | Path) -> str:
    """Run a program to its end and return its stdout. Exits with its stderr if it fails, and ends its children."""
    return execute_all([[str(argument) for argument in argv]])[0]


def execute_all(commands: Sequence[Sequence[str]]) -> list[str]:
    """Run programs side by side, to the end of all, as `execute` does."""
    processes = [start(argv) for argv in commands]
    try:
        return [finish(process) for process in processes]
    except BaseException:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        raise


def start(argv: Sequence[str]) -> subprocess.Popen[str]:
    """Start a program as the leader of a session, so that its children can be ended with it."""
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
        cwd=REPO,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a program and return its stdout. Exits with its stderr if it fails."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    if process.returncode:
        sys.exit(f"exit {process.returncode}: {' '.join(map(str, process.args))}\n{err}")
    return out


def sync_file_system(folder: Path) -> float:
    """Call syncfs(2) in this process, cheaper than the `sync -f` that a peer's user would run; return its seconds."""
    began = time.perf_counter()
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), "syncfs", str(folder))
    finally:
        os.close(descriptor)
    return time.perf_counter() - began


def wait_until_idle(folder: Path) -> None:
    """Write everything back, then wait until the disk below `folder` has been idle for a fifth of a second."""
    os.sync()
    device = folder.stat().st_dev
    counters = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    before, deadline = "", time.monotonic() + 10
    while counters.exists() and (now := counters.read_text()) != before and time.monotonic() < deadline:
        before = now
        time.sleep(0.2)


def format_spread(seconds: Sequence[float]) -> str:
    """Return median and range as text, for progress messages: the figure is a ratio."""
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


def print_progress(text: str) -> None:
    """Print to stderr: stdout is records."""
    print(text, file=sys.stderr, flush=True)
