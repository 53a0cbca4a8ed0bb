"""How often may be asked, whoever asks whenever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pitools.launch.slurm_cache import rate_limit


@given(
    st.lists(
        st.tuples(st.floats(0, 300), st.sampled_from([rate_limit.SQUEUE_COST, rate_limit.SACCT_COST])), max_size=200
    )
)
def test_never_more_than_25_calls_in_ten_minutes(questions: list[tuple[float, int]]) -> None:
    """Whenever it is asked, in no ten minutes do the daemons count more."""
    now, calls, at_s, spent = 1e9, 0.0, 0.0, []
    for pause_s, cost in questions:
        now += pause_s
        has = rate_limit.calls_left(calls, at_s, now)
        if has >= cost:
            calls, at_s = has - cost, now
            spent.append((now, cost))
    for since, _ in spent:
        assert sum(cost for t, cost in spent if since <= t < since + 600) <= 25


def test_intervals_grow_and_begin_again() -> None:
    """2 s for a job that is new, two minutes where nothing changes, half a minute where something does."""
    waits = [0.0]
    for _ in range(9):
        waits.append(rate_limit.interval_s(waits[-1], changed=False, new_job=False))
    assert waits[1:] == [2, 4, 8, 16, 32, 64, 120, 120, 120]
    assert rate_limit.interval_s(120, changed=True, new_job=False) == 30
    assert rate_limit.interval_s(120, changed=True, new_job=True) == 2


def test_a_clock_that_goes_back_gives_no_calls() -> None:
    """The bucket holds what it held."""
    assert rate_limit.calls_left(3, 1000, 10) == 3
    assert rate_limit.calls_left(-5, 1000, 10) == 0
    assert [rate_limit.retry_after_s(n) for n in (1, 2, 3, 99)] == [5, 10, 20, 120]
    assert [rate_limit.accounting_retry_s(n) for n in (1, 2, 3, 99)] == [5, 15, 45, 600]
