"""A loop of short steps on several ranks, which injects losses and records them by its own clock.

The entry of requests: `faulty_steps:main`. Steps sleep, ranks wait for each other at a socket, saves are those of
pitools' own Checkpointer, whose copy takes as long as asked. The truth of each step is a line of
`<attempt>/truth/<rank>.jsonl`: when it began, arrived where ranks wait, and ended (Unix time), and the seconds of each
loss that it had.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

STEP_S = 0.05
ENOUGH, SIGNALLED = 1, 2  # why the ranks end together


class CounterAdapter:
    """A checkpoint of one number; begin_save blocks for `save_s`."""

    format = "files"

    def __init__(self, save_s: float) -> None:
        self.save_s = save_s

    def describe(self, state: Any) -> dict[str, str]:
        """As FrameworkAdapter."""
        return {name: type(value).__name__ for name, value in state.items()}

    def begin_save(self, state: Any, payload_dir: Future[Path]) -> Callable[[Any], None]:
        """As FrameworkAdapter."""
        time.sleep(self.save_s)
        text = json.dumps(state)

        def write(exchange: Any) -> None:
            def at_rank0(_: Any) -> list[bytes]:
                (payload_dir.result() / "state.json").write_text(text)
                return []

            exchange(at_rank0=at_rank0)

        return write

    def load(self, payload: Path, like: Any) -> Any:
        """As FrameworkAdapter."""
        return json.loads((payload / "state.json").read_text())

    def rank_of_file(self, path: str, world_size: int) -> int:
        """As FrameworkAdapter."""
        return 0

    def random_state(self) -> dict[str, Any]:
        """As FrameworkAdapter."""
        return {}

    def set_random_state(self, states: dict[str, Any]) -> None:
        """As FrameworkAdapter."""


class FileStore:
    """A key-value store in a folder, for the Checkpointer's barriers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "%")

    def put(self, key: str, value: str) -> None:
        """Set a key."""
        temporary = self._folder / f".{os.urandom(8).hex()}"
        temporary.write_text(value)
        temporary.rename(self._path(key))

    def get(self, key: str, timeout_s: float) -> str:
        """Wait for a key. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                return self._path(key).read_text()
            time.sleep(0.002)
        raise TimeoutError(key)

    def delete(self, key: str) -> None:
        """Remove a key."""
        self._path(key).unlink(missing_ok=True)


@contextlib.contextmanager
def barrier(rank: int, world: int, name: str) -> Iterator[Callable[[int], int]]:
    """Yield a function that waits for all ranks, and returns the greatest of their numbers. Ranks share a host."""
    address = f"\0pit-{name}"
    if rank == 0:
        server = socket.socket(socket.AF_UNIX)
        server.bind(address)
        server.listen(world)
        peers = [server.accept()[0] for _ in range(world - 1)]
    else:
        peers = [socket.socket(socket.AF_UNIX)]
        while peers[0].connect_ex(address):
            time.sleep(0.01)

    def wait(number: int) -> int:
        if rank:
            peers[0].sendall(bytes([number]))
            return _read(peers[0])
        greatest = max([number, *map(_read, peers)])
        for peer in peers:
            peer.sendall(bytes([greatest]))
        return greatest

    yield wait


def _read(peer: socket.socket) -> int:
    if not (answer := peer.recv(1)):
        raise ConnectionError("a rank is gone")
    return answer[0]


def main(
    *,
    steps: int = 100,
    save_every: int = 0,
    save_s: float = 0.0,
    compile_s: float = 0.0,
    input_s: float = 0.0,
    slow_s: float = 0.0,
    slow_rank: int = 0,
    pause_s: float = 0.0,
    saves_at_signal: bool = True,
    until_goodput: float = 0.0,
) -> None:
    """Make steps. input_s, slow_s: in each step of one rank, for its batch or its computation. pause_s: between two
    steps, once. until_goodput: end once a resumed run's steps are this share of the time since its first attempt."""
    from pitools.checkpoint.checkpointer import Checkpointer
    from pitools.run.steps import StepLog, Stopwatch

    stopped: list[int] = []
    if saves_at_signal:
        signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    rank, world = int(os.environ["PIT_RANK"]), int(os.environ["PIT_WORLD_SIZE"])
    attempt = Path(os.environ["PIT_ATTEMPT_DIR"])
    store, adapter = FileStore(attempt / "store"), CounterAdapter(save_s)
    truth = attempt / "truth" / f"{rank}.jsonl"
    truth.parent.mkdir(exist_ok=True)
    is_slow = rank == slow_rank
    productive, began_at = 0.0, (attempt.parent / "0" / "start.json").stat().st_mtime
    with (
        Checkpointer(
            Path(os.environ["PIT_CHECKPOINT_DIR"]), adapter, rank=rank, world_size=world, put=store.put, get=store.get,
            delete=store.delete, run=attempt.parent.parent.name,
        ) as checkpointer,
        barrier(rank, world, f"{attempt.parent.parent.name}-{attempt.name}") as wait,
        truth.open("ab", buffering=0) as file,
    ):  # fmt: skip
        restored = checkpointer.restore({"step": 0, "productive": 0.0})
        first = restored.step if restored else 0
        productive = restored.state["productive"] if restored else 0.0
        log = StepLog(attempt / "steps", rank)
        wait(0)
        end = 0
        for step in range(first, steps):
            if step == steps // 2:
                time.sleep(pause_s)
            began, watch, losses = time.time(), Stopwatch(), {}
            if is_slow and input_s:
                losses["input"] = _sleep(input_s)
            for_input_s = watch.lap()
            if step == 0 and compile_s:
                losses["compile"] = _sleep(compile_s)
            if is_slow and slow_s:
                losses["slow"] = _sleep(slow_s)
            time.sleep(STEP_S)
            compute_s = watch.lap()
            productive += STEP_S
            is_enough = bool(until_goodput) and first > 0 and productive > until_goodput * (time.time() - began_at)
            arrived = time.time()
            end = wait(SIGNALLED if stopped else ENOUGH if is_enough else 0)
            comm_s, checkpoint_s = watch.lap(), 0.0
            if end == SIGNALLED or (save_every and (step + 1) % save_every == 0):
                save_began = time.time()
                checkpointer.save(step + 1, {"step": step + 1, "productive": productive})
                losses["save"], checkpoint_s = time.time() - save_began, watch.lap()
            ended = time.time()
            log.write(
                step=step, loss=1.0, wall_s=ended - began, input_s=for_input_s, compute_s=compute_s, comm_s=comm_s,
                rank_samples=1, checkpoint_s=checkpoint_s,
            )  # fmt: skip
            record = {"step": step, "begin": began, "arrived": arrived, "end": ended, **losses}
            file.write(json.dumps(record).encode() + b"\n")
            if end:
                break
        log.close()
    if end == SIGNALLED:
        raise SystemExit(128 + signal.SIGTERM)


def _sleep(seconds: float) -> float:
    began = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - began
