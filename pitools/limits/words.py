"""Limits as sentences: `16 GPUs (at most 8 for all of account "dept", 4 in use)`."""

from __future__ import annotations

from pitools.core import units
from pitools.limits.levels import AppliedLimit

_NAMES = {"node": "node", "cpu": "CPU", "gres/gpu": "GPU", "mem": "MiB", "billing": "billing unit"}
_WHOSE = {"": "a job of", "all": "all of", "user": "one user of", "account": "one account in"}


def limit_message(limit: AppliedLimit, used: int, asked: int) -> str:
    """Return what a limit says against a job. used, asked: minutes for times, MiB for memory."""
    rule, level, value, tres = limit.rule, limit.origin, limit.value, limit.tres
    whose = _WHOSE[rule.scope]
    if rule.asks == "wall" and not rule.scope:
        return f"{time_limit_message(asked, value)[:-1]} in {level})"
    if rule.asks == "wall":
        spent = f", {units.to_slurm_time(used * 60)} used" if used else ""
        return f"{time_limit_message(asked, value)[:-1]} for {whose} {level}{spent})"
    taken = f", {used} in use" if used else ""
    if rule.asks == "jobs":
        return f"{_amount(asked, 'job')} (at most {value} running for {whose} {level}{taken})"
    if rule.asks == "submitted":
        return f"{_amount(asked, 'job')} (at most {value} running or pending for {whose} {level}{taken})"
    unit = _NAMES.get(tres, tres)
    bound = "at least" if limit.name == "MinTRES" else "at most"
    if rule.asks == "minutes":
        promised = f", {used} used or promised" if used else ""
        return f"{asked} {unit} minutes ({bound} {value} for {whose} {level}{promised})"
    each = " a node" if rule.asks == "per-node" else ""
    return f"{_amount(asked, unit)}{each} ({bound} {value} for {whose} {level}{taken})"


def time_limit_message(asked_min: int, max_min: int) -> str:
    """Return what a maximum of the time limit says against a job."""
    return f"time limit {units.to_slurm_time(asked_min * 60)} (at most {units.to_slurm_time(max_min * 60)})"


def _amount(number: int, unit: str) -> str:
    plural = "" if number == 1 or unit == "MiB" or "/" in unit else "s"
    return f"{number} {unit}{plural}{' of memory' if unit == 'MiB' else ''}"
