"""A signal is noted, voted on, and forgotten."""

from __future__ import annotations

import os
import signal

import pytest

from pitools.train.preemption import SIGNALS, StopSignal, combine_votes


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_becomes_a_vote(number: int) -> None:
    """The process lives, votes for the signal it got first, and has its old handlers back afterwards."""
    before = [signal.getsignal(reference) for reference in SIGNALS]
    with StopSignal() as stop:
        assert combine_votes(stop.votes()) == 0
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert combine_votes(stop.votes()) == number
    assert [signal.getsignal(reference) for reference in SIGNALS] == before


def test_one_vote_among_many_decides() -> None:
    """Votes are summed over ranks: any is enough, and of two signals all ranks take the same."""
    assert combine_votes([0.0, 0.0]) == 0
    assert combine_votes([0.0, 1.0]) == signal.SIGUSR2
    assert combine_votes([1.0, 511.0]) == signal.SIGTERM
