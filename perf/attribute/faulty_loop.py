"""The training loops of pitools with a fault put into them, for `bench_injections`; an entry of a request."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pitools.train import dataset

FAULTS = ("healthy", "slow-input", "slow-rank", "host-stall", "recompiles", "big-checkpoint")
_ROW_S = 0.005  # of a slow disk, a sample
_STALL_S = 0.15
_BALLAST = 8 << 20  # floats
_DISK = threading.Lock()


def main(framework: str, fault: str, steps: int, global_batch_size: int) -> None:
    """Train with a fault: `framework` is torch or jax, `fault` one of FAULTS."""
    loop: Any = importlib.import_module(f"pitools.train.{framework}_bc")
    wrap = _wrap_torch if framework == "torch" else _wrap_jax
    if fault == "slow-input":
        _replace(dataset.DemonstrationDataset, "read", _slow_read)
    elif fault == "host-stall":
        _replace(loop, "combine_votes", _stall)
    elif fault == "big-checkpoint":
        _replace(loop, "as_state", lambda original, *args: {**original(*args), "ballast": np.ones(_BALLAST, "f4")})
        if framework == "torch":
            _replace(loop, "as_state", _as_tensors)
    elif fault != "healthy" and not (fault == "slow-rank" and os.environ["PIT_RANK"] == "0"):
        wrap(loop, fault)
    loop.main(steps=steps, global_batch_size=global_batch_size, checkpoint_every=1 if fault == "big-checkpoint" else 0)


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


def _wrap_torch(loop: Any, fault: str) -> None:
    import torch

    def twice(original: Any, *args: Any) -> Any:
        original(*args)
        return original(*args)

    def compiled(original: Any, policy: Any, inputs: Any, *args: Any) -> Any:
        torch._dynamo.reset()
        torch.compile(policy.forward, backend="eager", dynamic=False)(inputs)
        return original(policy, inputs, *args)

    _replace(loop, "compute", twice if fault == "slow-rank" else compiled)


def _wrap_jax(loop: Any, fault: str) -> None:
    import jax

    def make(original: Any, global_batch_size: int) -> Any:
        compute = original(global_batch_size)

        def twice(*args: Any) -> Any:
            jax.block_until_ready(compute(*args))
            return compute(*args)

        def compiled(*args: Any) -> Any:
            return original(global_batch_size)(*args)

        return twice if fault == "slow-rank" else compiled

    _replace(loop, "make_compute", make)
