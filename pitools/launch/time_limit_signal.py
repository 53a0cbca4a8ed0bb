"""How long before its time limit a run is told, and by which signal."""

from __future__ import annotations

SIGNAL_LEAD_S = 120  # a checkpoint and a late sender: Slurm's may come up to 60 s early, never late
_MAX_LEAD_S = 65535  # sbatch takes no more


def default_signal(framework: str, grace_s: float = 0.0) -> str:
    """What `sbatch --signal` gets where the request says nothing: `USR2@120`, or `TERM@120` for JAX.

    JAX's own preemption service listens to SIGTERM. Elsewhere it is USR2: USR1 is NCCL's, and TERM means to most
    programs that they are to end, not to save. grace_s: what the site gives between SIGTERM and SIGKILL, in seconds:
    a site that is generous there is one whose checkpoints take long.
    """
    name = "TERM" if framework == "jax" else "USR2"
    return f"{name}@{min(_MAX_LEAD_S, round(max(SIGNAL_LEAD_S, grace_s)))}"
