"""Slurm's limits that keep a job out of a partition: access, size and time, each reason as text.

For limits per job, the first level that sets a resource applies: the partition's QOS, the job's QOS, the user's
association, the account's, then the accounts above. A limit of a group applies at every account above the job, unless a
QOS sets it. This is Slurm's order. `sbatch --test-only` ignores these limits: a job over one stays pending for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pitools.core import units
from pitools.core.errors import PitError
from pitools.place.clusters.account_limits import AccountLimits
from pitools.place.clusters.snapshot import Snapshot
from pitools.site import dialect
from pitools.slurm.fields import parse_count
from pitools.slurm.records import Association, Partition, Qos, SlurmJob

_WITH_CHILDREN = (24, 5)  # from this version on, an account that a partition names includes the accounts below it
_NAMES = {"node": "nodes", "cpu": "CPUs", "gres/gpu": "GPUs"}


class LimitGroup(NamedTuple):
    """A limit that several jobs share. description: as text. limits: TRES name → maximum. counts: selects the jobs."""

    description: str
    limits: dict[str, int]
    counts: Callable[[SlurmJob], bool]


def refusal_reasons(job: dialect.JobSpec, partition: Partition, snapshot: Snapshot) -> Iterator[str]:
    """Return the reasons why this partition would never run the job, as far as the snapshot shows them."""
    limits = snapshot.account
    accounts = {
        job.account,
        *(_accounts_above(job.account, _parent_accounts(snapshot)) if snapshot.version >= _WITH_CHILDREN else ()),
    }
    yield from _partition_reasons(job, partition, accounts, limits)
    if limits is None or not snapshot.enforced_limits:
        return
    user_rows = [row for row in associations(job, partition.partition, snapshot) if row.user]
    if "associations" in snapshot.enforced_limits and not user_rows:
        account = f'account "{job.account}"' if job.account else "any account"
        yield f"{limits.user} has no association with {account}"
    allowed = {name for row in user_rows for name in row.qos}
    if "qos" in snapshot.enforced_limits and job.qos and allowed and job.qos not in allowed:
        yield f'QOS "{job.qos}" is not allowed for the account (allowed: {", ".join(sorted(allowed))})'
    if "limits" in snapshot.enforced_limits:
        yield from _per_job_reasons(job, partition, snapshot)
        for group in limit_groups(job, partition, snapshot):
            yield from _excess_reasons(requested_tres(job), group.limits, group.description)


def associations(job: dialect.JobSpec, partition: str, snapshot: Snapshot) -> list[Association]:
    """Return the associations that apply to the job, nearest first: the user's, the account's, those of accounts above.

    For a job without an account only the user's: the snapshot does not contain the default account.
    """
    account = snapshot.account
    if account is None:
        return []
    rows = [row for row in account.associations if row.cluster == snapshot.cluster]
    user_rows = [
        row
        for row in rows
        if row.user == account.user and row.partition in ("", partition) and job.account in ("", row.account)
    ]
    accounts = {row.account: row for row in rows if not row.user}
    names = (job.account, *_accounts_above(job.account, _parent_accounts(snapshot)))
    above = [accounts[name] for name in names if name in accounts]
    return sorted(user_rows, key=lambda row: not row.partition) + (above if job.account else [])


def _parent_accounts(snapshot: Snapshot) -> dict[str, str]:
    """Return account → its parent account."""
    rows = snapshot.account.associations if snapshot.account else ()
    return {row.account: row.parent for row in rows if not row.user and row.cluster == snapshot.cluster}


def _accounts_above(account: str, parents: Mapping[str, str]) -> list[str]:
    """Return the accounts above this one, nearest first."""
    ancestors: list[str] = []
    while (account := parents.get(account, "")) and account not in ancestors:
        ancestors.append(account)
    return ancestors


def requested_tres(job: dialect.JobSpec) -> dict[str, int]:
    """Return the resources that the job requests, by TRES name."""
    return {
        "node": job.nodes,
        "cpu": job.nodes * job.tasks_per_node * job.cpus_per_task,
        "gres/gpu": job.nodes * job.gpus_per_node,
    }


def limit_groups(job: dialect.JobSpec, partition: Partition, snapshot: Snapshot) -> Iterator[LimitGroup]:
    """Return the limits that the job would share with other jobs."""
    account = snapshot.account
    if account is None or "limits" not in snapshot.enforced_limits:
        return
    limited: set[str] = set()
    for qos in _qos_by_precedence(job, partition, account):
        counts = _counts_for_qos(qos.qos, qos.qos == job.qos, partition.partition)
        limits = {name: n for name, n in parse_limits(qos.grp_tres).items() if name not in limited}
        limited |= limits.keys()
        yield LimitGroup(f'all of QOS "{qos.qos}"', limits, counts)
    per_user: set[str] = set()
    for qos in _qos_by_precedence(job, partition, account):
        counts = _counts_for_qos(qos.qos, qos.qos == job.qos, partition.partition)
        limits = {name: n for name, n in parse_limits(qos.max_tres_per_user).items() if name not in per_user}
        per_user |= limits.keys()
        yield LimitGroup(f'one user of QOS "{qos.qos}"', limits, _counts_for_user(counts, account.user))
    if not job.account:
        return
    for row in associations(job, partition.partition, snapshot):
        limits = {name: n for name, n in parse_limits(row.grp_tres).items() if name not in limited}
        yield LimitGroup(f"all of {_association_name(row)}", limits, _counts_below(row, _parent_accounts(snapshot)))


def _counts_for_qos(name: str, is_own_qos: bool, partition: str) -> Callable[[SlurmJob], bool]:
    """Return a filter for the jobs of a QOS; for the partition's own QOS, also every job in the partition."""
    return lambda other: other.qos == name or (not is_own_qos and other.partition == partition)


