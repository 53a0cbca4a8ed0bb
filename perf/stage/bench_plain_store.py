"""A Zarr store without a manifest, 2,000 chunks of 307 kB, judged by us: from memory to memory.

perf/run stage_plain_store [--quick] [--rounds 5] [--memory /dev/shm]

The same race as bench_copy.py, written by zarr-python with its own codecs; the chunks hold random bytes. Ours
hashes every byte, judges every chunk by what it says of itself, and lists the store again at the end.
"""

from __future__ import annotations

import sys
from pathlib import Path

from perf.harness.harness import report
from perf.harness.workspace import arguments, print_progress, workspace
from perf.stage.copy_runner import CopyRunner
from perf.stage.stage_data import FileSet
from perf.stage.stage_peers import copy_commands, install
from pitools.store import digest
from pitools.store.manifest import FileEntry

# More is expected against rsync and what verifies by MD5; cp starts in no time, and neither hashes nor lists the store
# a second time.
TARGETS, LEAST = {"rclone copy": 1.5, "rsync -a": 1.5, "cp -r": 0.7}, 1.0
SIDE = 320


def make_store(folder: Path, chunks: int) -> FileSet:
    """A store of images, a chunk a frame, of actions, and of where episodes end."""
    import numpy as np
    import zarr

    random = np.random.default_rng(1)
    group = zarr.create_group(folder)
    frame = (SIDE, SIDE, 3)
    images = group.create_array("data/images", shape=(chunks, *frame), chunks=(1, *frame), dtype="uint8")
    for first in range(0, chunks, 50):
        images[first : first + 50] = random.integers(0, 256, (50, *frame), dtype="uint8")
    action = group.create_array("data/action", shape=(chunks, 7), chunks=(100, 7), dtype="float32")
    action[...] = random.random((chunks, 7), dtype="float32")
    ends = group.create_array("meta/episode_ends", shape=(chunks // 50,), chunks=(chunks // 50,), dtype="int64")
    ends[...] = np.arange(50, chunks + 1, 50)
    files = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size, text = digest.digest_file(path)
        files.append(FileEntry(path=path.relative_to(folder).as_posix(), bytes=size, digest=text))
    return FileSet(folder=folder, version="", files=tuple(files))


def main() -> int:
    args = arguments(__doc__)
    install()
    chunks = 200 if args.quick else 2_000
    with workspace(args.memory, needed=2 * chunks * SIDE * SIDE * 3) as here:
        store = make_store(here / "pick.zarr", chunks)
        case = f"a plain Zarr store, {len(store.files):,} files of {store.bytes / 1e6:.0f} MB, memory to memory"
        print_progress(case)
        (here / "copies").mkdir()
        race = CopyRunner(store, here / "copies", sync=False)
        peers = race.tuned(copy_commands(store), tune=not args.quick)
        return report(race.cases(case, race.run(args.rounds, peers), peers, TARGETS, least=LEAST))


if __name__ == "__main__":
    sys.exit(main())
