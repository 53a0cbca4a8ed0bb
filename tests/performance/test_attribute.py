"""The parts of steps: their sums, their values against other tools and by brute force, and the verdicts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import DataError, ToolMissing
from pitools.perf.attribute.buckets import BUCKETS, Buckets, split_steps
from pitools.perf.attribute.plot import draw
from pitools.perf.attribute.verdict import judge
from pitools.perf.spans import Kind, Names, RankSpans, Spans, SpanTable, Windows, make_spans, make_windows

Read = Callable[..., SpanTable]
# By TraceLens's GPU event analyser over all device events of each file, ms: compute, exposed communication, exposed
# copies, communication, total. HTA's figures are the same where it counts the same: all steps (it drops the last),
# nanoseconds (it rounds starts up and ends down), and filling memory as computing.
PEERS = {
    "negative_queue_length_values_check": (211.484, 185.3, 41.64, 187.87, 1231.461),
    "nccl_parser_config": (116.046561, 39.529327, 1.924190, 46.876492, 660.551006),
    "trace_diff/control": (282.582, 87.267, 18.738, 163.535, 464.594),
    "df_index_resolver": (621.408, 357.343, 21.862, 357.343, 1732.965),
    "amd_trace": (0.110881, 0.0, 0.038161, 0.0, 8.911887),
}


def one_rank(spans: list[tuple[Kind, int, int]], steps: list[tuple[int, int, int]], **more: object) -> RankSpans:
    kind, start, end = zip(*spans, strict=True) if spans else ((), (), ())
    rows = make_spans(kind=kind, stream=0, name=0, start_ns=list(start), end_ns=list(end))
    return replace(RankSpans(Path("a"), 0, rows, make_windows(steps)), **more)


def table(*ranks: RankSpans) -> SpanTable:
    numbered = [each.numbered(rank) for rank, each in enumerate(ranks)]
    return SpanTable(
        Spans.join([each.spans for each in numbered]),
        Windows.join([each.windows for each in numbered]),
        ["all-reduce"],
        dict(enumerate(numbered)),
    )


def part(buckets: Buckets, name: str, rank: int = 0) -> list[int]:
    return buckets.parts_ns[buckets.windows.rank == rank, BUCKETS.index(name)].tolist()


times = st.tuples(st.integers(0, 60), st.integers(0, 20))
kinds = st.sampled_from([kind for kind in Kind if kind is not Kind.OP])


@given(
    st.lists(st.tuples(kinds, times), max_size=25),
    st.lists(st.integers(0, 60), min_size=2, max_size=6, unique=True),
    st.booleans(),
)
def test_parts_sum_and_each_moment_is_of_the_first_kind(
    spans: list[tuple[Kind, tuple[int, int]]], cuts: list[int], has_device: bool
) -> None:
    """Whatever overlaps, parts sum to the wall time, and are what painting each nanosecond gives."""
    order = ("compute", "communication", "checkpoint", "compile", "copy", "input", "host")
    if not has_device:
        order = ("checkpoint", "compile", "input", "compute", "communication", "copy", "host")
    painted = ["idle"] * 100
    for name in reversed(order):
        for kind, (start, length) in spans:
            if kind.name.lower() == name:
                painted[start : start + length] = [name] * length
    cuts = sorted(cuts)
    steps = [(i, start, end) for i, (start, end) in enumerate(pairwise(cuts))]
    rows = [(kind, start, start + length) for kind, (start, length) in spans]
    buckets = split_steps(table(one_rank(rows, steps, has_device=has_device)))
    assert buckets.parts_ns.sum(axis=1).tolist() == buckets.wall_ns.tolist()
    for (_, start, end), parts in zip(steps, buckets.parts_ns.tolist(), strict=True):
        assert parts == [painted[start:end].count(name) for name in BUCKETS]


@pytest.mark.parametrize("name", PEERS)
def test_gpu_traces_are_split_as_by_other_tools(real: Path, read: Read, name: str) -> None:
    """Compute, exposed communication and copies of real traces are TraceLens's within 0.01 %, and so is the total."""
    spans = read(real / "kineto" / name)
    device = np.isin(spans.spans.kind, (Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY))
    whole = make_windows([(-1, spans.spans.start_ns[device].min(), spans.spans.end_ns[device].max())])
    rank = next(iter(spans.ranks))
    buckets = split_steps(replace(spans, windows=replace(whole, rank=np.array([rank]))))
    got = [*(part(buckets, each, rank)[0] for each in ("compute", "communication", "copy"))]
    assert [each / 1e6 for each in (*got, buckets.total_ns[0], buckets.wall_ns[0])] == pytest.approx(
        PEERS[name], rel=1e-4
    )


