"""What a partition holds: its state, the sizes that it permits, and who may use it.

sbatch refuses jobs of a wrong size, or of an account or QOS that may not use it, only if slurm.conf has
EnforcePartLimits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pitools.limits.levels import Levels
from pitools.limits.records import Binding, Effect, JobRequest, LimitState
from pitools.limits.words import time_limit_message
from pitools.slurm.records import Partition

_WITH_CHILDREN = (24, 5)  # from this version on, an account that a partition names includes the accounts below it
_NOT_PERMITTED = "{} not permitted to use this partition"
_NO_ACCESS = "Access/permission denied"
_CLOSED = ("drain", "inactive")  # sbatch refuses jobs; to a partition that is down they can be submitted


def is_refused_at_submit(state: LimitState) -> bool:
    """Return whether sbatch refuses what a partition does not permit, before other limits: EnforcePartLimits."""
    return state.part_limits not in ("", "no")


def entry_bindings(request: JobRequest, levels: Levels, state: LimitState) -> Iterator[Binding | None]:
    """Yield what closes the partition to every job, or None; then what else lets sbatch refuse the job in any case.

    A user without an association, or a QOS that is not allowed, is refused between the two.
    """
    partition = levels.partition
    if not partition:
        yield None
        return
    message = f"the partition is {partition.state} (expected up)"
    reason = "Required partition not available"
    is_closed = partition.state in _CLOSED
    yield _bind(partition, state, "State", reason, message, effect="refused") if is_closed else None
    if partition.restrictions.get("RootOnly") == "YES" and request.user != "root":
        yield _bind(partition, state, "RootOnly", _NO_ACCESS, "only root may use the partition", effect="refused")
    if partition.restrictions.get("ReqResv") == "YES" and not request.in_reservation:
        message = "only jobs in a reservation may use the partition"
        yield _bind(partition, state, "ReqResv", _NO_ACCESS, message, effect="refused")
    if partition.allow_groups and state.groups and state.groups.isdisjoint(partition.allow_groups):
        message = f"only the groups {', '.join(partition.allow_groups)} may use the partition"
        reason = _NOT_PERMITTED.format("User's group")
        yield _bind(partition, state, "AllowGroups", reason, message, effect="refused")


def size_bindings(request: JobRequest, levels: Levels, state: LimitState) -> Iterator[Binding]:
    """Yield what of the partition's state and sizes binds the job."""
    partition, flags = levels.partition, levels.job_flags
    if not partition:
        return
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


def access_bindings(levels: Levels, state: LimitState) -> Iterator[Binding]:
    """Yield each list of accounts or QOS that leaves the job out."""
    partition = levels.partition
    if not partition:
        return
    accounts = set(levels.accounts if state.version >= _WITH_CHILDREN else (levels.account,))
    for kind, word, names, allowed, denied in (
        ("Account", "account", accounts, partition.allow_accounts, partition.deny_accounts),
        ("QOS", "QOS", {levels.qos}, partition.allow_qos, partition.deny_qos),
    ):
        name = levels.account if kind == "Account" else levels.qos
        if not name or _is_allowed(names, allowed, denied):
            continue
        limit = f"{'Allow' if allowed else 'Deny'}{'Accounts' if kind == 'Account' else 'Qos'}"
        reason = f"Invalid{kind}" if is_refused_at_submit(state) else _NOT_PERMITTED.format(f"Job's {word}")
        yield _bind(partition, state, limit, reason, f'{word} "{name}" may not use the partition')


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
