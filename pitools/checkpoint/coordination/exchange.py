"""Messages between the ranks during a save: files in the unpublished folder, with barriers before they are read.

The key-value store carries only the barriers: it is in rank 0's memory, and a plan can be megabytes.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from pitools.checkpoint.coordination.barrier import Barrier, Delete, Get, Put, first_line
from pitools.core.errors import ClusterError, ConfigError, PitError
from pitools.core.record import decode_json

# The ranks' messages, by rank → rank 0's replies, by rank.
ComputeReplies = Callable[[list[bytes]], Sequence[bytes]]


class SaveExchange:
    """The messages of one save. Every rank makes the same calls in the same order; a rank that fails calls `fail`.

    folder: for this save alone, visible to all ranks; created before the first call.
    """

    def __init__(self, barrier: Barrier, name: str, folder: Path) -> None:
        self.rank, self._barrier, self._name, self._folder = barrier.rank, barrier, name, folder
        self._count = 0
        self._reported = False

    def __call__(self, message: bytes = b"", at_rank0: ComputeReplies | None = None) -> bytes:
        """Send a message to rank 0, and return its reply after all ranks have sent theirs; b"" for no reply.

        Raises Unreachable with the missing ranks, ClusterError with another rank's failure, and the errors of
        `at_rank0`.
        """
        if message:
            self._path(self._count + 1, self.rank, "message").write_bytes(message)
        self._count += 1
        self._reported = True
        name = f"{self._name}.{self._count}"
        senders = self._barrier.gather(name, "sent" if message else "")
        if not at_rank0:
            self._reported = False
            return b""
        if self.rank == 0:
            self._reply(at_rank0, [number for number, sent in enumerate(senders) if sent])
        if problem := self._barrier.broadcast(f"{name}.reply"):
            raise ClusterError(problem, where=f"rank {self.rank}", hint="see rank 0's log")
        self._reported = False
        return self._read(self.rank, "reply")

    def fail(self, error: BaseException) -> None:
        """Send this rank's error to the ranks that wait for it, so that they do not wait for their time-out."""
        if self._reported:
            return
        with suppress(PitError):
            self._barrier.wait(f"{self._name}.{self._count + 1}", error)

    def _reply(self, at_rank0: ComputeReplies, senders: list[int]) -> None:
        try:
            if lost := [rank for rank in senders if not self._path(self._count, rank, "message").exists()]:
                problem = f"no files of {self._barrier.format_ranks(lost)} (expected one folder, shared by all nodes)"
                hint = f"on each node: ls {self._folder.parent.parent}"
                raise ClusterError(problem, where=str(self._folder), hint=hint)
            messages = [self._read(rank, "message") for rank in range(self._barrier.world_size)]
            for rank, data in enumerate(at_rank0(messages)):
                if data:
                    self._path(self._count, rank, "reply").write_bytes(data)
        except BaseException as error:
            problem = f"rank 0: {type(error).__name__}: {first_line(error)}"
            self._barrier.broadcast(f"{self._name}.{self._count}.reply", problem)
            raise

    def _path(self, count: int, rank: int, kind: str) -> Path:
        return self._folder / f"{count}.{rank}.{kind}"

    def _read(self, rank: int, kind: str) -> bytes:
        path = self._path(self._count, rank, kind)
        return path.read_bytes() if path.exists() else b""


@contextmanager
def all_or_none(barrier: Barrier, name: str) -> Iterator[None]:
    """Raise at every rank if the block raises at any: the rank's own error, else RemoteRankError."""
    try:
        yield
    except Exception as error:
        with suppress(PitError):
            barrier.wait(name, error)
        raise
    barrier.wait(name)


def handshake(
    put: Put | None,
    get: Get | None,
    delete: Delete | None,
    rank: int,
    world_size: int,
    *,
    timeout_s: float,
) -> tuple[Barrier, str]:
    """Return a barrier that has the ranks' nodes, and a token that only these ranks share.

    Only one may be open in a store. Raises ConfigError, Unreachable.
    """
    if put is None or get is None or delete is None:
        if world_size != 1:
            message = f"put, get or delete: missing ({world_size} ranks need a key-value store that they share)"
            hint = "put, get, delete = torch_store(), of pitools.checkpoint.coordination.torch_store"
            raise ConfigError(message, where="Checkpointer", hint=hint)
        put, get, delete = (lambda _, __: None), (lambda _, __: ""), (lambda _: None)
    prefix = "pit/checkpoint"
    first = Barrier(put, get, rank, world_size, timeout_s=timeout_s, prefix=prefix, delete=delete)
    names = first.gather("begin", os.environ.get("PIT_NODE") or socket.gethostname())
    names_json = first.broadcast("nodes", msgspec.json.encode([secrets.token_hex(4), *names]).decode())
    token, *nodes = decode_json(names_json, list[str])
    barrier = Barrier(put, get, rank, world_size, timeout_s=timeout_s, prefix=prefix, nodes=nodes, delete=delete)
    # All keys from here on contain the token. Those above do not: the next Checkpointer writes them again.
    barrier.wait(f"{token}/connected")
    first.delete_written()
    barrier.broadcast(f"{token}/ready")
    return barrier, token
