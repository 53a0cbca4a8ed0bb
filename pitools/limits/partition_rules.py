"""What a partition holds: its state, the sizes that it permits, and who may use it.

sbatch refuses such jobs only if slurm.conf has EnforcePartLimits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pitools.limits.levels import Levels
from pitools.limits.records import Binding, Effect, JobRequest, LimitState
from pitools.limits.words import time_limit_message
from pitools.slurm.records import Partition

_WITH_CHILDREN = (24, 5)  # from this version on, an account that a partition names includes the accounts below it
_NOT_PERMITTED = "{} not permitted to use this partition"
_CLOSED = ("drain", "inactive")  # sbatch refuses jobs; to a partition that is down they can be submitted


def is_refused_at_submit(state: LimitState) -> bool:
    """Return whether sbatch refuses what a partition does not permit, before other limits: EnforcePartLimits."""
    return state.part_limits not in ("", "no")


def closed_binding(partition: Partition, state: LimitState) -> Binding | None:
    """Return what refuses every job of a partition that takes none, before its limits are looked at."""
    if partition.state not in _CLOSED:
        return None
    message = f"the partition is {partition.state} (expected up)"
    return _bind(partition, state, "State", "Required partition not available", message, effect="refused")


def size_bindings(request: JobRequest, levels: Levels, partition: Partition, state: LimitState) -> Iterator[Binding]:
    """Yield what of the partition's state and sizes binds the job."""
    flags = levels.job_qos.flags if levels.job_qos else ()
    if partition.state not in ("up", *_CLOSED):
        message = f"the partition is {partition.state} (expected up)"
        yield _bind(partition, state, "State", "PartitionDown", message)
    smallest, largest, nodes = partition.min_nodes, partition.max_nodes, request.nodes
    if largest is not None and nodes > largest and "PartitionMaxNodes" not in flags:
        message = f"{nodes} nodes (at most {largest} a job)"
        yield _bind(partition, state, "MaxNodes", "PartitionNodeLimit", message, largest, nodes)
    if nodes < smallest and "PartitionMinNodes" not in flags:
        message = f"{nodes} nodes (at least {smallest} a job)"
        yield _bind(partition, state, "MinNodes", "PartitionNodeLimit", message, smallest, nodes)
    if partition.max_time_s is not None and request.time_s > partition.max_time_s and "PartitionTimeLimit" not in flags:
        asked, longest = request.time_s // 60, partition.max_time_s // 60
        message = time_limit_message(asked, longest)
        yield _bind(partition, state, "MaxTime", "PartitionTimeLimit", message, longest, asked)


def access_bindings(levels: Levels, partition: Partition, state: LimitState) -> Iterator[Binding]:
    """Yield each list of the partition that leaves the job out."""
    accounts = set(levels.accounts if state.version >= _WITH_CHILDREN else (levels.account,))
    groups = partition.allow_groups
    if groups and state.groups and state.groups.isdisjoint(groups):
        message = f"only the groups {', '.join(groups)} may use the partition"
        yield _bind(partition, state, "AllowGroups", _NOT_PERMITTED.format("User's group"), message)
    if levels.account and not _is_allowed(accounts, partition.allow_accounts, partition.deny_accounts):
        limit = "AllowAccounts" if partition.allow_accounts else "DenyAccounts"
        message = f'account "{levels.account}" may not use the partition'
        reason = "InvalidAccount" if is_refused_at_submit(state) else _NOT_PERMITTED.format("Job's account")
        yield _bind(partition, state, limit, reason, message)
    if levels.qos and not _is_allowed({levels.qos}, partition.allow_qos, partition.deny_qos):
        limit = "AllowQos" if partition.allow_qos else "DenyQos"
        message = f'QOS "{levels.qos}" may not use the partition'
        reason = "InvalidQOS" if is_refused_at_submit(state) else _NOT_PERMITTED.format("Job's QOS")
        yield _bind(partition, state, limit, reason, message)


def _bind(
    partition: Partition,
    state: LimitState,
    limit: str,
    reason: str,
    message: str,
    value: int | None = None,
    asked: int | None = None,
    effect: Effect | None = None,
) -> Binding:
    effect = effect or ("refused" if is_refused_at_submit(state) else "pends")
    level = f'partition "{partition.partition}"'
    return Binding(level=level, limit=limit, reason=reason, effect=effect, message=message, value=value, asked=asked)


def _is_allowed(names: Collection[str], allowed: Collection[str], denied: Collection[str]) -> bool:
    # With an allow list, Slurm ignores the deny list.
    return not set(names).isdisjoint(allowed) if allowed else set(names).isdisjoint(denied)
