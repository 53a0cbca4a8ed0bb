"""Ranks compare secrets before they do anything together."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.train.distributed import WrongJob, check_secret
from pitools.train.rank import RankEnv


class Store:
    """A key-value store whose readers wait, as JAX's and torch's do."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, seconds: float) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout=20), key
            return self._values[key]

    def everything(self) -> str:
        return repr(self._values)


def meet(secrets: Sequence[str], store: Store) -> list[WrongJob | None]:
    """What each rank is told."""
    reported: list[WrongJob | None] = [None] * len(secrets)

    def one(number: int) -> None:
        rank = RankEnv(rank=number, world_size=len(secrets), secret=secrets[number])
        try:
            check_secret(rank, store.put, store.get, where="n01:29500")
        except WrongJob as error:
            reported[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(secrets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return reported


@given(st.lists(st.sampled_from(["0123456789abcdef", "fedcba9876543210"]), min_size=2, max_size=5))
def test_all_go_on_or_none_does(secrets: list[str]) -> None:
    """One rank of another job, wherever it stands, stops every rank; ranks of one job pass."""
    store = Store()
    futures = meet(secrets, store)
    if len(set(secrets)) == 1:
        assert futures == [None] * len(secrets)
    else:
        assert None not in futures
    observed = store.everything() + "".join(str(error) for error in futures)
    assert not any(secret in observed for secret in secrets)


def test_both_sides_are_named() -> None:
    """The message names both ranks and the hashes of both jobs, and where they met."""
    lead, stranger = meet(["aa", "bb"], Store())
    assert lead is not None
    assert stranger is not None
    assert "rank 0 of job" in str(lead)
    assert "rank 1 of job" in str(lead)
    assert "rank 0 of job" in str(stranger)
    assert (lead.where, lead.exit_code) == ("n01:29500", 4)


def test_a_rank_that_comes_late_is_told_too() -> None:
    """A stranger that takes a place after the verdict on it does not pass by that verdict."""
    store = Store()
    assert meet(["aa", "aa"], store) == [None, None]
    with pytest.raises(WrongJob):
        check_secret(RankEnv(rank=1, world_size=2, secret="bb"), store.put, store.get, where="n01:29500")