@pytest.mark.parametrize(
    ("name", "verdict", "rank"),
    [
        ("torch-healthy", "compute", None),
        ("torch-slow-input", "input", None),
        ("torch-slow-rank", "straggler", 1),
        ("torch-host-stall", "host", None),
        ("jax-healthy", "compute", None),
        ("jax-slow-input", "input", None),
        ("jax-slow-rank", "straggler", 1),
        ("jax-recompile", "compile", None),
    ],
)
def test_faults_are_found_in_profiles_of_cpus(
    profiles: Path, read: Read, name: str, verdict: str, rank: int | None
) -> None:
    """Both frameworks' profiles on CPUs give the fault that was put in, and parts that sum to wall time."""
    spans = read(profiles / name)
    buckets = split_steps(spans)
    assert (len(spans.ranks), len(buckets.windows)) == (2, 10)
    assert buckets.parts_ns.sum(axis=1).tolist() == buckets.wall_ns.tolist()
    judged = judge(buckets)
    assert (judged.verdict, judged.rank) == (verdict, rank)
    if verdict == "input":  # each step sleeps 50 ms
        assert np.median(part(buckets, "input")) == pytest.approx(50e6, rel=0.05)
    if verdict != "compute":
        assert judged.advice[0].cause == verdict


def ranks_that_meet(late_ms: int, clock_ms: int, count: int = 8) -> SpanTable:
    """Two ranks of irregular steps: compute, then an all-reduce of 5 ms, which rank 1 joins late by a clock ahead."""
    ms = 1_000_000
    ranks = []
    for rank in (0, 1):
        begin, spans, steps = (clock_ms * rank + 10**6) * ms, [], []
        for step in range(count):
            arrival = begin + (50 + step * 37 % 50 + rank * late_ms) * ms
            end = arrival + (5 + (1 - rank) * late_ms) * ms
            spans += [(Kind.COMPUTE, begin, arrival), (Kind.COMMUNICATION, arrival, end)]
            steps.append((step, begin, end))
            begin = end
        ranks.append(one_rank(spans, steps))
    return table(*ranks)


@pytest.mark.parametrize("clock_ms", [0, 7000, -3])
def test_waiting_is_told_from_transfer_whatever_the_clocks(clock_ms: int) -> None:
    """A rank that is 30 ms late makes the other wait 30 ms in each step; the transfer takes 5 ms on both."""
    buckets = split_steps(ranks_that_meet(30, clock_ms))
    assert buckets.skew_ns.tolist() == [30_000_000] * 8 + [0] * 8
    assert part(buckets, "communication") == [35_000_000] * 8
    assert [(record.transfer_ms, record.skew_ms) for record in buckets.records()] == [(5, 30)] * 8 + [(5, 0)] * 8
    assert any("clock of rank 1" in note for note in buckets.matched.notes) is (clock_ms != 0)
    verdict = judge(buckets)
    assert (verdict.verdict, verdict.rank) == ("straggler", 1)
    assert "compute" in verdict.evidence[0]


@pytest.mark.parametrize("name", ["gloo:broadcast", "ncclDevKernel_Reduce_Sum_f32_RING_LL", "ppermute.3", "gloo:recv"])
def test_what_a_root_ends_early_aligns_no_clocks(name: str) -> None:
    """Two such of 0.2 ms before each all-reduce: rank 0 ends them 30 ms earlier, and waits 30 ms in the all-reduce."""
    spans = ranks_that_meet(30, 0)
    meets = spans.spans.where(spans.spans.kind == Kind.COMMUNICATION)
    early = [
        replace(
            meets,
            name=np.full(len(meets), 1, np.int32),
            start_ns=meets.start_ns - before,
            end_ns=meets.start_ns - before + 200_000,
        )
        for before in (1_000_000, 500_000)
    ]
    rows = Spans.join([spans.spans, *early])
    buckets = split_steps(replace(spans, spans=rows, texts=["gloo:all_reduce", name]))
    assert buckets.matched.offsets_ns == {0: 0, 1: 0}
    assert buckets.skew_ns.tolist() == [30_000_000] * 8 + [0] * 8
    assert judge(buckets).rank == 1


