"""Limits that a job shares with others, and which of the queue's jobs count against each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from pitools.limits import rules
from pitools.limits.levels import find_levels
from pitools.limits.records import JobRequest, LimitState
from pitools.slurm.fields import parse_gpus
from pitools.slurm.records import LimitUsage, SlurmJob


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
            counts = _counted_jobs(limit.level.keys[limit.rule.scope], state)
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
        for key in level.keys.values() if not level.uses else ():
            counts = _counted_jobs(key, state)
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


def _counted_jobs(key: LimitUsage, state: LimitState) -> Callable[[SlurmJob], bool]:
    """Return a filter for the jobs that count in a row of use."""
    # The QOS of a partition counts every job there; that of a job, its jobs anywhere. An account counts those below it.
    of_partition = {row.partition for row in state.partitions if row.qos == key.qos}
    parents = {row.account: row.parent for row in state.associations if not row.user and row.cluster == state.cluster}

    def counts(job: SlurmJob) -> bool:
        if key.user not in ("", job.user) or key.partition not in ("", job.partition):
            return False
        if key.qos and job.qos != key.qos and job.partition not in of_partition:
            return False
        exact = key.qos or key.user
        return key.account in ("", job.account) if exact else key.account in _path(job.account, parents)

    return counts


def _path(account: str, parents: Mapping[str, str]) -> list[str]:
    """Return an account and those above it, nearest first."""
    path = [account]
    while (account := parents.get(account, "")) and account not in path:
        path.append(account)
    return path
