"""Why an attempt ended: the first fault in time over all ranks, and what Slurm knows for certain.

The order in which this is decided:
 1. the program's own end with code 0, and Slurm's state for the job: certain words;
 2. a person's cancel, the watch's standstill, Slurm's own words in its messages;
 3. the first fault over all ranks; what ranks say because another has gone, and how they are then ended, is none;
 4. the signals that the job was sent;
 5. the complaints of ranks about others, when nothing came before them;
 6. that there is no word at all.
Pure: it reads nothing but what was gathered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from pitools.launch import exit_codes, fingerprint
from pitools.launch.diagnosis import log_timestamps, patterns, timeline
from pitools.launch.diagnosis.evidence import Seen
from pitools.launch.diagnosis.patterns import Sure
from pitools.launch.diagnosis.rank_exits import End
from pitools.launch.diagnosis.timeline import Order
from pitools.run.attempt_records import Cause, Evidence, Kind, Signal

_KEPT = 40  # pieces of evidence that a cause carries
_STALLED_S = 600.0
LIMIT_S = 90.0  # Slurm looks at time limits every half minute or minute, and tells at once
NONSENSE_S = -3600.0
_UNSTARTED = ("code-126", "code-127", "program-unreadable")
_WEIGHT = {"word": 0, "fault": 0, "warning": 1, "cascade": 2, "end": 3}


def judge(seen: Seen) -> Cause:
    """The cause that all this speaks for: the first fault in time, unless Slurm, or the program itself, says more."""
    order = timeline.of(seen)
    rules = (_finished, _slurm_state, _cancelled, _hang, _slurm_word, not_started, _first_fault, signals, _cascade)
    for rule in rules:
        if found := rule(seen, order):
            return _whole(seen, order, found)
    return _whole(seen, order, _vanished(seen, order))


def _finished(seen: Seen, _order: Order) -> Cause | None:
    if seen.exit_code == 0:
        warned = bool(seen.signals)
        sure: Sure = "likely" if warned else "certain"
        return say("finished", sure, "the program ended with code 0" + (", after a signal" if warned else ""))
    if seen.exit_code is None and seen.told and seen.told.state == "COMPLETED":
        return say("finished", "certain", "Slurm says COMPLETED")
    return None


def _slurm_state(seen: Seen, order: Order) -> Cause | None:
    """Slurm's word for the job, where it is of this attempt; FAILED says nothing of why."""
    state, who = (seen.told.state, "Slurm") if seen.told else (seen.state, "the supervisor")
    kind = patterns.table().states.get(state)
    if seen.told and seen.told.signal == 125:
        kind = "memory"
    if kind is None or kind == "finished":
        return None
    reason = f"{who} says {state}"
    if kind == "time-limit":
        return _hang(seen, order) or _before(seen, order) or _stalled(seen) or say(kind, "certain", reason)
    if kind == "cancelled" and seen.told and seen.told.by_uid is not None:
        return say(kind, "certain", f"{reason} by uid {seen.told.by_uid}")
    if kind == "node":
        nodes = order.lost_nodes or order.silent_nodes
        return say(kind, "certain", reason + (f": {', '.join(nodes)}" if nodes else ""), nodes=nodes)
    return say(kind, "certain", reason)


def _end_of(seen: Seen) -> str:
    return seen.ended or (seen.told.end if seen.told else "")


def _before(seen: Seen, order: Order) -> Cause | None:
    """A rank that failed long before the time limit, while the others waited for it: that is why."""
    gap = log_timestamps.seconds_between(order.root.t, _end_of(seen)) if order.root else None
    return _first_fault(seen, order) if gap is not None and gap > 2 * LIMIT_S else None


def _stalled(seen: Seen) -> Cause | None:
    """A time limit that was reached standing still."""
    last = max((t for _, t in seen.last_step.values()), default="")
    gap = log_timestamps.seconds_between(last, _end_of(seen))
    if gap is None or gap < _STALLED_S:
        return None
    return say("hang", "likely", f"no step for {gap:.0f} s before the time limit")


def _cancelled(seen: Seen, _order: Order) -> Cause | None:
    return say("cancelled", "certain", "`pit launch cancel` was asked for") if seen.cancelled else None


def _hang(seen: Seen, order: Order) -> Cause | None:
    """A standstill that the watch ended, unless something that was seen before explains the standstill itself."""
    hang, root = seen.hang, order.root
    if hang is None:
        return say("hang", "likely", "the watch ended it") if seen.exit_code == exit_codes.HUNG else None
    gap = log_timestamps.seconds_between(root.t, hang.t) if root else None
    if root and root.sure != "guess" and gap is not None and gap > log_timestamps.TOLERANCE_S:
        return _first_fault(seen, order)
    behind = sorted(hang.behind)
    nodes = {seen.node_of(rank) for rank in behind} - {""}
    alone = timeline.some(nodes, seen) if len(nodes) == 1 and len(set(seen.hosts)) > 1 else ()
    who = f"; behind: {_ranks(behind)}" if behind else ""
    reason = f"no step for {hang.silent_s:.0f} s after step {hang.step} (usual: {hang.usual_s:.3g} s){who}"
    return say("hang", "certain", reason, nodes=alone, rank=behind[0] if len(behind) == 1 else None)


