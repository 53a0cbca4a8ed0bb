"""Appends of a few episodes: healthy ones are taken, and faults are seen; samples of perf/dataset/bench_drift.py."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture
def bench(repo: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """perf/dataset/bench_drift.py."""
    monkeypatch.syspath_prepend(str(repo))
    from perf.dataset import bench_drift

    return bench_drift


def shares(bench: ModuleType, fault: str, count: int) -> dict[int, float]:
    """The share of appends of real episodes that are refused, by their number of episodes."""
    value = bench.campaign(bench.bridge(), fault, count, np.random.default_rng(0))
    return {added: float(np.mean([bool(why) for why in each])) for added, each in value.items()}


def test_healthy_appends_of_any_size_are_taken(bridge, bench) -> None:
    """Of random real episodes added to others at most one append in a hundred is refused, however few they are."""
    share_by_name = shares(bench, "", 20)
    assert list(share_by_name) == [1, 2, 3, 5, 10, 20]
    assert max(share_by_name.values()) <= 0.01


@pytest.mark.parametrize("fault", ["x1000", "x57.3", "dead joint", "dark", "bright"])
def test_faults_in_small_appends_are_seen(bridge, bench, fault) -> None:
    """Another unit is refused from one episode on, a dead joint and another light from as many as say so."""
    share_by_name = shares(bench, fault, 8)
    assert min(share_by_name) == bench.LEAST_NEW.get(fault, 1)
    assert min(share_by_name.values()) >= 0.96


def test_a_column_that_seldom_moves(bench) -> None:
    """A lid or a gripper that moved in one of the parent's episodes may rest again where it was, and nowhere else; a
    command that moved in each may not, though it often was at that end."""

    def episode(lid: np.ndarray, command: np.ndarray) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        return {
            "action": np.column_stack([rng.normal(size=(50, 3)), command]),
            "obs/lid": np.column_stack([rng.normal(size=(50, 3)), lid]),
        }

    rest, moves = np.zeros(50), np.linspace(0, 1, 50)
    seldom = [episode(rest, rest)] * 19 + [episode(moves, moves.round())]
    assert bench.refused(seldom, [episode(rest, rest)] * 8) == []
    assert bench.refused(seldom, [episode(rest + 1, rest)] * 8) == ["constant-drift obs/lid"]
    often = [episode(rest, np.clip(3 * moves, 0, 1))] * 20
    assert bench.refused(often, [episode(rest, rest + 1)] * 8) == ["constant-drift action"]


def test_a_parent_of_few_episodes(bench) -> None:
    """Where the parent's few episodes were, says little of where others are; another unit is seen all the same."""
    rng = np.random.default_rng(0)

    def episodes(count: int, size: float = 1) -> list[dict[str, np.ndarray]]:
        return [
            {"action": size * (3 * rng.normal(size=4) + rng.normal(size=(50, 4)) * [1, 1, 0.01, 1])}
            for _ in range(count)
        ]

    assert [bench.refused(episodes(2), episodes(3)) for _ in range(20)] == [[]] * 20
    assert all(bench.refused(episodes(2), episodes(3, 57.3)) for _ in range(20))
