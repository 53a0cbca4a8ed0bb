"""Judge whether Slurm's limits let a job run: refused by sbatch, pending, or free to run, and what binds.

slurmctld tests a job several times: when it is submitted, before it looks for nodes, and for the nodes it has chosen.
Each test goes through the levels in Slurm's order (levels.py), and the first limit that binds becomes the job's reason.
A limit of a QOS replaces the same limit of the QOS after it and of all associations; of those, each account's group
limits bind. perf/tenancy/bench_limits.py compares all of this with a real slurmctld.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pitools.limits import partition_rules, rules
from pitools.limits.levels import AppliedLimit, Level, applicable_limits, find_levels
from pitools.limits.records import Binding, Effect, JobRequest, LimitState, Verdict
from pitools.limits.rules import RULES
from pitools.limits.words import limit_message
from pitools.slurm.fields import parse_tres_amounts
from pitools.slurm.records import LimitUsage, Partition


class _Job(NamedTuple):
    """A request in Slurm's units: TRES amounts, minutes. is_safe: whether `safe` limits of minutes are enforced.

    per_node: what a node of the partition has, on average.
    """

    tres: dict[str, int]
    request: JobRequest
    minutes: int
    is_safe: bool
    per_node: Mapping[str, int]


def judge(request: JobRequest, state: LimitState) -> Verdict:
    """Return whether limits let the job run now, and every limit that binds it.

    With a state without usage the bindings are those that hold the job for ever.
    """
    levels, denial = find_levels(request, state)
    partition = next((row for row in state.partitions if row.partition == request.partition), None)
    tres, per_node = _requested_tres(request, partition), _node_tres(partition)
    job = _Job(tres, request, request.time_s // 60, "safe" in state.enforced, per_node)
    on_nodes = job._replace(tres=_tres_on_nodes(tres, request, partition, per_node))
    closed = partition_rules.closed_binding(partition, state) if partition else None
    found = [binding for binding in (closed, denial) if binding]
    sizes = list(partition_rules.size_bindings(request, levels, partition, state)) if partition else []
    access = list(partition_rules.access_bindings(levels, partition, state)) if partition else []
    if partition_rules.is_refused_at_submit(state):
        found += (*sizes, *access)
    if "limits" in state.enforced:
        found += _test(rules.AT_SUBMIT, levels.chain, job, "refused", is_strict=levels.denies)
    found += sizes
    if "limits" in state.enforced:
        found += _test(rules.BEFORE_NODES, levels.chain, job, "pends")
    found += access
    if "limits" in state.enforced:
        found += sorted(_test(rules.FOR_NODES, levels.chain, on_nodes, "pends"), key=_node_count_first)
    unique: dict[tuple[str, str], Binding] = {}
    for binding in sorted(found, key=lambda binding: binding.effect != "refused"):
        unique.setdefault((binding.level, binding.limit), binding)
    bindings = tuple(unique.values())
    effect = bindings[0].effect if bindings else "may-run"
    return Verdict(effect=effect, bindings=bindings, account=levels.account, qos=levels.qos)


def _requested_tres(request: JobRequest, partition: Partition | None) -> dict[str, int]:
    """Return what the job requests by TRES name; memory, in MiB, only if it is known."""
    tres = {"cpu": request.cpus, "node": request.nodes, **request.gres}
    if request.memory_mib is not None:
        tres["mem"] = request.memory_mib
    return {**tres, "billing": _billing(tres, partition.billing_weights if partition else {})}


def _node_tres(partition: Partition | None) -> dict[str, int]:
    """Return what a node of the partition has, on average."""
    if not partition or not partition.nodes:
        return {}
    amounts = {"cpu": partition.cpus, **parse_tres_amounts(partition.tres)}
    return {tres: amount // partition.nodes for tres, amount in amounts.items()}


def _tres_on_nodes(
    tres: Mapping[str, int], request: JobRequest, partition: Partition | None, per_node: Mapping[str, int]
) -> dict[str, int]:
    """Return what the job takes of its nodes: an exclusive job all their CPUs."""
    if not request.is_exclusive or not partition:
        return dict(tres)
    taken = {**tres, "cpu": max(tres["cpu"], request.nodes * per_node.get("cpu", 0))}
    return {**taken, "billing": _billing(taken, partition.billing_weights)}


def _billing(tres: Mapping[str, int], weights: Mapping[str, str]) -> int:
    """Return the billing of TRESBillingWeights: the CPUs where there are none. A weight of memory may be per `G`."""
    if not weights:
        return tres["cpu"]
    total = 0.0
    for name, text in weights.items():
        scale = {"K": 1024.0, "G": 1 / 1024, "T": 1 / 1024**2}.get(text[-1:], 1.0) if name.lower() == "mem" else 1.0
        total += tres.get(name.lower(), 0) * scale * float(text.rstrip("KMGT"))
    return int(total)


def _node_count_first(binding: Binding) -> tuple[bool, int]:
    """Sort key: slurmctld first compares the number of nodes alone with the smallest limit on it."""
    is_count = binding.limit in ("GrpTRES=node", "MaxTRES=node", "MaxTRESPU=node", "MaxTRESPA=node")
    is_alone = is_count and (binding.asked or 0) > (binding.value or 0)
    return (not is_alone, (binding.value or 0) if is_alone else 0)


def _test(
    order: Mapping[str, str], chain: Sequence[Level], job: _Job, effect: Effect, *, is_strict: bool = True
) -> Iterator[Binding]:
    """Yield what binds in one of slurmctld's tests. is_strict: if not, only counts of submitted jobs are tested."""
    for limit in applicable_limits(chain, order):
        rule = RULES[limit.name]
        if not is_strict and rule.asks != "submitted":
            continue
        amounts = _asked_and_used(limit, job, at_submit=effect == "refused")
        if amounts is None:
            continue
        asked, used = amounts
        level = limit.level.origin(rule.field, limit.tres)
        yield Binding(
            level=level,
            limit=f"{limit.name}={limit.tres}" if limit.tres else limit.name,
            reason=rules.reason(limit.name, limit.tres, is_qos=limit.level.kind == "qos"),
            effect=effect,
            message=limit_message(limit.name, limit.tres, level, limit.value, used, asked),
            value=limit.value,
            used=used,
            asked=asked,
            scope=rule.scope,
        )


