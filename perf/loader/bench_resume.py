"""Going on in the middle of an epoch of 10⁸ samples: until the next batch's samples are known, and until it is there.

perf/run loader_resume [--quick] [--rounds 3] [--memory /dev/shm]      needs 12 GB of memory, or 2 GB quick

A version of 10⁸ steps, in episodes of 1,000, with a window about each step. Ours is told a position in the middle of an
epoch, another one each time: the samples of its batch of 64, then the whole batch, read from the page cache by a
loader that is there already, and once more with everything opened anew.

torch: RandomSampler, as a DataLoader that is resumed must use it: its permutation, and all that came before skipped.
mosaic streaming: the function that StreamingDataset calls when it resumes, with its default partition and shuffle, for
one node, one rank, and one worker, of shards of 10,000 samples. Its dataset is stood in for by an object that answers
for one stream without repetition, so that no 10,000 shards have to be written; what it opens besides is not counted.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

from perf.harness.harness import Case, compare, from_ratios, interleave, report
from perf.harness.workspace import arguments, execute, print_progress, workspace
from perf.loader.loader_peers import enter_peer_venv
from pitools.loader.loader import Loader, LoaderState
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.store.reader.version_reader import VersionReader

BATCH, EPISODE, SHARD = 64, 1000, 10_000
LIMIT_S, TIMES = 0.010, 100.0
SEED = 7


def dataset(home: Path, samples: int) -> Path:
    """A version of so many steps, one byte each."""
    import h5py

    with h5py.File(home / "r.hdf5", "w") as file:
        values = np.random.default_rng(0).integers(0, 255, (EPISODE, 1), np.uint8)
        for number in range(samples // EPISODE):
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = EPISODE
            demo["actions"] = values
    execute(
        sys.executable,
        "-m",
        "pitools",
        "dataset",
        "ingest",
        home / "r.hdf5",
        "--to",
        home,
        "--name",
        "resume",
        "--codec",
        "raw",
    )
    (path,) = (path for path in (home / "resume").iterdir() if not path.name.startswith("."))
    return path


class Ours:
    """A loader over the version, and positions to go to."""

    def __init__(self, path: Path, samples: int) -> None:
        self._path = path
        self._positions = positions(samples)
        self._loader = self._open()
        if (actual := len(self._loader.samples.order.samples_at(np.arange(BATCH)))) != BATCH:
            sys.exit(f"{actual} samples")

    def order(self) -> None:
        """From a position to the samples of its batch."""
        state = self._state()
        self._loader.load_state(state)
        self._loader.samples.draw(np.arange(state.position, state.position + BATCH))

    def batch(self) -> None:
        """From a position to its batch."""
        self._loader.load_state(self._state())
        next(self._loader)

    def anew(self) -> None:
        """The same with the version, its windows, and the threads made anew."""
        loader = self._open()
        loader.load_state(self._state())
        next(loader)
        loader.close()

    def _open(self) -> Loader:
        arrays = VersionReader(self._path, resident_bytes=0)
        windows = Windows(arrays.offsets, np.arange(len(arrays.offsets) - 1), {"action": WindowSpan(0, 16)}, pad=True)
        return Loader(WindowSamples(arrays, windows, seed=SEED), global_batch_size=BATCH)

    def _state(self) -> LoaderState:
        return LoaderState(identity=dict(self._loader.samples.identity), position=next(self._positions))


def positions(samples: int) -> Iterator[int]:
    """Beginnings of batches, about the middle of an epoch."""
    middle = samples // 2 // BATCH
    return (BATCH * (middle + 37 * number % 1000) for number in itertools.count())


@contextmanager
def at_rest() -> Iterator[None]:
    """No run begins while what the one before it was reading ahead is still being read."""
    time.sleep(0.05)
    yield


def torchs(samples: int) -> Callable[[], object]:
    import torch
    from torch.utils.data import RandomSampler

    where = positions(samples)

    def run() -> list[int]:
        sampler = RandomSampler(range(samples), generator=torch.Generator().manual_seed(SEED))
        begin = next(where)
        return list(itertools.islice(sampler, begin, begin + BATCH))

    return run


def streamings(samples: int) -> Callable[[], object]:
    # What it has for images wants a torchvision that fits the torch; nothing of it is used.
    sys.modules["streaming.vision"] = ModuleType("streaming.vision")
    from streaming.base.batching.random import generate_work_random_batching

    where = positions(samples)
    shards, ids = np.full(samples // SHARD, SHARD, np.int64), np.arange(samples)
    stand_in = SimpleNamespace(
        num_canonical_nodes=1,
        global_batch_size=BATCH,
        partition_algo="relaxed",
        epoch_size=samples,
        initial_physical_nodes=1,
        shuffle=True,
        shuffle_algo="py1e",
        shuffle_seed=SEED,
        shuffle_block_size=4_000_000,
        resample_streams=lambda _: (shards, ids),
    )
    world = SimpleNamespace(num_nodes=1, ranks_per_node=1, workers_per_rank=1)

    def run() -> list[int]:
        work = generate_work_random_batching(stand_in, world, 0, next(where))
        return work.reshape(-1)[:BATCH].tolist()

    return run


def cases(ours: Ours, samples: int, rounds: int) -> list[Case]:
    case = f"resume at {samples:.0e} samples"
    peers = {"torch RandomSampler": torchs(samples), "mosaic streaming": streamings(samples)}
    versions = {"torch RandomSampler": version("torch"), "mosaic streaming": version("mosaicml-streaming")}
    # Ours alone take so little that what a peer leaves of the caches would be all of it: many in a row, then the peers.
    runs = {"order": ours.order, "batch": ours.batch, "anew": ours.anew}
    quick = interleave(20 * rounds, runs, around_each=lambda _: at_rest())
    turn = interleave(rounds, {"ours": ours.order, **peers})
    print_progress(", ".join(f"{name} {np.median(times) * 1e3:.2f} ms" for name, times in {**quick, **turn}.items()))
    return [
        *(
            from_ratios(
                f"{case}, {name}: {LIMIT_S * 1e3:g} ms ÷ ours ({np.median(quick[key]) * 1e3:.2f} ms)",
                "limit",
                "",
                [LIMIT_S / took for took in quick[key]],
                target=target,
            )
            for key, name, target in (
                ("order", "samples of the next batch", 1.0),
                ("batch", "the whole next batch", 1.0),
                ("anew", "the same with all opened anew, told", 0.0),
            )
        ),
        *(
            compare(f"{case}, samples of the next batch", name, versions[name], turn["ours"], turn[name], target=TIMES)
            for name in peers
        ),
    ]


def main() -> int:
    args = arguments(__doc__)
    enter_peer_venv()
    samples = 10**7 if args.quick else 10**8
    with workspace(args.memory, needed=4 * samples) as home:
        return report(cases(Ours(dataset(home, samples), samples), samples, args.rounds))


if __name__ == "__main__":
    sys.exit(main())
