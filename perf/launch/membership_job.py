"""A JAX job that knows whether it is whole: every process gathers all job ids, and all must be its own.

membership_job:main      as a run's entry point, with the environment that pitools gives
python membership_job.py inside srun, by JAX's own rule for the port, with an address that resolves here
"""

from __future__ import annotations

import os
import sys

LIMIT_S = 60


def main() -> None:
    """Join as a user's script would, with nothing but what the environment says."""
    check_membership({})


def check_membership(explicit: dict[str, object]) -> None:
    """Join, gather the job ids of all processes, and exit 1 unless they are all this job's."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(initialization_timeout=LIMIT_S, **explicit)
    own_part = int(os.environ["SLURM_JOB_ID"])
    observed = np.asarray(multihost_utils.process_allgather(np.array(own_part))).ravel().tolist()
    print(f"job {own_part} sees {observed}", flush=True)
    if observed != [own_part] * int(os.environ["SLURM_NTASKS"]):
        sys.exit(1)
    jax.distributed.shutdown()


if __name__ == "__main__":
    port = int(os.environ["SLURM_JOB_ID"]) % 4096 + 61440  # jax/_src/clusters/slurm_cluster.py
    check_membership(
        {
            "coordinator_address": f"127.0.0.1:{port}",
            "num_processes": int(os.environ["SLURM_NTASKS"]),
            "process_id": int(os.environ["SLURM_PROCID"]),
        }
    )
