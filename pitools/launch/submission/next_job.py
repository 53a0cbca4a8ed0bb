"""Submit a run's next job, without the nodes that its runs keep away from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pitools.launch.plan import Plan
from pitools.launch.submission import exactly_once, exclusions
from pitools.run import run_folder
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.errors import SlurmReason, SlurmRefused

PATIENCE_S = 60.0


def send(
    run_dir: Path,
    plan: Plan,
    site: Site,
    *,
    number: int | None = None,
    wait_s: float = 0.0,
    patience_s: float | None = PATIENCE_S,
    args: Sequence[str] = (),
) -> run_folder.JobRef:
    """Submit the run's next job, exactly once, or finish the submission that was begun. Raises as `exactly_once.send`.

    number: which it is. wait_s: the job is not to begin before. patience_s: with a Slurm that is busy or silent. args:
    more flags of sbatch's.
    """
    later = (f"--begin=now+{round(wait_s)}",) if wait_s >= 1 else ()
    runs = run_dir.parent
    kept_out = exclusions.args(runs, site, plan)
    try:
        return exactly_once.send(run_dir, site, args=(*kept_out, *later, *args), number=number, patience_s=patience_s)
    except SlurmRefused as error:
        if not kept_out or error.reason is not SlurmReason.INVALID_NODE_NAME:
            raise
    # A node that has left the cluster since, or that a log spelled otherwise: it must not keep any job from starting.
    there = {node.node for node in client(site).nodes()}
    kept_out = exclusions.args(runs, site, plan, there=there)
    return exactly_once.send(run_dir, site, args=(*kept_out, *later, *args), number=number, patience_s=patience_s)
