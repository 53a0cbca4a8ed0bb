from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from pitools.checkpoint.coordination.barrier import Barrier, BarrierResult, RemoteRankError
from pitools.core.errors import NoSpace, PitError, Unreachable
from pitools.core.record import decode_json


class Keys:
    """A key-value store as a job's ranks share it: a key is written once, and waited for."""

    def __init__(self) -> None:
        self._kept: dict[str, str] = {}
        self._change = threading.Condition()
        self.timed_out: list[str] = []

    def put(self, key: str, value: str) -> None:
        with self._change:
            assert key not in self._kept
            self._kept[key] = value
            self._change.notify_all()

    def get(self, key: str, timeout_s: float) -> str:
        with self._change:
            if not self._change.wait_for(lambda: key in self._kept, timeout_s):
                self.timed_out.append(key)
                raise TimeoutError(key)
            return self._kept[key]


def meet(
    ranks: int,
    work: Callable[[Barrier], object],
    *,
    absent: set[int] = frozenset(),
    keys: Keys | None = None,
    **more: object,
):
    """What each rank that comes gets, or raises."""
    keys = keys or Keys()

    def run(rank: int) -> object:
        try:
            return work(Barrier(keys.put, keys.get, rank, ranks, **more))
        except PitError as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return {rank: pool.submit(run, rank) for rank in range(ranks) if rank not in absent}


def test_all_come() -> None:
    """Nobody goes on before the last is there, however often they meet; rank 0 gets all words in order."""
    order: list[tuple[str, int]] = []

    def work(barrier: Barrier) -> list[str]:
        time.sleep(0.05 * (barrier.rank == 3))
        order.append(("come", barrier.rank))
        barrier.wait("save.1")
        order.append(("gone", barrier.rank))
        reported = barrier.broadcast("token", "abc" if barrier.rank == 0 else "")
        return [reported, *barrier.gather("save.2", f"v{barrier.rank}")]

    output = {rank: future.result() for rank, future in meet(5, work).items()}
    assert {text for text, _ in order[:5]} == {"come"}
    assert output[0] == ["abc", "v0", "v1", "v2", "v3", "v4"]
    assert output[4] == ["abc"]


def test_missing_ranks_are_named_with_their_nodes() -> None:
    """When the time is over every rank that came raises the names of those that did not."""
    keys, nodes = Keys(), ["n01", "n01", "n02", "n02", "n04", "n04"]

    def work(barrier: Barrier) -> None:
        for rank in (1, 3) * (not barrier.rank):  # rank 0 is last of those that come: none of them is late
            keys.get(f"pit/barrier/step_40 written/{rank}", 60)
        barrier.wait("step_40 written")

    futures = meet(6, work, absent={2, 4, 5}, keys=keys, timeout_s=0.2, nodes=nodes)
    for future in futures.values():
        error = future.result()
        assert isinstance(error, Unreachable)
        assert error.message == "step_40 written: barrier timed out (0.2 s), missing: rank 2 on n02, ranks 4, 5 on n04"
    verdict = decode_json(keys.get("pit/barrier/step_40 written/verdict", 0), BarrierResult)
    assert verdict == BarrierResult(missing=(2, 4, 5))


def test_many_missing_ranks_are_counted() -> None:
    """Of hundreds of missing ranks some are named."""
    barrier = Barrier(lambda *_: None, lambda *_: "", 0, 400)
    assert barrier.format_ranks(range(400)).endswith("14, 15 and 384 more")


def test_rank_0_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks time out, and name rank 0."""
    monkeypatch.setattr("pitools.checkpoint.coordination.barrier._SLACK_S", 0.1)
    futures = meet(3, lambda b: b.wait("x"), absent={0}, timeout_s=0.1, nodes=["n1", "n2", "n3"])
    for future in futures.values():
        assert isinstance(future.result(), Unreachable)
        assert future.result().message.endswith("missing: rank 0 on n1")


def test_trouble_of_one_is_told_to_all_at_once() -> None:
    """A rank whose disk is full does not make the others wait: all raise its words."""
    keys, full = Keys(), NoSpace("no space left", where="/nvme")
    futures = meet(4, lambda b: b.wait("x", full if b.rank == 2 else None), keys=keys, timeout_s=60, nodes="abcd")
    errors = {rank: future.result() for rank, future in futures.items()}
    assert all(isinstance(error, RemoteRankError) for error in errors.values())
    assert {error.error_kind for error in errors.values()} == {"NoSpace"}
    assert {error.message for error in errors.values()} == {"rank 2 on c: NoSpace: /nvme: no space left"}
    assert keys.timed_out == []


@pytest.mark.parametrize(("failing", "absent"), [(1, 2), (2, 1)])
def test_a_failure_is_named_before_the_missing_ranks(failing: int, absent: int) -> None:
    """One rank fails while another never comes: all raise the failure, at once if the failing one is read first."""
    keys = Keys()
    futures = meet(
        3,
        lambda barrier: barrier.wait("x", OSError("disk full") if barrier.rank == failing else None),
        absent={absent},
        keys=keys,
        timeout_s=0.2,
    )
    errors = [future.result() for future in futures.values()]
    assert {error.error_kind for error in errors} == {"OSError"}
    assert keys.timed_out == [f"pit/barrier/x/{absent}"] * (absent < failing)


def test_words_that_look_like_a_verdict_are_words() -> None:
    """Whatever a rank says comes as it was said, quotation marks and all; errors are counted, and the first is told."""
    words = ["=", "!", '-"', "", "é\n"]
    futures = meet(5, lambda b: b.gather("x", words[b.rank]))
    assert futures[0].result() == words
    keys = Keys()
    reported = meet(3, lambda b: b.wait("x", OSError(f"!{b.rank}\nmore") if b.rank else None), keys=keys, nodes="abc")
    verdict = decode_json(keys.get("pit/barrier/x/verdict", 0), BarrierResult)
    assert verdict == BarrierResult(failed=(1,), error="!1", error_kind="OSError")
    assert {future.result().message for future in reported.values()} == {"rank 1 on b: OSError: !1"}


def test_trouble_of_rank_0_waits_for_nobody() -> None:
    """Rank 0's own trouble is told although another rank will never come."""
    keys, broken = Keys(), ValueError()  # it has no words: its class is told
    futures = meet(
        3, lambda b: b.wait("x", None if b.rank else broken), absent={1}, keys=keys, timeout_s=60, nodes="abc"
    )
    assert {future.result().error_kind for future in futures.values()} == {"ValueError"}
    assert keys.timed_out == []


def test_alone() -> None:
    """One rank needs no store."""
    barrier = Barrier(lambda *_: None, lambda *_: "", 0, 1)
    barrier.wait("x")
    assert barrier.gather("x", "v") == ["v"]
    assert barrier.broadcast("y", "v") == "v"
    with pytest.raises(RemoteRankError) as caught:
        barrier.wait("x", NoSpace("full"))
    assert caught.value.error_kind == "NoSpace"
