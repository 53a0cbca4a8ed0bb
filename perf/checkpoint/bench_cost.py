"""What a guarded save costs over the framework's own asynchronous save: until training goes on, and until it is safe.

perf/run checkpoint_cost [--quick] [--rounds 5] [--memory /dev/shm] [--disk /var/tmp]

A state of 256 MiB (64 quick) in 16 arrays, on the disk and on a tmpfs. Ours: `Checkpointer.save`, then `wait`. Peers:
orbax's AsyncCheckpointer with `wait_until_finished`, and torch's `async_save` with its future, a stager kept from save
to save as ours is. Each save is into a new folder, and what was saved before is removed outside the time. Both peers
sync their files, as ours does; neither syncs folders' names, and neither can tell a flipped bit from a weight.

On a shared machine two saves of one kind differ by more than a tenth. So the guard's own part is timed within each save
as well: from the last byte that the framework wrote to the end, and where digests are taken while DCP writes, what its
writes waited for them. "With the guard's part" is a save over the same save without it.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from perf.harness.harness import Case, compare, interleave, report
from perf.harness.workspace import arguments, print_progress, workspace
from pitools.checkpoint.checkpointer import Checkpointer
from pitools.core.daemon_pool import DaemonPool

ARRAYS, MEBIBYTES = 16, 256
REACH = 0.9  # at most a tenth more

Saves = dict[str, Callable[[], None]]


class Clock:
    """Seconds until `save` returned, by who saved, and of each of our saves the seconds that are the guard's own."""

    def __init__(self) -> None:
        self.blocked: dict[str, list[float]] = {}
        self.own: list[float] = []
        self.waited = 0.0

    def guard_s(self, began: float) -> None:
        """A save of ours ended."""
        self.own.append(time.perf_counter() - began + self.waited)
        self.waited = 0.0

    @contextmanager
    def __call__(self, who: str) -> Iterator[None]:
        """Time the block."""
        began = time.perf_counter()
        yield
        self.blocked.setdefault(who, []).append(time.perf_counter() - began)


def own_part(adapter: Any, clock: Clock, save: Callable[[], None]) -> Callable[[], None]:
    """A save whose time after the framework's last write is noted."""
    wrote, write = [0.0], adapter._write

    def noted(*args: Any) -> Any:
        digests = write(*args)
        wrote[0] = time.perf_counter()
        return digests

    def instead() -> None:
        save()
        clock.guard_s(wrote[0])

    adapter._write = noted
    return instead


def waits(clock: Clock) -> type[DaemonPool]:
    """A pool that notes how long its digests are waited for."""

    class Noted(DaemonPool):
        def submit(self, *args: Any, **more: Any) -> Any:
            future = super().submit(*args, **more)
            result = future.result

            def noted(*limit: float) -> Any:
                began = time.perf_counter()
                try:
                    return result(*limit)
                finally:
                    clock.waited += time.perf_counter() - began

            future.result = noted  # type: ignore[method-assign]
            return future

    return Noted


def values(mebibytes: int) -> dict[str, Any]:
    """Noise, as weights are to a compressor."""
    rng = np.random.default_rng(0)
    rows = (mebibytes << 20) // ARRAYS // 4 // 1024
    return {f"w{number}": rng.standard_normal((rows, 1024), np.float32) for number in range(ARRAYS)}


def of_jax(home: Path, mebibytes: int, clock: Clock) -> Saves:
    """Ours and orbax's."""
    import jax
    import orbax.checkpoint as ocp

    from pitools.checkpoint.adapters.orbax_adapter import OrbaxAdapter

    state = jax.device_put(values(mebibytes))
    adapter = OrbaxAdapter()
    guard, steps = Checkpointer(home / "ours", adapter, keep_last=99), itertools.count(1)
    checkpointer, numbers = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()), itertools.count(1)

    def ours() -> None:
        with clock("ours"):
            guard.save(next(steps), state)
        guard.wait()

    def peer() -> None:
        with clock("peer"):
            checkpointer.save(home / "peer" / str(next(numbers)), args=ocp.args.PyTreeSave(state))
        checkpointer.wait_until_finished()

    return {"ours": own_part(adapter, clock, ours), "peer": peer}


def of_torch(home: Path, mebibytes: int, clock: Clock) -> Saves:
    """Ours and DCP's."""
    import torch
    from torch.distributed.checkpoint import async_save
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    from pitools.checkpoint.adapters import dcp_files
    from pitools.checkpoint.adapters.dcp_adapter import DcpAdapter

    dcp_files.DaemonPool = waits(clock)  # type: ignore[misc,attr-defined]
    state = {name: torch.from_numpy(array) for name, array in values(mebibytes).items()}
    adapter = DcpAdapter()
    guard, steps, numbers = Checkpointer(home / "ours", adapter, keep_last=99), itertools.count(1), itertools.count(1)
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    stager = DefaultStager(options)

    def ours() -> None:
        with clock("ours"):
            guard.save(next(steps), state)
        guard.wait()

    def peer() -> None:
        with clock("peer"):
            saved = async_save(
                state, checkpoint_id=home / "peer" / str(next(numbers)), async_stager=stager, no_dist=True
            )
        saved.result()

    return {"ours": own_part(adapter, clock, ours), "peer": peer}


def measure(framework: str, where: str, home: Path, mebibytes: int, rounds: int) -> list[Case]:
    """Blocking and total time of one framework on one file system."""

    @contextmanager
    def cleared(_: str) -> Iterator[None]:
        for old in (*home.glob("ours/step_*"), home / "peer"):
            shutil.rmtree(old, ignore_errors=True)
        (home / "peer").mkdir()
        os.sync()
        yield

    clock = Clock()
    saves = (of_jax if framework == "orbax-checkpoint" else of_torch)(home, mebibytes, clock)
    total = interleave(rounds, saves, around_each=cleared, rotate=True)
    blocked = {name: times[1:] for name, times in clock.blocked.items()}
    without = [all_s - own_s for all_s, own_s in zip(total["ours"], clock.own[-rounds:], strict=True)]
    text = {name: f"{min(blocked[name]):.3f} of {min(total[name]):.3f} s" for name in saves}
    print_progress(f"{framework} {where}: blocked and in all, ours {text['ours']}, peer {text['peer']}")
    return [
        compare(
            f"{case}, {mebibytes} MiB to {where}",
            framework,
            version(framework),
            times["ours"],
            times["peer"],
            target=REACH,
        )
        for case, times in (
            ("until safe", total),
            ("with the guard's part", {"ours": total["ours"], "peer": without}),
            ("until training goes on", blocked),
        )
    ]


def main() -> int:
    """Both frameworks, both file systems."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    given, cases = arguments(__doc__), []
    mebibytes = 64 if given.quick else MEBIBYTES
    for framework, (where, place) in itertools.product(
        ("orbax-checkpoint", "torch"), (("the disk", given.disk), ("a tmpfs", given.memory))
    ):
        with workspace(place, needed=4 * mebibytes << 20) as home:
            cases += measure(framework, where, home, mebibytes, given.rounds)
    return report(cases)


if __name__ == "__main__":
    sys.exit(main())
