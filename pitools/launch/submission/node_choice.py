"""Choose the best free nodes for a run's queued job, and update the choice until the job starts or a time-out.

fabric = node_choice.load_fabric(plan, site, slurm)   before the submission
job = ... sbatch with DELAYED_START_ARGS, if there is a fabric ...
acquired = node_choice.acquire_nodes(plan, site, fabric, slurm, job_id)
"""

from __future__ import annotations

from pathlib import Path

from pitools.launch.plan import Plan
from pitools.node.site_suspicion import costs_at_site
from pitools.run import run_folder
from pitools.site.schema import Site
from pitools.slurm.client import Client
from pitools.topology import discover
from pitools.topology.acquire import loop
from pitools.topology.acquire.loop import DELAYED_START_ARGS
from pitools.topology.acquire.options import Acquired, AcquireOptions, require_choosable
from pitools.topology.fabric_model import Fabric, nodes_of

__all__ = ["DELAYED_START_ARGS", "FOLLOW_TIMEOUT_S", "TICKET_FOLLOW_S", "acquire_nodes", "load_fabric", "record_choice"]

# After this time the job waits without a constraint on its nodes, since no process would update it. A ticket's time is
# shorter: it is submitted when nodes are free for it, and the other tickets of a tick wait meanwhile.
FOLLOW_TIMEOUT_S, TICKET_FOLLOW_S = 60.0, 15.0


def load_fabric(plan: Plan, site: Site, slurm: Client) -> Fabric | None:
    """Return the site's fabric; None if the request leaves the choice to Slurm, or the site has no topology.

    Raises the errors of `fabric_of_site`, and ClusterError if the site cannot restrict a job to chosen nodes.
    """
    if plan.request.topology == "none":
        return None
    fabric = discover.fabric_of_site(site, slurm)
    if not fabric.leaves and not fabric.torus:
        return None
    require_choosable(fabric, _acquire_options(plan, FOLLOW_TIMEOUT_S))
    return fabric


def acquire_nodes(
    plan: Plan, site: Site, fabric: Fabric, slurm: Client, job_id: str, *, follow_s: float = FOLLOW_TIMEOUT_S
) -> Acquired:
    """Choose nodes for a job queued with DELAYED_START_ARGS; follow it until it starts, for at most `follow_s` seconds.

    Nodes that are suspected at the site are avoided: see node/suspicion.py. Raises the errors of `run_acquire_loop`;
    the job is cancelled then.
    """
    options = _acquire_options(plan, follow_s)._replace(avoid=costs_at_site(site, nodes_of(fabric)))
    return loop.run_acquire_loop(slurm, job_id, fabric, options)


def record_choice(run_dir: Path, acquired: Acquired) -> None:
    """Append the choice of nodes to the run's events."""
    run_folder.append_event(
        run_dir,
        "topology",
        by=acquired.by,
        tries=acquired.tries,
        chosen=acquired.chosen,
        node_list=acquired.node_list,
        leaves=acquired.leaves,
        is_within=acquired.is_within,
        is_released=acquired.is_released,
        reason=acquired.reason,
    )


def _acquire_options(plan: Plan, follow_s: float) -> AcquireOptions:
    by = plan.request.topology
    return AcquireOptions(
        by="exclude" if by == "none" else by, timeout_s=follow_s, unreachable_s=follow_s, segment=plan.job.segment
    )
