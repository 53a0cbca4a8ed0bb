"""Named barriers with a time-out over a key-value store; an error names the missing ranks.

Rank 0 collects the ranks' messages and publishes one result, so that either all ranks continue or all raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from pitools.core.errors import ClusterError, Unreachable
from pitools.core.record import decode_json

# Rank 0 may itself be late by a barrier's whole time-out, and only then publishes the result.
_SLACK_S = 10.0
_MAX_NAMED = 16
# Keys left in the store before they are deleted: deleted one by one they would cost as much as a short save.
_MAX_WRITTEN_KEYS = 1000


Put = Callable[[str, str], None]
# (key, seconds) → its value once it is set. Raises TimeoutError when it is not set in time.
Get = Callable[[str, float], str]
Delete = Callable[[str], None]


def store_gone_error(error: Exception, where: str) -> Unreachable:
    """Return the error for a key-value store that no longer answers. where: its address."""
    problem = f"rank 0 no longer answers: {first_line(error)}"
    return Unreachable(problem, where=where, hint="see the log of rank 0, which runs the ranks' store")


class RemoteRankError(ClusterError):
    """A failure of another rank, raised at all ranks. error_kind: class name of that rank's error."""

    def __init__(self, message: str, *, where: str = "", hint: str = "", error_kind: str = "") -> None:
        super().__init__(message, where=where, hint=hint)
        self.error_kind = error_kind


class _RankMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank's message, as JSON. error_kind: class name of its error, "" for none."""

    value: str = ""
    error: str = ""
    error_kind: str = ""


class BarrierResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rank 0's result for all, as JSON. missing, failed: ranks. error, error_kind: of the rank that failed."""

    missing: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    error: str = ""
    error_kind: str = ""


