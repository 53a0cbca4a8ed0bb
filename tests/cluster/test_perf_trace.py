"""Runs of two nodes are traced while they run, and their traces attributed."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm
Pit = Callable[..., subprocess.CompletedProcess[str]]

# All-reduces over gloo; rank 1 computes more, so that rank 0 waits for it.
LOOP = """
import os, time
from pathlib import Path
from pitools.run.steps import StepLog
from pitools.run.trace_capture import annotate
from pitools.train.distributed import join_{framework}
from pitools.train.rank import read_rank_env

def main():
    rank = read_rank_env()
    log = StepLog(rank.attempt_dir / "steps", rank.rank)
    with join_{framework}(rank{backend}):
        step_once = prepare(rank.rank)
        end = time.monotonic() + 120
        for step in range(100_000):
            if time.monotonic() > end:
                break
            began = time.perf_counter()
            with annotate("input"):
                time.sleep(0.005)
            step_once()
            wall_s = time.perf_counter() - began
            log.write(step=step, loss=1, wall_s=wall_s, input_s=0.005, compute_s=0, comm_s=0, rank_samples=1)
        log.close()
"""
PREPARE = {
    "torch": """
import torch
def prepare(rank):
    torch.set_num_threads(1)
    array, sums = torch.ones(800, 800), torch.ones(1000)
    def step_once():
        for _ in range(1 + 7 * rank):
            array @ array
        torch.distributed.all_reduce(sums)
    return step_once
""",
    "jax": """
import jax, numpy as np
from pitools.train.jax_bc import make_all_reduce
def prepare(rank):
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 1 + 7 * rank, lambda _, y: (y @ y) / 800, x))
    all_reduce = make_all_reduce()
    array, row = jax.numpy.ones((800, 800)), jax.device_put(np.ones((1, 1000), np.float32), jax.local_devices()[0])
    def step_once():
        jax.block_until_ready(work(array))
        jax.block_until_ready(all_reduce(row))
    return step_once
""",
}
REQUEST = """
name = "traced-{framework}"
entry = "loop:main"
framework = "{framework}"
nodes = 2
time = "5m"
env = {{ OMP_NUM_THREADS = "1" }}
"""


@pytest.fixture(params=["torch", "jax"])
def running(request: pytest.FixtureRequest, pit: Pit, clusters: Path, tmp_path: Path) -> Iterator[str]:
    """A run on alpha; it is cancelled at the end."""
    framework = request.param
    backend = ', "gloo"' if framework == "torch" else ""
    (tmp_path / "loop.py").write_text(PREPARE[framework] + LOOP.format(framework=framework, backend=backend))
    (tmp_path / "traced.toml").write_text(REQUEST.format(framework=framework))
    done = pit("launch", "run", str(tmp_path / "traced.toml"), "--site", "alpha")
    assert done.returncode == 0, done.stderr
    run_dir = json.loads(done.stdout)["run_dir"]
    yield run_dir
    pit("launch", "cancel", run_dir, "--site", "alpha")


def test_a_running_run_is_traced_and_attributed(running: str, pit: Pit) -> None:
    """All ranks record the same steps, whose parts sum and name the slow rank; a second request waits its turn; a run
    that has ended is said."""
    request = Path(running) / "attempts" / "0" / "traces" / "request.json"
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(pit, "perf", "trace", running, "--site", "alpha", "--steps", "16", "--timeout", "3m")
        while not request.exists():
            assert not asking.done(), asking.result().stderr
            time.sleep(0.1)
        second = pit("perf", "trace", running, "--site", "alpha")
        asked = asking.result()
    assert (second.returncode, "is going on" in second.stderr) == (75, True), second.stderr
    assert asked.returncode == 0, asked.stderr
    told = asked.stderr
    assert "waits for steps" in told
    traced = [json.loads(line) for line in asked.stdout.splitlines()]
    assert [(each["rank"], each["state"]) for each in traced] == [(0, "done"), (1, "done")]
    assert traced[0]["first_step"] == traced[1]["first_step"]
    assert traced[0]["blocked_s"] < 2
    command = told.rpartition("pit perf attribute ")[2].strip()
    *steps, verdict = map(json.loads, pit("perf", "attribute", command).stdout.splitlines())
    assert sorted({step["step"] for step in steps}) == list(range(traced[0]["first_step"], traced[0]["last_step"] + 1))
    parts = ("compute", "communication", "copy", "input", "host", "compile", "checkpoint", "idle")
    for step in steps:
        assert sum(step[f"{name}_ms"] for name in parts) == pytest.approx(step["wall_ms"], abs=1e-6)
    own_ms = [
        sum(each["wall_ms"] - each["communication_ms"] for each in steps if each["rank"] == rank) for rank in (0, 1)
    ]
    assert own_ms[0] < own_ms[1]
    # Others may load the machine: then so few steps decide nothing, but nothing else either.
    assert (verdict["verdict"], verdict["rank"]) in (("straggler", 1), ("inconclusive", None))
    pit("launch", "cancel", running, "--site", "alpha")
    late = pit("perf", "trace", running, "--site", "alpha", "--timeout", "60s")
    if late.returncode == 1:  # the run ended only while this one waited
        late = pit("perf", "trace", running, "--site", "alpha", "--timeout", "60s")
    assert (late.returncode, "the run has ended" in late.stderr) == (2, True), late.stderr
