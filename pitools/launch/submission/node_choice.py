"""The best nodes for a run: chosen when its job is queued, and looked after until it starts, for a while.

found = node_choice.fabric(plan, site, slurm)   before anything is queued
job = ... sbatch with HELD, if there is one ...
got = node_choice.get(plan, found, slurm, job_id)
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from pitools.launch.plan import Plan
from pitools.run import run_folder
from pitools.site.schema import Site
from pitools.slurm.client import Client
from pitools.topology import discover
from pitools.topology.acquire import loop
from pitools.topology.acquire.loop import DELAYED_START_ARGS
from pitools.topology.acquire.options import Acquired, AcquireOptions, require_choosable
from pitools.topology.fabric_model import Fabric

__all__ = ["DELAYED_START_ARGS", "FOLLOW_TIMEOUT_S", "TICKET_FOLLOW_S", "acquire_nodes", "load_fabric", "record_choice"]

# Then the job waits like any other: no constraint is left on a job that nobody watches. A ticket is sent when nodes are
# free for it, and the other tickets of a tick wait behind it.
FOLLOW_TIMEOUT_S, TICKET_FOLLOW_S = 60.0, 15.0


def load_fabric(plan: Plan, site: Site, slurm: Client) -> Fabric | None:
    """The fabric to choose from; None where the request leaves it to Slurm, or the site tells of none.

    Raises what reading it raises, and ClusterError where the site cannot keep a job to the choice.
    """
    if plan.request.topology == "none":
        return None
    found = discover.fabric_of_site(site, slurm)
    if not found.leaves and not found.torus:
        return None
    require_choosable(found, _acquire_options(plan, FOLLOW_TIMEOUT_S))
    return found


def acquire_nodes(
    plan: Plan, fabric: Fabric, slurm: Client, job_id: str, *, follow_s: float = FOLLOW_TIMEOUT_S
) -> Acquired:
    """Choose nodes for a job that was queued with HELD, and follow it until it starts, for so long at most.

    Raises what `acquire` raises: the job has been cancelled then.
    """
    return loop.run_acquire_loop(slurm, job_id, fabric, _acquire_options(plan, follow_s))


def record_choice(run_dir: Path, acquired: Acquired) -> None:
    """Let the run's events tell of its choice."""
    with contextlib.suppress(OSError):  # the job is there all the same
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
            why=acquired.reason,
        )


def _acquire_options(plan: Plan, follow_s: float) -> AcquireOptions:
    by = plan.request.topology
    return AcquireOptions(
        by="exclude" if by == "none" else by, timeout_s=follow_s, unreachable_s=follow_s, segment=plan.job.segment
    )
