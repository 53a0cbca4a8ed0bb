"""Read what a user may run at a site: limits, and what slurmctld counts against them now."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC

from pitools.core.errors import PitError, UsageError, suggest
from pitools.limits.read import read_limits
from pitools.limits.records import JobRequest, LimitState
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm import argv, parse_jobs
from pitools.slurm.fields import comma_list, new_separator
from pitools.slurm.multi_query import run_queries, stdout_or_raise
from pitools.slurm.parse_assoc_mgr import parse_assoc_mgr
from pitools.slurm.parse_cluster import parse_config
from pitools.slurm.records import LimitUsage
from pitools.slurm.transport import Transport
from pitools.tenancy.allowance import Allowance, Counts, allowances

_QUEUE_FIELDS = ("job_id", "state", "user", "account", "qos", "partition", "nodes", "gres")


def read_allowances(site: Site, user: str = "") -> list[Allowance]:
    """Return what the user, "" for the site's own, may run at a site.

    Raises UsageError for a user without associations where Slurm requires them, Unreachable and ClusterError.
    """
    transport = client(site).transport
    request = JobRequest(user=user, partition="", time_s=60)
    request, state = read_limits(request, transport, with_usage=False)
    rows = list(allowances(request.user, state, _counts(request.user, state, transport), site.name))
    if not rows:
        users = {row.user for row in state.associations if row.user and row.cluster == state.cluster}
        hint = suggest(request.user, users) or f"sacctmgr add user {request.user} account=..., or a policy's [teams]"
        raise UsageError(f'user "{request.user}" is in no account', where=f"site {site.name}", hint=hint)
    return rows


def _counts(user: str, state: LimitState, transport: Transport) -> Counts:
    if "limits" not in state.enforced:
        return Counts()
    parents = {row.account: row.parent for row in state.associations if not row.user}
    accounts = list(dict.fromkeys(row.account for row in state.associations if row.user == user))
    for account in accounts:
        if (parent := parents.get(account, "")) and parent not in accounts:
            accounts.append(parent)
    sep = new_separator()
    queue = ["squeue", "-h", "--noconvert", "-o", sep.join(parse_jobs.JOB_FORMAT[name] for name in _QUEUE_FIELDS)]
    counted, *rest = run_queries(
        transport, [argv.assoc_mgr(accounts, [row.qos for row in state.qos]), queue, argv.CONFIG]
    )
    jobs, config = (stdout_or_raise(transport, done) for done in rest)
    usage: tuple[LimitUsage, ...] = ()
    with suppress(PitError):  # PrivateData=usage
        usage = tuple(parse_assoc_mgr(stdout_or_raise(transport, counted)))
    private = comma_list(parse_config(config).values.get("PrivateData", ""))
    rows = parse_jobs.parse_squeue(jobs, sep, _QUEUE_FIELDS, UTC)
    return Counts(usage, rows, "jobs" if "jobs" in private else "amounts")
