"""Jobs as a launcher starts them: one process a rank, with its environment set, on loopback."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest

from pitools.dataset.ingest.ingest import ingest
from pitools.run import steps
from tests.train import forked_ranks

LIMIT_S = 120


def write_recording(path: Path, lengths: Sequence[int], *, size: int = 16, seed: int = 0) -> Path:
    """A robomimic file of noise, whose actions follow from what is seen; its first demo is the split `valid`."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(4, 3))
    with h5py.File(path, "w") as file:
        for i, length in enumerate(lengths):
            demo = file.create_group(f"data/demo_{i}")
            image = rng.integers(0, 256, (length, size, size, 3), np.uint8)
            proprio = rng.normal(3.0, 0.1, (length, 4))
            demo["obs/eye_image"], demo["obs/joints"] = image, proprio
            demo["obs/depth"] = np.zeros((length, size, size), np.float32)
            demo["actions"] = (proprio @ mixing + image.mean(axis=(1, 2, 3))[:, None] / 255.0).astype(np.float32)
        names = [f"demo_{i}" for i in range(len(lengths))]
        file["mask/train"], file["mask/valid"] = np.array(names[1:], "S"), np.array(names[:1], "S")
    return path


@pytest.fixture(scope="session")
def recording() -> Callable[..., Path]:
    """Writes a small robomimic file."""
    return write_recording


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version of 60 steps to learn from, and 10 not to."""
    folder = tmp_path_factory.mktemp("small")
    return Path(ingest([write_recording(folder / "a.hdf5", (10, 25, 35))], root=folder / "data", name="small").path)


class Job:
    """The processes of one job, and what they left in its folder."""

    def __init__(
        self,
        server: forked_ranks.Server,
        folder: Path,
        module: str,
        data: Path | Sequence[Path],
        secrets: Sequence[str],
        args: dict[str, object],
        *,
        checkpoints: bool = True,
    ) -> None:
        self.folder, places = folder, [data] * len(secrets) if isinstance(data, Path) else data
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {
            **forked_ranks.environment(),
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "PIT_WORLD_SIZE": str(len(secrets)),
            "PIT_ATTEMPT_DIR": str(folder),
            "PIT_CHECKPOINT_DIR": str(folder.parent / "checkpoints") if checkpoints else "",
        }
        folder.mkdir(parents=True)
        call = f"from pitools.train.{module} import main; main(**{args!r})"
        self.processes = []
        for rank, secret in enumerate(secrets):
            env = {**shared, "PIT_RANK": str(rank), "PIT_LOCAL_RANK": str(rank), "PIT_JOB_SECRET": secret}
            env["PIT_DATA_DEMO"] = str(places[rank])
            self.processes.append(server.start(call, env, folder / f"{rank}.out"))

    def wait(self) -> list[int]:
        """Exit codes by rank."""
        deadline = time.monotonic() + LIMIT_S
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]

    def ok(self) -> Job:
        """Itself, after every rank has ended well and said nothing that reads like trouble."""
        assert self.wait() == [0] * len(self.processes), self.text()
        assert "Traceback" not in self.text()
        assert "rror" not in self.text()
        return self

    def log(self, rank: int = 0) -> list[steps.Step]:
        """The step log of a rank so far."""
        path = self.folder / "steps" / f"{rank}.jsonl"
        return steps.read_step_log(path) if path.exists() else []

    def losses(self, rank: int = 0) -> list[float]:
        """The losses a rank has logged."""
        return [step.loss for step in self.log(rank)]

    def text(self, rank: int | None = None) -> str:
        """What a rank printed, or all of them."""
        ranks = range(len(self.processes)) if rank is None else (rank,)
        return "".join((self.folder / f"{number}.out").read_text() for number in ranks)

    def kill(self) -> None:
        """End what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture(scope="session")
def server() -> Iterator[Callable[[str], forked_ranks.Server]]:
    """A server of forks, by framework."""
    yield from forked_ranks.servers()


@pytest.fixture(scope="session")
def start(server: Callable[[str], forked_ranks.Server]) -> Iterator[Callable[..., Job]]:
    """Starts a job: `start(folder, module, data, ["secret"] * ranks, steps=…)`. `folder` is that of the attempt;
    `data` one place, or each rank's."""
    jobs = []

    def begin(
        folder: Path,
        module: str,
        data: Path | Sequence[Path],
        secrets: Sequence[str] = ("aa",),
        *,
        checkpoints: bool = True,
        **args: object,
    ) -> Job:
        framework = server(module.removesuffix("_bc"))
        jobs.append(Job(framework, folder, module, data, secrets, args, checkpoints=checkpoints))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()
