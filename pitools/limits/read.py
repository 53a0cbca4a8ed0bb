"""Read the limits of a site that apply to a job, with what slurmctld counts against them: two or three calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC

import msgspec

from pitools.core.errors import PitError
from pitools.limits.levels import find_levels
from pitools.limits.records import JobRequest, LimitState
from pitools.limits.shared import usage_of_jobs
from pitools.slurm import argv, parse_accounting, parse_cluster, parse_jobs, parse_nodes
from pitools.slurm.fields import comma_list, new_separator, none_to_empty
from pitools.slurm.multi_query import run_queries, stdout_or_raise
from pitools.slurm.parse_assoc_mgr import parse_assoc_mgr
from pitools.slurm.records import Config, LimitUsage
from pitools.slurm.transport import Transport

_ENFORCED = "AccountingStorageEnforce"
_QUEUE_FIELDS = ("job_id", "state", "user", "account", "qos", "partition", "nodes", "gres")


def read_limits(request: JobRequest, transport: Transport, *, with_usage: bool = True) -> tuple[JobRequest, LimitState]:
    """Return the request in the name of the site's user, and the limits there with what is used of them.

    Raises Unreachable and ClusterError. Where slurmctld hides its counts (PrivateData=usage), the use is that of the
    jobs that squeue lists.
    """
    commands = [argv.USER, ["id", "-Gn"], argv.CONFIG, argv.PARTITIONS, argv.associations(), argv.QOS]
    *answers, associations, qos = run_queries(transport, commands)
    user, groups, config_text, partitions = (stdout_or_raise(transport, done) for done in answers)
    config = parse_cluster.parse_config(config_text)
    enforced = enforced_limits(config)
    # A cluster that enforces nothing may have no accounting at all.
    rows, qos_rows = (stdout_or_raise(transport, done) if enforced else "" for done in (associations, qos))
    request = msgspec.structs.replace(request, user=request.user or user.strip())
    state = LimitState(
        cluster=config.cluster,
        version=config.version,
        enforced=enforced,
        associations=tuple(parse_accounting.parse_associations(rows)),
        qos=tuple(parse_accounting.parse_qos(qos_rows)),
        partitions=tuple(parse_nodes.parse_partitions(partitions)),
        part_limits=config.values.get("EnforcePartLimits", "no").lower(),
        submit_plugins=none_to_empty(config.values.get("JobSubmitPlugins", "")),
        priority_flags=comma_list(config.values.get("PriorityFlags", "").lower()),
        private=comma_list(config.values.get("PrivateData", "").lower()),
        groups=frozenset(groups.split()) if request.user == user.strip() else frozenset(),
    )
    if enforced and not request.account:
        state = msgspec.structs.replace(state, default_accounts=_default_accounts(request.user, state, transport))
    return request, add_usage([request], state, transport) if with_usage else state


def enforced_limits(config: Config) -> tuple[str, ...]:
    """Return the words of AccountingStorageEnforce; () if slurmctld enforces none. `all` names them all."""
    words = [word.strip().lower() for word in config.values.get(_ENFORCED, "").split(",")]
    if "all" in words:
        return ("associations", "limits", "qos", "safe")
    return tuple(word for word in words if word not in ("", "none"))


def _default_accounts(user: str, state: LimitState, transport: Transport) -> dict[str, str]:
    done = run_queries(transport, [argv.default_accounts(user)])[0]
    accounts = parse_accounting.parse_default_accounts(stdout_or_raise(transport, done))
    return {user: accounts[state.cluster]} if state.cluster in accounts else {}


def add_usage(requests: Sequence[JobRequest], state: LimitState, transport: Transport) -> LimitState:
    """Return the limits with what is used of those of these jobs. Raises Unreachable and ClusterError."""
    if "limits" not in state.enforced:
        return state
    levels = [find_levels(request, state)[0] for request in requests]
    accounts = list(dict.fromkeys(name for each in levels for name in each.accounts))
    qos = list(dict.fromkeys(row.qos for each in levels for row in each.qos_rows))
    sep = new_separator()
    queue = ["squeue", "-h", "--noconvert", "-o", sep.join(parse_jobs.JOB_FORMAT[name] for name in _QUEUE_FIELDS)]
    counted, jobs = run_queries(transport, [argv.assoc_mgr(accounts, qos), queue])
    usage: list[LimitUsage] = []
    with suppress(PitError):
        usage = parse_assoc_mgr(stdout_or_raise(transport, counted))
    state = msgspec.structs.replace(state, usage=tuple(usage))
    if all(level.uses for request in requests for level in find_levels(request, state)[0].chain):
        return state
    # PrivateData=usage hides the rows of accounts, or all: there, squeue's jobs count.
    rows = parse_jobs.parse_squeue(stdout_or_raise(transport, jobs), sep, _QUEUE_FIELDS, UTC)
    return msgspec.structs.replace(state, usage=(*usage, *usage_of_jobs(requests, state, rows)))
