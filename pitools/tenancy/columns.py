"""The columns of sacctmgr that a policy holds: their option, their key in a policy, and their values in both forms.

A value has one canonical text, so that equal settings are equal texts: `mem=16G` and `mem=16384M` are the same limit.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from pitools.core import units
from pitools.core.errors import UsageError
from pitools.slurm.fields import comma_list, none_to_empty, parse_count, parse_mib, parse_tres

Kind = Literal["tres", "count", "time", "list", "number", "text"]
TomlValue = int | float | str | list[str] | dict[str, int | str]

_NO_NUMBER = "-1"  # sacctmgr's value that removes a limit
_QUOTES = str.maketrans({'"': "`", "'": "`"})
_MAX = 2**32 - 3  # the next two numbers mean "no limit" and "not set"
# What sacctmgr keeps and prints as it is; it splits names at commas and brackets, and MySQL ignores a blank at the end.
_NAME = re.compile(r"""(?!where$|set$|[+ -])[^,=|"'`\[\]\x00-\x1f\x7f-\U0010ffff]+(?<! )""")
_LINE = re.compile(r"[^|\x00-\x1f\x7f-\x9f\u0100-\U0010ffff]*")
FLAGS = comma_list(
    "DenyOnLimit,EnforceUsageThreshold,NoDecay,NoReserve,OverPartQOS,PartitionMaxNodes,PartitionMinNodes,"
    "PartitionTimeLimit,Relative,RequiresReservation,UsageFactorSafe"
)
_AMOUNT = re.compile(r"\d+|\d+(?:\.\d+)?[KMGTP]")


class Column(NamedTuple):
    """A column. option: of sacctmgr. key: in a policy. unset: what sacctmgr prints where the option was never set."""

    option: str
    key: str
    kind: Kind
    unset: str = ""


_LIMITS = (
    Column("GrpTRES", "grp_tres", "tres"),
    Column("GrpTRESMins", "grp_tres_mins", "tres"),
    Column("GrpTRESRunMins", "grp_tres_run_mins", "tres"),
    Column("GrpJobs", "grp_jobs", "count"),
    Column("GrpJobsAccrue", "grp_jobs_accrue", "count"),
    Column("GrpSubmit", "grp_submit", "count"),
    Column("GrpWall", "grp_wall", "time"),
    Column("MaxTRES", "max_tres", "tres"),
    Column("MaxTRESPerNode", "max_tres_per_node", "tres"),
    Column("MaxTRESMins", "max_tres_mins", "tres"),
)
ASSOCIATION = (
    Column("Fairshare", "shares", "text", "1"),
    Column("Priority", "priority", "count"),
    Column("QOS", "tiers", "list"),
    Column("DefaultQOS", "default_tier", "text"),
    *_LIMITS,
    Column("MaxJobs", "max_jobs", "count"),
    Column("MaxJobsAccrue", "max_jobs_accrue", "count"),
    Column("MaxSubmit", "max_submit", "count"),
    Column("MaxWall", "max_wall", "time"),
    Column("MinPrioThresh", "min_prio_thresh", "count"),
)
# Not MaxTRESRunMinsPA: sacctmgr 22.05 gives it amounts of MaxTRESRunMinsPU, and does not remove the last.
QOS = (
    Column("Priority", "priority", "count", "0"),
    Column("Preempt", "preempts", "list"),
    Column("PreemptMode", "preempt_mode", "text", "cluster"),
    Column("PreemptExemptTime", "preempt_exempt_time", "time"),
    Column("GraceTime", "grace_time", "time", "00:00:00"),
    Column("Flags", "flags", "list"),
    Column("UsageFactor", "usage_factor", "number", "1"),
    Column("UsageThres", "usage_threshold", "number"),
    Column("LimitFactor", "limit_factor", "number", "0"),
    *_LIMITS,
    Column("MaxWall", "max_wall", "time"),
    Column("MinTRES", "min_tres", "tres"),
    Column("MaxTRESPU", "max_tres_per_user", "tres"),
    Column("MaxTRESPA", "max_tres_per_account", "tres"),
    Column("MaxTRESRunMinsPU", "max_tres_run_mins_per_user", "tres"),
    Column("MaxJobsPU", "max_jobs_per_user", "count"),
    Column("MaxJobsPA", "max_jobs_per_account", "count"),
    Column("MaxSubmitJobsPU", "max_submit_per_user", "count"),
    Column("MaxSubmitJobsPA", "max_submit_per_account", "count"),
    Column("MaxJobsAccruePU", "max_jobs_accrue_per_user", "count"),
    Column("MaxJobsAccruePA", "max_jobs_accrue_per_account", "count"),
    Column("MinPrioThresh", "min_prio_thresh", "count"),
)
ACCOUNT = (
    Column("Parent", "parent", "text", "root"),
    Column("Description", "description", "text"),
    Column("Organization", "organization", "text"),
    *ASSOCIATION,
)
USER = (Column("DefaultAccount", "default_team", "text"), Column("AdminLevel", "admin", "text", "None"))
COLUMNS = {"tier": QOS, "team": ACCOUNT, "member": ASSOCIATION, "user": USER, "lead": ()}


