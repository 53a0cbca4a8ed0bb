"""A rank's environment as its launcher sets it. Without a launcher: one rank, no step log, no checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pitools.core.errors import ConfigError


class RankEnv(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a training job.

    rank, world_size: its number among all ranks, and their count. local_rank: its number on this node.
    secret: random text that only this job's ranks share. attempt_dir: where the step log goes, None for nowhere.
    checkpoint_dir: where checkpoints are saved and restored, None for nowhere.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    secret: str = ""
    attempt_dir: Path | None = None
    checkpoint_dir: Path | None = None


def read_rank_env(env: Mapping[str, str] = os.environ) -> RankEnv:
    """Return this process's rank, from `PIT_*`. Raises ConfigError with the invalid variable."""
    for name in () if "PIT_WORLD_SIZE" in env else ("SLURM_STEP_NUM_TASKS", "WORLD_SIZE"):
        # N tasks that each run as the only rank would train N models, and overwrite each other's checkpoints.
        if _count(env, name, 1) > 1:
            hint = "start ranks by `pit launch run`, or by the script that `pit script render train` prints"
            raise ConfigError(f"{name}={env[name]}, but PIT_WORLD_SIZE is not set", where="environment", hint=hint)
    rank, world_size = _count(env, "PIT_RANK", 0), _count(env, "PIT_WORLD_SIZE", 1)
    if rank >= world_size:
        raise ConfigError(f"PIT_RANK={rank} is not one of PIT_WORLD_SIZE={world_size} ranks", where="environment")
    return RankEnv(
        rank=rank,
        world_size=world_size,
        local_rank=_count(env, "PIT_LOCAL_RANK", 0),
        secret=env.get("PIT_JOB_SECRET", ""),
        attempt_dir=_folder(env, "PIT_ATTEMPT_DIR"),
        checkpoint_dir=_folder(env, "PIT_CHECKPOINT_DIR"),
    )


def dataset_path(name: str, env: Mapping[str, str] = os.environ) -> Path:
    """Where the dataset called `name` was staged on this node: `PIT_DATA_<NAME>`. Raises ConfigError."""
    variable = f"PIT_DATA_{name.upper()}"
    if not env.get(variable):
        hint = f"request the dataset, or set {variable} to a version: its folder, ROOT/NAME or ROOT/NAME@TAG"
        raise ConfigError(f'no staged dataset "{name}": {variable} is not set', where="environment", hint=hint)
    return Path(env[variable])


def cpu_threads(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the CPU threads that this rank may use, from its launcher or Slurm; None if neither sets them."""
    # OMP_NUM_THREADS may be a list, "4,2", with a count for each level of nested regions.
    outermost = {"OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()}
    return _count(outermost, "OMP_NUM_THREADS", 0) or _count(env, "SLURM_CPUS_PER_TASK", 0) or None


def _count(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name) or str(default)
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name}={text!r} is not a count", where="environment")
    return int(text)


def _folder(env: Mapping[str, str], name: str) -> Path | None:
    return Path(env[name]) if env.get(name) else None
