"""The best nodes for a run: chosen when its job is queued, and looked after for a minute."""

from __future__ import annotations

import sys
from pathlib import Path

from pitools.launch.plan import Plan
from pitools.run import folder
from pitools.site.model import Site
from pitools.slurm.client import Client
from pitools.topology import discover
from pitools.topology.get import acquire
from pitools.topology.get.wish import Wish, check
from pitools.topology.model import Fabric

# Then the job waits like any other: no constraint is left on a job that nobody watches.
FOLLOW_S = 60.0


def fabric(plan: Plan, site: Site, slurm: Client) -> Fabric | None:
    """The fabric to choose from; None, and a word on stderr, where there is nothing to choose by.

    Raises what reading it raises, and ClusterError where the site cannot keep a job to the choice.
    """
    if plan.request.topology == "none":
        return None
    found = discover.of_site(site, slurm)
    if not found.leaves and not found.torus:
        print(f'pit: site "{site.name}" tells no topology: Slurm takes whichever nodes are free', file=sys.stderr)
        return None
    check(found, _wish(plan))
    return found


def get(plan: Plan, found: Fabric, slurm: Client, run_dir: Path, job_id: str) -> None:
    """Choose nodes for the run's job, and follow it until it starts, for a minute at most; the run's events tell.

    Raises what `acquire` raises: the job has been cancelled then.
    """
    got = acquire.acquire(slurm, job_id, found, _wish(plan))
    folder.note(
        run_dir, "topology", by=got.by, tries=got.tries, chosen=got.chosen, node_list=got.node_list, leaves=got.leaves,
        is_within=got.is_within, is_lifted=got.is_lifted, why=got.why,
    )  # fmt: skip


def _wish(plan: Plan) -> Wish:
    by = plan.request.topology
    return Wish(by="exclude" if by == "none" else by, timeout_s=FOLLOW_S, segment=plan.job.segment)
