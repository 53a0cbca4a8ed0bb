"""What stands between a job and a partition: who may use it, how much, for how long; one sentence each.

Of limits on one job the first that names a resource counts: the partition's QOS, the job's, the user's association, the
account's, and so on upwards. What a group may hold at a time counts at every account above the job, unless a QOS says
it first. That is Slurm's order, of which `sbatch --test-only` knows nothing: a job over such a limit waits for ever.
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

_WITH_CHILDREN = (24, 5)  # since when an account that a partition names stands for those below it, at the latest
_NAMES = {"node": "nodes", "cpu": "CPUs", "gres/gpu": "GPUs"}


class LimitGroup(NamedTuple):
    """What some jobs may hold together. description: for people; limits: by the names of Slurm's TRES; counts: which
    jobs."""

    description: str
    limits: dict[str, int]
    counts: Callable[[SlurmJob], bool]


def refusal_reasons(job: dialect.JobSpec, partition: Partition, snapshot: Snapshot) -> Iterator[str]:
    """Why this partition would never take the job, as far as the cluster tells."""
    standing = snapshot.account
    named = {
        job.account,
        *(_accounts_above(job.account, _parents(snapshot)) if snapshot.version >= _WITH_CHILDREN else ()),
    }
    yield from _partition_reasons(job, partition, named, standing)
    if standing is None or not snapshot.enforced_limits:
        return
    mine = [row for row in associations(job, partition.partition, snapshot) if row.user]
    if "associations" in snapshot.enforced_limits and not mine:
        account = f'account "{job.account}"' if job.account else "any account"
        yield f"{standing.user} has no association with {account}"
    allowed = {name for row in mine for name in row.qos}
    if "qos" in snapshot.enforced_limits and job.qos and allowed and job.qos not in allowed:
        yield f'QOS "{job.qos}" is not among those of the account: {", ".join(sorted(allowed))}'
    if "limits" in snapshot.enforced_limits:
        yield from _per_job_reasons(job, partition, snapshot)
        for group in limit_groups(job, partition, snapshot):
            yield from _excess_reasons(requested_tres(job), group.limits, group.description)


def associations(job: dialect.JobSpec, partition: str, snapshot: Snapshot) -> list[Association]:
    """The rows of accounting that the job comes under, the nearest first: the user's, the account's, those above it.

    Of a job without an account the user's rows alone: which of them is the default, the answer does not tell.
    """
    standing = snapshot.account
    if standing is None:
        return []
    there = [row for row in standing.associations if row.cluster == snapshot.cluster]
    mine = [
        row
        for row in there
        if row.user == standing.user and row.partition in ("", partition) and job.account in ("", row.account)
    ]
    accounts = {row.account: row for row in there if not row.user}
    above = [
        accounts[name] for name in (job.account, *_accounts_above(job.account, _parents(snapshot))) if name in accounts
    ]
    return sorted(mine, key=lambda row: not row.partition) + (above if job.account else [])


def _parents(snapshot: Snapshot) -> dict[str, str]:
    rows = snapshot.account.associations if snapshot.account else ()
    return {row.account: row.parent for row in rows if not row.user and row.cluster == snapshot.cluster}


def _accounts_above(account: str, parents: Mapping[str, str]) -> list[str]:
    """The accounts above one, the nearest first."""
    found: list[str] = []
    while (account := parents.get(account, "")) and account not in found:
        found.append(account)
    return found


def requested_tres(job: dialect.JobSpec) -> dict[str, int]:
    """What the job would hold, by the names of Slurm's TRES."""
    return {
        "node": job.nodes,
        "cpu": job.nodes * job.tasks_per_node * job.cpus_per_task,
        "gres/gpu": job.nodes * job.gpus_per_node,
    }


def limit_groups(job: dialect.JobSpec, partition: Partition, snapshot: Snapshot) -> Iterator[LimitGroup]:
    """Whatever the job would hold a part of, with how much of it there may be."""
    standing = snapshot.account
    if standing is None or "limits" not in snapshot.enforced_limits:
        return
    taken: set[str] = set()
    for qos in _qos(job, partition, standing):
        those = _counts_for_qos(qos.qos, qos.qos == job.qos, partition.partition)
        most = {name: n for name, n in parse_limits(qos.grp_tres).items() if name not in taken}
        taken |= most.keys()
        yield LimitGroup(f'all of QOS "{qos.qos}"', most, those)
    per_user: set[str] = set()
    for qos in _qos(job, partition, standing):
        those = _counts_for_qos(qos.qos, qos.qos == job.qos, partition.partition)
        most = {name: n for name, n in parse_limits(qos.max_tres_per_user).items() if name not in per_user}
        per_user |= most.keys()
        yield LimitGroup(f'one user of QOS "{qos.qos}"', most, _of_user(those, standing.user))
    if not job.account:
        return
    for row in associations(job, partition.partition, snapshot):
        most = {name: n for name, n in parse_limits(row.grp_tres).items() if name not in taken}
        yield LimitGroup(f"all of {_association_name(row)}", most, _counts_below(row, _parents(snapshot)))


