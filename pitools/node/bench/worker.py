"""One rank of a group test: `srun python -m pitools.node.bench.worker`, a rank for each GPU, or for each node without.

Each all-reduce is of a known pattern, and every element of its result is compared: a wrong one is a fault that no
bandwidth shows. The pattern is of whole numbers below 2^24, whose sum in float32 is exact in any order, and differs by
rank and repetition, so that a stale or misplaced buffer is wrong, too.

    a rank that listens   prints {"rank": 0, "address": "host:port"}, of the network that srun came by
    every rank            reads these lines from stdin, where the test's starter repeats them; prints RankResults
    a hang                ends with a traceback after --timeout, by a thread that needs no lock of Python's; the
                          framework's import has a time-out of its own
    no starter            ends the ranks, too: their stdin ends with it
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import queue
import socket
import stat
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from pitools.core.record import Record
from pitools.node.bench.collectives import PERIOD, Collective, RankPosition, choose_collective

CPU_SIZES = (1 << 18, 1 << 24)
GPU_SIZES = (1 << 20, 1 << 26, 1 << 30)
"""Bytes of the buffers."""
_REPEATS = 5
_IMPORT_S = 45.0  # at most, for the framework's files from shared storage
_RANK_PERIOD = 61  # prime, as PERIOD
_MAX_SUM = 1 << 24

C = TypeVar("C", bound=Collective)


class SizeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of one size. wall_s: the median. wrong: elements, of all repetitions, that were not the right ones.

    walls_s: of each repetition; wrong_sources: the ranks that sent them: both of `pit perf collectives` alone.
    """

    bytes: int
    wall_s: float
    wrong: int
    operation: str = "all_reduce"
    walls_s: tuple[float, ...] = ()
    wrong_sources: tuple[int, ...] = ()


class RankResult(Record, frozen=True, kw_only=True, tag="pit.node-bench-rank/1"):
    """What one rank measured. device: `cpu`, or the GPU's name. software: the framework's version."""

    rank: int
    node: str
    framework: str
    device: str
    sizes: tuple[SizeResult, ...]
    software: str = ""


def measure(collective: Collective, position: RankPosition, n_bytes: int) -> SizeResult:
    """All-reduce a buffer of this size repeatedly, the first time untimed, and compare each result."""
    pattern = collective.pattern(n_bytes // 4)
    walls_s, wrong = [], 0
    for repeat in range(_REPEATS + 1):
        offsets = [float((rank + 7 * repeat) % _RANK_PERIOD) for rank in range(position.world_size)]
        wall_s, sums = collective.all_reduce(pattern + offsets[position.rank])
        wrong += int((sums != pattern * float(position.world_size) + sum(offsets)).sum())
        walls_s.append(wall_s)
    return SizeResult(bytes=n_bytes, wall_s=statistics.median(walls_s[1:]), wrong=wrong)


def bus_bandwidth(n_bytes: int, wall_s: float, world_size: int) -> float:
    """Return an all-reduce's bus bandwidth, bytes/s, as nccl-tests define it: comparable between numbers of ranks."""
    return 2 * (world_size - 1) / world_size * n_bytes / max(wall_s, 1e-9)


def read_position(environ: Mapping[str, str]) -> RankPosition:
    """Return this task's position from srun's variables. Raises KeyError without them."""
    return RankPosition(
        rank=int(environ["SLURM_PROCID"]),
        world_size=int(environ["SLURM_NTASKS"]),
        local_rank=int(environ["SLURM_LOCALID"]),
        node=environ["SLURMD_NODENAME"],
        launch_ip=environ["SLURM_LAUNCH_NODE_IPADDR"],
    )


def own_ip(launch_ip: str) -> str:
    """Return this host's address on the network of another's; no packet is sent. Raises OSError."""
    family = socket.AF_INET6 if ":" in launch_ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((launch_ip, 9))
        return str(probe.getsockname()[0])


def _set_interface(ip: str) -> None:
    """Have gloo use the interface of an address: it takes that of the host name, in Debian often 127.0.1.1."""
    import psutil

    names = [name for name, at in psutil.net_if_addrs().items() if any(one.address == ip for one in at)]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


def start_rank(name: str, **arguments: dict[str, Any]) -> argparse.Namespace:
    """Return the options of a program that srun starts, with --timeout, from which on it ends itself.

    name: of its module. arguments: of argparse's add_argument, by name.
    """
    parser = argparse.ArgumentParser(prog=f"pitools.{name}")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds")
    for argument, keywords in arguments.items():
        parser.add_argument(argument, **keywords)
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.timeout, exit=True)
    return options


def end_with_stdin(on_line: Callable[[bytes], object] = lambda _: None) -> None:
    """Call a function with each line of stdin, if that is a pipe, and end this process with it: the starter is gone."""
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return
    with open(0, "rb", buffering=0, closefd=False) as lines:  # sys.stdin has a lock, held while the interpreter exits
        for line in lines:
            on_line(line)
    os._exit(1)


def main(make_collective: Callable[[], Collective] = choose_collective) -> None:
    """Run this rank to its end."""
    options = start_rank("node.bench.worker", **{"--sizes": {"default": "", "help": "bytes, with commas between"}})

    def measure_sizes(collective: Collective, position: RankPosition) -> Iterator[tuple[SizeResult, ...]]:
        on_gpu = collective.device != "cpu"
        sizes = [int(size) for size in options.sizes.split(",") if size] or (GPU_SIZES if on_gpu else CPU_SIZES)
        yield tuple(measure(collective, position, size) for size in sizes)

    run_rank(options.timeout, make_collective, measure_sizes)


def run_rank(
    timeout_s: float,
    make_collective: Callable[[], C],
    measure_sizes: Callable[[C, RankPosition], Iterable[tuple[SizeResult, ...]]],
) -> None:
    """Join the other ranks, and print what this one measures. Ends the process after the time-out.

    measure_sizes: yields what one RankResult holds: a line of at most 1,024 bytes, so that slurmstepd keeps it whole.
    """
    faulthandler.dump_traceback_later(_IMPORT_S + timeout_s, exit=True)
    stdin = queue.SimpleQueue[bytes]()
    threading.Thread(target=end_with_stdin, args=(stdin.put,), daemon=True).start()
    # Libraries print to stdout, as NCCL does: it is for our lines alone.
    results = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    position = read_position(os.environ)
    if position.world_size * (PERIOD + _RANK_PERIOD) > _MAX_SUM:
        raise SystemExit(f"{position.world_size} ranks: too many for exact sums")
    ip = own_ip(position.launch_ip)
    _set_interface(ip)

    def exchange_address(port: int, rank: int) -> tuple[str, int]:
        if port:
            results.write(msgspec.json.encode({"rank": position.rank, "address": f"{ip}:{port}"}) + b"\n")
        while (line := msgspec.json.decode(stdin.get()))["rank"] != rank:
            pass
        host, _, text = line["address"].rpartition(":")
        return host, int(text)

    collective = make_collective()
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    collective.connect(position, exchange_address)
    for sizes in measure_sizes(collective, position):
        result = RankResult(
            rank=position.rank,
            node=position.node,
            framework=collective.name,
            device=collective.device,
            sizes=sizes,
            software=collective.software,
        )
        results.write(msgspec.json.encode(result) + b"\n")
    collective.close()


if __name__ == "__main__":
    main()