def _slurm_word(_seen: Seen, order: Order) -> Cause | None:
    """What Slurm's own messages state, unless a rank had failed before."""
    word, root = order.word, order.root
    if word is None:
        return None
    gap = log_timestamps.seconds_between(root.t, word.t) if root else None
    if (
        root
        and root.kind != "unknown"
        and gap is not None
        and gap > log_timestamps.TOLERANCE_S
        and root.kind != word.kind
    ):
        return None
    # A rank's output may hold what Slurm wrote there; it may also hold anything else.
    sure: Sure = "likely" if word.rank is not None else patterns.sure_of(word.rule)
    nodes = (order.lost_nodes or order.silent_nodes) if word.kind == "node" else ()
    return say(word.kind, sure, f"Slurm: {word.what}", nodes=nodes)


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
        "node",
        "likely",
        reason,
        rank=root.rank,
        exit_code=root.exit_code,
        fingerprint=root.fingerprint,
        nodes=(root.node,) if root.node else (),
    )


def _first_fault(seen: Seen, order: Order) -> Cause | None:
    root = order.root
    if root is None:
        return None
    task = root.rank
    if "/logs/stage." in root.source:  # its tasks are nodes, not ranks
        root = msgspec.structs.replace(root, rank=None)
    where = " on ".join(part for part in (f"rank {root.rank}" if root.rank is not None else "", root.node) if part)
    because = patterns.because(root.rule)
    reason = f"{where}: {root.what}" if where else root.what
    reason += f" ({because})" if because else ""
    if root.kind == "unknown" and not root.is_exception and root.rule != "stage-refused":
        reason += quoted(seen, task)
    code, is_own = root.exit_code, _is_on_own_disk(root, seen)
    if root.rule == "stage-refused" and is_own and _is_on_every_node(seen, root.rule):
        return say("user", "likely", f"{reason}; it is so on every node: see paths.nvme of the site", exit_code=code)
    if root.rule == "stage-refused":
        root = msgspec.structs.replace(root, kind="storage") if is_own else msgspec.structs.replace(root, sure="guess")
    return say(
        root.kind,
        root.sure,
        reason,
        rank=root.rank,
        exit_code=code,
        nodes=timeline.some([root.node], seen) if root.is_local or (is_own and root.kind == "storage") else (),
        signal=code - 128 if code is not None and 128 < code < 128 + 65 else 0,
        fingerprint=root.fingerprint,
    )


def _is_on_every_node(seen: Seen, rule: str) -> bool:
    """Whether each of several nodes has said the same."""
    nodes = max(len(set(seen.hosts)), seen.start.nodes if seen.start else 1)
    return nodes > 1 and len({one.node for one in seen.evidence if one.rule == rule} - {""}) >= nodes


def _is_on_own_disk(root: End, seen: Seen) -> bool:
    """Whether a path in the message is on the node's own disk."""
    own = (*patterns.table().local_paths, *([seen.nvme] if len(seen.nvme) > 1 else []))
    found = re.search(r"(?<![\w.])(/[^\s'\":,]+)", root.what)
    shared = seen.shared.rstrip("/") + "/"
    return found is not None and found[1].startswith(own) and not (found[1] + "/").startswith(shared)


def signals(seen: Seen, order: Order) -> Cause | None:
    """What the job was sent: the time limit's warning or end, or somebody's wish."""
    stopped = seen.exit_code == exit_codes.TO_BE_CONTINUED
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
    if seen.exit_code in exit_codes.STOPPED and _is_near_limit(seen):
        return say(
            "time-limit", "likely", f"the ranks were told to end, as the time limit was {seen.notice_s:.0f} s away"
        )
    if stopped or any(end.role == "warning" for end in order.ends):
        return say(
            "time-limit",
            "likely",
            "stopped in good order, to be continued"
            if stopped
            else "ended by the warning before the time limit, which the program does not catch",
        )
    return None


def _is_limit(sent: Signal, seen: Seen) -> bool:
    """Whether the signal came with the time limit, or as the warning before it that was asked for."""
    notice = seen.notice_s if sent.signal == seen.notice_signal else 0.0
    return sent.left_s is not None and NONSENSE_S < sent.left_s <= notice + LIMIT_S


def _is_near_limit(seen: Seen) -> bool:
    """Whether it ended by the time limit, or since the warning: Slurm sends that to the ranks alone."""
    left_s = log_timestamps.seconds_between(seen.ended, seen.start.ends) if seen.start else None
    return left_s is not None and NONSENSE_S < left_s <= seen.notice_s + LIMIT_S


