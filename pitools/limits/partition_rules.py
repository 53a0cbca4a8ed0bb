"""What a partition holds: its state, the sizes that it permits, and who may use it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

from pitools.limits.levels import Levels
from pitools.limits.records import Binding, Effect, JobRequest, LimitState
from pitools.limits.words import time_limit_message
from pitools.slurm.records import Partition

Stage = Literal["closed", "entry", "size", "access"]
_WITH_CHILDREN = (24, 5)  # from this version on, an account that a partition names includes the accounts below it
_NOT_PERMITTED = "{} not permitted to use this partition"
_NO_ACCESS = "Access/permission denied"


class _Check(NamedTuple):
    """What binds a job. value, asked: as in a Binding."""

    stage: Stage
    limit: str
    reason: str
    message: str
    value: int | None = None
    asked: int | None = None


def is_refused_at_submit(state: LimitState) -> bool:
    """Return whether sbatch refuses what a partition does not permit, before other limits: EnforcePartLimits."""
    return state.part_limits not in ("", "no")


def partition_bindings(request: JobRequest, levels: Levels, state: LimitState) -> dict[Stage, list[Binding]]:
    """Return what of the partition binds the job, by stage.

    closed, entry: sbatch refuses the job in any case; a user without an association, or with a QOS that is not
    allowed, is refused between the two. size, access: slurmctld tests them before and after the limits that need no
    nodes; sbatch refuses the job only with EnforcePartLimits.
    """
    found: dict[Stage, list[Binding]] = {"closed": [], "entry": [], "size": [], "access": []}
    if not (partition := levels.partition):
        return found
    for check in _checks(request, levels, partition, state):
        is_refused = check.stage in ("closed", "entry") or is_refused_at_submit(state)
        values = {name: value for name, value in check._asdict().items() if name != "stage"}
        effect: Effect = "refused" if is_refused else "pends"
        found[check.stage].append(Binding(level=f'partition "{partition.partition}"', effect=effect, **values))
    return found


def _checks(request: JobRequest, levels: Levels, partition: Partition, state: LimitState) -> Iterator[_Check]:
    message = f"the partition is {partition.state} (expected up)"
    if partition.state in ("drain", "inactive"):
        yield _Check("closed", "State", "Required partition not available", message)
    elif partition.state != "up":  # jobs can be submitted
        yield _Check("size", "State", "PartitionDown", message)
    if partition.restrictions.get("RootOnly") == "YES" and request.user != "root":
        yield _Check("entry", "RootOnly", _NO_ACCESS, "only root may use the partition")
    if partition.restrictions.get("ReqResv") == "YES" and not request.in_reservation:
        yield _Check("entry", "ReqResv", _NO_ACCESS, "only jobs in a reservation may use the partition")
    if partition.allow_groups and state.groups and state.groups.isdisjoint(partition.allow_groups):
        message = f"only the groups {', '.join(partition.allow_groups)} may use the partition"
        yield _Check("entry", "AllowGroups", _NOT_PERMITTED.format("User's group"), message)
    yield from _sizes(request, partition, levels.job_flags)
    if levels.account:
        accounts = levels.accounts if state.version >= _WITH_CHILDREN else (levels.account,)
        yield from _lists("account", accounts, partition.allow_accounts, partition.deny_accounts, state)
    if levels.qos:
        yield from _lists("QOS", (levels.qos,), partition.allow_qos, partition.deny_qos, state)


def _sizes(request: JobRequest, partition: Partition, flags: Collection[str]) -> Iterator[_Check]:
    nodes, smallest, largest, longest_s = request.nodes, partition.min_nodes, partition.max_nodes, partition.max_time_s
    if largest is not None and nodes > largest and "PartitionMaxNodes" not in flags:
        message = f"{nodes} nodes (at most {largest} a job)"
        yield _Check("size", "MaxNodes", "PartitionNodeLimit", message, largest, nodes)
    if nodes < smallest and "PartitionMinNodes" not in flags:
        message = f"{nodes} nodes (at least {smallest} a job)"
        yield _Check("size", "MinNodes", "PartitionNodeLimit", message, smallest, nodes)
    if longest_s is not None and request.time_s > longest_s and "PartitionTimeLimit" not in flags:
        asked, longest = request.time_s // 60, longest_s // 60
        yield _Check("size", "MaxTime", "PartitionTimeLimit", time_limit_message(asked, longest), longest, asked)


def _lists(
    kind: Literal["account", "QOS"],
    names: Collection[str],
    allowed: Collection[str],
    denied: Collection[str],
    state: LimitState,
) -> Iterator[_Check]:
    # With an allow list, Slurm ignores the deny list.
    if not set(names).isdisjoint(allowed) if allowed else set(names).isdisjoint(denied):
        return
    limit = ("Allow" if allowed else "Deny") + ("Accounts" if kind == "account" else "Qos")
    invalid = "InvalidAccount" if kind == "account" else "InvalidQOS"
    reason = invalid if is_refused_at_submit(state) else _NOT_PERMITTED.format(f"Job's {kind}")
    yield _Check("access", limit, reason, f'{kind} "{next(iter(names))}" may not use the partition')
