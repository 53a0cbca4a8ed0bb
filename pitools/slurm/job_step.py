"""Steps of the job that this process is in: its nodes and GPUs, srun's arguments, and why a step failed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

from pitools.core import hostlist

NO_VARIABLES = ("SLURM_HOSTFILE", "SLURM_DISTRIBUTION")
"""Variables to unset for `srun_argv`: they would place ranks on other nodes."""

GRACE_S = 30.0
"""How long after its ranks' own time-out Slurm ends a step."""


def nodes_of_job(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the nodes of the job that this process is in; none outside of a job."""
    return hostlist.expand(environ.get("SLURM_JOB_NODELIST", "")) if environ.get("SLURM_JOB_ID") else []


def gpus_per_node(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many GPUs this job has on a node. sbatch and salloc name it differently: `8` and `h100:8`."""
    text = environ.get("SLURM_GPUS_ON_NODE") or environ.get("SLURM_GPUS_PER_NODE", "")
    count = text.rpartition(":")[2]
    return int(count) if count.isdecimal() else 0


def srun_argv(
    nodes: Sequence[str], ranks_per_node: int, timeout_s: float, *, kill_on_bad_exit: bool = True
) -> list[str]:
    """Return the command that starts a step on some nodes of this job. kill_on_bad_exit: a rank's end ends all."""
    return [
        "srun",
        "--overlap",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes) * ranks_per_node}",
        f"--ntasks-per-node={ranks_per_node}",
        f"--nodelist={hostlist.fold(nodes)}",
        "--distribution=block",
        "--mem=0",
        "--cpu-bind=none",
        f"--kill-on-bad-exit={kill_on_bad_exit:d}",
        f"--time={math.ceil((timeout_s + GRACE_S) / 60)}",
    ]


def failure_reason(stderr: str) -> str:
    """Return srun's first error, which names the first node that failed, and a rank's last line, or its time-out."""
    lines = [line for line in map(str.strip, stderr.splitlines()) if line]
    errors = [line for line in lines if line.startswith("srun: error:")]
    others = [line for line in lines if not line.startswith(("srun:", "slurmstepd"))]
    timed_out = [line for line in others if line.startswith("Timeout (")]  # faulthandler's, before its traceback
    return "; ".join(errors[:1] + (timed_out or others)[-1:])
