"""Ranks all-reduce for real, by sockets, torch and jax, and count every wrong element."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from pitools.node.bench import worker
from pitools.node.bench.collectives import RankPosition, SocketCollective
from pitools.node.bench.worker import RankResult, measure

PROGRAM = """\
import os
from pitools.node.bench import collectives, worker

class Faulty(collectives.{kind}Collective):
    def all_reduce(self, buffer):
        wall_s, sums = super().all_reduce(buffer)
        if os.environ["SLURM_PROCID"] == "1":
            sums = sums + 0
            sums[5] += 1
        return wall_s, sums

worker.main(Faulty)
"""


class Alone(SocketCollective):
    """One rank, whose sums are its own buffer."""

    def __init__(self, wrong: int) -> None:
        self.wrong = wrong

    def all_reduce(self, buffer: Any) -> tuple[float, Any]:
        buffer[: self.wrong] += 1
        return 0.5, buffer


def start(argv: list[str], rank: int, count: int = 2) -> subprocess.Popen[bytes]:
    variables = {"SLURM_PROCID": rank, "SLURM_NTASKS": count, "SLURM_LOCALID": rank, "SLURMD_NODENAME": f"n{rank}"}
    variables["SLURM_LAUNCH_NODE_IPADDR"] = "127.0.0.1"  # type: ignore[assignment]
    if "Jax" in Path(argv[0]).read_text():
        variables["SLURM_LOCALID"] = 0  # of two CPU devices, each process has one
    env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return subprocess.Popen([sys.executable, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)


def pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin
    assert process.stdout
    return process.stdin, process.stdout


@pytest.mark.parametrize(("kind", "count"), [("Torch", 2), ("Jax", 2), ("Socket", 2), ("Socket", 5)])
def test_ranks_measure_and_find_a_wrong_element(tmp_path: Path, kind: str, count: int) -> None:
    """All report each size; the rank whose memory fails counts one wrong element in each of six all-reduces."""
    if kind != "Socket":
        pytest.importorskip(kind.lower())
    path = tmp_path / "rank.py"
    path.write_text(PROGRAM.format(kind=kind))
    ranks = [start([str(path), "--sizes=4096,65536", "--timeout=100"], rank, count) for rank in range(count)]
    try:
        for address in [pipes(rank)[1].readline() for rank in ranks[: count if kind == "Socket" else 1]]:
            for rank in ranks:
                pipes(rank)[0].write(address)
                pipes(rank)[0].flush()
        outputs = [pipes(rank)[1].read() for rank in ranks]  # with stdin open
        assert [rank.wait(120) for rank in ranks] == [0] * count
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    results = [msgspec.json.decode(output, type=RankResult) for output in outputs]
    assert [(result.rank, result.node, result.device) for result in results] == [
        (rank, f"n{rank}", "cpu") for rank in range(count)
    ]
    assert [[size.bytes for size in result.sizes] for result in results] == [[4096, 65536]] * count
    wrong = [[6, 6] if rank == 1 else [0, 0] for rank in range(count)]
    assert [[size.wrong for size in result.sizes] for result in results] == wrong
    assert all(size.wall_s > 0 for result in results for size in result.sizes)


@pytest.mark.parametrize("wrong", [0, 1, 1024])
def test_every_element_is_compared(wrong: int) -> None:
    """In each repetition, the untimed one too."""
    position = RankPosition(rank=0, world_size=1, local_rank=0, node="n", launch_ip="127.0.0.1")
    measured = measure(Alone(wrong), position, 4096)
    assert (measured.wrong, measured.wall_s) == (6 * wrong, 0.5)


def test_a_rank_that_waits_for_ever_ends_by_its_time_out(tmp_path: Path) -> None:
    """Here for an address that nobody sends."""
    path = tmp_path / "rank.py"
    path.write_text(
        "from pitools.node.bench import worker\n"
        "class Mute:\n"
        "    def connect(self, position, exchange_address):\n"
        "        exchange_address(1, 0)\n"
        "worker.main(Mute)\n"
    )
    rank = start([str(path), "--timeout=0.5"], 1)
    try:
        assert rank.wait(60) == 1
    finally:
        rank.kill()
        rank.communicate()


def test_a_rank_ends_with_its_starter(tmp_path: Path) -> None:
    """Its stdin ends, as when `pit` is killed while the ranks work."""
    path = tmp_path / "rank.py"
    path.write_text(
        "import time\n"
        "from pitools.node.bench import worker\n"
        "class Busy:\n"
        "    def connect(self, position, exchange_address):\n"
        "        print(*exchange_address(0, 0))\n"
        "        time.sleep(90)\n"
        "worker.main(Busy)\n"
    )
    rank = start([str(path), "--timeout=100"], 1)
    try:
        rank.communicate(b'{"rank":0,"address":"h:1"}\n', timeout=60)
        assert rank.returncode == 1
    finally:
        rank.kill()
        rank.wait()


def test_without_a_pipe_no_starter_is_waited_for() -> None:
    """A node's own report measures with an empty stdin."""
    code = "from pitools.node.bench.worker import end_with_stdin; end_with_stdin(); print('goes on')"
    done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert done.stdout == b"goes on\n"


def test_the_own_address_is_of_the_network_that_srun_came_by() -> None:
    """No packet is sent, and none must be answered."""
    assert worker.own_ip("127.0.0.1") == "127.0.0.1"
    assert worker.own_ip("::1") == "::1"
