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
from pitools.place.clusters.account_limits import Standing
from pitools.place.clusters.snapshot import Snapshot
from pitools.site import dialect
from pitools.slurm.fields import count
from pitools.slurm.records import Association, Job, Partition, Qos

_WITH_CHILDREN = (24, 5)  # since when an account that a partition names stands for those below it, at the latest
_NAMES = {"node": "nodes", "cpu": "CPUs", "gres/gpu": "GPUs"}


class Group(NamedTuple):
    """What some jobs may hold together. who: for people; most: by the names of Slurm's TRES; holds: which jobs."""

    who: str
    most: dict[str, int]
    holds: Callable[[Job], bool]


def refusals(job: dialect.Job, partition: Partition, snapshot: Snapshot) -> Iterator[str]:
    """Why this partition would never take the job, as far as the cluster tells."""
    standing = snapshot.standing
    named = {job.account, *(_above(job.account, _parents(snapshot)) if snapshot.version >= _WITH_CHILDREN else ())}
    yield from _of_partition(job, partition, named, standing)
    if standing is None or not snapshot.enforces:
        return
    mine = [row for row in associations(job, partition.partition, snapshot) if row.user]
    if "associations" in snapshot.enforces and not mine:
        account = f'account "{job.account}"' if job.account else "any account"
        yield f"{standing.user} has no association with {account}"
    allowed = {name for row in mine for name in row.qos}
    if "qos" in snapshot.enforces and job.qos and allowed and job.qos not in allowed:
        yield f'QOS "{job.qos}" is not among those of the account: {", ".join(sorted(allowed))}'
    if "limits" in snapshot.enforces:
        yield from _of_one(job, partition, snapshot)
        for group in groups(job, partition, snapshot):
            yield from _over(asked(job), group.most, group.who)


def associations(job: dialect.Job, partition: str, snapshot: Snapshot) -> list[Association]:
    """The rows of accounting that the job comes under, the nearest first: the user's, the account's, those above it.

    Of a job without an account the user's rows alone: which of them is the default, the answer does not tell.
    """
    standing = snapshot.standing
    if standing is None:
        return []
    there = [row for row in standing.associations if row.cluster == snapshot.cluster]
    mine = [
        row
        for row in there
        if row.user == standing.user and row.partition in ("", partition) and job.account in ("", row.account)
    ]
    accounts = {row.account: row for row in there if not row.user}
    above = [accounts[name] for name in (job.account, *_above(job.account, _parents(snapshot))) if name in accounts]
    return sorted(mine, key=lambda row: not row.partition) + (above if job.account else [])


def _parents(snapshot: Snapshot) -> dict[str, str]:
    rows = snapshot.standing.associations if snapshot.standing else ()
    return {row.account: row.parent for row in rows if not row.user and row.cluster == snapshot.cluster}


def _above(account: str, parents: Mapping[str, str]) -> list[str]:
    """The accounts above one, the nearest first."""
    found: list[str] = []
    while (account := parents.get(account, "")) and account not in found:
        found.append(account)
    return found


def asked(job: dialect.Job) -> dict[str, int]:
    """What the job would hold, by the names of Slurm's TRES."""
    return {
        "node": job.nodes,
        "cpu": job.nodes * job.tasks_per_node * job.cpus_per_task,
        "gres/gpu": job.nodes * job.gpus_per_node,
    }


def groups(job: dialect.Job, partition: Partition, snapshot: Snapshot) -> Iterator[Group]:
    """Whatever the job would hold a part of, with how much of it there may be."""
    standing = snapshot.standing
    if standing is None or "limits" not in snapshot.enforces:
        return
    taken: set[str] = set()
    for qos in _qos(job, partition, standing):
        those = _of_qos(qos.qos, qos.qos == job.qos, partition.partition)
        most = {name: n for name, n in limited(qos.grp_tres).items() if name not in taken}
        taken |= most.keys()
        yield Group(f'all of QOS "{qos.qos}"', most, those)
    per_user: set[str] = set()
    for qos in _qos(job, partition, standing):
        those = _of_qos(qos.qos, qos.qos == job.qos, partition.partition)
        most = {name: n for name, n in limited(qos.max_tres_per_user).items() if name not in per_user}
        per_user |= most.keys()
        yield Group(f'one user of QOS "{qos.qos}"', most, _and_user(those, standing.user))
    if not job.account:
        return
    for row in associations(job, partition.partition, snapshot):
        most = {name: n for name, n in limited(row.grp_tres).items() if name not in taken}
        yield Group(f"all of {_whose(row)}", most, _below(row, _parents(snapshot)))


