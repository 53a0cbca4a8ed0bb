"""Collectives: nccl-tests' formulas, results that are checked, the fit, and what is normal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from pitools.node.bench.run import GroupRun
from pitools.perf.collectives import baseline
from pitools.perf.collectives.fit import fit_alpha_beta, fit_results
from pitools.perf.collectives.operations import (
    OPERATIONS,
    bus_factor,
    expected_output,
    message_bytes,
    piece_elements,
)
from pitools.perf.collectives.run import CollectiveResult, Placement, choose_placements, run_placement, to_results
from pitools.perf.collectives.worker import wrong_chunks
from pitools.perf.regression.store import Series, add_points, read_series

Array = NDArray[np.float64]
PAIR = Placement("leaf", ("n0", "n1"), 1)
# Starts ranks on this machine, and repeats what srun would: its stdin to each of them, their lines to stdout.
SRUN = """\
#!{python}
import os, subprocess, sys
count = next(int(each.split("=")[1]) for each in sys.argv if each.startswith("--ntasks="))
worker = sys.argv[next(i for i, each in enumerate(sys.argv) if not each.startswith("-") and i):]
ranks = []
for rank in range(count):
    env = dict(SLURM_PROCID=rank, SLURM_NTASKS=count, SLURM_LOCALID=0, SLURMD_NODENAME="n%d" % rank)
    env = os.environ | {{name: str(value) for name, value in env.items()}} | {{"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}}
    ranks.append(subprocess.Popen(worker, env=env, stdin=subprocess.PIPE))
line = sys.stdin.buffer.readline()
for rank in ranks:
    rank.stdin.write(line)
    rank.stdin.flush()
sys.exit(max(rank.wait() for rank in ranks))
"""
# A rank whose memory fails: what it sends has a wrong element.
FAULTY = """\
import os
from pitools.perf.collectives import worker

class Faulty(worker.{base}):
    def time_calls(self, operation, position, inputs, n_out):
        if position.rank == 1:
            inputs = [each.copy() if hasattr(each, "copy") else each for each in inputs]
            inputs[0][3] += 1
        return super().time_calls(operation, position, inputs, n_out)

worker.main({{"torch": Faulty, "jax": Faulty}})
"""


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `srun` that starts ranks on this machine."""
    path = tmp_path / "bin" / "srun"
    path.parent.mkdir()
    path.write_text(SRUN.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def result(busbw: float, **more: object) -> CollectiveResult:
    """An all-reduce of two nodes under one leaf switch."""
    fields = {"operation": "all_reduce", "placement": "leaf", "n_nodes": 2, "ranks": 2, "bytes": 1 << 20, "leaves": 1}
    fields |= {
        "wall_s": 1 / busbw,
        "busbw_bytes_per_s": busbw,
        "framework": "torch",
        "device": "cpu",
        "nodes": "n[0-1]",
    }
    return msgspec.convert(fields | more, CollectiveResult)


@pytest.mark.parametrize("n_ranks", range(1, 9))
def test_bandwidths_are_those_of_nccl_tests(n_ranks: int) -> None:
    """Sizes and factors as doc/PERFORMANCE.md and the *GetBw functions of nccl-tests have them."""
    share = (n_ranks - 1) / n_ranks
    factors = {name: bus_factor(name, n_ranks) for name in OPERATIONS}
    assert factors == pytest.approx(
        {
            "all_reduce": 2 * share,
            "all_gather": share,
            "reduce_scatter": share,
            "broadcast": 1,
            "all_to_all": share,
            "send_recv": 1,
        }
    )
    for name in OPERATIONS:
        pieces = n_ranks if name in ("all_gather", "reduce_scatter", "all_to_all") else 1
        count = piece_elements(name, 8400, n_ranks)
        assert (count, message_bytes(name, count, n_ranks)) == (2100 // pieces, 2100 // pieces * pieces * 4)
        assert message_bytes(name, piece_elements(name, 1, n_ranks), n_ranks) == 4 * pieces  # no empty message


def collective(name: str, inputs: list[Any], count: int) -> list[Any]:
    """The outputs of an operation, by its definition."""
    n_ranks, total = len(inputs), np.sum(inputs, axis=0)
    parts = [slice(rank * count, (rank + 1) * count) for rank in range(n_ranks)]
    outputs: dict[str, Callable[[int], Any]] = {
        "all_reduce": lambda _: total,
        "all_gather": lambda _: np.concatenate(inputs),
        "reduce_scatter": lambda rank: total[parts[rank]],
        "broadcast": lambda _: inputs[0],
        "all_to_all": lambda rank: np.concatenate([each[parts[rank]] for each in inputs]),
        "send_recv": lambda rank: inputs[rank - 1],
    }
    return [np.array(outputs[name](rank)) for rank in range(n_ranks)]


@given(st.sampled_from(list(OPERATIONS)), st.integers(1, 8), st.integers(1, 9), st.data())
def test_every_wrong_element_is_counted_with_its_source(
    name: str, n_ranks: int, count: int, data: st.DataObject
) -> None:
    """Right outputs have none; one element that is another counts as one, in its chunk."""
    n_in = count * (n_ranks if OPERATIONS[name].many_in else 1)
    pattern: Array = np.arange(n_in, dtype=np.float64) % 251
    offsets = data.draw(st.permutations([7.0 * rank for rank in range(n_ranks)]))
    for rank, output in enumerate(collective(name, [pattern + offset for offset in offsets], count)):
        expected = expected_output(name, rank, count, offsets)
        base = pattern[expected.start : expected.start + count]
        assert wrong_chunks(base, output, expected) == [0] * len(expected.offsets)
        at = data.draw(st.integers(0, len(output) - 1))
        output[at] += 1
        assert wrong_chunks(base, output, expected) == [
            int(at // count == part) for part in range(len(expected.offsets))
        ]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_two_ranks_measure_all_operations(srun: None, framework: str) -> None:
    """With messages of two sizes, of which the smaller are made several times in a row."""
    pytest.importorskip(framework)
    sizes = ["--sizes=4096,1048576"]
    rows = run_placement(PAIR, framework, sizes, ranks_per_node=1, timeout_s=100)
    names = [name for name in OPERATIONS if (framework, name) != ("jax", "broadcast")]
    assert [(row.operation, row.bytes) for row in rows] == [(name, size) for name in names for size in (4096, 1 << 20)]
    assert {(row.verdict, row.wrong, row.device, row.software.split()[0]) for row in rows} == {
        ("ok", 0, "cpu", framework)
    }
    for row in rows:
        assert 0 < row.wall_p10_s <= row.wall_s <= row.wall_p90_s
        assert row.algbw_bytes_per_s == pytest.approx(row.bytes / row.wall_s)
        assert row.busbw_bytes_per_s == pytest.approx(row.bytes / row.wall_s * bus_factor(row.operation, 2))


@pytest.mark.parametrize(("framework", "base"), [("torch", "TorchOperations"), ("jax", "JaxOperations")])
def test_a_rank_that_corrupts_is_found(srun: None, tmp_path: Path, framework: str, base: str) -> None:
    """By what it sends to itself and to others; after a reduction alone, nobody knows whose element was wrong."""
    pytest.importorskip(framework)
    path = tmp_path / "rank.py"
    path.write_text(FAULTY.format(base=base))
    worker = [sys.executable, str(path)]
    for names, suspect in (("all_gather,all_to_all,send_recv", True), ("all_reduce", False)):
        options = ["--sizes=65536", f"--operations={names}"]
        rows = run_placement(PAIR, framework, options, ranks_per_node=1, timeout_s=100, worker=worker)
        assert {row.verdict for row in rows} == {"wrong"}
        assert {"all from or at rank 1 on n1" in row.problem for row in rows} == {suspect}


def test_a_step_that_fails_is_a_result() -> None:
    """With the nodes that have none, and no bandwidth."""
    (row,) = to_results(GroupRun(PAIR.nodes, (), "exit code 9"), PAIR, "torch", 1)
    assert (row.verdict, row.busbw_bytes_per_s, row.problem) == ("failed", None, "no result of n[0-1]: exit code 9")


LEAVES = {f"n{number}": f"leaf{number % 2}" for number in range(8)}


@pytest.mark.parametrize(
    ("nodes", "leaf_of", "ranks_per_node", "expected"),
    [
        ("n0 n1 n2 n3", LEAVES, 1, ["leaf:n0 n2", "leaves:n0 n1", "leaves:n0 n1 n2 n3"]),
        ("n0 n2 n4", LEAVES, 1, ["leaf:n0 n2 n4"]),
        ("n0 n1", LEAVES, 1, ["leaves:n0 n1"]),
        ("n0 n2 n4 n1", LEAVES, 1, ["leaf:n0 n2 n4", "leaves:n0 n2 n1", "leaves:n0 n2 n4 n1"]),
        ("n0 n1", {}, 8, ["node:n0", "nodes:n0 n1"]),
        ("n0 n9", LEAVES, 1, ["nodes:n0 n9"]),
        ("n0", LEAVES, 8, ["node:n0"]),
    ],
)
def test_placements_compare_as_many_nodes(
    nodes: str, leaf_of: dict[str, str], ranks_per_node: int, expected: list[str]
) -> None:
    """Under one leaf switch and across several; a fabric that lacks a node says nothing."""
    placements = choose_placements(nodes.split(), leaf_of, ranks_per_node)
    assert [f"{each.name}:{' '.join(each.nodes)}" for each in placements] == expected


@given(st.floats(1e-7, 1e-2), st.floats(1e6, 1e12), st.integers(0, 8))
def test_alpha_and_beta_are_recovered(alpha_s: float, beta: float, outlier: int) -> None:
    """Exactly, although one of nine sizes took ten times as long."""
    sizes = [float(4 ** (power + 1)) for power in range(9)]
    walls_s = [(alpha_s + size / beta) * (10 if place == outlier else 1) for place, size in enumerate(sizes)]
    alpha, slope, residual = fit_alpha_beta(sizes, walls_s)
    fitted = [alpha + slope * size for size in sizes]
    assert fitted == pytest.approx([alpha_s + size / beta for size in sizes], rel=1e-6)
    assert residual == pytest.approx(0.1)


def test_alpha_and_beta_are_recovered_from_noise() -> None:
    """Within 15 % each, at noise of 5 % and ten sizes from 1 KiB to 256 MiB; and as bus bandwidth in the records."""
    random = np.random.default_rng(1)
    sizes = [1 << power for power in range(10, 30, 2)]
    for _ in range(100):
        walls_s = [(30e-6 + size / 20e9) * random.lognormal(0, 0.05) for size in sizes]
        alpha, slope, _ = fit_alpha_beta(sizes, walls_s)
        assert (alpha, 1 / slope) == pytest.approx((30e-6, 20e9), rel=0.15)
    rows = [result(1.0, bytes=size, wall_s=30e-6 + size / 20e9, ranks=4, n_nodes=4) for size in sizes]
    (fit,) = fit_results([*rows, result(1.0, operation="send_recv")])
    assert (fit.alpha_s, fit.beta_busbw_bytes_per_s) == pytest.approx((30e-6, 30e9))


def noise(family: str, random: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Healthy bandwidths about 1, a row for each series."""
    normal = random.normal(size=shape)
    if family == "lognormal":
        return np.exp(0.1 * normal)
    if family == "spikes":  # disturbances, of 5 % of the results
        return np.exp(0.02 * normal) * np.where(random.random(shape) < 0.05, 0.5, 1.0)
    if family == "ar1":
        for place in range(1, shape[1]):
            normal[:, place] = 0.5 * normal[:, place - 1] + 0.75**0.5 * normal[:, place]
    return np.exp((0.05 if family == "ar1" else 0.03) * normal)


def judged(series: Array, n_earlier: int, share: float = 1.0) -> list[str]:
    """The verdicts on the results of a placement, after n_earlier runs, if it loses a share of its bandwidth."""
    rows = [result(1.0, bytes=4 * number + 4) for number in range(len(series))]
    earlier = {("cpu", baseline.measure_name(row)): one[:n_earlier] for row, one in zip(rows, series, strict=True)}
    runs = iter(series[:, n_earlier:].T.tolist())

    def measure() -> list[CollectiveResult]:
        speeds = [share * speed for speed in next(runs)]
        return [
            msgspec.structs.replace(row, busbw_bytes_per_s=speed, wall_s=1 / speed)
            for row, speed in zip(rows, speeds, strict=True)
        ]

    return [row.verdict for row in baseline.measure_and_judge(measure, earlier)]


@pytest.mark.parametrize("n_earlier", [8, 30])
@pytest.mark.parametrize("family", ["gauss", "lognormal", "ar1", "spikes"])
def test_what_is_normal_is_called_so(family: str, n_earlier: int) -> None:
    """At most 1 of 100 healthy runs, of 4 placements, has a slow result; at noise of 3 %, a 20 % loss is found.

    Each result has noise of its own, which lasts as long as the command measures; a disturbance passes.
    """
    n_placements, n_results = 400, 30
    values = noise(family, np.random.default_rng(n_earlier), (n_placements * n_results, n_earlier + 4))
    if family != "spikes":
        values[:, -4:] = values[:, -4:-3]
    healthy = [judged(each, n_earlier) for each in np.split(values, n_placements)]
    assert sum("slow" in verdicts for verdicts in healthy) <= 0.01 / 4 * n_placements
    if family in ("gauss", "spikes"):
        lost = [judged(each, n_earlier, 0.8) for each in np.split(values[: 50 * n_results], 50)]
        assert np.mean(["slow" in verdicts for verdicts in lost]) >= 0.95


def test_tails_are_those_of_students_distribution() -> None:
    """Within 1 % of z, for the degrees of freedom of 8 to 30 runs; the limit is where 1 of 100 is below."""
    for degrees in range(5, 28):
        normal = baseline.Normal(0.0, 1.0, degrees)
        assert normal.p_value(normal.low_limit()) == pytest.approx(0.01)
        for p in (0.01, 1e-3, 1e-4):
            exact = float(stats.t.isf(p, degrees))
            assert stats.norm.isf(normal.p_value(np.exp(-exact))) == pytest.approx(stats.norm.isf(p), rel=0.01)


def test_a_disturbance_passes_and_a_wrong_result_stays() -> None:
    """The fastest result of each size is kept; nothing is measured again without need."""
    earlier = {("cpu", baseline.measure_name(result(1.0))): [1.0] * 8}
    runs = iter([[result(0.5)], [result(0.95)]])
    (row,) = baseline.measure_and_judge(lambda: next(runs), earlier)
    assert (row.verdict, row.of_baseline, next(runs, None)) == ("ok", 0.95, None)
    runs = iter([[result(0.5)], [result(0.5, verdict="wrong")]])
    assert baseline.measure_and_judge(lambda: next(runs), earlier)[0].verdict == "wrong"
    runs = iter([[result(0.5)]])
    short = {key: values[:7] for key, values in earlier.items()}
    (row,) = baseline.measure_and_judge(lambda: next(runs), short)
    assert (row.verdict, row.of_baseline) == ("ok", None)


def test_a_baseline_is_of_the_same_thing(tmp_path: Path) -> None:
    """Site, partition, device, placement, operation and size; what is wrong or slow is not kept."""
    store = tmp_path / "perf.sqlite"
    rows = [
        result(1e9),
        result(2e9, bytes=4),
        result(3e9, bytes=8, verdict="slow"),
        result(4e9, placement="leaves", leaves=2),
    ]
    for day in range(9):
        points = baseline.to_points(
            rows, site="alpha", partition="train", t=f"2026-11-0{day + 1}T00:00:00Z", source="job 1"
        )
        assert add_points(store, points) == 3
    series: list[Series] = read_series(store)
    kept = baseline.to_baseline(series, "alpha", "train")
    judged = baseline.judge_results([result(1e9), result(1e9, bytes=4), result(1e9, n_nodes=4, ranks=4)], kept)
    assert [(row.verdict, row.of_baseline) for row in judged] == [("ok", 1.0), ("slow", 0.5), ("ok", None)]
    assert baseline.judge_results([result(1.0, device="H100")], kept)[0].of_baseline is None
    assert baseline.to_baseline(series, "alpha", "dev") == baseline.to_baseline(series, "beta", "train") == {}