@pytest.mark.parametrize(
    "name",
    [
        "cross_device_reduce_1stage",
        "ncclDevKernel_ReduceScatter_Sum",
        "all-gather-start",
        "unreduced_psum",
        "AllReduce",
    ],
)
def test_what_ends_on_all_ranks_together_is_matched(name: str) -> None:
    """As an all-reduce is, though a part of its name is that of another collective."""
    buckets = split_steps(replace(ranks_that_meet(30, 0), texts=[name]))
    assert buckets.skew_ns.tolist() == [30_000_000] * 8 + [0] * 8


def test_clocks_that_differ_by_less_than_a_millisecond_are_the_same() -> None:
    """Ranks end a collective some 0.1 ms apart: that is no shift of a Unix clock, and no note."""
    spans = ranks_that_meet(30, 0)
    shift = np.where(spans.spans.rank == 1, 100_000, 0)
    rows = replace(spans.spans, start_ns=spans.spans.start_ns + shift, end_ns=spans.spans.end_ns + shift)
    matched = split_steps(replace(spans, spans=rows)).matched
    assert matched.offsets_ns == {0: 0, 1: 0}
    assert not any("shifted" in note for note in matched.notes)


def test_collectives_that_do_not_end_together_are_not_matched() -> None:
    """Ranks of a larger job, whose collectives end far apart at random, give no waiting times, and a note."""
    spans = ranks_that_meet(0, 0, count=20)
    noise = np.random.default_rng(0).integers(0, 400_000_000, len(spans.spans))
    is_late = (spans.spans.rank == 1) & (spans.spans.kind == Kind.COMMUNICATION)
    moved = replace(
        spans.spans, start_ns=spans.spans.start_ns + noise * is_late, end_ns=spans.spans.end_ns + noise * is_late
    )
    buckets = split_steps(replace(spans, spans=moved))
    assert not buckets.skew_ns.any()
    assert "do not match" in buckets.matched.notes[0]
    assert {record.skew_ms for record in buckets.records()} == {None}


def test_collectives_are_matched_by_number_where_there_is_one() -> None:
    """A rank whose trace begins later, in one window without steps, is matched by numbers, not by order."""
    spans = ranks_that_meet(30, 0)
    step = spans.step_of()
    numbered = replace(spans.spans, sequence=step, group=np.zeros(len(spans.spans), np.int32))
    late = (spans.spans.rank == 1) & (step == 0)
    windows = spans.windows.where(np.array([0, 8]))
    windows = replace(windows, end_ns=spans.windows.end_ns[[7, 15]], step=np.array([-1, -1]))
    buckets = split_steps(replace(spans, spans=numbered.where(~late), windows=windows))
    assert buckets.skew_ns.tolist() == [7 * 30_000_000, 0]


def test_profiles_of_different_steps_share_those_that_both_have() -> None:
    """Of steps 0 to 7 on one rank and 1 to 8 on another, seven are matched by order, and the others are not."""
    spans = ranks_that_meet(30, 0, count=9)
    steps = spans.step_of()
    keep = np.where(spans.spans.rank == 0, steps < 8, steps > 0)
    windows = spans.windows.where(np.where(spans.windows.rank == 0, spans.windows.step < 8, spans.windows.step > 0))
    buckets = split_steps(replace(spans, spans=spans.spans.where(keep), windows=windows))
    assert buckets.skew_ns.tolist() == [0] + [30_000_000] * 7 + [0] * 8


