"""Submit a run's next job without the excluded nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pitools.core.errors import PitError
from pitools.launch.plan import Plan
from pitools.launch.submission import exactly_once, exclusions
from pitools.run import run_folder
from pitools.site.connect import client
from pitools.site.schema import Site

RETRY_FOR_S = 60.0


def submit_next_job(
    run_dir: Path,
    plan: Plan,
    site: Site,
    *,
    job_number: int | None = None,
    wait_s: float = 0.0,
    retry_for_s: float | None = RETRY_FOR_S,
    args: Sequence[str] = (),
    runs: Path | None = None,
) -> run_folder.JobRef:
    """Submit the run's next job exactly once, or complete its interrupted submission.

    job_number: of the submission, None for the next. wait_s: how long the job must wait before it starts, in seconds.
    retry_for_s: how long to retry while Slurm is busy or silent. args: further sbatch arguments. runs: the folder of
    runs whose exclusions count; None for that of the run. Raises the errors of `submit_once`.
    """
    begin_args: tuple[str, ...] = plan.first_job_flags if job_number == 0 else ()
    if wait_s >= 1:
        begin_args = (f"--begin=now+{round(wait_s)}",)
    runs = runs or run_dir.parent
    exclude_args = exclusions.sbatch_exclude_args(runs, site, plan, lambda: _partition_nodes(plan, site))
    return exactly_once.submit_once(
        run_dir, site, args=(*exclude_args, *begin_args, *args), job_number=job_number, retry_for_s=retry_for_s
    )


def _partition_nodes(plan: Plan, site: Site) -> set[str] | None:
    """Return the nodes of the job's partitions; None if Slurm does not answer, as the submission will say."""
    partitions = set(plan.job.partition.split(",")) - {""}
    try:
        nodes = client(site).nodes()
    except PitError:
        return None
    return {node.node for node in nodes if not (partitions and partitions.isdisjoint(node.partitions))}