def _counts_for_user(counts: Callable[[SlurmJob], bool], user: str) -> Callable[[SlurmJob], bool]:
    return lambda other: other.user == user and counts(other)


def _counts_below(row: Association, parents: Mapping[str, str]) -> Callable[[SlurmJob], bool]:
    if row.user:
        return lambda other: (other.user, other.account) == (row.user, row.account)
    within = {row.account} | {account for account in parents if row.account in _accounts_above(account, parents)}
    return lambda other: other.account in within


def _qos_by_precedence(job: dialect.JobSpec, partition: Partition, account: AccountLimits) -> list[Qos]:
    """Return the partition's QOS, then the job's; the job's first if it has the flag OverPartQOS."""
    named = {row.qos: row for row in account.qos}
    over = job.qos in named and "OverPartQOS" in named[job.qos].flags
    order = (job.qos, partition.qos) if over else (partition.qos, job.qos)
    return [named[name] for name in dict.fromkeys(order) if name in named]


def _partition_reasons(
    job: dialect.JobSpec, partition: Partition, accounts: set[str], account: AccountLimits | None
) -> Iterator[str]:
    if partition.state != "up":
        yield f"the partition is {partition.state} (expected up)"
    if partition.max_nodes is not None and job.nodes > partition.max_nodes:
        yield f"{job.nodes} nodes (at most {partition.max_nodes} a job)"
    if job.nodes < partition.min_nodes:
        yield f"{job.nodes} nodes (at least {partition.min_nodes} a job)"
    if partition.max_time_s is not None and job.time_s > partition.max_time_s:
        limit = units.to_slurm_time(partition.max_time_s)
        yield f"time limit {units.to_slurm_time(job.time_s)} (at most {limit})"
    if job.account and not _is_allowed(accounts, partition.allow_accounts, partition.deny_accounts):
        yield f'account "{job.account}" may not use the partition'
    if job.qos and not _is_allowed({job.qos}, partition.allow_qos, partition.deny_qos):
        yield f'QOS "{job.qos}" may not use the partition'
    if partition.allow_groups and account and account.groups and account.groups.isdisjoint(partition.allow_groups):
        yield f"only the groups {', '.join(partition.allow_groups)} may use the partition"


def _is_allowed(names: set[str], allowed: Sequence[str], denied: Sequence[str]) -> bool:
    # With an allow list, Slurm ignores the deny list.
    return not names.isdisjoint(allowed) if allowed else names.isdisjoint(denied)


def _per_job_reasons(job: dialect.JobSpec, partition: Partition, snapshot: Snapshot) -> Iterator[str]:
    """Return the reasons by limits on a single job."""
    assert snapshot.account
    qos = _qos_by_precedence(job, partition, snapshot.account)
    rows = associations(job, partition.partition, snapshot) if job.account else []
    levels = [(f'a job of QOS "{row.qos}"', row.max_tres) for row in qos]
    levels += [(f"a job of {_association_name(row)}", row.max_tres) for row in rows]
    limited: set[str] = set()
    for description, limits in levels:
        applied = {name: n for name, n in parse_limits(limits).items() if name not in limited}
        limited |= applied.keys()
        yield from _excess_reasons(requested_tres(job), applied, description)
    timed = next((row for row in qos if row.max_wall_s is not None), None)
    if timed and timed.max_wall_s is not None and job.time_s > timed.max_wall_s:
        limit = units.to_slurm_time(timed.max_wall_s)
        yield f'time limit {units.to_slurm_time(job.time_s)} (at most {limit} in QOS "{timed.qos}")'


def _association_name(row: Association) -> str:
    return f'{row.user} in account "{row.account}"' if row.user else f'account "{row.account}"'


def _excess_reasons(requested: Mapping[str, int], limits: Mapping[str, int], description: str) -> Iterator[str]:
    for name, n in limits.items():
        if requested.get(name, 0) > n:
            yield f"{requested[name]} {_NAMES[name]} (at most {n} for {description})"


def parse_limits(limits: Mapping[str, str]) -> dict[str, int]:
    """Parse Slurm's limits as numbers; a value that is not a number is not a limit."""
    numbers = {}
    for name, text in limits.items():
        try:
            number = parse_count(text)
        except PitError:
            continue
        if number is not None:
            numbers[name] = number
    return numbers