def test_steps_that_a_rank_lacks_are_not_in_the_verdict() -> None:
    """Rank 1's trace is cut to 8 of 20 steps: rank 0's waits in the other 12 would be a slow network. Rows stay."""
    spans = ranks_that_meet(30, 0, count=20)
    cut = (spans.spans.rank == 1) & (spans.step_of() >= 8)
    windows = spans.windows.where((spans.windows.rank == 0) | (spans.windows.step < 8))
    buckets = split_steps(replace(spans, spans=spans.spans.where(~cut), windows=windows))
    both, alone = judge(split_steps(ranks_that_meet(30, 0))), judge(buckets)
    assert (alone.verdict, alone.rank, alone.steps, alone.shares) == (both.verdict, both.rank, 8, both.shares)
    assert len(buckets.records()) == 28
    assert "12 steps are not in the verdict: not all ranks have them" in alone.notes
    apart = replace(windows, step=windows.step + 100 * windows.rank)
    assert judge(split_steps(replace(spans, windows=apart))).steps == 28  # no step is of both


def test_a_healthy_run_has_no_straggler() -> None:
    """Ranks that are late by noise, each in some steps, are no stragglers: at most 2 of 100 runs of five steps."""
    random = np.random.default_rng(1)
    found = 0
    for _ in range(100):
        ms, begin, spans, steps = 1_000_000, 10**12, ([], []), []
        for step in range(5):
            arrivals = begin + 50 * ms + random.integers(0, 40 * ms, 2)
            end = int(arrivals.max()) + 5 * ms
            for rank in (0, 1):
                spans[rank].extend(
                    [(Kind.COMPUTE, begin, int(arrivals[rank])), (Kind.COMMUNICATION, int(arrivals[rank]), end)]
                )
            steps.append((step, begin, end))
            begin = end
        found += judge(split_steps(table(*(one_rank(each, steps) for each in spans)))).verdict == "straggler"
    assert found <= 2


def ranks_that_wait_for_cpus(work_ms: tuple[int, int], waits_ms: np.ndarray) -> SpanTable:
    """Two ranks that work for a time, longer by their waits (steps, 2) for a CPU, before an all-reduce of 5 ms."""
    ms, begin, spans, steps = 1_000_000, 10**12, ([], []), []
    for step, waits in enumerate(waits_ms):
        arrivals = [begin + int(work + wait) * ms for work, wait in zip(work_ms, waits, strict=True)]
        end = max(arrivals) + 5 * ms
        for rank, arrival in enumerate(arrivals):
            spans[rank].extend([(Kind.COMPUTE, begin, arrival), (Kind.COMMUNICATION, arrival, end)])
        steps.append((step, begin, end))
        begin = end
    got = table(*(one_rank(each, steps) for each in spans))
    return replace(got, windows=replace(got.windows, cpu_wait_ns=(waits_ms.T.reshape(-1) * ms).astype(np.int64)))


def test_a_rank_that_waits_for_a_cpu_is_no_straggler() -> None:
    """Another program takes rank 1's CPU for 50 ms in each step: its own work is as long as the other's."""
    random = np.random.default_rng(0)
    busy = ranks_that_wait_for_cpus((20, 20), random.integers(0, 10, (20, 2)) + np.array([0, 50]))
    verdict = judge(split_steps(busy))
    assert (verdict.verdict, verdict.rank) == ("inconclusive", None)
    assert "rank 1 waited for a CPU for" in verdict.evidence[0] == verdict.notes[0]
    unknown = replace(busy, windows=replace(busy.windows, cpu_wait_ns=np.zeros(40, np.int64)))
    assert judge(split_steps(unknown)).rank == 1


def test_a_straggler_is_found_among_ranks_that_wait_for_cpus() -> None:
    """Work of 40 ms instead of 20 ms, in steps in which either rank waits 0 to 100 ms for a CPU."""
    waits = np.random.default_rng(0).integers(0, 100, (20, 2))
    judged = judge(split_steps(ranks_that_wait_for_cpus((20, 40), waits)))
    assert (judged.verdict, judged.rank) == ("straggler", 1)
    a_little = judge(split_steps(ranks_that_wait_for_cpus((40, 44), waits)))
    assert a_little.verdict != "straggler"  # of what the ranks wait for each other, it is a tenth
    sharing = ranks_that_wait_for_cpus((12, 17), waits % 5 + np.array([0, 18]))
    assert judge(split_steps(sharing)).verdict != "straggler"  # programs that share a CPU also share its caches


