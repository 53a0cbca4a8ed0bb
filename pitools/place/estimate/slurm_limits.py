"""Slurm's limits for a candidate, from its site's snapshot: `sbatch --test-only` ignores them."""

from __future__ import annotations

from pitools.limits.judge import judge
from pitools.limits.records import JobRequest, LimitState
from pitools.limits.request import job_request
from pitools.limits.shared import SharedLimit, shared_limits
from pitools.place.clusters.snapshot import Snapshot
from pitools.site.dialect import JobSpec
from pitools.site.schema import Site


def refusal_reasons(job: JobSpec, site: Site, snapshot: Snapshot) -> list[str]:
    """Return the reasons why the job's partition would never run it, as far as the snapshot shows them."""
    request, state = _request_and_state(job, site, snapshot)
    return [binding.message for binding in judge(request, state).bindings]


def limits_shared_with_others(job: JobSpec, site: Site, snapshot: Snapshot) -> list[SharedLimit]:
    """Return the limits that the job would share with other jobs."""
    return list(shared_limits(*_request_and_state(job, site, snapshot)))


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
