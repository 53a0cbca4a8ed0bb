"""Limits that a job shares with others, and which of the queue's jobs count against each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from pitools.limits import rules
from pitools.limits.levels import AppliedLimit, find_levels, path_up
from pitools.limits.records import JobRequest, LimitState
from pitools.slurm.fields import parse_gpus
from pitools.slurm.records import LimitUsage, SlurmJob


def shared_limits(request: JobRequest, state: LimitState) -> Iterator[AppliedLimit]:
    """Yield the limits that the job would share with other jobs, in Slurm's order."""
    levels, _ = find_levels(request, state)
    for order in (rules.AT_SUBMIT, rules.BEFORE_NODES, rules.FOR_NODES):
        for limit in levels.applicable_limits(order):
            if limit.rule.scope and (limit.rule.asks == "submitted") == (order is rules.AT_SUBMIT):
                yield limit


def usage_of_jobs(requests: Iterable[JobRequest], state: LimitState, jobs: Iterable[SlurmJob]) -> Iterator[LimitUsage]:
    """Yield what the queue's jobs use of each level of these requests whose use the state lacks.

    Counts jobs, nodes and GPUs; a row of an array counts as one job. CPUs, memory and minutes are left out.
    """
    levels = [level for request in requests for level in find_levels(request, state)[0].chain if not level.uses]
    keys = {msgspec.json.encode(key): key for level in levels for key in level.keys.values()}
    queue = list(jobs)
    for key in keys.values():
        counts = counted_jobs(key, state)
        counted = [job for job in queue if counts(job)]
        running = [job for job in counted if job.state != "PENDING"]
        gpus = sum(job.nodes * parse_gpus(job.gres)[1] for job in running)
        yield msgspec.structs.replace(
            key,
            jobs=len(running),
            submitted=len(counted),
            tres={"node": sum(job.nodes for job in running), "gres/gpu": gpus},
            hidden="jobs" if "jobs" in state.private else "amounts",
        )


def counted_jobs(key: LimitUsage, state: LimitState) -> Callable[[SlurmJob], bool]:
    """Return a filter for the jobs that count in a row of use: a level's `keys` have that of each of its limits."""
    # The QOS of a partition counts every job there; that of a job, its jobs anywhere. An account counts those below it.
    of_partition = {row.partition for row in state.partitions if row.qos == key.qos}
    parents = {row.account: row.parent for row in state.associations if not row.user and row.cluster == state.cluster}

    def counts(job: SlurmJob) -> bool:
        if key.user not in ("", job.user) or key.partition not in ("", job.partition):
            return False
        if key.qos and job.qos != key.qos and job.partition not in of_partition:
            return False
        exact = key.qos or key.user
        return key.account in ("", job.account) if exact else key.account in path_up(job.account, parents)

    return counts
