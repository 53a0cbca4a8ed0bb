"""Check a plan against the site's limits before sbatch does: what refuses it, and what would hold it for ever."""

from __future__ import annotations

import msgspec

from pitools.core.errors import ClusterError, PitError
from pitools.launch.plan import Plan
from pitools.limits.judge import judge
from pitools.limits.read import read_limits
from pitools.limits.records import Binding, JobRequest, LimitState
from pitools.limits.request import job_request
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.transport import Transport

UNKNOWN = "limits are not checked"
_TIMEOUT_S = 5.0


def check_limits(plan: Plan, site: Site) -> list[str]:
    """Return what the user should know of the limits that bind the plan's job now: a line each; [] if none does.

    Raises ClusterError for a job that sbatch would refuse. A site that does not answer gives one line.
    """
    if not _has_limits(site):
        return []
    try:
        request, state = read_limits(job_request(plan.job, site), _transport(site))
    except PitError as error:
        return [f"{UNKNOWN}: {error}"]
    now = judge(request, state)
    if now.effect == "refused":
        binding = now.bindings[0]
        where = f"sbatch at {site.name}: {binding.reason}"
        raise ClusterError(binding.message, where=where, hint=_hint(binding.limit))
    if lines := _for_ever(request, state):
        return lines
    if now.bindings:
        return [f"the job waits until others end: {_sentence(now.bindings[0])}"]
    return [f"not judged: {'; '.join(now.not_judged)}"] if now.not_judged else []


def limits_for_ever(plan: Plan, site: Site) -> list[str]:
    """Return each limit for which the plan's job would never start, a line each; a site that does not answer gives one.

    Whether sbatch refuses the job is left to sbatch: other jobs, this one too, may count by now.
    """
    if not _has_limits(site):
        return []
    try:
        return _for_ever(*read_limits(job_request(plan.job, site), _transport(site), with_usage=False))
    except PitError as error:
        return [f"{UNKNOWN}: {error}"]


def _has_limits(site: Site) -> bool:
    return site.scheduler == "slurm" and not site.connection.host.endswith((".example", ".invalid"))


def _transport(site: Site) -> Transport:
    transport = client(site).transport
    return msgspec.structs.replace(transport, timeout_s=min(_TIMEOUT_S, transport.timeout_s))


def _for_ever(request: JobRequest, state: LimitState) -> list[str]:
    verdict = judge(request, msgspec.structs.replace(state, usage=()))
    return [f"the job would never start: {_sentence(binding)}" for binding in verdict.bindings]


def _sentence(binding: Binding) -> str:
    return f"{binding.message}; {binding.reason}, of {binding.level}"


def _hint(limit: str) -> str:
    if not limit:
        return "see: sacctmgr show assoc user=$USER format=account,partition,qos"
    if "Submit" in limit:
        return "wait until some of these jobs have ended"
    return "request less, or name another partition, account or QOS"
