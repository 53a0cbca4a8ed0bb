"""Real states of JAX and torch, sharded over two processes, saved, damaged, and restored by two and by one."""

from __future__ import annotations

import pickle
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from pitools.checkpoint.store import layout, lookup, verify
from pitools.core.errors import DataError
from tests.train import forked_ranks

LIMIT_S = 90
Start = Callable[..., list["Ran"]]


class Ran(NamedTuple):
    """One rank, and what it says."""

    process: forked_ranks.Fork
    out: Path

    def ended(self, limit_s: float = LIMIT_S) -> str:
        """All it said, when it has ended."""
        self.process.wait(limit_s)
        return self.out.read_text()


@pytest.fixture(params=["jax", "torch"])
def framework(request: pytest.FixtureRequest) -> str:
    """One that is installed."""
    pytest.importorskip(request.param, reason="this framework is not installed")
    return str(request.param)


@pytest.fixture(scope="session")
def server() -> Iterator[Callable[[str], forked_ranks.Server]]:
    """A server of forks, by framework."""
    yield from forked_ranks.servers()


@pytest.fixture
def start(server: Callable[[str], forked_ranks.Server], tmp_path: Path) -> Iterator[Start]:
    """Starts ranks: `start(framework, folder, "1,2", world_size)`; each restores, checks what came, saves the steps."""
    begun: list[Ran] = []

    def begin(framework: str, folder: Path, steps: str, world_size: int) -> list[Ran]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        env = forked_ranks.environment() | {
            "PIT_WORLD_SIZE": str(world_size),
            "PIT_JOB_SECRET": "aa",
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        argv = [str(Path(__file__).with_name("rank_process.py")), framework, str(folder), steps, "3"]
        for rank in range(world_size):
            own = env | {"PIT_RANK": str(rank), "PIT_LOCAL_RANK": str(rank)}
            out = tmp_path / f"{len(begun)}.out"
            begun.append(Ran(server(framework).start(as_script(argv), own, out), out))
        return begun[-world_size:]

    yield begin
    for rank in begun:
        rank.process.kill()
        rank.process.wait(LIMIT_S)


def as_script(argv: Sequence[str]) -> str:
    """Code that runs a script with its arguments."""
    return f"import runpy, sys; sys.argv = {argv!r}; runpy.run_path(sys.argv[0], run_name='__main__')"


def ended(ranks: list[Ran]) -> list[str]:
    """What each rank said, after all have ended well."""
    output = [rank.ended() for rank in ranks]
    assert [rank.process.returncode for rank in ranks] == [0] * len(ranks), "\n".join(output)
    return output


def test_two_save_and_two_and_one_restore(framework: str, start: Start, folder: Path) -> None:
    """Sharded, replicated and plain values come back, at the same world size and at another, where they belong.

    Each state is written over as soon as `save` returns. Of the newest a bit is flipped: both take the one before.
    """
    assert ended(start(framework, folder, "1,2", 2)) == ["restored None\n"] * 2
    assert lookup.complete_steps(folder) == [2, 1]
    assert not verify.verify_checkpoint(folder / "step_2")
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
    assert ended(start(framework, folder, "", 2)) == ["restored 4\n"] * 2


def test_a_peer_s_death_in_a_save_is_named(framework: str, start: Start, folder: Path) -> None:
    """kill -9 of one rank while all save again and again: the other ends soon, and what is there is whole and good."""
    steps = ",".join(map(str, range(1, 2000)))
    ranks = start(framework, folder, steps, 2)
    deadline = time.monotonic() + LIMIT_S
    while (lookup.latest_step(folder) or 0) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ranks[1].process.send_signal(signal.SIGKILL)
    output = ranks[0].ended(60)
    assert ranks[0].process.returncode != 0
    assert "rank 1" in output, output
    assert lookup.latest_step(folder) >= 3
    for step in lookup.complete_steps(folder):
        assert not verify.verify_checkpoint(layout.step_path(folder, step))


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(4))
def test_a_kill_of_all_at_any_moment(framework: str, start: Start, folder: Path, moment: int) -> None:
    """kill -9 of both ranks at some moment of some save, twice: what is there is good, and saving goes on from it."""
    rng, newest = random.Random(moment), 0
    for _ in range(2):
        ranks = start(framework, folder, ",".join(map(str, range(newest + 1, newest + 500))), 2)
        deadline = time.monotonic() + LIMIT_S
        while (lookup.latest_step(folder) or 0) < newest + 1:
            assert time.monotonic() < deadline
            assert ranks[0].process.poll() is None, ranks[0].ended()
            time.sleep(0.002)
        time.sleep(rng.random() * 0.3)
        for rank in rng.sample(ranks, 2):
            rank.process.send_signal(signal.SIGKILL)
            rank.ended(60)
        assert lookup.latest_step(folder) > newest
        newest = lookup.latest_step(folder)
        assert (folder / "latest").exists()
        for step in lookup.complete_steps(folder):
            assert not verify.verify_checkpoint(layout.step_path(folder, step))
    output = ended(start(framework, folder, str(newest + 1), 1))
    assert f"restored {newest}" in output[0]
    assert not layout.leftovers(folder)