def _counts_for_qos(name: str, is_the_job_s: bool, partition: str) -> Callable[[SlurmJob], bool]:
    """Jobs that count for a QOS: those that ask for it, or, where it is the partition's, that are there."""
    return lambda one: one.qos == name or (not is_the_job_s and one.partition == partition)


def _of_user(those: Callable[[SlurmJob], bool], user: str) -> Callable[[SlurmJob], bool]:
    return lambda one: one.user == user and those(one)


def _counts_below(row: Association, parents: Mapping[str, str]) -> Callable[[SlurmJob], bool]:
    if row.user:
        return lambda one: (one.user, one.account) == (row.user, row.account)
    within = {row.account} | {account for account in parents if row.account in _accounts_above(account, parents)}
    return lambda one: one.account in within


def _qos(job: dialect.JobSpec, partition: Partition, standing: AccountLimits) -> list[Qos]:
    """The partition's QOS, then the job's; the other way round where the job's says that it goes over it."""
    named = {row.qos: row for row in standing.qos}
    over = job.qos in named and "OverPartQOS" in named[job.qos].flags
    order = (job.qos, partition.qos) if over else (partition.qos, job.qos)
    return [named[name] for name in dict.fromkeys(order) if name in named]


def _partition_reasons(
    job: dialect.JobSpec, partition: Partition, accounts: set[str], standing: AccountLimits | None
) -> Iterator[str]:
    if partition.state != "up":
        yield f"the partition starts no jobs: its state is {partition.state}"
    if partition.max_nodes is not None and job.nodes > partition.max_nodes:
        yield f"{job.nodes} nodes, and a job may have {partition.max_nodes}"
    if job.nodes < partition.min_nodes:
        yield f"{job.nodes} nodes, and a job must have {partition.min_nodes}"
    if partition.max_time_s is not None and job.time_s > partition.max_time_s:
        limit = units.to_slurm_time(partition.max_time_s)
        yield f"it asks for {units.to_slurm_time(job.time_s)}, and a job may have {limit}"
    if job.account and not _is_allowed(accounts, partition.allow_accounts, partition.deny_accounts):
        yield f'account "{job.account}" may not use it'
    if job.qos and not _is_allowed({job.qos}, partition.allow_qos, partition.deny_qos):
        yield f'QOS "{job.qos}" may not use it'
    if partition.allow_groups and standing and standing.groups and standing.groups.isdisjoint(partition.allow_groups):
        yield f"it is for the groups {', '.join(partition.allow_groups)}"


def _is_allowed(names: set[str], allowed: Sequence[str], denied: Sequence[str]) -> bool:
    # Where some are allowed, Slurm does not look who is denied.
    return not names.isdisjoint(allowed) if allowed else names.isdisjoint(denied)


def _per_job_reasons(job: dialect.JobSpec, partition: Partition, snapshot: Snapshot) -> Iterator[str]:
    """What one job may have at most."""
    assert snapshot.account
    qos = _qos(job, partition, snapshot.account)
    rows = associations(job, partition.partition, snapshot) if job.account else []
    levels = [(f'a job of QOS "{one.qos}"', one.max_tres) for one in qos]
    levels += [(f"a job of {_association_name(row)}", row.max_tres) for row in rows]
    taken: set[str] = set()
    for who, limits in levels:
        most = {name: n for name, n in parse_limits(limits).items() if name not in taken}
        taken |= most.keys()
        yield from _excess_reasons(requested_tres(job), most, who)
    timed = next((one for one in qos if one.max_wall_s is not None), None)
    if timed and timed.max_wall_s is not None and job.time_s > timed.max_wall_s:
        yield f'{units.to_slurm_time(job.time_s)}, and QOS "{timed.qos}" gives {units.to_slurm_time(timed.max_wall_s)}'


def _association_name(row: Association) -> str:
    return f'{row.user} in account "{row.account}"' if row.user else f'account "{row.account}"'


def _excess_reasons(wanted: Mapping[str, int], most: Mapping[str, int], who: str) -> Iterator[str]:
    for name, n in most.items():
        if wanted.get(name, 0) > n:
            yield f"{wanted[name]} {_NAMES[name]}, and {who} may have {n}"


def parse_limits(limits: Mapping[str, str]) -> dict[str, int]:
    """Slurm's limits as numbers; what is no number is no limit."""
    found = {}
    for name, text in limits.items():
        try:
            most = parse_count(text)
        except PitError:
            continue
        if most is not None:
            found[name] = most
    return found
