"""Real states of JAX and torch, sharded over two processes, saved, damaged, and restored by two and by one."""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pitools.checkpoint import find, layout, verify
from pitools.core.errors import DataError

LIMIT_S = 90
FOREIGN = ("PIT_", "SLURM_", "JAX_", "XLA_", "CUDA_", "MASTER_", "NPROC", "RANK", "WORLD_SIZE", "LOCAL_RANK")
Start = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture(params=["jax", "torch"])
def framework(request: pytest.FixtureRequest) -> str:
    """One that is installed."""
    pytest.importorskip(request.param, reason="this framework is not installed")
    return str(request.param)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts ranks: `start(framework, folder, "1,2", world_size)`; each restores, checks what came, saves the steps."""
    begun: list[subprocess.Popen[str]] = []

    def begin(framework: str, folder: Path, steps: str, world_size: int) -> list[subprocess.Popen[str]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)} | {
            "PIT_WORLD_SIZE": str(world_size), "PIT_NONCE": "aa", "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2",
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        argv = [sys.executable, str(Path(__file__).with_name("ranks.py")), framework, str(folder), steps, "3"]
        for rank in range(world_size):
            own = env | {"PIT_RANK": str(rank), "PIT_LOCAL_RANK": str(rank)}
            begun.append(subprocess.Popen(argv, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return begun[-world_size:]

    yield begin
    for process in begun:
        with process:
            process.kill()


def ended(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What each rank said, after all have ended well."""
    said = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)
    return said


def test_two_save_and_two_and_one_restore(framework: str, start: Start, folder: Path) -> None:
    """Sharded, replicated and plain values come back, at the same world size and at another, where they belong.

    Each state is written over as soon as `save` returns. Of the newest a bit is flipped: both take the one before.
    """
    assert ended(start(framework, folder, "1,2", 2)) == ["restored None\n"] * 2
    assert find.whole(folder) == [2, 1]
    assert not verify.check(folder / "step_2")
    names = {path.name for path in (folder / "step_2" / "payload").iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp"} <= names or {"ocdbt.process_0", "ocdbt.process_1"} <= names
    files = (path for path in (folder / "step_2" / "payload").rglob("*") if path.is_file())
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    one = ended(start(framework, folder, "4", 1))
    assert "moved to" in one[0]
    assert "restored 1" in one[0]
    if framework == "jax":  # two ranks of torch cost 10 s; perf/bench_checkpoint_resize.py goes up and down with both
        assert ended(start(framework, folder, "", 2)) == ["restored 4\n"] * 2


@pytest.mark.parametrize("framework", ["jax", pytest.param("torch", marks=pytest.mark.slow)], indirect=True)
def test_a_peer_s_death_in_a_save_is_named(framework: str, start: Start, folder: Path) -> None:
    """kill -9 of one rank while all save again and again: the other ends soon, and what is there is whole and good."""
    steps = ",".join(map(str, range(1, 2000)))
    ranks = start(framework, folder, steps, 2)
    deadline = time.monotonic() + LIMIT_S
    while find.newest(folder) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ranks[1].send_signal(signal.SIGKILL)
    said = ranks[0].communicate(timeout=60)[0]
    assert ranks[0].returncode != 0
    assert "rank 1" in said, said
    assert find.newest(folder) >= 3
    for step in find.whole(folder):
        assert not verify.check(layout.step_path(folder, step))


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(4))
def test_a_kill_of_all_at_any_moment(framework: str, start: Start, folder: Path, moment: int) -> None:
    """kill -9 of both ranks at some moment of some save, twice: what is there is good, and saving goes on from it."""
    rng, newest = random.Random(moment), 0
    for _ in range(2):
        ranks = start(framework, folder, ",".join(map(str, range(newest + 1, newest + 500))), 2)
        deadline = time.monotonic() + LIMIT_S
        while find.newest(folder) < newest + 1:
            assert time.monotonic() < deadline
            assert ranks[0].poll() is None, ranks[0].communicate()
            time.sleep(0.002)
        time.sleep(rng.random() * 0.3)
        for rank in rng.sample(ranks, 2):
            rank.send_signal(signal.SIGKILL)
            rank.communicate(timeout=60)
        assert find.newest(folder) > newest
        newest = find.newest(folder)
        assert (folder / "latest").exists()
        for step in find.whole(folder):
            assert not verify.check(layout.step_path(folder, step))
    said = ended(start(framework, folder, str(newest + 1), 1))
    assert f"restored {newest}" in said[0]
    assert not layout.left_over(folder)


NOTEBOOK = """
import asyncio, sys
from pathlib import Path
import numpy as np
from pitools.checkpoint.guard import Guard
from pitools.checkpoint.orbax import Orbax

async def cell():
    with Guard(Path(sys.argv[1]), Orbax()) as guard:
        guard.save(1, {"w": np.arange(4.0)})
        guard.wait()
        print(guard.restore({"w": np.zeros(4)}).state["w"].tolist())

asyncio.run(cell())
"""


def test_a_save_in_an_event_loop(folder: Path) -> None:
    """A notebook's cells run in one: orbax is given one of its own."""
    pytest.importorskip("jax", reason="this framework is not installed")
    # In a process of its own: once JAX has a backend, every fork of this one would warn.
    argv = [sys.executable, "-c", NOTEBOOK, str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout == "[0.0, 1.0, 2.0, 3.0]\n", done.stderr


def test_a_pickle_that_calls_is_refused(folder: Path) -> None:
    """DCP's index is a pickle: one that names a function is an error, and nothing is called."""
    torch = pytest.importorskip("torch", reason="this framework is not installed")
    from pitools.checkpoint.dcp import Dcp

    class Call:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (folder / "called",)

    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Call()))
    with pytest.raises(DataError, match="no place in a checkpoint"):
        Dcp().load(folder, {"w": torch.zeros(1)})
    assert not (folder / "called").exists()
