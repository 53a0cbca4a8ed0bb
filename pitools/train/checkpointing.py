"""A loop's checkpoints: whether there are any, where, and when the next is due."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pitools.checkpoint.checkpointer import Adapter, Guard
from pitools.train.distributed import Peers
from pitools.train.rank import Rank


def open_guard(
    rank: Rank, peers: Peers, framework: Literal["jax", "torch"], env: Mapping[str, str] = os.environ
) -> Guard | None:
    """What keeps this rank's checkpoints; None where nobody said a folder, and then orbax or DCP is not imported.

    PIT_CHECKPOINT_NVME: a folder on the node's own disk, to save in first. Raises Unreachable.
    """
    if rank.checkpoint_dir is None:
        return None
    if framework == "jax":
        from pitools.checkpoint.adapters.orbax_adapter import Orbax

        adapter: Adapter = Orbax()
    else:
        from pitools.checkpoint.adapters.dcp_adapter import Dcp

        adapter = Dcp(rank.rank)
    near = env.get("PIT_CHECKPOINT_NVME")
    return Guard(
        rank.checkpoint_dir,
        adapter,
        rank=peers.rank,
        world_size=peers.world_size,
        put=peers.put,
        get=peers.get,
        delete=peers.delete,
        run=Path(env.get("PIT_RUN_DIR", "")).name,
        stage=Path(near) if near else None,
    )


def due(done: int, total: int, every: int, stopped: int) -> bool:
    """Whether to save after `done` of `total` steps: at the end, at a stop, and every so many steps unless 0."""
    return bool(stopped) or done == total or (every > 0 and done % every == 0)
