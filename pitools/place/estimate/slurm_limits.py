"""Slurm's limits for a candidate, from its site's snapshot: `sbatch --test-only` ignores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pitools.limits.judge import judge
from pitools.limits.levels import AppliedLimit
from pitools.limits.records import JobRequest, LimitState
from pitools.limits.request import job_request
from pitools.limits.shared import counted_jobs, shared_limits
from pitools.place.clusters.snapshot import Snapshot
from pitools.site.dialect import JobSpec
from pitools.site.schema import Site
from pitools.slurm.records import SlurmJob


def refusal_reasons(job: JobSpec, site: Site, snapshot: Snapshot) -> list[str]:
    """Return the reasons why the job's partition would never run it, as far as the snapshot shows them."""
    request, state = _request_and_state(job, site, snapshot)
    return [binding.message for binding in judge(request, state).bindings]


def limits_shared_with_others(
    job: JobSpec, site: Site, snapshot: Snapshot
) -> Iterator[tuple[AppliedLimit, Callable[[SlurmJob], bool]]]:
    """Yield the limits on TRES that the job would share with other jobs, and a filter for those that count."""
    request, state = _request_and_state(job, site, snapshot)
    for limit in shared_limits(request, state):
        if limit.rule.asks == "tres":
            yield limit, counted_jobs(limit.level.keys[limit.rule.scope], state)


def _request_and_state(job: JobSpec, site: Site, snapshot: Snapshot) -> tuple[JobRequest, LimitState]:
    """Return the limits without any use of them: what binds then binds for ever."""
    account = snapshot.account
    state = LimitState(
        cluster=snapshot.cluster,
        version=snapshot.version,
        enforced=snapshot.enforced_limits if account else (),
        associations=account.associations if account else (),
        qos=account.qos if account else (),
        partitions=snapshot.partitions,
        priority_flags=snapshot.priority_flags,
        groups=account.groups if account else frozenset(),
    )
    return job_request(job, site, account.user if account else ""), state
