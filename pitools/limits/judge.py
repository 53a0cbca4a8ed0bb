"""Judge whether Slurm's limits let a job run: refused by sbatch, pending, or free to run, and what binds.

slurmctld tests a job several times: when it is submitted, before it looks for nodes, and for the nodes it has chosen.
Each test goes through the levels in Slurm's order (levels.py), and the first limit that binds becomes the job's reason.
A limit of a QOS replaces the same limit of the QOS after it and of all associations; of those, each account's group
limits bind. perf/tenancy/bench_limits.py compares all of this with a real slurmctld.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from pitools.limits import rules
from pitools.limits.billing import billing
from pitools.limits.levels import AppliedLimit, Levels, find_levels
from pitools.limits.not_judged import not_judged
from pitools.limits.partition_rules import is_refused_at_submit, partition_bindings
from pitools.limits.records import Binding, Effect, JobRequest, LimitState, Verdict
from pitools.limits.words import limit_message
from pitools.slurm.fields import parse_tres_amounts
from pitools.slurm.records import Partition

# Reasons for the number of nodes; of equal limits the first gives its own.
_NODE_COUNTS = (
    "MaxNodePerAccount",
    "QOSMaxNodePerJobLimit",
    "QOSMaxNodePerUserLimit",
    "QOSGrpNodeLimit",
    "AssocGrpNodeLimit",
    "AssocMaxNodePerJobLimit",
)


class _Job(NamedTuple):
    """A request in Slurm's units: TRES amounts, minutes. is_safe: whether `safe` limits of minutes are enforced.

    usage_factor: what multiplies its minutes. per_node: what a node of the partition has, on average.
    """

    tres: dict[str, int]
    nodes: int
    tasks: int
    minutes: int
    usage_factor: float
    is_exclusive: bool
    is_safe: bool
    per_node: Mapping[str, int]
    priority_flags: tuple[str, ...]


def judge(request: JobRequest, state: LimitState) -> Verdict:
    """Return whether limits let the job run now, and every limit that binds it.

    With a state without usage the bindings are those that hold the job for ever.
    """
    levels, denial = find_levels(request, state)
    partition = partition_bindings(request, levels, state)
    job = _job(request, levels, state)
    found = [*partition["closed"], *([denial] if denial else []), *partition["entry"]]
    found += (*partition["size"], *partition["access"]) if is_refused_at_submit(state) else ()
    found += (*_test(rules.AT_SUBMIT, levels, job, "refused"), *partition["size"])
    found += (*_test(rules.BEFORE_NODES, levels, job, "pends"), *partition["access"])
    for_nodes = _test(rules.FOR_NODES, levels, _on_nodes(job, levels.partition), "pends")
    found += sorted(for_nodes, key=_node_count_first)
    unique: dict[tuple[str, str], Binding] = {}
    for binding in sorted(found, key=lambda binding: binding.effect != "refused"):
        unique.setdefault((binding.level, binding.limit), binding)
    bindings = tuple(unique.values())
    return Verdict(
        effect=bindings[0].effect if bindings else "may-run",
        bindings=bindings,
        account=levels.account,
        qos=levels.qos,
        not_judged=tuple(dict.fromkeys(not_judged(request, levels, state))),
    )


def first_limit(request: JobRequest, state: LimitState) -> Binding | None:
    """Return the first limit that binds the job and larger ones: not a minimum. None if there is none."""
    return next((each for each in judge(request, state).bindings if not each.limit.startswith("Min")), None)


def raised_to_minimums(request: JobRequest, state: LimitState) -> JobRequest:
    """Return the request with the CPUs and GRES of the minimums that it is below, and the nodes that these need."""
    bindings = [each for each in judge(request, state).bindings if each.limit.startswith("Min")]
    pairs = [(each.limit.removeprefix("MinTRES=").replace("MinNodes", "node"), each.value or 0) for each in bindings]
    least = dict(sorted(pairs))  # of two of nodes the larger
    nodes, gres = least.get("node", request.nodes), {name: least[name] for name in least if name.startswith("gres/")}
    cpus = max(nodes, least.get("cpu", request.cpus))
    raised = msgspec.structs.replace(request, nodes=nodes, cpus=cpus, gres=request.gres | gres)
    for each in judge(raised, state).bindings:
        name = each.limit.removeprefix("MaxTRESPerNode=")
        if each.value and name != each.limit:
            nodes = max(nodes, -(-raised.tres[name] // each.value))
    return msgspec.structs.replace(raised, nodes=nodes, cpus=max(nodes, cpus))


def _job(request: JobRequest, levels: Levels, state: LimitState) -> _Job:
    partition = levels.partition
    per_node: dict[str, int] = {}
    if partition and partition.nodes:
        amounts = {"cpu": partition.cpus, **parse_tres_amounts(partition.tres)}
        per_node = {name: amount // partition.nodes for name, amount in amounts.items()}
    is_factor_safe = levels.job_qos and "UsageFactorSafe" in levels.job_qos.flags
    return _Job(
        tres={**request.tres, "billing": billing(request.tres, partition, state.priority_flags)[0]},
        nodes=request.nodes,
        tasks=request.tasks,
        minutes=request.time_s // 60,
        usage_factor=levels.job_qos.usage_factor if levels.job_qos and is_factor_safe else 1.0,
        is_exclusive=request.is_exclusive or bool(partition and partition.over_subscribe == "EXCLUSIVE"),
        is_safe="safe" in state.enforced,
        per_node=per_node,
        priority_flags=state.priority_flags,
    )


def _on_nodes(job: _Job, partition: Partition | None) -> _Job:
    """Return the job with what it takes of its nodes: an exclusive job all their CPUs and GRES."""
    if not job.is_exclusive or not partition:
        return job
    whole = {name: job.nodes * amount for name, amount in job.per_node.items() if name.startswith(("cpu", "gres/"))}
    taken = job.tres | {name: max(amount, job.tres.get(name, 0)) for name, amount in whole.items()}
    return job._replace(tres={**taken, "billing": billing(taken, partition, job.priority_flags)[0]})


def _node_count_first(binding: Binding) -> tuple[bool, int, int]:
    """Sort key: slurmctld first compares the number of nodes alone with the smallest limit on it."""
    if binding.reason not in _NODE_COUNTS or (binding.asked or 0) <= (binding.value or 0):
        return (True, 0, 0)
    return (False, binding.value or 0, _NODE_COUNTS.index(binding.reason))


def _test(order: Mapping[str, str], levels: Levels, job: _Job, effect: Effect) -> Iterator[Binding]:
    """Yield what binds in one of slurmctld's tests. Only DenyOnLimit lets it test all limits at the submission."""
    at_submit = effect == "refused"
    denies = any("DenyOnLimit" in row.flags for row in levels.qos_rows)
    for limit in levels.applicable_limits(order):
        if at_submit and not denies and limit.rule.asks != "submitted":
            continue
        amounts = _asked_and_used(limit, job, at_submit=at_submit)
        if amounts is None:
            continue
        asked, used = amounts
        yield Binding(
            level=limit.origin,
            limit=limit.label,
            reason=rules.reason(limit.name, limit.tres, is_qos=limit.level.kind == "qos"),
            effect=effect,
            message=limit_message(limit, used, asked),
            value=limit.value,
            used=used,
            asked=asked,
            scope=limit.rule.scope,
        )


