"""The reference loops, slowed down so that faults can be aimed at steps, with the faults that only a program can make.

Entries of requests: `slow_loop:jax`, `slow_loop:torch`, with the loop's own arguments and these:
delay_s: after each step, until the run's folder has a file `go`. raise_at: a Python error after this step, at every
rank. hog_at: after this step rank 1 takes memory until it gets no more (`ulimit -v`). die_at: until the kernel ends it,
in a memory cgroup of its own, as Slurm's task/cgroup would make one (cgroups of version 1, root).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import time
from pathlib import Path
from typing import Any

CGROUPS = Path("/sys/fs/cgroup/memory")
MEMORY_LIMIT = 256 << 20


def jax(**args: Any) -> None:
    """The JAX loop."""
    _run("jax_bc", **args)


def torch(**args: Any) -> None:
    """The PyTorch loop."""
    _run("torch_bc", **args)


def _run(
    module: str, *, delay_s: float = 0.0, raise_at: int = -1, hog_at: int = -1, die_at: int = -1, **args: Any
) -> None:
    from pitools.run.steps import StepLog

    write, go = StepLog.write, Path(os.environ["PIT_RUN_DIR"], "go")

    def slowly(self: StepLog, **step: Any) -> None:
        write(self, **step)
        time.sleep(0.0 if go.exists() else delay_s)
        if step["step"] == raise_at:
            raise ValueError(f"the batch of step {raise_at} cannot be used")
        if step["step"] in (hog_at, die_at) and os.environ.get("PIT_RANK") == "1":
            exhaust_memory(dies=step["step"] == die_at)

    StepLog.write = slowly  # type: ignore[method-assign]
    importlib.import_module(f"pitools.train.{module}").main(**args)


def exhaust_memory(*, dies: bool) -> None:
    """Take memory until there is none."""
    if dies:
        group = CGROUPS / f"pit-recover-{os.getpid()}"
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(MEMORY_LIMIT))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    else:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_LIMIT, used + MEMORY_LIMIT))
    taken = []
    while True:
        taken.append(b"\1" * (16 << 20))


def remove_cgroups() -> None:
    """Remove the cgroups of those that have ended."""
    for group in CGROUPS.glob("pit-recover-*"):
        with contextlib.suppress(OSError):
            group.rmdir()
