"""A new version with 1 % of its shards changed, staged where the old one stands: time, and bytes read from the source.

perf/run stage_restage [--quick] [--rounds 5] [--disk /var/tmp] [--memory /dev/shm]

Both versions stand afterwards. `rsync -a` into a fresh folder copies everything. With --link-dest it links what the
old folder has: with --checksum by content, which it reads on both sides; without, by size and second of modification,
which is its best case, since here the unchanged shards are the same files in both versions (in a version that was
ingested anew every time differs, and all is copied). That last one is told, not claimed to be beaten: it checks
nothing, takes a shard rewritten within the same second for unchanged, and is over before a Python has started.

Bytes read are counted twice: by our record, and by the kernel for the whole process tree, from which the same run on
versions of 16-byte shards is taken off: it reads as many modules, manifests and folders.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from perf.harness.harness import Case, compare, from_ratios, interleave, report
from perf.harness.workspace import (
    arguments,
    execute,
    format_spread,
    print_progress,
    sync_file_system,
    wait_until_idle,
    workspace,
)
from perf.stage.process_usage import bytes_read
from perf.stage.stage_data import MIB, FileSet, make_file_set, make_next_version, require_same, stage
from perf.stage.stage_peers import install, version

SHARDS = 100
MAY_READ = 1.02 / 100
OURS = "pit-stage run"
# rsync's words before source and destination, and the least ratio.
PEERS = {
    "rsync -a": ([], 3.0),
    "rsync -a --checksum --link-dest": (["--checksum", "--link-dest=OLD"], 3.0),
    "rsync -a --link-dest": (["--link-dest=OLD"], 0.0),
}


class Restage:
    """Old versions staged in `home`, ours and rsync's, and what it takes to have the new ones there too.

    pair, tiny: the old and the new version, in full and of 16-byte shards. recorded, counted: bytes that ours read
    from the source, in each run, by its own record and by the kernel.
    """

    def __init__(self, pair: tuple[FileSet, FileSet], tiny: tuple[FileSet, FileSet], home: Path) -> None:
        self.new, self.tiny, self.home = pair[1], tiny[1], home
        self.root, self.old, self.dest = home / "pit", home / "old", home / "new"
        self.recorded: list[int] = []
        self.counted: list[int] = []
        for item in (pair[0], tiny[0]):
            stage(item, self.root)
        execute("rsync", "-a", f"{pair[0].folder}/", self.old)

    def ours(self) -> None:
        """The run that is timed; its bytes are counted too, which costs two reads of a file in /proc."""
        count, record = bytes_read(lambda: stage(self.new, self.root))
        self.recorded.append(int(str(record["copied_bytes"])))
        self.counted.append(count)

    def theirs(self, words: list[str]) -> Callable[[], None]:
        """A run of rsync with these options, durable at its end."""
        options = [text.replace("OLD", str(self.old)) for text in words]

        def run() -> None:
            execute("rsync", "-a", *options, f"{self.new.folder}/", self.dest)
            sync_file_system(self.home)

        return run

    @contextmanager
    def setting(self, name: str) -> Iterator[None]:
        """Neither new version is there before, nor after."""
        wait_until_idle(self.home)
        yield
        if name != OURS:
            require_same(self.new, self.dest, content=True)
            shutil.rmtree(self.dest)
            return
        require_same(self.new, self.root / "objects" / self.new.version, content=True)
        self.counted[-1] -= bytes_read(lambda: stage(self.tiny, self.root))[0]
        for item in (self.new, self.tiny):
            forget(item, self.root)


def forget(made: FileSet, root: Path) -> None:
    """Remove a version from a root that no process uses now, with what is kept about it."""
    for path in root.glob(f"*/{made.version}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def cases(restage: Restage, rounds: int, size: int) -> list[Case]:
    case = f"{SHARDS} shards of {size // MIB} MiB, 1 % changed, memory to disk, with sync"
    print_progress(case)
    runs: dict[str, Callable[[], object]] = {OURS: restage.ours}
    runs |= {peer: restage.theirs(words) for peer, (words, _) in PEERS.items()}
    times = interleave(rounds, runs, around_each=restage.setting, rotate=True)
    for name, seconds in times.items():
        print_progress(f"  {name}: {format_spread(seconds)}")
    rsync, total = version("rsync"), restage.new.bytes
    actual = [
        compare(
            case,
            peer,
            rsync,
            times[OURS],
            times[peer],
            target=target,
            command=" ".join(["rsync", "-a", *words, "SRC/", "DEST"]),
        )
        for peer, (words, target) in PEERS.items()
    ]
    for how, counts in (("our record", restage.recorded[1:]), ("the kernel's count", restage.counted[1:])):
        print_progress(f"  read by {how}: {', '.join(f'{count / total:.4%}' for count in counts)}")
        name = f"{case}: set ÷ bytes read, by {how}"
        actual.append(
            from_ratios(name, "the changed shards", "", [total / count for count in counts], target=1 / MAY_READ)
        )
    return actual


def main() -> int:
    args = arguments(__doc__)
    install()
    size = (4 if args.quick else 32) * MIB
    total = SHARDS * size
    with workspace(args.memory, needed=int(1.05 * total)) as memory, workspace(args.disk, needed=4 * total) as disk:
        old, tiny = make_file_set(memory / "full", [size] * SHARDS), make_file_set(memory / "tiny", [16] * SHARDS)
        pairs = [(item, make_next_version(item, SHARDS)) for item in (old, tiny)]
        return report(cases(Restage(pairs[0], pairs[1], disk), args.rounds, size))


if __name__ == "__main__":
    sys.exit(main())
