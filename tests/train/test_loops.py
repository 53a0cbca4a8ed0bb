"""Both reference loops, as real jobs of several processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pitools.dataset.ingest import ingest
from pitools.run import steps
from pitools.train import checkpoint

STEPS = 400
CLOSE = 1e-5


@pytest.fixture(scope="module", params=["jax_bc", "torch_bc"])
def module(request: pytest.FixtureRequest) -> str:
    """A loop, where its framework is installed."""
    pytest.importorskip(request.param.removesuffix("_bc"), reason="this framework is not installed")
    return str(request.param)


@pytest.fixture(scope="module")
def alone(module: str, start: Callable[..., Any], small: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process that nobody interrupts."""
    folder = tmp_path_factory.mktemp("alone") / "0"
    return list(start(folder, module, small, steps=STEPS, batch_size=15).ok().losses())


def test_two_ranks_learn_what_one_does(
    module: str, alone: list[float], start: Callable[..., Any], small: Path, tmp_path: Path
) -> None:
    """Two ranks of unequal shares log one loss, at every step that of one process, in laps that make up the step."""
    job = start(tmp_path / "0", module, small, ["aa"] * 2, steps=40, batch_size=15, checkpoint_every=16).ok()
    np.testing.assert_allclose(job.losses(), alone[:40], atol=CLOSE, rtol=0)
    logs = [job.log(0), job.log(1)]
    for number, (first, second) in enumerate(zip(*logs, strict=True)):
        assert (first.step, first.loss) == (second.step, second.loss) == (number, first.loss)
        assert (first.samples, second.samples) == (7, 8)
    for step in (*logs[0], *logs[1]):
        laps = (step.input_s, step.compute_s, step.comm_s)
        assert min(laps) > 0
        assert sum(laps) <= step.wall_s
        assert step.bytes_read == step.samples * (16 * 16 * 3 + 4 * 4 + 3 * 4)
    # What is no lap is saving, and rank 1 saves nothing.
    summary = steps.summarize([logs[1]])
    assert summary is not None
    assert summary.steps == 40
    assert summary.other_share < 0.1
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_16.npz", "step_32.npz", "step_40.npz"]


def test_a_signal_to_one_rank_stops_all_and_loses_nothing(
    module: str, alone: list[float], start: Callable[..., Any], small: Path, tmp_path: Path
) -> None:
    """SIGTERM at rank 1 stops both after one step; a single rank goes on as if nothing had been, and then is done."""
    job = start(tmp_path / "0", module, small, ["aa"] * 2, steps=STEPS, batch_size=15)
    until(lambda: len(job.log(1)) > 2 or job.processes[1].poll() is not None)
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.wait() == [128 + signal.SIGTERM] * 2, job.text()
    done = len(job.log(0))
    assert len(job.log(1)) == done < STEPS
    assert checkpoint.newest(tmp_path / "checkpoints") == f"step_{done}.npz"
    resumed = start(tmp_path / "1", module, small, steps=STEPS, batch_size=15).ok()
    assert [step.step for step in resumed.log()] == list(range(done, STEPS))
    np.testing.assert_allclose(job.losses() + resumed.losses(), alone, atol=CLOSE, rtol=0)
    assert start(tmp_path / "2", module, small, steps=STEPS, batch_size=15).ok().log() == []


def test_ranks_of_two_jobs_refuse_each_other(
    module: str, start: Callable[..., Any], small: Path, tmp_path: Path
) -> None:
    """A rank with another nonce ends both jobs before any step, and no nonce is printed."""
    ours, theirs = "5e1f00d5e1f00d5e", "0ddba110ddba1100"
    job = start(tmp_path / "0", module, small, [ours, theirs], steps=5, batch_size=6)
    assert 0 not in job.wait()
    for rank, other in ((0, 1), (1, 0)):
        assert "WrongJob" in job.text(rank)
        assert f"met rank {other} of job" in job.text(rank)
        assert job.log(rank) == []
    assert ours not in job.text()
    assert theirs not in job.text()


def test_real_demonstrations_are_learnt_the_same_by_four_ranks(
    module: str, start: Callable[..., Any], bridge: Path, tmp_path: Path
) -> None:
    """On WidowX episodes the loss of 4 ranks halves in 100 steps, and each step's is that of one process."""
    data = Path(ingest([bridge], root=tmp_path / "data", name="bridge").path)
    one = start(tmp_path / "one" / "0", module, data, steps=100).ok().losses()
    four = start(tmp_path / "four" / "0", module, data, ["aa"] * 4, steps=100).ok().losses()
    np.testing.assert_allclose(four, one, atol=CLOSE, rtol=0)
    assert np.mean(four[-10:]) < 0.5 * np.mean(four[:10])


def until(met: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.005)