def _asked_and_used(limit: AppliedLimit, job: _Job, *, at_submit: bool) -> tuple[int, int] | None:
    """Return what the job asks of a limit and what others use of it; None if it does not bind.

    At the submission the job is compared alone, except with limits on the number of submitted jobs.
    """
    rule, value, tres = RULES[limit.name], limit.value, limit.tres
    usage = limit.level.usage(rule.scope)
    counts_use = bool(rule.scope) and not at_submit
    if rule.asks == "jobs":
        return (1, usage.jobs) if usage.jobs >= value else None
    if rule.asks == "submitted":
        return (job.request.tasks, usage.submitted) if usage.submitted + job.request.tasks > value else None
    if rule.asks == "wall":
        used = usage.wall_s // 60 if counts_use else 0
        is_over = job.minutes + used > value and (job.is_safe or not counts_use)
        return (job.minutes, used) if is_over or (counts_use and used >= value) else None
    asked = job.tres.get(tres, 0)
    if limit.name == "MinTRES":
        return (asked, 0) if asked < value and (tres != "mem" or "mem" in job.tres) else None
    if not asked:
        return None
    if rule.asks == "minutes":
        return _minutes(limit, job, at_submit=at_submit)
    if rule.asks == "per-node":
        return (asked // job.request.nodes, 0) if asked // job.request.nodes > value else None
    used = usage.tres.get(tres, 0) if counts_use else 0
    shared = _shared_nodes(job, usage) if tres == "node" and counts_use else 0
    return (asked, used) if asked + used - shared > value else None


def _shared_nodes(job: _Job, usage: LimitUsage) -> int:
    """Return how many of its nodes the job can share with those that the use counts already: a node counts once.

    Slurm fills nodes in use first. What others than these jobs use there is unknown.
    """
    if job.request.is_exclusive:
        return 0
    nodes = usage.tres.get("node", 0)
    rooms = [min(nodes, job.request.nodes)]
    for tres in ("cpu", "gres/gpu", "mem"):
        if asked := -(-job.tres.get(tres, 0) // job.request.nodes):
            left = nodes * job.per_node.get(tres, asked) - usage.tres.get(tres, 0)
            rooms.append(max(0, left // asked))
    return min(rooms)


def _minutes(limit: AppliedLimit, job: _Job, *, at_submit: bool) -> tuple[int, int] | None:
    """Do as `_asked_and_used` for a limit on TRES minutes."""
    amount, value = job.tres[limit.tres], limit.value
    asked = amount * job.minutes
    if at_submit:
        return (asked, 0) if job.minutes > value // amount else None
    usage = limit.level.usage(RULES[limit.name].scope)
    promised = usage.tres_run_mins.get(limit.tres, 0)
    if limit.name != "GrpTRESMins":
        return (asked, promised) if asked + promised > value else None
    spent = usage.tres_mins.get(limit.tres, 0)
    if not job.is_safe:
        return (asked, spent) if spent >= value else None
    return (asked, promised + spent) if spent >= value or asked + promised + spent > value else None
