"""Parse the output of `sacct -P` and `sacctmgr -n -P show` into records."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import tzinfo
from typing import Any

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

# Every version since 22.05 supports these (`Restarts`: since 24.11). The last column contains no text of users.
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
    "Submit",
    "Start",
    "End",
    "ElapsedRaw",
    "TimelimitRaw",
    "NNodes",
    "NodeList",
    "Reason",
    "Comment",
    "AllocTRES",
)
_OPTIONAL = frozenset({"Reason", "Comment"})
# Columns of sacctmgr → field of the record, and its parser. Every version since 22.05 has them.
_Columns = dict[str, tuple[str, Callable[[str], object]]]
_ASSOCIATION_COLUMNS: _Columns = {
    "Cluster": ("cluster", str),
    "Account": ("account", str),
    "User": ("user", str),
    "Partition": ("partition", str),
    "QOS": ("qos", comma_list),
    "DefaultQOS": ("default_qos", str),
    "GrpTRES": ("grp_tres", parse_tres),
    "MaxTRES": ("max_tres", parse_tres),
    "ParentName": ("parent", str),
    "GrpJobs": ("grp_jobs", parse_count),
    "GrpSubmit": ("grp_submit", parse_count),
    "GrpWall": ("grp_wall_s", parse_slurm_duration),
    "GrpTRESMins": ("grp_tres_mins", parse_tres),
    "GrpTRESRunMins": ("grp_tres_run_mins", parse_tres),
    "MaxJobs": ("max_jobs", parse_count),
    "MaxSubmit": ("max_submit", parse_count),
    "MaxWall": ("max_wall_s", parse_slurm_duration),
    "MaxTRESMins": ("max_tres_mins", parse_tres),
    "MaxTRESPerNode": ("max_tres_per_node", parse_tres),
}
_QOS_COLUMNS: _Columns = {
    "Name": ("qos", str),
    "Priority": ("priority", parse_count),
    "Preempt": ("preempt", comma_list),
    "GraceTime": ("grace_s", parse_slurm_duration),
    "Flags": ("flags", comma_list),
    "GrpTRES": ("grp_tres", parse_tres),
    "MaxTRESPU": ("max_tres_per_user", parse_tres),
    "MaxWall": ("max_wall_s", parse_slurm_duration),
    "MaxTRES": ("max_tres", parse_tres),
    "GrpJobs": ("grp_jobs", parse_count),
    "GrpSubmit": ("grp_submit", parse_count),
    "GrpWall": ("grp_wall_s", parse_slurm_duration),
    "GrpTRESMins": ("grp_tres_mins", parse_tres),
    "GrpTRESRunMins": ("grp_tres_run_mins", parse_tres),
    "MaxTRESMins": ("max_tres_mins", parse_tres),
    "MaxTRESPerNode": ("max_tres_per_node", parse_tres),
    "MinTRES": ("min_tres", parse_tres),
    "MaxJobsPU": ("max_jobs_per_user", parse_count),
    "MaxSubmitPU": ("max_submit_per_user", parse_count),
    "MaxJobsPA": ("max_jobs_per_account", parse_count),
    "MaxSubmitPA": ("max_submit_per_account", parse_count),
    "MaxTRESPA": ("max_tres_per_account", parse_tres),
    "PreemptMode": ("preempt_mode", str),
    "UsageFactor": ("usage_factor", float),
    "LimitFactor": ("limit_factor", float),
    "MaxTRESRunMinsPU": ("max_tres_run_mins_per_user", parse_tres),
    "MaxTRESRunMinsPA": ("max_tres_run_mins_per_account", parse_tres),
}
ASSOCIATION_FORMAT = tuple(_ASSOCIATION_COLUMNS)
QOS_FORMAT = tuple(_QOS_COLUMNS)
_MIN_COLUMNS = 8  # of both formats; the columns after these are optional

_CANCELLED_BY = re.compile(r" by (\d+)$")


def parse_sacct(text: str, sep: str = "|", zone: tzinfo | None = None) -> list[AccountingRow]:
    """Parse `sacct -X -P [-D]` by its header line.

    Unknown columns are ignored. Raises ClusterError for a missing column or an invalid value.
    """
    header = text.split("\n", 1)[0].split(sep)
    missing = [name for name in ACCOUNTING_FORMAT if name not in header and name not in _OPTIONAL]
    if missing:
        raise parse_error("sacct", f"missing column {', '.join(missing)}", sep.join(header))
    table = split_rows(text, sep, len(header), "sacct")[1:]
    return [_parse_row(dict(zip(header, row, strict=True)), sep.join(row), zone) for row in table]


def _parse_row(values: dict[str, str], line: str, zone: tzinfo | None) -> AccountingRow:
    cancelled_by = _CANCELLED_BY.search(values["State"])
    try:
        exit_code, _, signal = values["ExitCode"].partition(":")
        return AccountingRow(
            job_id=values["JobID"],
            raw_id=values["JobIDRaw"],
            state=states.parse_job_state(values["State"]),
            cancelled_by_uid=int(cancelled_by[1]) if cancelled_by else None,
            exit_code=int(exit_code),
            signal=int(signal or 0),
            name=values["JobName"],
            user=values["User"],
            account=values["Account"],
            qos=values["QOS"],
            partition=values["Partition"],
            submit=parse_slurm_time(values["Submit"], zone),
            start=parse_slurm_time(values["Start"], zone),
            end=parse_slurm_time(values["End"], zone),
            elapsed_s=int(values["ElapsedRaw"] or 0),
            time_limit_s=parse_slurm_duration(values["TimelimitRaw"], unit_s=60),
            nodes=parse_count(values["NNodes"]) or 0,
            node_list=none_to_empty(values["NodeList"]),
            alloc_tres=parse_tres(values["AllocTRES"]),
            reason=none_to_empty(values.get("Reason", "")),
            comment=values.get("Comment", ""),
            restarts=parse_count(values.get("Restarts", "")),
        )
    except ValueError as error:
        raise parse_error("sacct", str(error), line) from error


def parse_associations(text: str) -> list[Association]:
    """Parse `sacctmgr -n -P show assoc`. Raises ClusterError."""
    return [
        Association(**_sacctmgr_values(row, _ASSOCIATION_COLUMNS, "sacctmgr show assoc"))
        for row in _sacctmgr_rows(text, "sacctmgr show assoc")
    ]


def parse_default_accounts(text: str) -> dict[str, str]:
    """Return cluster → default account of `sacctmgr -n -P show user … withassoc`. Raises ClusterError."""
    rows = (line.split("|") for line in text.split("\n") if line)
    try:
        return {cluster: account for cluster, account in rows if cluster and account}
    except ValueError as error:
        raise parse_error("sacctmgr show user", "not a cluster with an account", text) from error


def parse_qos(text: str) -> list[Qos]:
    """Parse `sacctmgr -n -P show qos`. Raises ClusterError."""
    return [
        Qos(**_sacctmgr_values(row, _QOS_COLUMNS, "sacctmgr show qos"))
        for row in _sacctmgr_rows(text, "sacctmgr show qos")
    ]


def _sacctmgr_values(row: Sequence[str], columns: _Columns, command: str) -> dict[str, Any]:
    """Return the fields of a row; an empty value leaves the field's default."""
    try:
        return {
            name: value
            for (name, parse), text in zip(columns.values(), row, strict=False)
            if (value := parse(text) if text else None) is not None
        }
    except ValueError as error:
        raise parse_error(command, str(error), "|".join(row)) from error


def _sacctmgr_rows(text: str, command: str) -> Iterator[list[str]]:
    """Yield rows. sacctmgr always separates by |, which administrators' names do not contain."""
    for line in text.split("\n"):
        if line:
            row = line.split("|")
            if len(row) < _MIN_COLUMNS:
                raise parse_error(command, f"{len(row)} values (expected {_MIN_COLUMNS})", line)
            yield row
