"""Checkpoints that were damaged: who notices, and what is trained on from there.

perf/run checkpoint_faults [--quick] [--memory /dev/shm]

Three checkpoints of each framework are saved by us, and of each fault a copy is made of links, in which one file of the
newest is replaced: one bit flipped anywhere, cut anywhere, gone, or the folder is left as a kill between two of its
files would leave it, in the order in which they were written. Ours: `Checkpointer.restore`. The peer's: the same files,
newest folder first as a loop finds them, with orbax's own checkpointer or torch's `load`. A fault is silent where what
is restored differs from every state that was saved, or an older one is taken for the newest; the case's ratio is the
share of faults after which training goes on from a state that was saved, ours; the peer's share is told in the case.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from perf.harness.harness import Case, from_ratios, report
from perf.harness.workspace import arguments, print_progress, workspace
from pitools.checkpoint.checkpointer import Checkpointer, FrameworkAdapter

STEPS = (1, 2, 3)
FAULTS = 500  # of each framework
KINDS = ("bit flip", "truncation", "missing file", "kill between files")


def array(step: int, name: int) -> np.ndarray[Any, Any]:
    """What a checkpoint holds; noise, so that no flip can be without effect."""
    return np.random.default_rng([step, name]).standard_normal((64, 257), np.float32)


class Jax:
    """Orbax, as ours drives it and alone."""

    name = "orbax-checkpoint"
    errors: type[BaseException] = Exception

    def __init__(self) -> None:
        import jax
        import orbax.checkpoint as ocp

        from pitools.checkpoint.adapters.orbax_adapter import OrbaxAdapter

        self.adapter: FrameworkAdapter = OrbaxAdapter()
        self._put, self._checkpointer = jax.device_put, ocp.PyTreeCheckpointer()

    def state(self, step: int) -> Any:
        """Parameters after a step."""
        return {f"w{name}": self._put(array(step, name)) for name in range(4)}

    def plain(self, payload: Path) -> Any:
        """As a loop without us restores."""
        return self._checkpointer.restore(payload, item=self.state(0))


class Torch:
    """DCP, as ours drives it and alone."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        from pitools.checkpoint.adapters.dcp_adapter import DcpAdapter

        self.adapter: FrameworkAdapter = DcpAdapter()
        self._torch = torch
        self.errors: type[BaseException] = torch.distributed.checkpoint.api.CheckpointException

    def state(self, step: int) -> Any:
        """Parameters after a step."""
        return {f"w{name}": self._torch.from_numpy(array(step, name)) for name in range(4)}

    def plain(self, payload: Path) -> Any:
        """As a loop without us restores."""
        state = self.state(0)
        self._torch.distributed.checkpoint.load(state, checkpoint_id=payload, no_dist=True)
        return state


def saved(framework: Jax | Torch, folder: Path) -> None:
    """Three checkpoints."""
    with Checkpointer(folder, framework.adapter) as guard:
        for step in STEPS:
            guard.save(step, framework.state(step), {"position": step}, {"lr": 0.5})


def step_of(state: Any) -> int:
    """The step whose state this is, to the bit; 0 for none."""
    for step in reversed(STEPS):
        if all(np.asarray(state[f"w{name}"]).tobytes() == array(step, name).tobytes() for name in range(4)):
            return step
    return 0


def damage(newest: Path, kind: str, rng: random.Random) -> str:
    """Do it to one file of a folder of links; returns which."""
    files = sorted((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_mtime_ns)
    if kind == "kill between files":
        value = rng.randrange(len(files))
        for path in files[value:]:
            path.unlink()
        return f"after {value} of {len(files)}"
    # By bytes for half of the faults: else the small files that describe the rest would take nearly all.
    weights = [path.stat().st_size for path in files] if rng.random() < 0.5 else [1] * len(files)
    (path,) = rng.choices(files, [max(weight, 1) for weight in weights])
    data = path.read_bytes()
    path.unlink()
    if kind == "bit flip":
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
    elif kind == "truncation":
        path.write_bytes(data[: rng.randrange(len(data))])
    return str(path.relative_to(newest))


def ours(framework: Jax | Torch, folder: Path) -> int:
    """The step we go on from; -1 where nothing is found."""
    with Checkpointer(folder, framework.adapter) as guard:
        restored_state = guard.restore(framework.state(0))
        if restored_state is None:
            return -1
        step = step_of(restored_state.state)
        return (
            step
            if (restored_state.step, restored_state.loader_state, restored_state.custom_metadata)
            == (step, {"position": step}, {"lr": 0.5})
            else 0
        )


def peers(framework: Jax | Torch, folder: Path) -> int:
    """The step that a loop without us goes on from, 0 for a state that never was; -1 for an error."""
    try:
        return step_of(framework.plain(folder / "step_3" / "payload"))
    except (Exception, framework.errors):  # noqa: BLE001  # whatever it says, it was noticed
        return -1


def measure(framework: Jax | Torch, home: Path, faults: int) -> list[Case]:
    """One case a kind."""
    original = home / framework.name / "original"
    saved(framework, original)
    cases = []
    for kind in KINDS:
        count, detected, restored = faults // len(KINDS), 0, 0
        counter: Counter[str] = Counter()
        for number in range(count):
            rng = random.Random(f"{kind} {number}")
            reported = []
            for name in (ours, peers):
                folder = home / framework.name / "damaged"
                shutil.copytree(original, folder, symlinks=True, copy_function=os.link)
                state = rng.getstate()
                where = folder / "step_3"
                # What only we write is not there to be hit where the peer is alone.
                damage(where if name is ours else where / "payload", kind, rng)
                rng.setstate(state)
                reported.append(name(framework, folder))
                shutil.rmtree(folder)
            detected += reported[0] in (1, 2)
            restored += reported[0] == 2
            counter["an error"] += reported[1] == -1
            counter["silently a state that never was"] += reported[1] == 0
            counter["no effect"] += reported[1] == 3
        silent = counter["silently a state that never was"]
        print_progress(
            f"{framework.name} {kind}: {detected} of {count} detected, {restored} restored; peer: {dict(counter)}"
        )
        words = f"{kind}, {count} times: share gone on from the newest good one ({silent} silent at the peer)"
        cases.append(from_ratios(words, framework.name, version(framework.name), [restored / count], target=1.0))
    return cases


def main() -> int:
    """Both frameworks."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    given = arguments(__doc__)
    faults = 40 if given.quick else FAULTS
    makers: list[Callable[[], Jax | Torch]] = [Jax, Torch]
    # What a peer says of a damaged checkpoint is pages, and all of it expected.
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None
    with workspace(given.memory, needed=64 << 20) as home, Path(os.devnull).open("w") as sink, redirect_stdout(sink):
        cases = list(itertools.chain.from_iterable(measure(make(), home, faults) for make in makers))
    return report(cases)


if __name__ == "__main__":
    sys.exit(main())
