"""Parse the output of `squeue -o` and `scontrol -o show job` into records."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import tzinfo

from pitools.slurm import states
from pitools.slurm.fields import (
    key_values,
    none_to_empty,
    parse_count,
    parse_error,
    parse_slurm_duration,
    parse_slurm_time,
    split_rows,
)
from pitools.slurm.records import SlurmJob

# Field of SlurmJob → squeue's format. The first and last column contain no text of users: see fields.split_rows.
JOB_FORMAT = {
    "job_id": "%i",
    "array_job_id": "%F",
    "array_task": "%K",
    "state": "%T",
    "user": "%u",
    "account": "%a",
    "qos": "%q",
    "partition": "%P",
    "nodes": "%D",
    "node_list": "%N",
    "start": "%S",
    "end": "%e",
    "time_limit_s": "%l",
    "elapsed_s": "%M",
    "priority": "%Q",
    "gres": "%b",
    "reason": "%r",
    "name": "%j",
    "comment": "%k",
    "work_dir": "%Z",
    "raw_id": "%A",
}

# In `scontrol show job` the name is second and may contain anything; it ends at Slurm's next keys.
_AFTER_NAME = re.compile(r"(?: HetJobIdSet=\S+)? UserId=\S+\(\d+\) GroupId=\S+\(\d+\) MCS_label=")
_RECORD = re.compile(r"(?:\A|\n)(?=JobId=\d+ )")
_TEXT_BEGINS = " Command="
_TEXT_KEYS = (
    "Command",
    "WorkDir",
    "AdminComment",
    "SystemComment",
    "Comment",
    "Extra",
    "Power",
    "StdErr",
    "StdIn",
    "StdOut",
    "TresPerJob",
    "TresPerNode",
    "TresPerSocket",
    "TresPerTask",
    "MailUser",
    "MailType",
)


def parse_squeue(
    text: str, sep: str = "|", fields: Sequence[str] = tuple(JOB_FORMAT), zone: tzinfo | None = None
) -> list[SlurmJob]:
    """Parse `squeue -h -o`. fields: fields of SlurmJob, one per column. Raises ClusterError."""
    return [
        _parse_job(dict(zip(fields, row, strict=True)), "squeue", sep.join(row), zone)
        for row in split_rows(text, sep, len(fields), "squeue")
    ]


def _parse_job(values: Mapping[str, str], command: str, line: str, zone: tzinfo | None) -> SlurmJob:
    try:
        job_id = values["job_id"]
        task = none_to_empty(values.get("array_task", ""))
        return SlurmJob(
            job_id=job_id,
            raw_id=values.get("raw_id") or re.split(r"\D", job_id)[0],
            # squeue prints an array id for every job; only array tasks have a task number.
            array_job_id=values.get("array_job_id", "") if task else "",
            array_task=task,
            state=states.parse_job_state(values["state"]),
            name=values.get("name", ""),
            user=values.get("user", ""),
            account=none_to_empty(values.get("account", "")),
            qos=none_to_empty(values.get("qos", "")),
            partition=values.get("partition", ""),
            reason=none_to_empty(values.get("reason", "")),
            nodes=parse_count(values.get("nodes", "")) or 0,
            node_list=none_to_empty(values.get("node_list", "")),
            start=parse_slurm_time(values.get("start", ""), zone),
            end=parse_slurm_time(values.get("end", ""), zone),
            time_limit_s=parse_slurm_duration(values.get("time_limit_s", "")),
            elapsed_s=parse_slurm_duration(values.get("elapsed_s", "")) or 0,
            priority=parse_count(values.get("priority", "")),
            gres=re.sub(r"(^|,)gres[:/]", r"\1", none_to_empty(values.get("gres", ""))),
            comment=_unless_null(values.get("comment", "")),
            work_dir=_unless_null(values.get("work_dir", "")),
            restarts=parse_count(values.get("restarts", "")),
            preempted=parse_slurm_time(values.get("preempted", ""), zone),
            features=none_to_empty(values.get("features", "")),
            required_nodes=none_to_empty(values.get("required_nodes", "")),
            excluded_nodes=none_to_empty(values.get("excluded_nodes", "")),
            reservation=none_to_empty(values.get("reservation", "")),
            segment=parse_count(values.get("segment", "")) or 0,
        )
    except KeyError as error:
        raise parse_error(command, f"missing key {error}", line) from error


def _unless_null(text: str) -> str:
    return "" if text == "(null)" else text


def parse_scontrol_jobs(text: str, zone: tzinfo | None = None) -> list[SlurmJob]:
    """Parse `scontrol -o show job`.

    Raises ClusterError, also if a job's name or comment imitates Slurm's keys, so that its end is ambiguous.
    """
    if text.strip() in ("", "No jobs in the system"):
        return []
    if not text.endswith("\n"):
        raise parse_error("scontrol show job", "truncated", text)
    records = [record for record in _RECORD.split(text.rstrip("\n")) if record]
    return [_parse_job(_scontrol_values(record), "scontrol show job", record, zone) for record in records]


def _scontrol_values(record: str) -> dict[str, str]:
    ends = list(_AFTER_NAME.finditer(record))
    head, named, _ = record.partition(" JobName=")
    if not record.startswith("JobId=") or not named or len(ends) != 1:
        raise parse_error("scontrol show job", "a key is missing, or a user's text imitates one", record)
    ids = key_values(head)
    user_text = record[record.find(_TEXT_BEGINS, ends[0].end()) :] if _TEXT_BEGINS in record[ends[0].end() :] else ""
    body, user_values = key_values(record[ends[0].start() :].removesuffix(user_text)), key_values(user_text, _TEXT_KEYS)
    values = {
        "job_id": _job_id(ids),
        "raw_id": ids["JobId"],
        "array_job_id": ids.get("ArrayJobId", ""),
        "array_task": ids.get("ArrayTaskId", ""),
        "name": record[len(head + named) : ends[0].start()],
        "user": body["UserId"].split("(")[0],
        # Only here Slurm joins the words of a reason by "_".
        "reason": body.get("Reason", "").replace("_", " "),
        "gres": user_values.get("TresPerNode", ""),
        "comment": user_values.get("Comment", ""),
        "work_dir": user_values.get("WorkDir", ""),
    }
    named_in_body = {
        "account": "Account",
        "qos": "QOS",
        "state": "JobState",
        "partition": "Partition",
        "node_list": "NodeList",
        "nodes": "NumNodes",
        "start": "StartTime",
        "end": "EndTime",
        "time_limit_s": "TimeLimit",
        "elapsed_s": "RunTime",
        "priority": "Priority",
        "restarts": "Restarts",
        "preempted": "PreemptTime",
        "features": "Features",
        "required_nodes": "ReqNodeList",
        "excluded_nodes": "ExcNodeList",
        "reservation": "Reservation",
        "segment": "SegmentSize",
    }
    return values | {field: body[key] for field, key in named_in_body.items() if key in body}


def _job_id(ids: Mapping[str, str]) -> str:
    """Return the id as squeue prints it: `6_0`, `6_[3-9%3]`, `11+1`."""
    if "ArrayJobId" in ids:
        task = ids.get("ArrayTaskId", "")
        return f"{ids['ArrayJobId']}_{task}" if task.isdigit() else f"{ids['ArrayJobId']}_[{task}]"
    if "HetJobId" in ids:
        return f"{ids['HetJobId']}+{ids.get('HetJobOffset', '0')}"
    return ids["JobId"]
