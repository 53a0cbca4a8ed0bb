"""A run that loses nodes: 8 ranks, then 4, then 2, and the losses of a run of one process that nobody interrupts.

perf/run checkpoint_resize [--quick]

Both reference loops, on the CPU, over noise whose actions follow from what is seen. Each world is started anew and told
to go up to a later step; it goes on from the checkpoint of the one before. The ratio is the allowed difference of the
loss, 1e-5, over the largest that any step has; that all worlds are given the same global batches is checked apart, by
the samples that a loader of each world size hands out.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import h5py
import numpy as np

import pitools
from perf.harness.harness import Case, from_ratios, report
from perf.harness.workspace import arguments, execute, print_progress, workspace
from pitools.loader.loader import Loader, NumpyBatch
from pitools.run import steps
from pitools.train.dataset import DemonstrationDataset

WORLDS, BATCH, CLOSE, LIMIT_S = (8, 4, 2), 24, 1e-5, 500
FOREIGN = ("PIT_", "SLURM_", "JAX_", "XLA_", "CUDA_", "MASTER_", "OMP_", "NPROC", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def dataset(home: Path) -> Path:
    """60 steps of frames and joints."""
    rng = np.random.default_rng(0)
    with h5py.File(home / "a.hdf5", "w") as file:
        for number, length in enumerate((20, 25, 35)):
            image, joints = rng.integers(0, 256, (length, 16, 16, 3), np.uint8), rng.normal(3.0, 0.1, (length, 4))
            demo = file.create_group(f"data/demo_{number}")
            demo["obs/eye_image"], demo["obs/joints"] = image, joints
            demo["actions"] = (joints[:, :3] + image.mean(axis=(1, 2, 3))[:, None] / 255.0).astype(np.float32)
    execute(sys.executable, "-m", "pitools", "dataset", "ingest", home / "a.hdf5", "--to", home, "--name", "small")
    (path,) = (path for path in (home / "small").iterdir() if not path.name.startswith("."))
    return path


def train(module: str, data: Path, attempt: Path, world_size: int, until: int) -> list[float | None]:
    """Losses of one attempt, of as many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)} | {
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PIT_JOB_SECRET": "aa",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "PIT_WORLD_SIZE": str(world_size),
        "PIT_ATTEMPT_DIR": str(attempt),
        "PIT_DATA_DEMO": str(data),
        "PIT_CHECKPOINT_DIR": str(attempt.parent / "checkpoints"),
    }
    call = f"from pitools.train.{module} import main; main(steps={until}, global_batch_size={BATCH})"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", call],
            stdout=subprocess.DEVNULL,
            env=env | {"PIT_RANK": str(rank), "PIT_LOCAL_RANK": str(rank)},
        )
        for rank in range(world_size)
    ]
    if any(tuple(rank.wait(LIMIT_S) for rank in ranks)):
        sys.exit(f"{module}: a rank of {world_size} failed")
    return [step.loss for step in steps.read_step_log(attempt / "steps" / "0.jsonl")]


def same_batches(data: Path, count: int) -> bool:
    """Whether the parts that each world's ranks are given are together the batches of one process."""
    full = [batch.sample_indices.tolist() for batch in islice(_copies(data, 0, 1), count)]
    for world_size in WORLDS:
        parts = [list(islice(_copies(data, rank, world_size), count)) for rank in range(world_size)]
        if [np.concatenate([part[index].sample_indices for part in parts]).tolist() for index in range(count)] != full:
            return False
    return True


def _copies(data: Path, rank: int, world_size: int) -> Iterator[NumpyBatch]:
    for batch in Loader(DemonstrationDataset(data), global_batch_size=BATCH, rank=rank, world_size=world_size):
        yield batch._replace(sample_indices=batch.sample_indices.copy())


def main() -> int:
    """Both loops."""
    given = arguments(__doc__)
    each, cases = 8 if given.quick else 40, []
    with workspace(given.memory, needed=256 << 20) as home:
        data = dataset(home)
        if not same_batches(data, len(WORLDS) * each):
            sys.exit("the worlds are given other batches")
        for module in ("jax_bc", "torch_bc"):
            alone = train(module, data, home / module / "alone" / "0", 1, len(WORLDS) * each)
            actual: list[float | None] = []
            for number, world_size in enumerate(WORLDS):
                actual += train(module, data, home / module / "shrinks" / str(number), world_size, (number + 1) * each)
            apart = np.abs(np.array(actual, float) - np.array(alone, float))
            worlds = " → ".join(map(str, WORLDS))
            print_progress(
                f"{module} on {worlds} ranks: losses of {len(actual)} steps differ by {apart.max():.1e} at most"
            )
            cases.append(_case(module, worlds, apart))
    return report(cases)


def _case(module: str, worlds: str, apart: np.ndarray) -> Case:
    words = f"{module} resumed on {worlds} ranks, same batches: 1e-5 ÷ largest difference of the loss"
    return from_ratios(
        words, "one process, uninterrupted", pitools.__version__, [CLOSE / max(float(apart.max()), 1e-12)], target=1.0
    )


if __name__ == "__main__":
    sys.exit(main())
