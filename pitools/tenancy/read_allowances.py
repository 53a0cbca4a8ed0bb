"""Read what a user may run at a site: limits, and what slurmctld counts against them now."""

from __future__ import annotations

from pitools.core.errors import UsageError, suggest
from pitools.limits.read import add_usage, read_limits
from pitools.limits.records import JobRequest
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.tenancy.allowance import Allowance, allowances, choices, without_others


def read_allowances(site: Site, user: str = "") -> list[Allowance]:
    """Return what the user, "" for the site's own, may run at a site.

    Raises UsageError for a user without associations where Slurm requires them, Unreachable and ClusterError.
    """
    transport = client(site).transport
    request, state = read_limits(JobRequest(user=user, partition="", time_s=60), transport, with_usage=False)
    own = without_others(request.user, state)
    if not (jobs := list(choices(request.user, own))):
        users = {row.user for row in state.associations if row.user and row.cluster == state.cluster}
        hint = suggest(request.user, users) or f"sacctmgr add user {request.user} account=..., or a policy's [teams]"
        raise UsageError(f'user "{request.user}" is in no account', where=f"site {site.name}", hint=hint)
    return list(allowances(request.user, add_usage(jobs, own, transport), site.name))
