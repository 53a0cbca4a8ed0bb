"""Two rules for causes.py: what Slurm sent the job or its ranks, and programs that a node could not start."""

from __future__ import annotations

import msgspec

from pitools.launch.diagnosis import log_timestamps
from pitools.launch.diagnosis.evidence import Seen
from pitools.launch.diagnosis.patterns import Sure
from pitools.launch.diagnosis.timeline import Order
from pitools.run.attempt_records import Cause, Kind, Signal

LIMIT_S = 90.0  # Slurm looks at time limits every half minute or minute, and tells at once
NONSENSE_S = -3600.0
_TO_BE_CONTINUED = 95
_STOPPED = (_TO_BE_CONTINUED, 128 + 15, 128 + 12)
_UNSTARTED = ("code-126", "code-127", "program-unreadable")


def say(kind: Kind, sure: Sure, reason: str, **more: object) -> Cause:
    """A cause, without what `causes.judge` adds to each."""
    return msgspec.structs.replace(Cause(attempt="", kind=kind, confidence=sure, reason=reason), **more)


def quoted(seen: Seen, rank: int | None) -> str:
    """What the output of a rank, or of the job itself, ends with; "" where it says nothing."""
    line = seen.last_lines.get(rank, "")
    return f"; its output ends: {line}" if line else ""


def signals(seen: Seen, order: Order) -> Cause | None:
    """What the job was sent: the time limit's warning or end, or somebody's wish."""
    stopped = seen.exit_code == _TO_BE_CONTINUED
    term = next((one for one in seen.signals if one.signal == "SIGTERM"), None)
    warned = next((one for one in seen.signals if one.signal in ("SIGUSR2", "SIGUSR1")), None)
    for sent in (warned, term):
        if sent and _is_limit(sent, seen):
            sure: Sure = "certain" if stopped else "likely"
            return say("time-limit", sure, f"{sent.signal} with {sent.left_s:.0f} s left of the time limit")
    if sent := term or warned:
        sane = sent.left_s is not None and sent.left_s > NONSENSE_S
        rest = f"{sent.left_s:.0f} s left" if sane else "no time limit known"
        return say(
            "preempted", "guess", f"{sent.signal} with {rest}: preempted or cancelled, and only Slurm knows which"
        )
    if any(one.signal == "SIGINT" for one in seen.signals):
        return say("cancelled", "likely", "SIGINT: interrupted")
    if seen.exit_code in _STOPPED and _is_near_limit(seen):
        return say(
            "time-limit", "likely", f"the ranks were told to end, as the time limit was {seen.notice_s:.0f} s away"
        )
    if stopped or any(end.role == "warning" for end in order.ends):
        return say("time-limit", "likely", "stopped in good order, to be continued" if stopped
                    else "ended by the warning before the time limit, which the program does not catch")  # fmt: skip
    return None


def _is_limit(sent: Signal, seen: Seen) -> bool:
    """Whether the signal came with the time limit, or as the warning before it that was asked for."""
    notice = seen.notice_s if sent.signal == seen.notice_signal else 0.0
    return sent.left_s is not None and NONSENSE_S < sent.left_s <= notice + LIMIT_S


def _is_near_limit(seen: Seen) -> bool:
    """Whether it ended by the time limit, or since the warning: Slurm sends that to the ranks alone."""
    left_s = log_timestamps.seconds_between(seen.ended, seen.start.ends) if seen.start else None
    return left_s is not None and NONSENSE_S < left_s <= seen.notice_s + LIMIT_S


def not_started(seen: Seen, order: Order) -> Cause | None:
    """A program that was not found, or cannot be run: on all nodes it is the user's; on one, where ours is, the node's.

    What the user's own program ran has left word by us. Where we could not even begin, it is the node: the same program
    of ours had just run on the job's first.
    """
    root = order.root
    if root is None or root.rule not in _UNSTARTED:
        return None
    alike = {end.node for end in order.ends if end.rule in _UNSTARTED or end.exit_code in (126, 127)}
    alike |= {one.node for one in seen.evidence if one.rule == root.rule}
    nodes = max(len(set(seen.hosts)), seen.start.nodes if seen.start else 1)
    spoke = {failure.rank for failure in seen.failures} | ({seen.first.rank} if seen.first else set())
    reason = (f"{root.node}: {root.what}" if root.node else root.what) + quoted(seen, root.rank)
    if root.rule != "program-unreadable" and (root.rank in spoke or nodes == 1):
        return say("user", "likely", reason, rank=root.rank, exit_code=root.exit_code, fingerprint=root.fingerprint)
    if nodes > 1 and len(alike - {""}) >= nodes:
        reason = f"{reason}; it is so on every node"
        return say("user", "likely", reason, rank=root.rank, exit_code=root.exit_code, fingerprint=root.fingerprint)
    reason = f"{reason}: this node cannot start a program that others can"
    return say(
        "node", "likely", reason, rank=root.rank, exit_code=root.exit_code, fingerprint=root.fingerprint,
        nodes=(root.node,) if root.node else (),
    )  # fmt: skip
