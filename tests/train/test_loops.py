"""Both reference loops, as real jobs of several processes."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from pitools.checkpoint.checkpointer import Checkpointer
from pitools.checkpoint.store import lookup
from pitools.dataset.ingest.ingest import ingest
from pitools.launch.job.hang_watch import HangLimits
from pitools.run import steps
from pitools.store import version_state
from tests.train.conftest import LIMIT_S

STEPS = 200
CLOSE = 1e-5
BATCH = 17  # of 60 samples: an epoch does not end with a batch


@pytest.fixture(scope="module", params=["jax_bc", "torch_bc"])
def module(request: pytest.FixtureRequest) -> str:
    """A loop, where its framework is installed."""
    pytest.importorskip(request.param.removesuffix("_bc"), reason="this framework is not installed")
    return str(request.param)


@pytest.fixture(scope="module")
def either() -> str:
    """A loop that can run here, for what is the same code in both."""
    actual = [name for name in ("jax", "torch") if importlib.util.find_spec(name)]
    if not actual:
        pytest.skip("no framework is installed")
    return f"{actual[0]}_bc"


@pytest.fixture(scope="module")
def alone(module: str, start: Callable[..., Any], small: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process that nobody interrupts."""
    folder = tmp_path_factory.mktemp("alone") / "0"
    return list(start(folder, module, small, steps=STEPS, global_batch_size=BATCH).ok().losses())


def test_two_ranks_learn_what_one_does(
    module: str, alone: list[float], start: Callable[..., Any], small: Path, tmp_path: Path
) -> None:
    """Two ranks of unequal shares log one loss, at every step that of one process, in laps that make up the step."""
    job = start(tmp_path / "0", module, small, ["aa"] * 2, steps=40, global_batch_size=BATCH, checkpoint_every=16).ok()
    np.testing.assert_allclose(job.losses(), alone[:40], atol=CLOSE, rtol=0)
    logs = [job.log(0), job.log(1)]
    for number, (first, second) in enumerate(zip(*logs, strict=True)):
        assert (first.step, first.loss) == (second.step, second.loss) == (number, first.loss)
        assert (first.rank_samples, second.rank_samples) == (8, 9)
    for step in (*logs[0], *logs[1]):
        laps = (step.input_s, step.compute_s, step.comm_s)
        assert min(laps) > 0
        assert sum(laps) <= step.wall_s
    # A small dataset is read once, and then held.
    for log in logs:
        assert 60 * 16 * 16 * 3 < sum(step.bytes_read for step in log[:3]) < 100_000
        assert {step.bytes_read for step in log[3:]} == {0}
    # What is no lap is saving, and rank 1 saves nothing. Of the steps in the middle: others wait for a busy machine.
    summary = steps.summarize_steps([logs[1]])
    assert summary is not None
    assert summary.steps == 40
    assert median(1 - (step.input_s + step.compute_s + step.comm_s) / step.wall_s for step in logs[1]) < 0.1
    assert lookup.complete_steps(tmp_path / "checkpoints") == [40, 32, 16]


def test_a_signal_to_one_rank_stops_all_and_loses_nothing(
    module: str, alone: list[float], start: Callable[..., Any], small: Path, tmp_path: Path
) -> None:
    """A signal at rank 1, the launcher's for this framework, stops both after one step, with its code; a single rank
    goes on as if nothing had been, and then is done.
    """
    number = {"jax_bc": signal.SIGTERM, "torch_bc": signal.SIGUSR2}[module]
    job = start(tmp_path / "0", module, small, ["aa"] * 2, steps=STEPS, global_batch_size=BATCH)
    until(lambda: len(job.log(1)) > 2 or job.processes[1].poll() is not None)
    job.processes[1].send_signal(number)
    assert job.wait() == [128 + number] * 2, job.text()
    done = len(job.log(0))
    assert len(job.log(1)) == done < STEPS
    assert lookup.latest_step(tmp_path / "checkpoints") == done
    resumed = start(tmp_path / "1", module, small, steps=STEPS, global_batch_size=BATCH).ok()
    assert [step.step for step in resumed.log()] == list(range(done, STEPS))
    np.testing.assert_allclose(job.losses() + resumed.losses(), alone, atol=CLOSE, rtol=0)
    assert start(tmp_path / "2", module, small, steps=STEPS, global_batch_size=BATCH).ok().log() == []


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_other(
    module: str, killed: int, start: Callable[..., Any], small: Path, tmp_path: Path
) -> None:
    """Without a launcher, which would end it, and without checkpoints: the other fails in its next all-reduce."""
    job = start(tmp_path / "0", module, small, ["aa"] * 2, checkpoints=False, steps=10**6, global_batch_size=BATCH)
    until(lambda: len(job.log(1)) > 2 or job.processes[1].poll() is not None)
    job.processes[killed].kill()
    assert job.processes[1 - killed].wait(LIMIT_S) not in (0, -signal.SIGKILL), job.text()


