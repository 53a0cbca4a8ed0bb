"""Parse and classify Slurm's states of jobs and nodes, in long and short forms."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

UNKNOWN = "UNKNOWN"

_COMPACT = {
    "BF": "BOOT_FAIL",
    "CA": "CANCELLED",
    "CD": "COMPLETED",
    "CF": "CONFIGURING",
    "CG": "COMPLETING",
    "DL": "DEADLINE",
    "F": "FAILED",
    "NF": "NODE_FAIL",
    "OOM": "OUT_OF_MEMORY",
    "PD": "PENDING",
    "PR": "PREEMPTED",
    "R": "RUNNING",
    "RD": "RESV_DEL_HOLD",
    "RF": "REQUEUE_FED",
    "RH": "REQUEUE_HOLD",
    "RQ": "REQUEUED",
    "RS": "RESIZING",
    "RV": "REVOKED",
    "S": "SUSPENDED",
    "SE": "SPECIAL_EXIT",
    "SI": "SIGNALING",
    "SO": "STAGE_OUT",
    "ST": "STOPPED",
    "TO": "TIMEOUT",
}
JOB_STATES = frozenset(_COMPACT.values())


class PendingReason(StrEnum):
    """Why a job is pending: the cases that callers treat differently."""

    BAD_CONSTRAINTS = "bad-constraints"  # no node, or not the partition, can satisfy the request
    BEGIN_TIME = "begin-time"
    HELD = "held"  # until a user or operator releases it
    NONE = "none"  # not set yet
    OTHER = "other"  # dependent, at a limit, ...
    PRIORITY = "priority"
    RESERVATION = "reservation"
    RESOURCES = "resources"  # its nodes are in use, or down


# Prefix of Slurm's reason; details may follow, such as the unavailable nodes.
_PENDING_REASONS = {
    "BadConstraints": PendingReason.BAD_CONSTRAINTS,
    "BeginTime": PendingReason.BEGIN_TIME,
    "JobHeldAdmin": PendingReason.HELD,
    "JobHeldUser": PendingReason.HELD,
    "JobHoldMaxRequeue": PendingReason.HELD,
    "job requeued in held state": PendingReason.HELD,
    "job requeued in special exit": PendingReason.HELD,
    "launch failed requeued held": PendingReason.HELD,
    **dict.fromkeys(("PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit"), PendingReason.BAD_CONSTRAINTS),
    "Nodes required": PendingReason.RESOURCES,
    "None": PendingReason.NONE,
    "Priority": PendingReason.PRIORITY,
    "ReqNodeNotAvail": PendingReason.RESOURCES,
    "Reservation": PendingReason.RESERVATION,
    "Resources": PendingReason.RESOURCES,
}

# States of later Slurm versions are not listed and count as unfinished.
_FINISHED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)

# Suffix of sinfo's node state → the flag that scontrol prints.
_NODE_SUFFIXES = {
    "*": "not_responding",
    "~": "powered_down",
    "#": "powering_up",
    "!": "power_down",
    "%": "powering_down",
    "$": "maintenance",
    "@": "reboot_requested",
    "^": "reboot_issued",
    "-": "planned",
    "+": "completing",
}
_BLOCKING = frozenset(
    {
        "drain",
        "fail",
        "invalid_reg",
        "maintenance",
        "not_responding",
        "power_down",
        "powering_down",
        "reboot_issued",
        "reboot_requested",
    }
)


def parse_job_state(text: str) -> str:
    """Return the full state: CANCELLED for `CANCELLED by 7`, OUT_OF_MEMORY for `OUT_OF_ME+`, PENDING for `PD`.

    An unknown or ambiguous state is returned as it is; an empty one is UNKNOWN.
    """
    state_text = text.split(" ", 1)[0].strip().upper()
    if state_text.endswith("+"):
        matches = [state for state in JOB_STATES if state.startswith(state_text[:-1])]
        return matches[0] if len(matches) == 1 else state_text
    return _COMPACT.get(state_text, state_text) or UNKNOWN


def pending_reason(text: str) -> PendingReason:
    """Classify Slurm's reason of a pending job; scontrol prints `_` for a space."""
    reason_text = text.replace("_", " ") or "None"
    matches = (reason for prefix, reason in _PENDING_REASONS.items() if reason_text.startswith(prefix))
    return next(matches, PendingReason.OTHER)


def is_held(reason: str) -> bool:
    """Return whether a pending job with this reason needs a release to start."""
    return pending_reason(reason) is PendingReason.HELD


def may_never_start(reason: str) -> bool:
    """Return whether a job with this reason pends until its request, or the cluster, is changed."""
    return pending_reason(reason) is PendingReason.BAD_CONSTRAINTS


def is_final(state: str) -> bool:
    """Return whether a state is final; False for UNKNOWN and for unlisted states."""
    return parse_job_state(state) in _FINISHED


def combined_state(states: Iterable[str]) -> str:
    """Return the state of a job with several parts: the first unfinished, else the first that is not COMPLETED."""
    state_list = list(states)
    unfinished = [state for state in state_list if not is_final(state)]
    failed = [state for state in state_list if state != "COMPLETED"]
    return (unfinished or failed or state_list or [UNKNOWN])[0]


def parse_node_state(text: str) -> tuple[str, tuple[str, ...]]:
    """Return base state and flags of `IDLE+DRAIN` or `DOWN*+DRAIN`, in lower case. Unknown ones are kept."""
    base, *flags = [part for part in text.lower().rstrip("+").split("+") if part] or ["unknown"]
    if text.endswith("+"):
        flags.append(_NODE_SUFFIXES["+"])
    base_state = base.rstrip("*~#!%$@^-")
    flags = [*(_NODE_SUFFIXES[mark] for mark in base[len(base_state) :]), *flags]
    return base_state or "unknown", tuple(dict.fromkeys(flags))


def is_schedulable(state: str, flags: Iterable[str]) -> bool:
    """Return whether a node in this state could start a job, now or after its current jobs."""
    blocking = set(flags) & _BLOCKING
    if "powered_down" in flags:
        blocking.discard("not_responding")  # a cloud node that was never started; Slurm starts it for a job
    return state in {"idle", "mixed", "allocated"} and not blocking
