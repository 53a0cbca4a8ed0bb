"""Nodes, partitions, reservations: `scontrol -o show node|partition|reservation` → records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import tzinfo

from pitools.slurm import states
from pitools.slurm.fields import count, gpus, moment, pairs, plain, span_s, tres, unreadable, words
from pitools.slurm.records import Node, Partition, Reservation

# In `scontrol show node`, people's words begin with the first of these; the keys before it are Slurm's alone.
_TEXT_BEGINS = re.compile(r"\s(?:Reason|Comment|Extra)=")
_TEXT_KEYS = ("Comment", "Extra", "Reason", "InstanceId", "InstanceType", "ReservationName", "ResumeAfterTime")
_REASON = re.compile(r"\sReason=(.*?) \[([^\s\[\]@]+)@(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d|Unknown)\]")


def scontrol_nodes(text: str, zone: tzinfo | None = None) -> list[Node]:
    """Nodes of `scontrol [-d] -o show node`. Raises ClusterError."""
    return [_node(line, zone) for line in _lines(text, "NodeName=", "scontrol show node")]


def _node(line: str, zone: tzinfo | None) -> Node:
    begins = _TEXT_BEGINS.search(line)
    said = line[begins.start() :] if begins else ""
    values = pairs(line.removesuffix(said))
    try:
        state, flags = states.node_state(values["State"])
        gpu_type, n_gpus = gpus(values.get("Gres", ""))
        reason, user, time = _reason(said, zone)
        return Node(
            node=values["NodeName"],
            state=state,
            flags=flags,
            partitions=words(values.get("Partitions", "")),
            gres=plain(values.get("Gres", "")),
            gpu_type=gpu_type,
            gpus=n_gpus,
            gpus_allocated=_gpus_allocated(values, n_gpus),
            cpus=int(values["CPUTot"]),
            cpus_allocated=int(values["CPUAlloc"]),
            memory_mib=count(values["RealMemory"]) or 0,
            free_memory_mib=count(values.get("FreeMem", "")),
            features=words(values.get("ActiveFeatures", "")),
            weight=int(values.get("Weight", "1")),
            reason=reason,
            reason_user=user,
            reason_time=time,
            address=values.get("NodeAddr", values["NodeName"]),
            hostname=values.get("NodeHostName", values["NodeName"]),
        )
    except (KeyError, ValueError) as error:
        raise unreadable("scontrol show node", f"missing or wrong: {error}", line) from error


def _gpus_allocated(values: dict[str, str], n_gpus: int) -> int | None:
    if not n_gpus:
        return 0
    if plain(values.get("GresUsed", "")):
        return gpus(values["GresUsed"])[1]
    # Without `-d` only the tracked TRES tell, and many a site does not track gres/gpu.
    if "gres/gpu" in tres(values.get("CfgTRES", "")):
        return count(tres(values.get("AllocTRES", "")).get("gres/gpu", "0"))
    return None


def _reason(said: str, zone: tzinfo | None) -> tuple[str, str, str]:
    """Reason, who gave it and when. Its own further lines stand, indented, behind the `[user@time]` of the first."""
    first, *further = said.split("\n")
    match = _REASON.search(first)
    if not match:
        return plain(pairs(said, _TEXT_KEYS).get("Reason", "")), "", ""
    return "\n".join([match[1], *(line.strip() for line in further)]), match[2], moment(match[3], zone)


def partitions(text: str) -> list[Partition]:
    """Partitions of `scontrol -o show partition`. Raises ClusterError."""
    return [_partition(line) for line in _lines(text, "PartitionName=", "scontrol show partition")]


def _partition(line: str) -> Partition:
    values = pairs(line)
    try:
        return Partition(
            partition=values["PartitionName"],
            state=values["State"].lower(),
            is_default=values["Default"] == "YES",
            node_list=plain(values["Nodes"]),
            nodes=count(values["TotalNodes"]) or 0,
            cpus=count(values["TotalCPUs"]) or 0,
            tres=tres(values.get("TRES", "")),
            min_nodes=count(values.get("MinNodes", "")) or 0,
            max_nodes=count(values["MaxNodes"]),
            max_time_s=span_s(values["MaxTime"]),
            default_time_s=span_s(values.get("DefaultTime", "")),
            grace_s=span_s(values.get("GraceTime", "")) or 0,
            allow_accounts=_allowed(values, "AllowAccounts"),
            allow_qos=_allowed(values, "AllowQos"),
            allow_groups=_allowed(values, "AllowGroups"),
            deny_accounts=words(values.get("DenyAccounts", "")),
            deny_qos=words(values.get("DenyQos", "")),
            qos=plain(values.get("QoS", "")),
            priority_tier=count(values.get("PriorityTier", "")) or 0,
            preempt_mode=plain(values.get("PreemptMode", "")),
            over_subscribe=plain(values.get("OverSubscribe", "")),
            is_hidden=values.get("Hidden") == "YES",
        )
    except KeyError as error:
        raise unreadable("scontrol show partition", f"it has no {error}", line) from error


def _allowed(values: dict[str, str], key: str) -> tuple[str, ...]:
    return () if values.get(key) == "ALL" else words(values.get(key, ""))


def reservations(text: str, zone: tzinfo | None = None) -> list[Reservation]:
    """Reservations of `scontrol -o show reservation`. Raises ClusterError."""
    return [_reservation(line, zone) for line in _lines(text, "ReservationName=", "scontrol show reservation")]


def _reservation(line: str, zone: tzinfo | None) -> Reservation:
    values = pairs(line)
    try:
        return Reservation(
            reservation=values["ReservationName"],
            start=moment(values["StartTime"], zone),
            end=moment(values["EndTime"], zone),
            state=values.get("State", "").lower(),
            node_list=plain(values["Nodes"]),
            cpus=count(tres(values.get("TRES", "")).get("cpu", "")) or 0,
            flags=tuple(flag.lower() for flag in words(values["Flags"])),
            users=words(values.get("Users", "")),
            accounts=words(values.get("Accounts", "")),
        )
    except KeyError as error:
        raise unreadable("scontrol show reservation", f"it has no {error}", line) from error


def _lines(text: str, begin: str, command: str) -> Iterator[str]:
    """The text of each record: a line that begins with its first key, and the lines of its own that follow."""
    if text.strip() in ("", *(f"No {what} in the system" for what in ("nodes", "partitions", "reservations"))):
        return
    if not text.startswith(begin) or not text.endswith("\n"):
        raise unreadable(command, "it is cut short" if text.startswith(begin) else "an unknown beginning", text)
    for record in text.rstrip("\n").split("\n" + begin):
        yield record if record.startswith(begin) else begin + record
