"""What may refuse or hold a job although no rule of judge.py knows whether it does."""

from __future__ import annotations

from collections.abc import Iterator

from pitools.limits import rules
from pitools.limits.billing import billing, is_unknown
from pitools.limits.levels import AppliedLimit, Levels
from pitools.limits.records import JobRequest, LimitState

_JUDGED = ("RootOnly", "ReqResv")
_NODE_COUNTS = ("GrpTRES=node", "MaxTRESPU=node", "MaxTRESPA=node")
_QOS_FLAGS = ("Relative", "EnforceUsageThreshold")
_IGNORES_RUN_MINS_OF_USERS = (22, 5)  # the last version known to ignore MaxTRESRunMinsPU and MaxTRESRunMinsPA


def not_judged(request: JobRequest, levels: Levels, state: LimitState) -> Iterator[str]:
    """Yield each limit or permission that might bind the job and is not judged, and why, as text."""
    partition = levels.partition
    if state.submit_plugins:
        yield f"JobSubmitPlugins={state.submit_plugins}: may change or refuse the job"
    if state.partitions and not partition:
        yield f'partition "{request.partition}": not shown by the site'
    if partition:
        names = [f"{name}={value}" for name, value in partition.restrictions.items() if name not in _JUDGED]
        names += ["AllowGroups"] if partition.allow_groups and not state.groups else []
        yield from (f'{name} of partition "{partition.partition}"' for name in names)
    if "limits" not in state.enforced:
        return
    if not levels.account:
        yield "limits of associations: the account of the job is unknown"
    elif levels.accounts[-1] != "root":
        yield f'limits of accounts above "{levels.accounts[-1]}": not shown by the site'
    if not levels.job_qos:
        yield f'limits of the QOS "{levels.qos}": it is unknown'
    is_billed = billing(request.tres, partition, state.priority_flags)[1]
    for row in levels.qos_rows:
        kinds = [flag for flag in _QOS_FLAGS if flag in row.flags]
        if state.version[:2] > _IGNORES_RUN_MINS_OF_USERS:
            kinds += ["MaxTRESRunMinsPU"] if row.max_tres_run_mins_per_user else []
            kinds += ["MaxTRESRunMinsPA"] if row.max_tres_run_mins_per_account else []
        yield from (f'{kind} of QOS "{row.qos}"' for kind in kinds)
    for order in (rules.AT_SUBMIT, rules.BEFORE_NODES, rules.FOR_NODES):
        for limit in levels.applicable_limits(order):
            if cause := _unknown_amount(limit, request, is_billed):
                yield f"{limit.label} of {limit.origin}: {cause}"


def _unknown_amount(limit: AppliedLimit, request: JobRequest, is_billed: bool) -> str:
    """Return what of a limit is unknown, "" if nothing is. is_billed: whether all of the billing is known."""
    if is_unknown(limit.tres, request.tres) or (limit.tres == "billing" and not is_billed):
        return "what the job uses is unknown"
    kind = limit.tres.partition("/")[0]
    is_counted = limit.rule.asks in ("jobs", "submitted", "tres") and kind in ("", "node", "gres")
    if limit.use.hidden and (limit.use.hidden == "jobs" or not is_counted):
        return "what other jobs use is hidden from this user"
    shares = limit.label in _NODE_COUNTS and not request.is_exclusive
    if shares and request.nodes <= limit.value < request.nodes + limit.used:
        return "the job fits only on nodes that are in use, if these have room"
    return ""