NOTEBOOK = """
import asyncio, sys, threading
from pathlib import Path
import jax, numpy as np
from pitools.checkpoint.store import layout
from pitools.checkpoint.checkpointer import Checkpointer
from pitools.checkpoint.adapters.orbax_adapter import OrbaxAdapter
from pitools.core.errors import NoSpace

go, real = threading.Event(), layout.create_payload_dir

def made(place):
    assert go.wait(10)
    if place.name.startswith(".step_2."):
        raise NoSpace("no inodes left", where=str(place))
    return real(place)

layout.create_payload_dir = made

async def cell():
    zeros = {"w": np.zeros(4), "v": jax.numpy.zeros(3)}
    with Checkpointer(Path(sys.argv[1]), OrbaxAdapter()) as checkpointer:
        state = {"w": np.arange(4.0), "v": jax.numpy.arange(3.0)}
        checkpointer.save(1, state)
        state["w"][:] = -1
        jax.block_until_ready(jax.jit(lambda v: v * 0 - 1, donate_argnums=0)(state["v"]))
        go.set()
        checkpointer.wait()
        before = {*threading.enumerate()}
        checkpointer.save(2, zeros)
        try:
            checkpointer.wait()
        except NoSpace as error:
            print(error.message, {*threading.enumerate()} - before)
        found = checkpointer.restore(zeros).state
        print(found["w"].tolist(), found["v"].tolist())

asyncio.run(cell())
"""


def test_a_save_in_an_event_loop(server: Callable[[str], forked_ranks.Server], folder: Path, tmp_path: Path) -> None:
    """A notebook's cells run in one: orbax is given one of its own. The cell goes on while there is no folder yet, and
    its arrays are its own again; where none can be made it is told, and no thread of orbax's
    goes on: at Python's end that may abort it.
    """
    pytest.importorskip("jax", reason="this framework is not installed")
    # In a process of its own: once JAX has a backend, every fork of this one would warn.
    code = f"import sys; sys.argv = ['', {str(folder)!r}]\n{NOTEBOOK}"
    cell = Ran(server("jax").start(code, forked_ranks.environment(), tmp_path / "out"), tmp_path / "out")
    lines = ended([cell])[0].splitlines()
    assert {"no inodes left set()", "[0.0, 1.0, 2.0, 3.0] [0.0, 1.0, 2.0]"} <= set(lines), lines


def test_a_pickle_that_calls_is_refused(folder: Path) -> None:
    """DCP's index is a pickle: one that names a function is an error, and nothing is called."""
    torch = pytest.importorskip("torch", reason="this framework is not installed")
    from pitools.checkpoint.adapters.dcp_adapter import DcpAdapter

    class Call:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (folder / "called",)

    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Call()))
    with pytest.raises(DataError, match="not allowed"):
        DcpAdapter().load(folder, {"w": torch.zeros(1)})
    assert not (folder / "called").exists()


NUMBER = """
import sys
from pathlib import Path

import jax

from pitools.checkpoint.adapters.orbax_adapter import OrbaxAdapter
from pitools.checkpoint.checkpointer import Checkpointer

with Checkpointer(Path(sys.argv[1]), OrbaxAdapter()) as checkpointer:
    assert checkpointer.restore({"step": 0}) is None
    checkpointer.save(7, {"step": jax.numpy.int32(7)})
    checkpointer.wait()
    print(int(checkpointer.restore({"step": 0}).state["step"]))
"""


def test_a_number_that_becomes_an_array_is_the_same_leaf(
    server: Callable[[str], forked_ranks.Server], folder: Path, tmp_path: Path
) -> None:
    """The step of a new TrainState is a Python number, then a 0-d array: each restores the other."""
    pytest.importorskip("jax", reason="this framework is not installed")
    code = f"import sys; sys.argv = ['', {str(folder)!r}]\n{NUMBER}"
    rank = Ran(server("jax").start(code, forked_ranks.environment(), tmp_path / "out"), tmp_path / "out")
    assert ended([rank]) == ["7\n"]
