"""Find what a user may run: for each account, QOS and partition the largest job, what binds a larger one, what is left.

Limits alone are asked, as limits/ judges them: whether nodes are free, and when a job starts, is place's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

import msgspec

from pitools.core.errors import UsageError, suggest
from pitools.core.record import Record
from pitools.limits import rules
from pitools.limits.judge import first_limit, judge, raised_to_minimums
from pitools.limits.levels import find_levels
from pitools.limits.read import add_usage, read_limits
from pitools.limits.records import Binding, Effect, JobRequest, LimitState
from pitools.limits.shared import shared_limits
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.fields import parse_tres_amounts
from pitools.slurm.records import Association, Partition

_YEAR_MIN = 366 * 24 * 60
_BUDGETS = ("GrpTRESMins=gres/gpu", "GrpTRESMins=cpu")


class LimitLeft(Record, frozen=True, kw_only=True, tag="pit.limit-left/1"):
    """A limit and its use now. value, used, left: minutes for times, MiB for memory. left: 0 if the use is over it."""

    level: str
    limit: str
    value: int
    used: int
    left: int


class Allowance(Record, frozen=True, kw_only=True, tag="pit.tenancy-allowance/1"):
    """What a user may run with one account and QOS in one partition, by limits alone.

    effect: may-run if a job of some size may, for a minute. now, ever: GPUs or CPUs, by resource, of the largest job
    that may run beside what runs, and alone with the partition up; 0 if that is below a minimum. max_time_s: of a small
    job, None for no limit within a year. hours_left: of the resource, of the tightest budget; None without one.
    binding: the first limit that stops a job of `now` + 1, or that minimum; None if only the partition's size does.
    reason, message: of that limit. left: each limit shared with other jobs. not_judged: what else may refuse or hold a
    job.
    """

    site: str
    user: str
    account: str
    qos: str
    partition: str
    effect: Effect
    resource: Literal["gpu", "cpu"]
    now: int
    ever: int
    max_time_s: int | None
    hours_left: float | None
    reason: str
    message: str
    binding: Binding | None
    left: tuple[LimitLeft, ...]
    not_judged: tuple[str, ...]


def read_allowances(site: Site, user: str = "") -> list[Allowance]:
    """Return what the user, "" for the site's own, may run at a site.

    Raises UsageError for a user without associations where Slurm requires them, Unreachable and ClusterError.
    """
    transport = client(site).transport
    request, state = read_limits(JobRequest(user=user, partition="", time_s=60), transport, with_usage=False)
    own = _without_others(request.user, state)
    if not (jobs := list(choices(request.user, own))):
        users = {row.user for row in state.associations if row.user and row.cluster == state.cluster}
        hint = suggest(request.user, users) or f"sacctmgr add user {request.user} account=..., or a policy's [teams]"
        raise UsageError(f'user "{request.user}" is in no account', where=f"site {site.name}", hint=hint)
    return list(allowances(request.user, add_usage(jobs, own, transport), site.name))


def allowances(user: str, state: LimitState, site: str) -> Iterator[Allowance]:
    """Yield what the user may run with each account, QOS and partition of a cluster."""
    state = _without_others(user, state)
    partitions = {row.partition: row for row in state.partitions}
    for request in choices(user, state):
        yield _allowance(request, state, partitions[request.partition], site)


def _without_others(user: str, state: LimitState) -> LimitState:
    """Return the state without rows of other users: they bind nobody here, and each judgement would look at all."""
    rows = tuple(row for row in state.associations if row.user in ("", user))
    usage = tuple(row for row in state.usage if row.user in ("", user))
    return msgspec.structs.replace(state, associations=rows, usage=usage)


def choices(user: str, state: LimitState) -> Iterator[JobRequest]:
    """Yield a small job in each account, QOS and partition that the user can name."""
    rows = [row for row in state.associations if row.cluster == state.cluster and row.user == user]
    if not rows and "associations" not in state.enforced:
        rows = [Association(cluster=state.cluster, account="", user=user)]
    for account in dict.fromkeys(row.account for row in rows):
        for partition in state.partitions:
            name = partition.partition
            here = [row for row in rows if row.account == account and row.partition in ("", name)]
            for row in sorted(here, key=lambda row: not row.partition)[:1]:  # one for the partition goes first
                for qos in row.qos if "qos" in state.enforced and row.qos else ("",):
                    yield JobRequest(user=user, account=account, qos=qos, partition=name, time_s=60)


def _allowance(request: JobRequest, state: LimitState, partition: Partition, site: str) -> Allowance:
    tres = parse_tres_amounts(partition.tres)
    gpus = tres.get("gres/gpu", 0)
    total = gpus or partition.cpus
    alone = msgspec.structs.replace(state, usage=(), partitions=(msgspec.structs.replace(partition, state="up"),))
    names = [name for name, amount in tres.items() if name.startswith("gres/gpu") and amount == gpus > 0]
    of_node = max(1, total // max(1, partition.nodes))
    levels, _ = find_levels(request, state)
    of_a_node = [on for on in levels.applicable_limits(rules.FOR_NODES) if on.name == "MaxTRESPerNode"]
    per_node = max(1, min([of_node, *(on.value for on in of_a_node if on.tres in (names or ["cpu"]))]))
    raised = raised_to_minimums(request, alone)  # any job may ask for so many nodes and CPUs, if they are there
    nodes, cpus = min(partition.nodes, raised.nodes), min(partition.cpus, raised.cpus)
    small = msgspec.structs.replace(request, nodes=nodes, cpus=cpus)
    sized = partial(_sized, small, names=names, per_node=per_node)
    one, most = sized(1), total * per_node // of_node

    def largest(limits: LimitState) -> tuple[int, Binding | None]:
        """Return the size of the largest job, 0 if it is below a minimum of what was counted, and this minimum."""
        amount = _largest(most, lambda amount: first_limit(sized(amount), limits) is None)
        bindings, counted = judge(sized(amount), limits).bindings if amount else (), ("MinNodes", "node", "cpu", *names)
        below = next((each for each in bindings if each.limit.removeprefix("MinTRES=") in counted), None)
        return 0 if below else amount, below

    now, below = largest(state)
    ever, never = largest(alone)
    by = state if now else alone
    minutes = _largest(_YEAR_MIN, lambda m: first_limit(msgspec.structs.replace(one, time_s=m * 60), by) is None)
    left = tuple(
        LimitLeft(level=on.origin, limit=on.label, value=on.value, used=on.used, left=max(0, on.value - on.used))
        for on in shared_limits(one, state)
    )
    budgets = [row.left / 60 for row in left if row.limit == _BUDGETS[0 if gpus else 1]]
    larger = sized(now + 1) if now < most else sized(per_node + 1, per_node=of_node)
    binding = never or below or (first_limit(larger, state) if now < total else None)
    verdict = judge(one, state)
    return Allowance(
        site=site,
        user=request.user,
        account=verdict.account,
        qos=verdict.qos,
        partition=request.partition,
        effect="may-run" if now else binding.effect if binding else "pends",
        resource="gpu" if gpus else "cpu",
        now=now,
        ever=ever,
        max_time_s=None if minutes == _YEAR_MIN else minutes * 60,
        hours_left=min(budgets, default=None),
        reason=binding.reason if binding else "",
        message=binding.message if binding else "",
        binding=binding,
        left=left,
        not_judged=verdict.not_judged,
    )


def _sized(small: JobRequest, amount: int, names: Sequence[str], per_node: int) -> JobRequest:
    """Return a small job with so many GPUs, by these names, or without names CPUs; with a CPU a node, or its own."""
    nodes = max(small.nodes, -(-amount // per_node))
    cpus, gres = max(nodes, small.cpus if names else amount), dict.fromkeys(names, amount)
    return msgspec.structs.replace(small, nodes=nodes, cpus=cpus, gres=gres)


def _largest(most: int, may_run: Callable[[int], bool]) -> int:
    """Return the largest amount that may run, 0 if not even 1 may. What may run, must run smaller, too."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if may_run(middle) else (low, middle)
    return low


def usable(rows: Iterable[Allowance]) -> list[Allowance]:
    """Return what may run at some time: not where a user has no right, or no job is small enough."""
    return [row for row in rows if row.ever]