class Barrier:
    """Barrier, gather and broadcast over the ranks of one job.

    put, get, delete: of a store that all ranks share; a key is written once, and deleted by rank 0 after every rank
    has read it. nodes: of each rank, if known. timeout_s: how long the first rank waits for the last, seconds.
    """

    def __init__(
        self,
        put: Put,
        get: Get,
        rank: int,
        world_size: int,
        *,
        timeout_s: float = 600.0,
        nodes: Sequence[str] = (),
        prefix: str = "pit/barrier",
        delete: Delete | None = None,
    ) -> None:
        self._put, self._get, self._delete = put, get, delete
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._nodes, self._prefix = nodes, prefix
        self._written: list[str] = []  # rank 0's: keys that some rank may not have read yet

    def wait(self, name: str, error: BaseException | None = None) -> None:
        """Return when every rank has called this without an error.

        name: unique, the same at all ranks. error: of this rank; every rank then raises its first line, as soon as the
        ranks of lower number have called this, at the latest after the time-out. Raises Unreachable with the missing
        ranks and their nodes, RemoteRankError with the first rank that failed.
        """
        self.gather(name, "", error=error)

    def gather(self, name: str, value: str, *, error: BaseException | None = None) -> list[str]:
        """Wait as `wait` does; return the values of all ranks, in order, at rank 0, and [] at the others."""
        message = _RankMessage(value, first_line(error), type(error).__name__) if error else _RankMessage(value)
        if self.world_size == 1:
            self._raise_error(name, self._combine_errors([message]))
            return [value]
        if self.rank:
            self._put(f"{self._prefix}/{name}/{self.rank}", _encoded(message))
            self._raise_error(name, decode_json(self._read_from_rank0(name, "verdict"), BarrierResult))
            return []
        # After an error here there is nothing to wait for.
        messages = [message] if error else self._collect(name, message)
        verdict = self._combine_errors(messages)
        is_complete = len(messages) == self.world_size and not verdict.missing
        self._publish_result(name, verdict, is_complete=is_complete)
        self._raise_error(name, verdict)
        return [reply.value for reply in messages if reply]

    def report(self, name: str, error: BaseException) -> None:
        """Send this rank's error to the ranks that wait, or will wait, with this name; do not wait for them."""
        message = _RankMessage("", first_line(error), type(error).__name__)
        if self.rank:
            self._put(f"{self._prefix}/{name}/{self.rank}", _encoded(message))
        elif self.world_size > 1:
            self._publish_result(name, self._combine_errors([message]))

    def broadcast(self, name: str, value: str = "") -> str:
        """Return rank 0's value at every rank. Raises Unreachable on a time-out."""
        if self.world_size == 1:
            return value
        if self.rank == 0:
            self._put(f"{self._prefix}/{name}/broadcast", value)
            self._written.append(f"{self._prefix}/{name}/broadcast")
            return value
        return self._read_from_rank0(name, "broadcast")

    @property
    def second_node_rank(self) -> int | None:
        """Return the first rank on another node than rank 0's; None for one node, or when nodes are not known."""
        return next((rank for rank, node in enumerate(self._nodes) if node != self._nodes[0]), None)

    def delete_written(self) -> None:
        """Delete the keys of all earlier calls, at rank 0; every rank must have read them."""
        keys, self._written = self._written, []
        if self._delete:
            for key in keys:
                self._delete(key)

    def _publish_result(self, name: str, verdict: BarrierResult, *, is_complete: bool = False) -> None:
        """Publish rank 0's result. is_complete: every rank is here, and so has read the keys of all earlier calls."""
        self._put(f"{self._prefix}/{name}/verdict", _encoded(verdict))
        if is_complete and len(self._written) > _MAX_WRITTEN_KEYS:
            self.delete_written()
        self._written += [f"{self._prefix}/{name}/{rank}" for rank in (*range(1, self.world_size), "verdict")]

    def _collect(self, name: str, own_message: _RankMessage) -> list[_RankMessage | None]:
        """Return each rank's message, up to the first with an error; None for those missing after the time-out."""
        deadline = time.monotonic() + self.timeout_s
        messages: list[_RankMessage | None] = [own_message]
        for rank in range(1, self.world_size):
            try:
                # After the time-out, messages already there are still read: the list of missing ranks has to be right.
                text = self._get(f"{self._prefix}/{name}/{rank}", max(deadline - time.monotonic(), 0.05))
                messages.append(message := decode_json(text, _RankMessage))
            except TimeoutError:
                messages.append(None)
            else:
                if message.error_kind:
                    break
        return messages

    @staticmethod
    def _combine_errors(messages: Sequence[_RankMessage | None]) -> BarrierResult:
        missing = tuple(rank for rank, message in enumerate(messages) if not message)
        failed = {rank: message for rank, message in enumerate(messages) if message and message.error_kind}
        first = next(iter(failed.values()), _RankMessage())
        return BarrierResult(missing, tuple(failed), first.error, first.error_kind)

    def _raise_error(self, name: str, verdict: BarrierResult) -> None:
        missing = self.format_ranks(verdict.missing)
        if verdict.failed:  # before the missing ones: they may wait for the failed rank
            kind = verdict.error_kind
            problem = f"{self.format_ranks(verdict.failed)}: {kind}: {verdict.error}"
            problem += f"; missing: {missing}" if missing else ""
            where, hint = f"rank {self.rank} at {name}", "see that rank's log"
            raise RemoteRankError(problem, where=where, hint=hint, error_kind=kind)
        if missing:
            problem = f"{name}: barrier timed out ({self.timeout_s:g} s), missing: {missing}"
            raise Unreachable(problem, where=f"rank {self.rank}", hint="see those ranks' logs and nodes")

    def _read_from_rank0(self, name: str, key: str) -> str:
        timeout_s = self.timeout_s + _SLACK_S + 0.05 * self.world_size
        try:
            return self._get(f"{self._prefix}/{name}/{key}", timeout_s)
        except TimeoutError as error:
            problem = f"{name}: barrier timed out ({timeout_s:g} s), missing: {self.format_ranks([0])}"
            raise Unreachable(problem, where=f"rank {self.rank}", hint="see that rank's log and node") from error

    def format_ranks(self, ranks: Iterable[int]) -> str:
        """Format ranks with their nodes: `ranks 3, 7 on n04, rank 9 on n05`."""
        by_node: dict[str, list[int]] = {}
        ranks = list(ranks)
        for rank in ranks[:_MAX_NAMED]:
            by_node.setdefault(self._nodes[rank] if rank < len(self._nodes) else "", []).append(rank)
        parts = [
            f"rank{'s' * (len(node_ranks) > 1)} {', '.join(map(str, node_ranks))}" + (f" on {node}" if node else "")
            for node, node_ranks in by_node.items()
        ]
        more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
        return ", ".join(parts) + more


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return next(iter(str(error).splitlines()), "")


def _encoded(message: _RankMessage | BarrierResult) -> str:
    return msgspec.json.encode(message).decode()
