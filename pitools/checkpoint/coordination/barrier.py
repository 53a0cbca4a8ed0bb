"""Ranks meet, with a name and a time-out, over a key-value store; who does not come is named.

Rank 0 looks for the others and tells all what it found, so that either all go on or all raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from pitools.core.errors import ClusterError, Unreachable
from pitools.core.record import decode_json

# Rank 0 may itself be late by all of a barrier's time, and then has to tell the others.
_SLACK_S = 10.0
_MOST_NAMED = 16
# Keys that are left in the store: to delete each at once would cost a short save as much as its meetings.
_KEPT = 1000


Put = Callable[[str, str], None]
# (key, seconds) → its value once it is there. Raises TimeoutError when it does not come in time.
Get = Callable[[str, float], str]
Delete = Callable[[str], None]


class RemoteRankError(ClusterError):
    """What is wrong at a rank, as all of them learn it. error_kind: the class of that rank's own error."""

    def __init__(self, what: str, *, where: str = "", hint: str = "", error_kind: str = "") -> None:
        super().__init__(what, where=where, hint=hint)
        self.error_kind = error_kind


class _Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one rank says, as JSON. error_kind: the class of what is wrong there, "" where nothing is."""

    value: str = ""
    error: str = ""
    error_kind: str = ""


class BarrierResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What rank 0 tells all, as JSON. missing: who did not come. failed: whose word is an error; that of the first."""

    missing: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    error: str = ""
    error_kind: str = ""


class Barrier:
    """Where the ranks of one job meet.

    put, get, delete: of a store that all ranks share; a key is written once, and deleted by rank 0 when no rank will
    ask for it any more. nodes: of each rank, where they are known. timeout_s: how long the first waits for the last.
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

    def wait(self, name: str, trouble: BaseException | None = None) -> None:
        """Return when every rank is here and none has trouble. name: never used twice, the same at all.

        trouble: what is wrong at this rank: every rank then raises its first line at once. Raises Unreachable naming
        the ranks that did not come and their nodes, RemoteRankError naming the first with trouble.
        """
        self.gather(name, "", trouble=trouble)

    def gather(self, name: str, value: str, *, trouble: BaseException | None = None) -> list[str]:
        """As `wait`; returns the values of all ranks, in order, at rank 0, and [] at the others."""
        word = _Word(value, first_line(trouble), type(trouble).__name__) if trouble else _Word(value)
        if self.world_size == 1:
            self._judge(name, self._verdict([word]))
            return [value]
        if self.rank:
            self._put(f"{self._prefix}/{name}/{self.rank}", _encoded(word))
            self._judge(name, decode_json(self._from_rank_0(name, "verdict"), BarrierResult))
            return []
        # With trouble here there is nothing to wait for.
        words = [word] if trouble else self._words(name, word)
        verdict = self._verdict(words)
        self._put(f"{self._prefix}/{name}/verdict", _encoded(verdict))
        if len(words) == self.world_size and not verdict.missing and len(self._written) > _KEPT:
            self._delete_written()
        self._written += [f"{self._prefix}/{name}/{rank}" for rank in (*range(1, self.world_size), "verdict")]
        self._judge(name, verdict)
        return [word.value for word in words if word]

    def tell(self, name: str, value: str = "") -> str:
        """Rank 0's value at every rank. Raises Unreachable when rank 0 does not come to say it."""
        if self.world_size == 1:
            return value
        if self.rank == 0:
            self._put(f"{self._prefix}/{name}/told", value)
            self._written.append(f"{self._prefix}/{name}/told")
            return value
        return self._from_rank_0(name, "told")

    @property
    def witness(self) -> int | None:
        """The first rank on another node than rank 0's; None where there is none, or the nodes are not known."""
        return next((rank for rank, node in enumerate(self._nodes) if node != self._nodes[0]), None)

    def _delete_written(self) -> None:
        """Delete the keys of all calls before this one: every rank has come to it, and so has read them."""
        keys, self._written = self._written, []
        if self._delete:
            for key in keys:
                self._delete(key)

    def _words(self, name: str, mine: _Word) -> list[_Word | None]:
        """What each rank put; None of those that did not come in time."""
        until = time.monotonic() + self.timeout_s
        words: list[_Word | None] = [mine]
        for rank in range(1, self.world_size):
            try:
                # When time is over those who have come are still heard: a list of the missing has to be right.
                text = self._get(f"{self._prefix}/{name}/{rank}", max(until - time.monotonic(), 0.05))
                words.append(decode_json(text, _Word))
            except TimeoutError:
                words.append(None)
        return words

    @staticmethod
    def _verdict(words: Sequence[_Word | None]) -> BarrierResult:
        missing = tuple(rank for rank, word in enumerate(words) if not word)
        failed = {rank: word for rank, word in enumerate(words) if word and word.error_kind}
        first = next(iter(failed.values()), _Word())
        return BarrierResult(missing, tuple(failed), first.error, first.error_kind)

    def _judge(self, name: str, verdict: BarrierResult) -> None:
        if verdict.missing:
            what = f"{self.named(verdict.missing)} did not come to {name} in {self.timeout_s:g} s"
            raise Unreachable(what, where=f"rank {self.rank}", hint="look at those ranks' logs and nodes")
        if verdict.failed:
            more = f", and {len(verdict.failed) - 1} more" if len(verdict.failed) > 1 else ""
            kind = verdict.error_kind
            what = f"{self.named(verdict.failed[:1])}{more}: {kind}: {verdict.error}"
            where, hint = f"rank {self.rank} at {name}", "look at that rank's log"
            raise RemoteRankError(what, where=where, hint=hint, error_kind=kind)

    def _from_rank_0(self, name: str, key: str) -> str:
        timeout_s = self.timeout_s + _SLACK_S + 0.05 * self.world_size
        try:
            return self._get(f"{self._prefix}/{name}/{key}", timeout_s)
        except TimeoutError as error:
            what = f"{self.named([0])} did not come to {name} in {timeout_s:g} s"
            raise Unreachable(what, where=f"rank {self.rank}", hint="look at that rank's log and node") from error

    def named(self, ranks: Iterable[int]) -> str:
        """These ranks and their nodes in words: `ranks 3, 7 on n04, rank 9 on n05`."""
        by_node: dict[str, list[int]] = {}
        ranks = list(ranks)
        for rank in ranks[:_MOST_NAMED]:
            by_node.setdefault(self._nodes[rank] if rank < len(self._nodes) else "", []).append(rank)
        parts = [
            f"rank{'s' * (len(some) > 1)} {', '.join(map(str, some))}" + (f" on {node}" if node else "")
            for node, some in by_node.items()
        ]
        more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
        return ", ".join(parts) + more


def first_line(error: BaseException) -> str:
    """What an error says, without what its library adds below."""
    return next(iter(str(error).splitlines()), "")


def _encoded(message: _Word | BarrierResult) -> str:
    return msgspec.json.encode(message).decode()