def _cascade(_seen: Seen, order: Order) -> Cause | None:
    """Ranks that complain about others, and nothing before: a node without a word, or the network."""
    if not order.cascade:
        return None
    lead = order.cascade[0]
    said = f"rank {lead.rank}: {lead.what}" if lead.rank is not None else lead.what
    if len(order.silent_nodes) == 1:
        reason = f"{said}; the others have ended, and nothing was heard of {order.silent_nodes[0]}"
        return say("node", "likely", reason, nodes=order.silent_nodes, fingerprint=lead.fingerprint)
    suspect = f"; {_ranks(order.silent)} said nothing" if order.silent else ""
    return say(
        "network",
        "guess" if order.silent else "likely",
        f"{said}; nothing came before it{suspect}",
        rank=order.silent[0] if len(order.silent) == 1 else None,
        fingerprint=lead.fingerprint,
    )


def _vanished(seen: Seen, order: Order) -> Cause:
    code = seen.exit_code
    if code is None and seen.restarted:
        reason = "it left no word, and Slurm began the job anew: a node failed, or it was preempted"
        return say("node", "guess", reason, nodes=order.lost_nodes)
    if code is None:
        return say("unknown", "guess", "it left no word of its end")
    if code == exit_codes.NOT_BEGUN:
        return say("unknown", "guess", f"it did not begin{quoted(seen, None)}")
    if 128 < code < 128 + 65:
        return say("unknown", "guess", f"ended by signal {code - 128}, and nothing says by whom", signal=code - 128)
    return say(
        "unknown",
        "guess",
        f"exit code {code}, and nothing says why{quoted(seen, None)}",
        fingerprint=fingerprint.of_end(f"exit code {code}"),
    )


def _ranks(ranks: Iterable[int]) -> str:
    some = list(ranks)
    text = ", ".join(map(str, some[:8])) + (", …" if len(some) > 8 else "")
    return f"rank{'s' if len(some) != 1 else ''} {text}"


def say(kind: Kind, sure: Sure, reason: str, **more: object) -> Cause:
    """A cause, without what `judge` adds to each."""
    return msgspec.structs.replace(Cause(attempt="", kind=kind, confidence=sure, reason=reason), **more)


def quoted(seen: Seen, rank: int | None) -> str:
    """What the output of a rank, or of the job itself, ends with; "" where it says nothing."""
    line = seen.last_lines.get(rank, "")
    return f"; its output ends: {line}" if line else ""


def _whole(seen: Seen, order: Order, cause: Cause) -> Cause:
    """The cause with what is the same whatever it is."""
    before = seen.start.progress if seen.start else 0
    return msgspec.structs.replace(
        cause,
        attempt=seen.attempt,
        progress=seen.progress,
        progressed=seen.progress > before,
        steps=max((step + 1 for step, _ in seen.last_step.values()), default=0),
        state=seen.told.state if seen.told else seen.state,
        exit_code=cause.exit_code if cause.exit_code is not None else seen.exit_code,
        evidence=_evidence(seen, order, cause),
    )


def _evidence(seen: Seen, order: Order, cause: Cause) -> tuple[Evidence, ...]:
    """What is worth keeping: what decided first, then the rest by time, of each rule and rank once."""
    root = [timeline.as_evidence(order.root)] if order.root else []
    own = [one for one in (*root, *([order.word] if order.word else [])) if one.kind == cause.kind][:1]
    pieces = [*own, *root, *map(timeline.as_evidence, order.ends), *seen.evidence, *_of_job(seen)]
    unique = {(one.source, one.rule, one.rank): one for one in reversed(pieces)}
    ranked = sorted(unique.values(), key=lambda one: (one not in own, _WEIGHT[one.role], one.t or "~", one.source))
    return tuple(sorted(ranked[:_KEPT], key=lambda one: (one not in own, one.t or "~", one.source)))


def _of_job(seen: Seen) -> Iterable[Evidence]:
    """What was seen of the attempt as a whole."""
    place = f"attempts/{seen.attempt}"
    for one in seen.signals[:8]:
        left = f" with {one.left_s:.0f} s left" if one.left_s is not None and one.left_s > NONSENSE_S else ""
        yield Evidence(
            t=one.t,
            source=f"{place}/signals.jsonl",
            what=f"{one.signal}{left}",
            kind="unknown",
            role="warning",
            rule="signal",
        )
    if seen.hang:
        yield Evidence(
            t=seen.hang.t,
            source=f"{place}/hang.json",
            what=f"no step after step {seen.hang.step}",
            kind="hang",
            rule="hang",
        )
    if seen.told:
        text = f"{seen.told.state}, exit code {seen.told.exit_code}:{seen.told.signal}"
        yield Evidence(t=seen.told.end, source="sacct", what=text, kind="unknown", role="word", rule="state")
    if seen.exit_code is not None:
        yield Evidence(
            t=seen.ended,
            source=f"{place}/exit.json",
            what=f"exit code {seen.exit_code}",
            kind="unknown",
            role="end",
            rule="exit",
        )
    if seen.cancelled:
        yield Evidence(t=seen.cancelled, source="events.jsonl", what="cancel", kind="cancelled", rule="cancel")
