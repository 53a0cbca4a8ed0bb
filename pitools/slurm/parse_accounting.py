"""Accounting: the answers of `sacct -P` and `sacctmgr -n -P show` → records."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import tzinfo

from pitools.slurm import states
from pitools.slurm.fields import (
    comma_list,
    none_to_empty,
    parse_count,
    parse_error,
    parse_slurm_duration,
    parse_slurm_time,
    parse_tres,
    split_rows,
)
from pitools.slurm.records import AccountingRow, Association, Qos

# Every version since 22.05 knows these (`Restarts` came with 24.11). The last column holds no text of users.
ACCOUNTING_FORMAT = (
    "JobID",
    "JobIDRaw",
    "JobName",
    "User",
    "Account",
    "QOS",
    "Partition",
    "State",
    "ExitCode",
    "DerivedExitCode",
    "Submit",
    "Eligible",
    "Start",
    "End",
    "ElapsedRaw",
    "TimelimitRaw",
    "NNodes",
    "NodeList",
    "Reason",
    "Comment",
    "ReqTRES",
    "AllocTRES",
)
_OPTIONAL = frozenset({"Reason", "Comment", "DerivedExitCode"})
ASSOCIATION_FORMAT = (
    "Cluster",
    "Account",
    "User",
    "Partition",
    "QOS",
    "DefaultQOS",
    "GrpTRES",
    "MaxTRES",
    "MaxJobs",
    "Fairshare",
    "ParentName",
)
QOS_FORMAT = (
    "Name",
    "Priority",
    "Preempt",
    "PreemptMode",
    "GraceTime",
    "Flags",
    "GrpTRES",
    "MaxTRESPU",
    "MaxWall",
    "UsageFactor",
    "MaxTRES",
)
_MIN_COLUMNS = 10  # of both; what is asked for behind these only makes the picture finer

_CANCELLED_BY = re.compile(r" by (\d+)$")


def parse_sacct(text: str, sep: str = "|", zone: tzinfo | None = None) -> list[AccountingRow]:
    """Jobs of `sacct -X -P [-D]`, its header line included: the header says which column is what.

    Columns that we do not know are left out. Raises ClusterError when one that we need is missing.
    """
    header = text.split("\n", 1)[0].split(sep)
    missing = [name for name in ACCOUNTING_FORMAT if name not in header and name not in _OPTIONAL]
    if missing:
        raise parse_error("sacct", f"it has no column {', '.join(missing)}", sep.join(header))
    table = split_rows(text, sep, len(header), "sacct")[1:]
    return [_accounting(dict(zip(header, row, strict=True)), sep.join(row), zone) for row in table]


def _accounting(values: dict[str, str], line: str, zone: tzinfo | None) -> AccountingRow:
    by = _CANCELLED_BY.search(values["State"])
    try:
        exit_code, _, signal = values["ExitCode"].partition(":")
        return AccountingRow(
            job_id=values["JobID"],
            raw_id=values["JobIDRaw"],
            state=states.parse_job_state(values["State"]),
            cancelled_by_uid=int(by[1]) if by else None,
            exit_code=int(exit_code),
            signal=int(signal or 0),
            derived_exit_code=int(values.get("DerivedExitCode", "").partition(":")[0] or 0),
            name=values["JobName"],
            user=values["User"],
            account=values["Account"],
            qos=values["QOS"],
            partition=values["Partition"],
            submit=parse_slurm_time(values["Submit"], zone),
            eligible=parse_slurm_time(values["Eligible"], zone),
            start=parse_slurm_time(values["Start"], zone),
            end=parse_slurm_time(values["End"], zone),
            elapsed_s=int(values["ElapsedRaw"] or 0),
            time_limit_s=parse_slurm_duration(values["TimelimitRaw"], unit_s=60),
            nodes=parse_count(values["NNodes"]) or 0,
            node_list=none_to_empty(values["NodeList"]),
            req_tres=parse_tres(values["ReqTRES"]),
            alloc_tres=parse_tres(values["AllocTRES"]),
            reason=none_to_empty(values.get("Reason", "")),
            comment=values.get("Comment", ""),
            restarts=parse_count(values.get("Restarts", "")),
        )
    except ValueError as error:
        raise parse_error("sacct", str(error), line) from error


def parse_associations(text: str) -> list[Association]:
    """Rows of `sacctmgr -n -P show assoc`. Raises ClusterError."""
    return [
        Association(
            cluster=row[0],
            account=row[1],
            user=row[2],
            partition=row[3],
            qos=comma_list(row[4]),
            default_qos=row[5],
            grp_tres=parse_tres(row[6]),
            max_tres=parse_tres(row[7]),
            max_jobs=parse_count(row[8]),
            fairshare=row[9],
            parent=row[10],
        )
        for row in _lines(text, ASSOCIATION_FORMAT, "sacctmgr show assoc")
    ]


def parse_default_accounts(text: str) -> dict[str, str]:
    """Cluster → default account, from `sacctmgr -n -P show user … withassoc`. Raises ClusterError."""
    rows = (line.split("|") for line in text.split("\n") if line)
    try:
        return {cluster: account for cluster, account in rows if cluster and account}
    except ValueError as error:
        raise parse_error("sacctmgr show user", "not a cluster and an account", text) from error


def parse_qos(text: str) -> list[Qos]:
    """Rows of `sacctmgr -n -P show qos`. Raises ClusterError."""
    return [
        Qos(
            qos=row[0],
            priority=parse_count(row[1]) or 0,
            preempt=comma_list(row[2]),
            preempt_mode=row[3],
            grace_s=parse_slurm_duration(row[4]) or 0,
            flags=comma_list(row[5]),
            grp_tres=parse_tres(row[6]),
            max_tres_per_user=parse_tres(row[7]),
            max_wall_s=parse_slurm_duration(row[8]),
            usage_factor=_factor(row[9]),
            max_tres=parse_tres(row[10]),
        )
        for row in _lines(text, QOS_FORMAT, "sacctmgr show qos")
    ]


def _lines(text: str, columns: Sequence[str], command: str) -> Iterator[list[str]]:
    """sacctmgr takes no separator of ours; what it prints here are administrators' names, which hold no bar."""
    for line in text.split("\n"):
        if line:
            row = line.split("|")
            if len(row) < _MIN_COLUMNS:
                raise parse_error(command, f"{len(row)} values instead of {_MIN_COLUMNS}", line)
            yield row + [""] * (len(columns) - len(row))


def _factor(text: str) -> float:
    try:
        return float(text or 1)
    except ValueError as error:
        raise parse_error("sacctmgr show qos", "not a number", text) from error
