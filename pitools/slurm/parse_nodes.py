"""Parse `scontrol -o show node|partition|reservation` into records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import tzinfo

from pitools.slurm import states
from pitools.slurm.fields import (
    comma_list,
    key_values,
    none_to_empty,
    parse_count,
    parse_error,
    parse_gpus,
    parse_slurm_duration,
    parse_slurm_time,
    parse_tres,
)
from pitools.slurm.records import Node, Partition, Reservation

# In `scontrol show node`, text of users starts at the first of these; all keys before it are Slurm's.
_TEXT_BEGINS = re.compile(r"\s(?:Reason|Comment|Extra)=")
_TEXT_KEYS = ("Comment", "Extra", "Reason", "InstanceId", "InstanceType", "ReservationName", "ResumeAfterTime")
_REASON = re.compile(r"\sReason=(.*?) \[[^\s\[\]@]+@(?:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d|Unknown)\]")
_MAXIMA = ("MaxCPUsPerNode", "MaxCPUsPerSocket", "MaxMemPerNode", "MaxMemPerCPU")
_RESTRICTIONS = ("RootOnly", "ReqResv", "AllocNodes", *_MAXIMA)


def parse_nodes(text: str) -> list[Node]:
    """Parse `scontrol [-d] -o show node`. Raises ClusterError."""
    return [_parse_node(line) for line in _lines(text, "NodeName=", "scontrol show node")]


def _parse_node(line: str) -> Node:
    text_start = _TEXT_BEGINS.search(line)
    user_text = line[text_start.start() :] if text_start else ""
    values = key_values(line.removesuffix(user_text))
    try:
        state, flags = states.parse_node_state(values["State"])
        gpu_type, n_gpus = parse_gpus(values.get("Gres", ""))
        return Node(
            node=values["NodeName"],
            state=state,
            flags=flags,
            partitions=comma_list(values.get("Partitions", "")),
            gres=none_to_empty(values.get("Gres", "")),
            gpu_type=gpu_type,
            gpus=n_gpus,
            gpus_allocated=_gpus_allocated(values, n_gpus),
            cpus=int(values["CPUTot"]),
            cpus_allocated=int(values["CPUAlloc"]),
            memory_mib=parse_count(values["RealMemory"]) or 0,
            features=comma_list(values.get("ActiveFeatures", "")),
            reason=_parse_reason(user_text),
            address=values.get("NodeAddr", values["NodeName"]),
        )
    except (KeyError, ValueError) as error:
        raise parse_error("scontrol show node", f"missing or invalid value: {error}", line) from error


def _gpus_allocated(values: dict[str, str], n_gpus: int) -> int | None:
    if not n_gpus:
        return 0
    if none_to_empty(values.get("GresUsed", "")):
        return parse_gpus(values["GresUsed"])[1]
    # Without `-d` only tracked TRES are listed, and many sites do not track gres/gpu.
    if "gres/gpu" in parse_tres(values.get("CfgTRES", "")):
        return parse_count(parse_tres(values.get("AllocTRES", "")).get("gres/gpu", "0"))
    return None


def _parse_reason(text: str) -> str:
    """Return the reason. Its further lines are indented, after the first line's `[user@time]`."""
    first, *further = text.split("\n")
    match = _REASON.search(first)
    if not match:
        return none_to_empty(key_values(text, _TEXT_KEYS).get("Reason", ""))
    return "\n".join([match[1], *(line.strip() for line in further)])


def parse_partitions(text: str) -> list[Partition]:
    """Parse `scontrol -o show partition`. Raises ClusterError."""
    return [_parse_partition(line) for line in _lines(text, "PartitionName=", "scontrol show partition")]


def _parse_partition(line: str) -> Partition:
    values = key_values(line)
    try:
        return Partition(
            partition=values["PartitionName"],
            state=values["State"].lower(),
            is_default=values["Default"] == "YES",
            node_list=none_to_empty(values["Nodes"]),
            nodes=parse_count(values["TotalNodes"]) or 0,
            cpus=parse_count(values["TotalCPUs"]) or 0,
            min_nodes=parse_count(values.get("MinNodes", "")) or 0,
            max_nodes=parse_count(values["MaxNodes"]),
            max_time_s=parse_slurm_duration(values["MaxTime"]),
            grace_s=parse_slurm_duration(values.get("GraceTime", "")) or 0,
            allow_accounts=_allowed(values, "AllowAccounts"),
            allow_qos=_allowed(values, "AllowQos"),
            allow_groups=_allowed(values, "AllowGroups"),
            deny_accounts=comma_list(values.get("DenyAccounts", "")),
            deny_qos=comma_list(values.get("DenyQos", "")),
            qos=none_to_empty(values.get("QoS", "")),
            over_subscribe=none_to_empty(values.get("OverSubscribe", "")),
            priority_tier=parse_count(values.get("PriorityTier", "1")) or 0,
            billing_weights=parse_tres(values.get("TRESBillingWeights", "")),
            tres=parse_tres(values.get("TRES", "")),
            restrictions={
                name: value
                for name in _RESTRICTIONS
                if (value := values.get(name, "")) not in ("", "NO", "ALL", "UNLIMITED")
            },
        )
    except KeyError as error:
        raise parse_error("scontrol show partition", f"missing key {error}", line) from error


def _allowed(values: dict[str, str], key: str) -> tuple[str, ...]:
    return () if values.get(key) == "ALL" else comma_list(values.get(key, ""))


def parse_reservations(text: str, zone: tzinfo | None = None) -> list[Reservation]:
    """Parse `scontrol -o show reservation`. Raises ClusterError."""
    return [_parse_reservation(line, zone) for line in _lines(text, "ReservationName=", "scontrol show reservation")]


def _parse_reservation(line: str, zone: tzinfo | None) -> Reservation:
    values = key_values(line)
    try:
        return Reservation(
            reservation=values["ReservationName"],
            start=parse_slurm_time(values["StartTime"], zone),
            end=parse_slurm_time(values["EndTime"], zone),
            state=values.get("State", "").lower(),
            node_list=none_to_empty(values["Nodes"]),
            cpus=parse_count(parse_tres(values.get("TRES", "")).get("cpu", "")) or 0,
            flags=tuple(flag.lower() for flag in comma_list(values["Flags"])),
            users=comma_list(values.get("Users", "")),
            accounts=comma_list(values.get("Accounts", "")),
        )
    except KeyError as error:
        raise parse_error("scontrol show reservation", f"missing key {error}", line) from error


def _lines(text: str, begin: str, command: str) -> Iterator[str]:
    """Yield the text of each record: the line that starts with `begin`, and further lines of its values."""
    if text.strip() in ("", *(f"No {kind} in the system" for kind in ("nodes", "partitions", "reservations"))):
        return
    if not text.startswith(begin) or not text.endswith("\n"):
        raise parse_error(command, "truncated" if text.startswith(begin) else f"it does not start with {begin}", text)
    for record in text.rstrip("\n").split("\n" + begin):
        yield record if record.startswith(begin) else begin + record