def test_a_wait_for_a_cpu_leaves_what_it_cannot_have_stretched() -> None:
    """A step of 55 ms, of which 30 are input, asleep, and 5 communication, in which a thread ended a wait of 90 ms."""
    spans = ranks_that_wait_for_cpus((50, 50), np.zeros((4, 2)))
    starts, rank = spans.windows.start_ns, spans.windows.rank
    inputs = make_spans(
        kind=Kind.INPUT, stream=0, name=0, rank=rank, start_ns=starts, end_ns=starts + 30_000_000
    )  # fmt: skip
    waits = np.where(rank == 1, 90_000_000, 4_000_000)
    windows = replace(spans.windows, cpu_wait_ns=waits)
    buckets = split_steps(replace(spans, spans=Spans.join([spans.spans, inputs]), windows=windows))
    assert buckets.own_ns.tolist() == [46_000_000] * 4 + [30_000_000] * 4


def test_a_rank_that_others_wait_for_because_of_its_input_is_slow_input() -> None:
    """Loaders that read ahead hide it on the others: of 105 ms, rank 1 waits 80 ms for input, and rank 0 for rank 1."""
    spans = ranks_that_wait_for_cpus((20, 100), np.zeros((20, 2)))
    windows = spans.windows.where(spans.windows.rank == 1)
    inputs = make_spans(
        kind=Kind.INPUT, stream=0, name=0, rank=1, start_ns=windows.start_ns, end_ns=windows.start_ns + 80_000_000
    )
    verdict = judge(split_steps(replace(spans, spans=Spans.join([spans.spans, inputs]))))
    assert (verdict.verdict, verdict.rank, verdict.advice[0].cause) == ("input", None, "input")
    assert "rank 1: its input is 80.000 ms" in verdict.evidence[0]
    assert verdict.advice[0].ceiling_ms == 80.0


def test_a_slow_ranks_own_sleep_is_not_the_host_time_of_all() -> None:
    """Rank 1 sleeps 30 of 55 ms, in which rank 0 waits; both are without work for 18 ms more. The sleep counts once."""
    rows = ranks_that_wait_for_cpus((20, 50), np.zeros((20, 2)))
    idle = np.where(rows.spans.rank == 1, 48_000_000, 18_000_000) * (rows.spans.kind == Kind.COMPUTE)
    verdict = judge(split_steps(replace(rows, spans=replace(rows.spans, start_ns=rows.spans.start_ns + idle))))
    assert (verdict.verdict, verdict.rank) == ("straggler", 1)
    assert {each.cause: each.ceiling_ms for each in verdict.advice} == {
        "straggler": 30.0, "host": 18.0, "communication": 5.0
    }  # fmt: skip


def test_a_smaller_cause_is_not_the_verdict_where_ranks_wait_more_for_none_surely() -> None:
    """Two ranks of which either is late by up to 150 ms wait more for each other than for their input of 25 ms, and
    less than for one of 60 ms: the larger may be a slow rank, and both are in the evidence."""
    late = np.random.default_rng(0).integers(0, 150, (20, 2))
    spans = ranks_that_wait_for_cpus((60, 60), late)
    spans = replace(spans, windows=replace(spans.windows, cpu_wait_ns=np.zeros(40, np.int64)))
    starts, rank = spans.windows.start_ns, spans.windows.rank
    for input_ms, verdict in ((0, "inconclusive"), (25, "inconclusive"), (60, "input")):
        ends = starts + input_ms * 1_000_000
        inputs = make_spans(kind=Kind.INPUT, stream=0, name=0, rank=rank, start_ns=starts, end_ns=ends)
        judged = judge(split_steps(replace(spans, spans=Spans.join([spans.spans, inputs]))))
        assert judged.verdict == verdict
        assert any("for none surely" in line for line in judged.evidence)
        assert any(line.startswith(f"input {input_ms}.000 ms") for line in judged.evidence) is (input_ms > 0)
        assert {each.cause: each.remedy for each in judged.advice}["straggler"].startswith("trace more steps")


