"""Parse `scontrol show assoc_mgr flags=assoc,qos`: what slurmctld counts against each limit now."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from pitools.slurm.fields import key_values, none_to_empty, parse_error
from pitools.slurm.records import LimitUsage

_COMMAND = "scontrol show assoc_mgr"
_BEGIN = "Current Association Manager state"
_USED = re.compile(r"\(([\d.]+)\)$")
_UID = re.compile(r"\((\d+)\)$")
_HEADING = re.compile(r"(?:Account|User) Limits$")


def parse_assoc_mgr(text: str) -> list[LimitUsage]:
    """Return the use of every association and QOS, and of each user and account in a QOS. Raises ClusterError."""
    if not text.startswith(_BEGIN):
        raise parse_error(_COMMAND, f"it does not start with {_BEGIN}", text)
    usage: list[LimitUsage] = []
    names: dict[str, str] = {}  # uid → user: a QOS lists users by uid
    for block in _blocks(text):
        head = key_values(block[0])
        if "QOS" in head:
            usage += _qos_usage(head["QOS"].partition("(")[0], block[1:], names)
            continue
        user = head.get("UserName", "")
        if uid := _UID.search(user):
            user = user.removesuffix(uid[0])
            names[uid[1]] = user
        values = key_values(" ".join(block[1:]))
        usage.append(
            _usage(values, LimitUsage(account=head["Account"], user=user, partition=head.get("Partition", "")))
        )
    return usage


def _blocks(text: str) -> Iterator[list[str]]:
    """Yield the lines of each record: the first is not indented and names an account or a QOS."""
    block: list[str] = []
    for line in (*text.split("\n"), ""):
        if line.startswith(" "):
            block.append(line.strip())
            continue
        if len(block) > 1:
            yield block
        block = [line] if line.startswith(("ClusterName=", "QOS=")) else []


def _qos_usage(qos: str, lines: list[str], names: dict[str, str]) -> Iterator[LimitUsage]:
    """Yield the use of a QOS as a whole, then of accounts and users in it."""
    start = next((i for i, line in enumerate(lines) if _HEADING.search(line)), len(lines))
    yield _usage(key_values(" ".join(lines[:start])), LimitUsage(qos=qos))
    kind, row, values = "", LimitUsage(qos=qos), ""
    for line in (*lines[start:], "User Limits"):
        if "=" in line:
            values += f" {line}"
            continue
        if values:
            yield _usage(key_values(values), row)
            values = ""
        if _HEADING.search(line):
            kind = line.split()[0]
            continue
        uid = _UID.search(line)
        name = line.removesuffix(uid[0]) if uid else names.get(line, line)
        row = LimitUsage(qos=qos, account=name) if kind == "Account" else LimitUsage(qos=qos, user=name)


def _usage(values: dict[str, str], row: LimitUsage) -> LimitUsage:
    """Return the row with the numbers in parentheses: `GrpJobs=5(2)` is 2 of 5, in minutes for times."""

    def used(*names: str) -> float:
        return next((float(m[1]) for name in names if (m := _USED.search(values.get(name, "")))), 0.0)

    return msgspec.structs.replace(
        row,
        jobs=int(used("GrpJobs", "MaxJobsPU", "MaxJobsPA")),
        submitted=int(used("GrpSubmitJobs", "MaxSubmitJobsPU", "MaxSubmitJobsPA")),
        wall_s=int(used("GrpWall") * 60),
        tres=_used_tres(values, "GrpTRES", "MaxTRESPU", "MaxTRESPA"),
        tres_mins=_used_tres(values, "GrpTRESMins"),
        tres_run_mins=_used_tres(values, "GrpTRESRunMins"),
    )


def _used_tres(values: dict[str, str], *names: str) -> dict[str, int]:
    """Return the amounts that are not zero."""
    text = next((values[name] for name in names if none_to_empty(values.get(name, ""))), "")
    parts = (part.partition("=") for part in text.split(","))
    amounts = {name: int(float(m[1])) for name, _, value in parts if (m := _USED.search(value))}
    return {name: amount for name, amount in amounts.items() if amount}