def test_a_kill_in_the_middle_of_an_epoch_loses_no_bit(
    module: str, alone: list[float], start: Callable[..., Any], small: Path, tmp_path: Path
) -> None:
    """Killed with -9 and started again, and again, one rank's losses are to the bit those of a run that was not."""
    actual: list[float] = []
    kills = 2 if module == "jax_bc" else 1  # torch's imports take longer than its steps
    for attempt in range(kills + 1):
        job = start(tmp_path / str(attempt), module, small, steps=60, global_batch_size=BATCH, checkpoint_every=7)
        done = len(actual)
        assert done * BATCH % 60 or not done
        if attempt < kills:
            until(lambda job=job: len(job.log()) > 16 or job.processes[0].poll() is not None)  # type: ignore[misc]
            job.kill()
            assert job.wait() == [-signal.SIGKILL], job.text()
            retained = lookup.latest_step(tmp_path / "checkpoints")
            # What was made after the last checkpoint is made again, and is the same.
            assert actual + job.losses() == alone[: done + len(job.losses())]
            actual += job.losses()[: retained - done]
        else:
            actual += job.ok().losses()
    assert actual == alone[:60]


def test_the_last_save_is_no_hang(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the last save is waited for, the hang watch allows it more than the time of some steps."""
    for name, path in (("DATA_DEMO", small), ("CHECKPOINT_DIR", tmp_path / "c"), ("ATTEMPT_DIR", tmp_path)):
        monkeypatch.setenv(f"PIT_{name}", str(path))
    allowed: list[float] = []
    close = Checkpointer.close

    def timed_close(checkpointer: Checkpointer) -> None:
        allowed.append((tmp_path / "steps" / "0.jsonl").stat().st_mtime - time.time())
        close(checkpointer)

    monkeypatch.setattr(Checkpointer, "close", timed_close)
    pytest.importorskip("pitools.train.torch_bc", exc_type=ImportError).main(steps=2, global_batch_size=4)
    assert allowed[0] > HangLimits().min_s


def test_a_checkpoint_of_another_order_is_refused(
    either: str, start: Callable[..., Any], small: Path, tmp_path: Path
) -> None:
    """With another seed the samples to come are others: it is said, and no step is made."""
    start(tmp_path / "0", either, small, steps=3, global_batch_size=6).ok()
    job = start(tmp_path / "1", either, small, steps=9, global_batch_size=6, seed=1)
    assert job.wait() == [1]
    assert "seed differs (expected '1', got '0')" in job.text()
    assert job.log() == []


def test_ranks_that_would_draw_other_samples_are_refused(
    either: str, start: Callable[..., Any], small: Path, tmp_path: Path
) -> None:
    """One version at two places, an episode of it in quarantine at one of them: said before any step is made."""
    copy = tmp_path / "data" / small.parent.name / small.name
    shutil.copytree(small, copy)
    version_state.set_quarantine(
        copy, version_state.Quarantine(whole_version=False, set_at="", set_by="", episodes={1: ("frozen",)})
    )
    job = start(tmp_path / "0", either, [small, copy], ["aa"] * 2, steps=5, global_batch_size=6)
    until(lambda: job.processes[1].poll() is not None)
    job.kill()  # rank 0 waits for the other's answer
    assert "ConfigError: dataset: samples differs" in job.text(1)
    assert job.log(0) == job.log(1) == []


def test_ranks_of_two_jobs_refuse_each_other(
    module: str, start: Callable[..., Any], small: Path, tmp_path: Path
) -> None:
    """A rank with another secret ends both jobs before any step, and no secret is printed."""
    ours, theirs = "5e1f00d5e1f00d5e", "0ddba110ddba1100"
    job = start(tmp_path / "0", module, small, [ours, theirs], steps=5, global_batch_size=6)
    assert 0 not in job.wait()
    for rank, other in ((0, 1), (1, 0)):
        assert "WrongJob" in job.text(rank)
        assert f"rank {other} of job" in job.text(rank)
        assert job.log(rank) == []
    assert ours not in job.text()
    assert theirs not in job.text()


@pytest.mark.slow
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
