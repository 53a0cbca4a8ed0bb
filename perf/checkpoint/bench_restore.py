"""What a verified restore costs over the framework's own, which takes a flipped bit for a weight.

perf/run checkpoint_restore [--quick] [--rounds 5] [--memory /dev/shm] [--disk /var/tmp]

A state of 256 MiB (64 quick) in 16 arrays, saved once by a Checkpointer; all restore from these files. Ours:
`Checkpointer.restore`, which digests every byte before anything is loaded. Peers: orbax's PyTreeCheckpointer, and
torch's `load`. Cold: the files are dropped from the page cache before each restore. Hot: they are in it, as after a
save on the same node.

Ours asks for each byte twice, to digest it and to load it. The bytes that came from the device say whether they were
also fetched twice: where memory holds a checkpoint, the second time is a copy from the page cache.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from perf.checkpoint.bench_cost import values
from perf.harness.harness import Case, compare, from_ratios, interleave, report
from perf.harness.workspace import arguments, print_progress, workspace
from pitools.checkpoint.checkpointer import Checkpointer

MEBIBYTES = 256
TARGET = 0.8  # at most a quarter more: what is loaded waits until all is verified, which no second buffer would change
FETCHED_ONCE = 0.95

Restores = dict[str, Callable[[], Any]]


def of_jax(home: Path, mebibytes: int) -> Restores:
    """Ours and orbax's."""
    import jax
    import orbax.checkpoint as ocp

    from pitools.checkpoint.adapters.orbax_adapter import OrbaxAdapter

    state = jax.device_put(values(mebibytes))
    guard = Checkpointer(home / "checkpoints", OrbaxAdapter())
    guard.save(1, state)
    guard.wait()
    checkpointer = ocp.PyTreeCheckpointer()
    arguments = jax.tree.map(lambda array: ocp.ArrayRestoreArgs(sharding=array.sharding), state)

    def ours() -> Any:
        return jax.block_until_ready(guard.restore(state).state)  # type: ignore[union-attr]

    def peer() -> Any:
        payload = home / "checkpoints" / "step_1" / "payload"
        return jax.block_until_ready(checkpointer.restore(payload, item=state, restore_args=arguments))

    return {"ours": ours, "peer": peer}


def of_torch(home: Path, mebibytes: int) -> Restores:
    """Ours and DCP's."""
    import torch
    from torch.distributed.checkpoint import load

    from pitools.checkpoint.adapters.dcp_adapter import DcpAdapter

    state = {name: torch.from_numpy(array) for name, array in values(mebibytes).items()}
    guard = Checkpointer(home / "checkpoints", DcpAdapter())
    guard.save(1, state)
    guard.wait()

    def emptied() -> dict[str, Any]:
        return {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def ours() -> Any:
        return guard.restore(emptied()).state  # type: ignore[union-attr]

    def peer() -> Any:
        actual = emptied()
        load(actual, checkpoint_id=home / "checkpoints" / "step_1" / "payload", no_dist=True)
        return actual

    return {"ours": ours, "peer": peer}


def fetched() -> int:
    """Bytes that came from a device for this process."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes:"))
    return int(line.split()[1])


def drop(folder: Path) -> None:
    """Have the page cache hold nothing of a folder's files."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(framework: str, home: Path, mebibytes: int, rounds: int) -> list[Case]:
    """One framework, cold and hot."""
    restores = (of_jax if framework == "orbax-checkpoint" else of_torch)(home, mebibytes)
    for who, restore in restores.items():
        actual, reference = restore(), values(mebibytes)
        if any(not np.array_equal(np.asarray(actual[name]), array) for name, array in reference.items()):
            sys.exit(f"{who}: {framework}: not what was saved")
    came: dict[str, list[int]] = {who: [] for who in restores}

    @contextmanager
    def cold(who: str) -> Iterator[None]:
        drop(home)
        before = fetched()
        yield
        came[who].append(fetched() - before)

    settings = {"cold": {"setting": cold}, "hot": {}}
    times = {kind: interleave(rounds, restores, rotate=True, **more) for kind, more in settings.items()}  # type: ignore[arg-type]
    text = {who: [round(count / 2**20) for count in counts] for who, counts in came.items()}
    print_progress(f"{framework}: MiB from the device, ours {text['ours']}, peer {text['peer']}")
    cases = [
        compare(
            f"restore, {mebibytes} MiB, {kind}",
            framework,
            version(framework),
            actual["ours"],
            actual["peer"],
            target=TARGET,
        )
        for kind, actual in times.items()
    ]
    ratios = [theirs / max(1, ours) for ours, theirs in zip(came["ours"][1:], came["peer"][1:], strict=True)]
    case = f"restore, {mebibytes} MiB, cold: bytes from the device"
    return [*cases, from_ratios(case, framework, version(framework), ratios, target=FETCHED_ONCE)]


def main() -> int:
    """Both frameworks."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    given, cases = arguments(__doc__), []
    mebibytes = 64 if given.quick else MEBIBYTES
    for framework in ("orbax-checkpoint", "torch"):
        with workspace(given.disk, needed=2 * mebibytes << 20) as home:
            cases += measure(framework, home, mebibytes, given.rounds)
    return report(cases)


if __name__ == "__main__":
    sys.exit(main())
