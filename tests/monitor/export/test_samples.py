"""The table of metrics, and the bounds of what is exported of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.monitor.export.metrics import BY_NAME, LABEL_LIMITS, METRICS, OTHER
from pitools.monitor.export.samples import Samples, max_series, read_rows

NAMES = st.text(max_size=12)


def test_the_table_is_consistent() -> None:
    """Names are unique, only counters end in _total, each label has a limit, and none is a job, user or node."""
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert set(metric.labels) <= LABEL_LIMITS.keys(), metric.name
    assert not {"job", "user", "account", "node"} & LABEL_LIMITS.keys()
    assert max_series() < 10_000


@settings(max_examples=40)
@given(st.dictionaries(st.tuples(NAMES, NAMES), st.integers(0, 9), max_size=60))
def test_gauges_are_bounded(values: dict[tuple[str, str], int]) -> None:
    """Whatever partitions and states there are, their sum stays, the largest keep their names, the rest is "other"."""
    gauges = Samples()
    values |= {(f"p{number}", "running"): 10 + number for number in range(60)}
    for (partition, state), value in values.items():
        gauges.add("pit_jobs", value, partition, state)
    bounded = gauges.bounded()
    assert sum(one[0] for one in bounded.values()) == sum(values.values())
    for place, label in enumerate(BY_NAME["pit_jobs"].labels):
        kept = {labels[place] for _, labels in bounded}
        assert len(kept - {OTHER}) <= LABEL_LIMITS[label]
    assert bounded["pit_jobs", ("p59", "running")] == [69]


@given(st.lists(st.lists(st.tuples(NAMES, st.floats(0, 1e6)), max_size=6), max_size=4))
def test_counters_are_bounded_and_never_go_down(cycles: list[list[tuple[str, float]]]) -> None:
    """An origin beyond the limit is "other"; a series that is there stays, through a file too, and only grows."""
    totals = Samples()
    for cycle in cycles:
        counts, before = Samples(), {key: values[0] for key, values in totals.items()}
        for origin, value in cycle:
            counts.add("pit_stage_bytes_total", value, origin)
        totals.merge(counts)
        totals = read_rows(totals.rows())
        assert all(totals[key][0] >= value for key, value in before.items())
        assert len(totals) <= LABEL_LIMITS["origin"] + 1
    counted = sum(value for cycle in cycles for _, value in cycle)
    assert sum(values[0] for values in totals.values()) == pytest.approx(counted)


def test_other_takes_no_place_of_a_label() -> None:
    """As many values as the limit says are kept beside "other", which may be there first: a cause has that name."""
    totals, counts = Samples(), Samples()
    for origin in (OTHER, *"abcd", "e"):
        counts.add("pit_stage_bytes_total", 1, origin)
    totals.merge(counts)
    assert [(labels[0], values[0]) for (_, labels), values in totals.items()] == [
        (OTHER, 2),
        *((one, 1) for one in "abcd"),
    ]
