"""Create a rank's Checkpointer, and decide when to save."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pitools.checkpoint.checkpointer import Checkpointer, FrameworkAdapter
from pitools.train.distributed import RankGroup
from pitools.train.rank import RankEnv


def make_checkpointer(
    rank: RankEnv, group: RankGroup, framework: Literal["jax", "torch"], env: Mapping[str, str] = os.environ
) -> Checkpointer | None:
    """Return this rank's checkpointer; None without a checkpoint folder, and then orbax or DCP is not imported.

    Raises Unreachable.
    """
    if rank.checkpoint_dir is None:
        return None
    if framework == "jax":
        from pitools.checkpoint.adapters.orbax_adapter import OrbaxAdapter

        adapter: FrameworkAdapter = OrbaxAdapter()
    else:
        from pitools.checkpoint.adapters.dcp_adapter import DcpAdapter

        adapter = DcpAdapter()
    return Checkpointer(
        rank.checkpoint_dir,
        adapter,
        rank=group.rank,
        world_size=group.world_size,
        put=group.put,
        get=group.get,
        delete=group.delete,
        run=Path(env.get("PIT_RUN_DIR", "")).name,
    )


def should_save(done: int, total: int, every: int, stopped: int) -> bool:
    """Whether to save after `done` of `total` steps: at the end, at a stop, and every so many steps unless 0."""
    return bool(stopped) or done == total or (every > 0 and done % every == 0)
