"""What a rank reads in its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from pitools.core.errors import ConfigError
from pitools.train import rank
from pitools.train.rank import RankEnv


def test_without_a_launcher_there_is_one_rank() -> None:
    """An empty environment is rank 0 of 1, which keeps nothing."""
    assert rank.read_rank_env({}) == RankEnv()


def test_a_launcher_says_everything() -> None:
    """Each variable of the contract arrives in its field."""
    env = {
        "PIT_RANK": "3",
        "PIT_WORLD_SIZE": "8",
        "PIT_LOCAL_RANK": "1",
        "PIT_JOB_SECRET": "ab",
        "WORLD_SIZE": "8",
        "PIT_ATTEMPT_DIR": "/r/attempts/0",
        "PIT_CHECKPOINT_DIR": "/r/checkpoints",
    }
    expected = RankEnv(
        rank=3,
        world_size=8,
        local_rank=1,
        secret="ab",
        attempt_dir=Path("/r/attempts/0"),
        checkpoint_dir=Path("/r/checkpoints"),
    )
    assert rank.read_rank_env(env) == expected


@pytest.mark.parametrize(
    ("env", "what"),
    [
        ({"PIT_RANK": "2", "PIT_WORLD_SIZE": "2"}, "PIT_RANK=2"),
        ({"PIT_RANK": "-1"}, "PIT_RANK='-1'"),
        ({"PIT_WORLD_SIZE": "two"}, "PIT_WORLD_SIZE='two'"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2"),
    ],
)
def test_an_impossible_environment_is_refused(env: dict[str, str], what: str) -> None:
    """A rank that is none, or tasks that would each train alone, are named by their variable."""
    with pytest.raises(ConfigError, match=what):
        rank.read_rank_env(env)


def test_a_dataset_is_found_by_name() -> None:
    """The name is upper-cased into PIT_DATA_<NAME>, and what is missing is named with what to set."""
    assert rank.dataset_path("pick_place", {"PIT_DATA_PICK_PLACE": "/nvme/x"}) == Path("/nvme/x")
    with pytest.raises(ConfigError, match="PIT_DATA_DEMO is not set"):
        rank.dataset_path("demo", {})


def test_threads_are_what_was_granted() -> None:
    """OMP_NUM_THREADS goes before Slurm's number; with neither the library decides."""
    assert rank.cpu_threads({"OMP_NUM_THREADS": "2", "SLURM_CPUS_PER_TASK": "8"}) == 2
    assert rank.cpu_threads({"OMP_NUM_THREADS": "4,2"}) == 4
    assert rank.cpu_threads({"SLURM_CPUS_PER_TASK": "8"}) == 8
    assert rank.cpu_threads({}) is None