def _of_qos(name: str, is_the_job_s: bool, partition: str) -> Callable[[Job], bool]:
    """Jobs that count for a QOS: those that ask for it, or, where it is the partition's, that are there."""
    return lambda one: one.qos == name or (not is_the_job_s and one.partition == partition)


def _and_user(those: Callable[[Job], bool], user: str) -> Callable[[Job], bool]:
    return lambda one: one.user == user and those(one)


def _below(row: Association, parents: Mapping[str, str]) -> Callable[[Job], bool]:
    if row.user:
        return lambda one: (one.user, one.account) == (row.user, row.account)
    within = {row.account} | {account for account in parents if row.account in _above(account, parents)}
    return lambda one: one.account in within


def _qos(job: dialect.Job, partition: Partition, standing: Standing) -> list[Qos]:
    """The partition's QOS, then the job's; the other way round where the job's says that it goes over it."""
    named = {row.qos: row for row in standing.qos}
    over = job.qos in named and "OverPartQOS" in named[job.qos].flags
    order = (job.qos, partition.qos) if over else (partition.qos, job.qos)
    return [named[name] for name in dict.fromkeys(order) if name in named]


def _of_partition(
    job: dialect.Job, partition: Partition, accounts: set[str], standing: Standing | None
) -> Iterator[str]:
    if partition.state != "up":
        yield f"the partition starts no jobs: its state is {partition.state}"
    if partition.max_nodes is not None and job.nodes > partition.max_nodes:
        yield f"{job.nodes} nodes, and a job may have {partition.max_nodes}"
    if job.nodes < partition.min_nodes:
        yield f"{job.nodes} nodes, and a job must have {partition.min_nodes}"
    if partition.max_time_s is not None and job.time_s > partition.max_time_s:
        limit = units.slurm_time(partition.max_time_s)
        yield f"it asks for {units.slurm_time(job.time_s)}, and a job may have {limit}"
    if job.account and not _let_in(accounts, partition.allow_accounts, partition.deny_accounts):
        yield f'account "{job.account}" may not use it'
    if job.qos and not _let_in({job.qos}, partition.allow_qos, partition.deny_qos):
        yield f'QOS "{job.qos}" may not use it'
    if partition.allow_groups and standing and standing.groups and standing.groups.isdisjoint(partition.allow_groups):
        yield f"it is for the groups {', '.join(partition.allow_groups)}"


def _let_in(names: set[str], allowed: Sequence[str], denied: Sequence[str]) -> bool:
    # Where some are allowed, Slurm does not look who is denied.
    return not names.isdisjoint(allowed) if allowed else names.isdisjoint(denied)


def _of_one(job: dialect.Job, partition: Partition, snapshot: Snapshot) -> Iterator[str]:
    """What one job may have at most."""
    assert snapshot.standing
    qos = _qos(job, partition, snapshot.standing)
    rows = associations(job, partition.partition, snapshot) if job.account else []
    levels = [(f'a job of QOS "{one.qos}"', one.max_tres) for one in qos]
    levels += [(f"a job of {_whose(row)}", row.max_tres) for row in rows]
    taken: set[str] = set()
    for who, limits in levels:
        most = {name: n for name, n in limited(limits).items() if name not in taken}
        taken |= most.keys()
        yield from _over(asked(job), most, who)
    timed = next((one for one in qos if one.max_wall_s is not None), None)
    if timed and timed.max_wall_s is not None and job.time_s > timed.max_wall_s:
        yield f'{units.slurm_time(job.time_s)}, and QOS "{timed.qos}" gives {units.slurm_time(timed.max_wall_s)}'


def _whose(row: Association) -> str:
    return f'{row.user} in account "{row.account}"' if row.user else f'account "{row.account}"'


def _over(wanted: Mapping[str, int], most: Mapping[str, int], who: str) -> Iterator[str]:
    for name, n in most.items():
        if wanted.get(name, 0) > n:
            yield f"{wanted[name]} {_NAMES[name]}, and {who} may have {n}"


def limited(limits: Mapping[str, str]) -> dict[str, int]:
    """Slurm's limits as numbers; what is no number is no limit."""
    found = {}
    for name, text in limits.items():
        try:
            most = count(text)
        except PitError:
            continue
        if most is not None:
            found[name] = most
    return found
