"""Steps within a job: which nodes and GPUs it has, how srun starts one, and why it failed."""

from __future__ import annotations

import pytest

from pitools.slurm.job_step import failure_reason, gpus_per_node, nodes_of_job, srun_argv


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 0),
        ({"SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_GPUS_PER_NODE": "h100:4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "h100"}, 0),
    ],
)
def test_ranks_follow_the_gpus_of_the_job(environ: dict[str, str], count: int) -> None:
    """As sbatch and salloc name them."""
    assert gpus_per_node(environ) == count


def test_a_step_has_all_ranks_and_an_end() -> None:
    """On these nodes, and no later than Slurm's limit of a minute's grain."""
    argv = srun_argv(["n2", "n1"], 8, 100.0)
    assert {"--nodes=2", "--ntasks=16", "--nodelist=n[1-2]", "--time=3", "--kill-on-bad-exit=1"} <= set(argv)
    assert nodes_of_job({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}) == ["n1", "n2"]
    assert nodes_of_job({"SLURM_JOB_NODELIST": "n[1-2]"}) == []


def test_the_reason_of_a_failed_step_has_the_node_and_the_rank_s_last_words() -> None:
    """As Slurm 22.05 printed it, whose own lines come last, and under two names."""
    stderr = """\
Traceback (most recent call last):
ModuleNotFoundError: No module named 'nosuch'
srun: error: delta02: task 1: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=6.0
slurmstepd-delta01: error: *** STEP 6.0 ON delta01 CANCELLED AT 2026-11-26T16:06:47 ***
"""
    reason = "srun: error: delta02: task 1: Exited with exit code 1; ModuleNotFoundError: No module named 'nosuch'"
    assert failure_reason(stderr) == failure_reason(stderr.replace("slurmstepd-delta01", "slurmstepd")) == reason
    assert failure_reason("") == ""
    stderr = 'Timeout (0:00:05)!\nThread 0x7 (most recent call first):\n  File "single.py", line 1 in main\n'
    assert failure_reason(stderr) == "Timeout (0:00:05)!"