def _asked_and_used(limit: AppliedLimit, job: _Job, *, at_submit: bool) -> tuple[int, int] | None:
    """Return what the job asks of a limit and what others use of it; None if it does not bind.

    At the submission the job is compared alone, except with limits on the number of submitted jobs.
    """
    asks, value, tres = limit.rule.asks, limit.value, limit.tres
    used = 0 if at_submit and asks != "submitted" else limit.used
    if asks == "jobs":
        return (1, used) if limit.used >= value else None
    if asks == "submitted":
        return (job.tasks, used) if used + job.tasks > value else None
    if asks == "wall":
        counts_use = bool(limit.rule.scope) and not at_submit
        asked = int(job.minutes * job.usage_factor) if counts_use else job.minutes
        is_over = asked + used > value and (job.is_safe or not counts_use)
        return (asked, used) if is_over or (counts_use and used >= value) else None
    asked = job.tres.get(tres, 0)
    if limit.name == "MinTRES":
        return (asked, 0) if asked < value and (tres != "mem" or "mem" in job.tres) else None
    if not asked:
        return None
    if asks == "minutes":
        return _minutes(limit, asked, job, at_submit=at_submit)
    if asks == "per-node":
        return (asked // job.nodes, 0) if asked // job.nodes > value else None
    shared = _shared_nodes(job, limit) if tres == "node" and used else 0
    return (asked, used) if asked + used - shared > value else None


def _shared_nodes(job: _Job, limit: AppliedLimit) -> int:
    """Return how many of its nodes the job can share with those that the use counts already: a node counts once.

    Slurm fills nodes in use first. What others than these jobs use there is unknown.
    """
    if job.is_exclusive:
        return 0
    in_use = limit.use.tres
    nodes = in_use.get("node", 0)
    rooms = [min(nodes, job.nodes)]
    for tres in ("cpu", "gres/gpu", "mem"):
        if asked := -(-job.tres.get(tres, 0) // job.nodes):
            left = nodes * job.per_node.get(tres, asked) - in_use.get(tres, 0)
            rooms.append(max(0, left // asked))
    return min(rooms)


def _minutes(limit: AppliedLimit, amount: int, job: _Job, *, at_submit: bool) -> tuple[int, int] | None:
    """Do as `_asked_and_used` for a limit on TRES minutes."""
    value = limit.value
    if at_submit:
        return (amount * job.minutes, 0) if job.minutes > value // amount else None
    asked = int(amount * job.minutes * job.usage_factor)
    if limit.name != "GrpTRESMins":
        return (asked, limit.used) if asked + limit.used > value else None
    spent = limit.use.tres_mins.get(limit.tres, 0)
    if not job.is_safe:
        return (asked, spent) if spent >= value else None
    return (asked, limit.used) if spent >= value or asked + limit.used > value else None
