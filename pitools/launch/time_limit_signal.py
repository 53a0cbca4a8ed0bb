"""The signal that a run gets before its time limit, and how long before."""

from __future__ import annotations

SIGNAL_LEAD_S = 120  # time for a checkpoint; Slurm may send the signal up to 60 s early, never late
_MAX_LEAD_S = 65535  # sbatch's limit


def default_signal(framework: str, grace_s: float = 0.0) -> str:
    """Return the default of `sbatch --signal`: `USR2@120`, or `TERM@120` for JAX.

    JAX's own preemption service handles SIGTERM. Otherwise USR2: NCCL uses USR1, and on TERM most programs exit without
    saving. grace_s: the site's time between SIGTERM and SIGKILL, in seconds: where it is long, checkpoints take long,
    and the signal is sent earlier.
    """
    name = "TERM" if framework == "jax" else "USR2"
    return f"{name}@{min(_MAX_LEAD_S, round(max(SIGNAL_LEAD_S, grace_s)))}"
