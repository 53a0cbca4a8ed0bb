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
from pitools.topology.acquire.loop import HELD
from pitools.topology.acquire.options import Acquired, Wish, check
from pitools.topology.fabric_model import Fabric

__all__ = ["FOLLOW_S", "HELD", "TICKET_S", "fabric", "get", "note"]

# Then the job waits like any other: no constraint is left on a job that nobody watches. A ticket is sent when nodes are
# free for it, and the other tickets of a tick wait behind it.
FOLLOW_S, TICKET_S = 60.0, 15.0


def fabric(plan: Plan, site: Site, slurm: Client) -> Fabric | None:
    """The fabric to choose from; None where the request leaves it to Slurm, or the site tells of none.

    Raises what reading it raises, and ClusterError where the site cannot keep a job to the choice.
    """
    if plan.request.topology == "none":
        return None
    found = discover.of_site(site, slurm)
    if not found.leaves and not found.torus:
        return None
    check(found, _wish(plan, FOLLOW_S))
    return found


def get(plan: Plan, found: Fabric, slurm: Client, job_id: str, *, follow_s: float = FOLLOW_S) -> Acquired:
    """Choose nodes for a job that was queued with HELD, and follow it until it starts, for so long at most.

    Raises what `acquire` raises: the job has been cancelled then.
    """
    return loop.acquire(slurm, job_id, found, _wish(plan, follow_s))


def note(run_dir: Path, got: Acquired) -> None:
    """Let the run's events tell of its choice."""
    with contextlib.suppress(OSError):  # the job is there all the same
        run_folder.note(
            run_dir,
            "topology",
            by=got.by,
            tries=got.tries,
            chosen=got.chosen,
            node_list=got.node_list,
            leaves=got.leaves,
            is_within=got.is_within,
            is_lifted=got.is_lifted,
            why=got.why,
        )


def _wish(plan: Plan, follow_s: float) -> Wish:
    by = plan.request.topology
    return Wish(by="exclude" if by == "none" else by, timeout_s=follow_s, silent_s=follow_s, segment=plan.job.segment)
