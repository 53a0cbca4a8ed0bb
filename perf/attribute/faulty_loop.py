"""The training loops of pitools with a fault put into them, for `bench_injections`; an entry of a request."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pitools.run import run_folder, traces
from pitools.train import dataset

# The steps that are traced: of a fault that makes them long, fewer.
FAULTS = {
    "healthy": 40,
    "slow-input": 20,
    "slow-rank": 40,
    "slow-link": 20,
    "host-stall": 20,
    "recompiles": 5,
    "big-checkpoint": 20,
}
THROTTLED = "127.66.0.1"  # an address of the loopback, whose traffic is slow
_FIRST_STEP = 3
_TIMEOUT_S = 180.0  # of a run
_ROW_S = 0.005  # of a slow disk, a sample
_STALL_S = 0.15
_BALLAST = 8 << 20  # floats
_DISK = threading.Lock()
_CLONE_NEWUTS = 0x04000000


def main(framework: str, folder: str, runs: Sequence[str]) -> None:
    """Do the runs FAULT-NUMBER in turn, each in a process that has the framework, and its own group of ranks."""
    importlib.import_module(f"pitools.train.{framework}_bc")  # seconds, once
    fork = multiprocessing.get_context("fork")
    for number, run in enumerate(runs, 1):
        process = fork.Process(target=_train, args=(framework, Path(folder) / f"{framework}-{run}", number))
        process.start()
        process.join(_TIMEOUT_S)
        if process.exitcode != 0:
            process.kill()
            print(f"{run}: exit {process.exitcode}", flush=True)


def _train(framework: str, run_dir: Path, number: int) -> None:
    """Train with a fault, and trace some steps. number: of the run in this job, for a port of its own."""
    fault = run_dir.name.removeprefix(f"{framework}-").rpartition("-")[0]
    attempt = run_dir / "attempts" / "0"
    attempt.mkdir(parents=True, exist_ok=True)
    request = traces.TraceRequest(t="", first_step=_FIRST_STEP, last_step=_FIRST_STEP + FAULTS[fault] - 1)
    run_folder.write_record(run_dir / traces.RUN_REQUEST_FILE, request)
    port = int(os.environ.get("MASTER_PORT") or os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2]) + number
    os.environ |= {"PIT_ATTEMPT_DIR": str(attempt), "MASTER_PORT": str(port)}
    os.environ.pop("PIT_CHECKPOINT_DIR", None)
    if framework == "jax":
        import jax

        os.environ["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
        if fault != "recompiles":
            jax.config.update("jax_compilation_cache_dir", str(run_dir.parent / "jax-cache"))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if fault == "big-checkpoint":
        os.environ["PIT_CHECKPOINT_DIR"] = str(run_dir / "checkpoints")
    loop = importlib.import_module(f"pitools.train.{framework}_bc")
    _inject(loop, framework, fault)
    loop.main(
        steps=request.last_step + 2, global_batch_size=128, checkpoint_every=1 if fault == "big-checkpoint" else 0
    )
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)


def _inject(loop: Any, framework: str, fault: str) -> None:
    wrap = _wrap_torch if framework == "torch" else _wrap_jax
    if fault == "slow-input":
        _replace(dataset.DemonstrationDataset, "read", _slow_read)
    elif fault == "slow-link":
        # Gloo, of both frameworks, listens at the address of the host's name.
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), "unshare (expected root)")
        socket.sethostname(THROTTLED)
    elif fault == "host-stall":
        _replace(loop, "combine_votes", _stall)
    elif fault == "big-checkpoint":
        _replace(loop, "as_state", lambda original, *args: {**original(*args), "ballast": np.ones(_BALLAST, "f4")})
        if framework == "torch":
            _replace(loop, "as_state", _as_tensors)
    elif fault == "recompiles" or (fault == "slow-rank" and os.environ["PIT_RANK"] == "1"):
        wrap(loop, fault)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a function by `function`, which gets the original as its first argument."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: function(original, *args, **kwargs))


def _slow_read(original: Any, self: Any, drawn: Any, low: int, high: int, *rest: Any) -> None:
    with _DISK:
        time.sleep(_ROW_S * (high - low))
    original(self, drawn, low, high, *rest)


def _stall(original: Any, votes: Any) -> Any:
    time.sleep(_STALL_S)
    return original(votes)


def _as_tensors(original: Any, *args: Any) -> Any:
    import torch

    return {name: torch.as_tensor(value) for name, value in original(*args).items()}


class _Shrinking:
    """Batches that have a row less at each step, as without padding; each shape is compiled anew."""

    def __init__(self) -> None:
        self._left_out = 0

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        self._left_out += 1
        return {name: array[: -self._left_out] for name, array in inputs.items()}


def _wrap_torch(loop: Any, fault: str) -> None:
    import torch

    shrink = _Shrinking()

    def twice(original: Any, *args: Any) -> Any:
        original(*args)
        return original(*args)

    def compiled(original: Any, policy: Any, inputs: Any, *args: Any) -> Any:
        if not hasattr(policy, "is_compiled"):
            torch._dynamo.config.recompile_limit = 1000
            policy.compile(backend="aot_eager", dynamic=False)
            policy.is_compiled = True
        return original(policy, shrink(inputs), *args)

    _replace(loop, "compute", twice if fault == "slow-rank" else compiled)


def _wrap_jax(loop: Any, fault: str) -> None:
    import jax

    shrink = _Shrinking()

    def make(original: Any, global_batch_size: int) -> Any:
        compute = original(global_batch_size)

        def twice(*args: Any) -> Any:
            jax.block_until_ready(compute(*args))
            return compute(*args)

        def compiled(params: Any, inputs: Any, votes: Any) -> Any:
            return compute(params, shrink(inputs), votes)

        return twice if fault == "slow-rank" else compiled

    _replace(loop, "make_compute", make)