def test_a_profile_without_steps_says_that_it_counts_as_one() -> None:
    """A row of step -1 has a note of how to mark steps; one with steps has none."""
    spans = ranks_that_meet(30, 0)
    unmarked = replace(spans, windows=replace(spans.windows, step=np.full(len(spans.windows), -1)))
    noted = [any("marks no steps" in note for note in judge(split_steps(each)).notes) for each in (spans, unmarked)]
    assert noted == [False, True]


def test_a_wait_for_a_cpu_is_not_the_programs_host_time() -> None:
    """Of 100 ms, ranks had a CPU in 30, so that 12 of 40 ms without work are the program's: they limit nothing."""
    ms = 1_000_000
    steps = [(step, step * 100 * ms, (step + 1) * 100 * ms) for step in range(4)]
    got = table(one_rank([(Kind.COMPUTE, start, start + 60 * ms) for _, start, _ in steps], steps))
    assert judge(split_steps(got)).verdict == "host"
    waited = replace(got, windows=replace(got.windows, cpu_wait_ns=np.full(4, 70 * ms)))
    assert judge(split_steps(waited)).verdict == "compute"


def test_advice_has_a_ceiling() -> None:
    """Input of 60 of 100 ms can be hidden behind the other 40 ms; gone altogether, it gains 60 ms."""
    ms = 1_000_000
    steps = [(step, step * 100 * ms, (step + 1) * 100 * ms) for step in range(4)]
    spans = [
        row
        for _, start, end in steps
        for row in ((Kind.INPUT, start, start + 60 * ms), (Kind.COMPUTE, start + 60 * ms, end))
    ]
    verdict = judge(split_steps(table(one_rank(spans, steps))))
    assert [(each.cause, each.gain_ms, each.ceiling_ms) for each in verdict.advice] == [("input", 40.0, 60.0)]
    assert verdict.verdict == "input"


def test_transfer_gains_no_more_than_what_it_can_hide_behind() -> None:
    """Of 100 ms, a transfer of 80 can hide behind 20 ms of compute; with a CPU in 30 of 100 ms, it limits less."""
    ms = 1_000_000
    steps = [(step, step * 100 * ms, (step + 1) * 100 * ms) for step in range(4)]
    spans = [
        row
        for _, start, end in steps
        for row in ((Kind.COMPUTE, start, start + 20 * ms), (Kind.COMMUNICATION, start + 20 * ms, end))
    ]
    got = table(one_rank(spans, steps))
    assert [(each.gain_ms, each.ceiling_ms) for each in judge(split_steps(got)).advice] == [(20.0, 80.0)]
    waited = replace(got, windows=replace(got.windows, cpu_wait_ns=np.full(4, 70 * ms)))
    assert [(each.gain_ms, each.ceiling_ms) for each in judge(split_steps(waited)).advice] == [(20.0, 24.0)]


def test_steps_without_time_are_refused() -> None:
    """As of a step log whose times are all 0."""
    with pytest.raises(DataError, match="no step takes any time"):
        judge(split_steps(table(one_rank([], [(step, 5, 5) for step in range(4)]))))


def test_a_picture_has_waiting_apart_from_transfer(tmp_path: Path) -> None:
    """In a colour of its own, in the bars of the steps and in the timeline; healthy ranks have none."""
    drawn = []
    for late_ms in (0, 30):
        buckets = split_steps(spans := ranks_that_meet(late_ms, 0))
        draw(spans, buckets, judge(buckets), tmp_path / "a.svg")
        text = (tmp_path / "a.svg").read_text()
        drawn.append(("<!-- skew: waiting for the last rank -->" in text, "fill: #f4c9a8; stroke: #f4c9a8" in text))
    assert drawn == [(False, False), (True, True)]


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the error says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    buckets = split_steps(spans := ranks_that_meet(0, 0))
    with pytest.raises(ToolMissing):
        draw(spans, buckets, judge(buckets), tmp_path / "a.png")


def test_names_have_one_index() -> None:
    """A text has the same index whenever it is asked for."""
    names = Names()
    assert [names.index(text) for text in ("a", "b", "a")] == [0, 1, 0]
    assert names.texts() == ["a", "b"]