def canonical(column: Column, text: str) -> str:
    """Return the canonical text of a value as sacctmgr prints or reads it; "" if it is unset. Raises UsageError."""
    text = text.strip() if column.kind == "text" else none_to_empty(text)
    if column.kind == "text" and column.option != "AdminLevel":
        text = text.translate(_QUOTES).encode().lower().decode()  # as Slurm keeps it: in lower case, of ASCII alone
    if column.option == "PreemptMode":
        text = ",".join(sorted(text.split(","))).replace("off", "cluster")
    elif column.option == "Flags":
        spelling = {flag.lower(): flag for flag in FLAGS}
        text = ",".join(sorted({spelling.get(flag.lower(), flag) for flag in comma_list(text)}))
    elif column.kind == "tres":
        amounts = {name: _amount(name, value) for name, value in sorted(parse_tres(text).items())}
        text = ",".join(f"{name}={value}" for name, value in amounts.items())
    elif column.kind == "time":
        seconds = units.parse_duration(text) if text else 0
        if column.option in ("GrpWall", "MaxWall") and seconds % 60:
            raise UsageError(f'"{text}" is not in whole minutes, as Slurm keeps it', hint=f"{-(-seconds // 60)}m")
        text = units.to_slurm_time(seconds) if text else ""
    elif column.kind == "list":
        text = ",".join(sorted(set(comma_list(text))))
    elif column.kind == "number" and text:
        text = f"{float(text):g}"
    return "" if text == column.unset else text


def _amount(name: str, value: str) -> str:
    if not _AMOUNT.fullmatch(value):
        raise UsageError(f'"{name}={value}" is not an amount of a resource', hint="write a whole number, memory as 16G")
    if name == "mem":
        return f"{parse_mib(value)}M"
    return value if name.startswith("bb/") else f"{parse_count(value)}"


def to_toml(column: Column, text: str) -> TomlValue:
    """Return a canonical value as a policy writes it."""
    if column.kind == "tres":
        return {name: int(value) if value.isdecimal() else value for name, value in parse_tres(text).items()}
    if column.kind == "list":
        return list(comma_list(text))
    if column.kind == "number":
        return float(text)
    return int(text) if column.kind == "count" or (column.key == "shares" and text.isdecimal()) else text


def from_toml(column: Column, value: TomlValue) -> str:
    """Return the canonical text of a policy's value; "" for one that unsets it. Raises UsageError."""
    if isinstance(value, dict | list):
        names = [name.lstrip("+-") if column.option == "QOS" else name for name in value]
        if wrong := [name for name in names if not is_name(name)]:
            raise UsageError(f'"{wrong[0]}" is no name', hint="without commas, quotes, brackets, = and |")
        texts = [f"{name}={amount}" for name, amount in value.items()] if isinstance(value, dict) else value
        return canonical(column, ",".join(texts))
    if column.key == "shares" and isinstance(value, str) and value != "parent":
        raise UsageError(f'"{value}" is no shares', hint='write a whole number, without quotes, or "parent"')
    if isinstance(value, int | float) and value == -1:
        return ""
    if isinstance(value, int | float) and not 0 <= value <= _MAX:
        raise UsageError(f"{value} is out of range (expected 0 to {_MAX}, or -1 for unset)")
    return canonical(column, str(value))


def is_name(text: str) -> bool:
    """Return whether Slurm can keep a text as the name of an account, a QOS or a user; but for capitals."""
    return _NAME.fullmatch(text) is not None


def is_user_name(text: str) -> bool:
    """Return whether a text may be the name of a user, as Slurm and POSIX have them; but for capitals."""
    return is_name(text) and not any(char in " :/" for char in text)


def is_line(text: str) -> bool:
    """Return whether sacctmgr prints a text, such as a description, so that it can be read: Latin-1 without `|`."""
    return _LINE.fullmatch(text) is not None


def setting(column: Column, before: str, after: str, name: str) -> str:
    """Return the argument of sacctmgr that changes a value; a resource in `before` and not in `after` gets -1.

    name: of the object, which describes it if nothing else does.
    """
    if column.kind == "tres":
        new = parse_tres(after)
        gone = {name: _NO_NUMBER for name in parse_tres(before) if name not in new}
        return f"{column.option}=" + ",".join(f"{name}={value}" for name, value in {**new, **gone}.items())
    if column.option == "GraceTime":  # seconds alone: of `00:05:00` sacctmgr reads the 00
        return f"{column.option}={units.parse_duration(after) if after else 0}"
    if after:
        return f"{column.option}={after}"
    if column.kind == "number":
        return f"{column.option}={_NO_NUMBER}"
    if column.option in ("Description", "Organization"):
        return f"{column.option}={name}"
    return f"{column.option}={column.unset or ('' if column.option in ('QOS', 'Preempt') else _NO_NUMBER)}"
