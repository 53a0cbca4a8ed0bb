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

RETRY_FOR_S = 60.0


def submit_next_job(
    run_dir: Path,
    plan: Plan,
    site: Site,
    *,
    number: int | None = None,
    wait_s: float = 0.0,
    retry_for_s: float | None = RETRY_FOR_S,
    args: Sequence[str] = (),
) -> run_folder.JobRef:
    """Submit the run's next job, exactly once, or finish the submission that was begun. Raises as `exactly_once.send`.

    number: which it is. wait_s: the job is not to begin before. retry_for_s: with a Slurm that is busy or silent. args:
    more flags of sbatch's.
    """
    begin_args = (f"--begin=now+{round(wait_s)}",) if wait_s >= 1 else ()
    runs = run_dir.parent
    exclude_args = exclusions.sbatch_exclude_args(runs, site, plan)
    try:
        return exactly_once.submit_once(
            run_dir, site, args=(*exclude_args, *begin_args, *args), number=number, retry_for_s=retry_for_s
        )
    except SlurmRefused as error:
        if not exclude_args or error.reason is not SlurmReason.INVALID_NODE_NAME:
            raise
    # A node that has left the cluster since, or that a log spelled otherwise: it must not keep any job from starting.
    existing_nodes = {node.node for node in client(site).nodes()}
    exclude_args = exclusions.sbatch_exclude_args(runs, site, plan, existing_nodes=existing_nodes)
    return exactly_once.submit_once(
        run_dir, site, args=(*exclude_args, *begin_args, *args), number=number, retry_for_s=retry_for_s
    )
