"""Limits that a job shares with others, and which of the queue's jobs count against each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from pitools.limits import rules
from pitools.limits.levels import Level, find_levels
from pitools.limits.records import JobRequest, LimitState
from pitools.limits.rules import Scope
from pitools.slurm.fields import parse_gpus
from pitools.slurm.records import Association, LimitUsage, SlurmJob


class SharedLimit(NamedTuple):
    """A limit on a TRES of several jobs. counts: selects the jobs whose use counts."""

    level: str
    limit: str
    tres: str
    value: int
    counts: Callable[[SlurmJob], bool]


def shared_limits(request: JobRequest, state: LimitState) -> Iterator[SharedLimit]:
    """Yield the limits on TRES that the job would share with other jobs, in Slurm's order."""
    levels, _ = find_levels(request, state)
    for limit in levels.applicable_limits(rules.FOR_NODES):
        if limit.rule.scope and limit.rule.asks == "tres":
            counts = _counted_jobs(limit.level, limit.rule.scope, request, levels.account, state)
            yield SharedLimit(limit.level.name, limit.name, limit.tres, limit.value, counts)


def usage_of_jobs(
    request: JobRequest, state: LimitState, jobs: Iterable[SlurmJob], hidden: Literal["amounts", "jobs"]
) -> Iterator[LimitUsage]:
    """Yield what the queue's jobs use of each level of this request whose use the state lacks.

    Counts jobs, nodes and GPUs; a row of an array counts as one job. CPUs, memory and minutes are left out. hidden: of
    the rows.
    """
    levels, _ = find_levels(request, state)
    queue = list(jobs)
    for level in levels.chain:
        for scope, key in level.keys.items() if not level.uses else ():
            counts = _counted_jobs(level, scope, request, levels.account, state)
            counted = [job for job in queue if counts(job)]
            running = [job for job in counted if job.state != "PENDING"]
            gpus = sum(job.nodes * parse_gpus(job.gres)[1] for job in running)
            yield msgspec.structs.replace(
                key,
                jobs=len(running),
                submitted=len(counted),
                tres={"node": sum(job.nodes for job in running), "gres/gpu": gpus},
                hidden=hidden,
            )


def _counted_jobs(
    level: Level, scope: Scope, request: JobRequest, account: str, state: LimitState
) -> Callable[[SlurmJob], bool]:
    """Return a filter for the jobs that count against a level's limits of this scope."""
    limits = level.rows[0]
    if isinstance(limits, Association):
        return _counts_below(limits, state)
    name = limits.qos
    # The QOS of the partition counts every job there; that of the job, its jobs anywhere.
    of_partition = {row.partition for row in state.partitions if row.qos == name}

    def counts(job: SlurmJob) -> bool:
        if job.qos != name and job.partition not in of_partition:
            return False
        return scope == "all" or (job.user == request.user if scope == "user" else job.account == account)

    return counts


def _counts_below(row: Association, state: LimitState) -> Callable[[SlurmJob], bool]:
    if row.user:
        return lambda job: (job.user, job.account) == (row.user, row.account)
    parents = {other.account: other.parent for other in state.associations if not other.user}
    within = {row.account} | {account for account in parents if row.account in _path(account, parents)}
    return lambda job: job.account in within


def _path(account: str, parents: Mapping[str, str]) -> list[str]:
    """Return the accounts above one, nearest first."""
    above: list[str] = []
    while (account := parents.get(account, "")) and account not in above:
        above.append(account)
    return above
