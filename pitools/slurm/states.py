"""The vocabulary of states: what Slurm's words mean, however it shortened them."""

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
_JOB_STATES = frozenset(_COMPACT.values())


class PendingReason(StrEnum):
    """Why a job waits, as far as callers treat the cases differently."""

    BAD_CONSTRAINTS = "bad-constraints"  # no node can ever be what it asks for
    BEGIN_TIME = "begin-time"
    HELD = "held"  # until somebody releases it
    NONE = "none"  # Slurm has not said
    OTHER = "other"  # dependent, at a limit, ...
    PRIORITY = "priority"
    RESERVATION = "reservation"
    RESOURCES = "resources"  # its nodes are in use, or down


# How Slurm's reason begins; more words may follow, such as which nodes are not available.
_PENDING_REASONS = {
    "BadConstraints": PendingReason.BAD_CONSTRAINTS,
    "BeginTime": PendingReason.BEGIN_TIME,
    "JobHeldAdmin": PendingReason.HELD,
    "JobHeldUser": PendingReason.HELD,
    "JobHoldMaxRequeue": PendingReason.HELD,
    "job requeued in held state": PendingReason.HELD,
    "job requeued in special exit": PendingReason.HELD,
    "launch failed requeued held": PendingReason.HELD,
    "Nodes required": PendingReason.RESOURCES,
    "None": PendingReason.NONE,
    "Priority": PendingReason.PRIORITY,
    "ReqNodeNotAvail": PendingReason.RESOURCES,
    "Reservation": PendingReason.RESERVATION,
    "Resources": PendingReason.RESOURCES,
}

# A state that a later Slurm adds is in neither set: it is not finished until Slurm says one of these.
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

# The mark that sinfo puts behind a node's state, as the flag that scontrol spells out.
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
    """One whole upper-case word: `CANCELLED by 7` is CANCELLED, `OUT_OF_ME+` is OUT_OF_MEMORY, `PD` is PENDING.

    A word that is not known, or that could be cut from several, is kept as it came; nothing at all is UNKNOWN.
    """
    word = text.split(" ", 1)[0].strip().upper()
    if word.endswith("+"):
        whole = [state for state in _JOB_STATES if state.startswith(word[:-1])]
        return whole[0] if len(whole) == 1 else word
    return _COMPACT.get(word, word) or UNKNOWN


def pending_reason(text: str) -> PendingReason:
    """Slurm's reason for a job that waits, classified; scontrol has `_` for a space."""
    said = text.replace("_", " ") or "None"
    return next((reason for words, reason in _PENDING_REASONS.items() if said.startswith(words)), PendingReason.OTHER)


def is_held(reason: str) -> bool:
    """Whether a job that waits for this reason begins only when somebody releases it."""
    return pending_reason(reason) is PendingReason.HELD


def is_finished(state: str) -> bool:
    """Whether a job in this state will not run again of itself; False for UNKNOWN and for states we do not know."""
    return parse_job_state(state) in _FINISHED


def combined_state(states: Iterable[str]) -> str:
    """The one state of a job made of several: the first unfinished, else the first that is not COMPLETED."""
    seen = list(states)
    unfinished = [state for state in seen if not is_finished(state)]
    bad = [state for state in seen if state != "COMPLETED"]
    return (unfinished or bad or seen or [UNKNOWN])[0]


def parse_node_state(text: str) -> tuple[str, tuple[str, ...]]:
    """Base state and flags of `IDLE+DRAIN` or `DOWN*+DRAIN`, in lower case. Words that we do not know are kept."""
    base, *flags = [part for part in text.lower().rstrip("+").split("+") if part] or ["unknown"]
    if text.endswith("+"):
        flags.append(_NODE_SUFFIXES["+"])
    word = base.rstrip("*~#!%$@^-")
    flags = [*(_NODE_SUFFIXES[mark] for mark in base[len(word) :]), *flags]
    return word or "unknown", tuple(dict.fromkeys(flags))


def is_schedulable(state: str, flags: Iterable[str]) -> bool:
    """Whether a node of this base state and these flags could start a job, now or once its present ones end."""
    held = set(flags) & _BLOCKING
    if "powered_down" in flags:
        held.discard("not_responding")  # a cloud node that was never started: Slurm starts it for a job
    return state in {"idle", "mixed", "allocated"} and not held
