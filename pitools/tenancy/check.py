"""Check a site against its policy: one call more than reading its accounting takes."""

from __future__ import annotations

from pitools.slurm import argv
from pitools.slurm.multi_query import run_queries, stdout_or_raise
from pitools.slurm.parse_nodes import parse_partitions
from pitools.tenancy import changed_by, drift, preemption
from pitools.tenancy.cluster_state import ClusterState
from pitools.tenancy.drift import Finding
from pitools.tenancy.policy import Policy, administrators
from pitools.tenancy.read import SiteAccounting

_USERS = ["sacctmgr", "-n", "-P", "show", "user", "format=User,AdminLevel"]


def check_site(accounting: SiteAccounting, policy: Policy, then: ClusterState) -> list[Finding]:
    """Return what differs from the policy at a site, what makes it ineffective, and notes. Raises ClusterError."""
    config, now, site = accounting.config, accounting.state, accounting.site.name
    transport = accounting.client.transport
    history = changed_by.queries(config.cluster) if now.objects != then.objects else []
    users, partitions, *answers = run_queries(transport, [_USERS, argv.PARTITIONS, *history])
    # A user without rights may not read the history: then nobody is named.
    made_by = changed_by.parse_changes([done.stdout if done.code == 0 else "" for done in answers] or [""] * 3)
    rows = parse_partitions(stdout_or_raise(transport, partitions))
    admin_levels = [line.partition("|") for line in stdout_or_raise(transport, users).splitlines()]
    # A right that a user's table of the policy would take away is drift already.
    levels = {
        user: level
        for user, _, level in admin_levels
        if now.objects.get(("user", user)) == then.objects.get(("user", user))
    }
    admins = administrators(policy, shares_database=bool(now.others))
    ineffective = [
        *drift.find_ineffective(config, then),
        *preemption.find_faults(config, then, rows),
        *drift.find_bypasses(now, then, set(policy.tiers), rows),
        *drift.find_administrators(levels, admins),
    ]
    found = list(drift.find_drift(now, then, made_by, site))
    found += [Finding(site=site, kind="ineffective", object=o, message=m, hint=h) for o, m, h in ineffective]
    notes = (*drift.find_notes(config, then), *preemption.find_notes(config, then, accounting.site.recovery.grace_s))
    return found + [Finding(site=site, kind="note", object=o, message=m, hint=h) for o, m, h in notes]
