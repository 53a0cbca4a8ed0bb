"""Classify why an attempt ended: the earliest fault of all ranks, and Slurm's statements.

The first of these rules that applies decides:
 1. the program's exit with code 0, and Slurm's state of the job: both are certain;
 2. a user's cancel, the hang watch, Slurm's statements in its messages;
 3. the earliest fault of all ranks; complaints about lost peers and the termination of ranks are no faults;
 4. the signals that the job received;
 5. complaints about lost peers without an earlier fault;
 6. no evidence.
Pure: reads only the gathered evidence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from pitools.launch import exit_codes, fingerprint
from pitools.launch.diagnosis import log_timestamps, patterns, timeline
from pitools.launch.diagnosis.evidence import AttemptEvidence
from pitools.launch.diagnosis.patterns import Confidence
from pitools.launch.diagnosis.rank_exits import RankExit
from pitools.launch.diagnosis.timeline import FaultTimeline
from pitools.run.attempt_records import Cause, CauseKind, Evidence, SignalRecord

_MAX_EVIDENCE = 40  # the most pieces of evidence in a cause
_STALLED_S = 600.0
LIMIT_S = 90.0  # Slurm checks time limits every 30 to 60 s, and then signals without delay
CLOCK_ERROR_S = -3600.0
_UNSTARTED = ("code-126", "code-127", "program-unreadable")
_ROLE_ORDER = {"slurm-statement": 0, "fault": 0, "warning": 1, "cascade": 2, "end": 3}


def classify(evidence: AttemptEvidence) -> Cause:
    """Return the cause of an attempt: the first rule that applies."""
    order = timeline.build_timeline(evidence)
    rules = (
        _finished,
        _slurm_state,
        _cancelled,
        _hang,
        _slurm_statement,
        classify_unstartable,
        _first_fault,
        classify_signals,
        _cascade,
    )
    for rule in rules:
        if found := rule(evidence, order):
            return _with_common_fields(evidence, order, found)
    return _with_common_fields(evidence, order, _vanished(evidence, order))


def _finished(seen: AttemptEvidence, _order: FaultTimeline) -> Cause | None:
    if seen.exit_code == 0:
        warned = bool(seen.signals)
        sure: Confidence = "likely" if warned else "certain"
        return make_cause("finished", sure, "the program ended with code 0" + (", after a signal" if warned else ""))
    if seen.exit_code is None and seen.accounting and seen.accounting.state == "COMPLETED":
        return make_cause("finished", "certain", "Slurm's state is COMPLETED")
    return None


def _slurm_state(seen: AttemptEvidence, order: FaultTimeline) -> Cause | None:
    """The cause by Slurm's state of the job; None if the state leaves the cause open, as FAILED does."""
    state, source = (seen.accounting.state, "Slurm") if seen.accounting else (seen.state, "the supervisor")
    kind = patterns.load_table().states.get(state)
    if seen.accounting and seen.accounting.signal == 125:
        kind = "memory"
    if kind is None or kind == "finished":
        return None
    reason = f"{source}'s state is {state}"
    if kind == "time-limit":
        return (
            _hang(seen, order) or _earlier_failure(seen, order) or _stalled(seen) or make_cause(kind, "certain", reason)
        )
    if kind == "cancelled" and seen.accounting and seen.accounting.cancelled_by_uid is not None:
        return make_cause(kind, "certain", f"{reason} by uid {seen.accounting.cancelled_by_uid}")
    if kind == "node":
        nodes = order.lost_nodes or order.silent_nodes
        return make_cause(kind, "certain", reason + (f": {', '.join(nodes)}" if nodes else ""), nodes=nodes)
    return make_cause(kind, "certain", reason)


def _job_end(seen: AttemptEvidence) -> str:
    return seen.ended or (seen.accounting.end if seen.accounting else "")


def _earlier_failure(seen: AttemptEvidence, order: FaultTimeline) -> Cause | None:
    """The cause by a rank that failed long before the time limit, while the others waited for it."""
    gap = log_timestamps.seconds_between(order.root.t, _job_end(seen)) if order.root else None
    return _first_fault(seen, order) if gap is not None and gap > 2 * LIMIT_S else None


def _stalled(seen: AttemptEvidence) -> Cause | None:
    """A hang that lasted until the time limit."""
    last = max((t for _, t in seen.last_step.values()), default="")
    gap = log_timestamps.seconds_between(last, _job_end(seen))
    if gap is None or gap < _STALLED_S:
        return None
    return make_cause("hang", "likely", f"no step for {gap:.0f} s before the time limit")


def _cancelled(seen: AttemptEvidence, _order: FaultTimeline) -> Cause | None:
    return make_cause("cancelled", "certain", "cancelled by `pit launch cancel`") if seen.cancelled else None


def _hang(seen: AttemptEvidence, order: FaultTimeline) -> Cause | None:
    """A hang that the hang watch ended, unless an earlier fault explains the hang."""
    hang, root = seen.hang, order.root
    if hang is None:
        return make_cause("hang", "likely", "ended by the hang watch") if seen.exit_code == exit_codes.HUNG else None
    gap = log_timestamps.seconds_between(root.t, hang.t) if root else None
    if root and root.confidence != "guess" and gap is not None and gap > log_timestamps.TOLERANCE_S:
        return _first_fault(seen, order)
    behind = sorted(hang.slow_ranks)
    nodes = {seen.node_of(rank) for rank in behind} - {""}
    alone = timeline.blamable_nodes(nodes, seen) if len(nodes) == 1 and len(set(seen.hosts)) > 1 else ()
    who = f"; behind: {_ranks(behind)}" if behind else ""
    reason = f"no step for {hang.stalled_s:.0f} s after step {hang.step} (usual: {hang.median_step_s:.3g} s){who}"
    return make_cause("hang", "certain", reason, nodes=alone, rank=behind[0] if len(behind) == 1 else None)


def _slurm_statement(_seen: AttemptEvidence, order: FaultTimeline) -> Cause | None:
    """The cause that Slurm's messages state, unless a rank had failed before."""
    word, root = order.slurm_statement, order.root
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
    # Slurm writes into a rank's output, but the program may write the same text there.
    sure: Confidence = "likely" if word.rank is not None else patterns.confidence_of(word.rule)
    nodes = (order.lost_nodes or order.silent_nodes) if word.kind == "node" else ()
    return make_cause(word.kind, sure, f"Slurm: {word.text}", nodes=nodes)


def classify_unstartable(evidence: AttemptEvidence, order: FaultTimeline) -> Cause | None:
    """The cause of a program that was not found or cannot be run: of kind `user` or `node`.

    `user` if it fails on every node, or if the rank left a failure record: then pitools itself could start there.
    Otherwise `node`: the same interpreter had just started on the job's first node.
    """
    root = order.root
    if root is None or root.rule not in _UNSTARTED:
        return None
    alike = {end.node for end in order.rank_exits if end.rule in _UNSTARTED or end.exit_code in (126, 127)}
    alike |= {one.node for one in evidence.evidence if one.rule == root.rule}
    nodes = max(len(set(evidence.hosts)), evidence.started_record.nodes if evidence.started_record else 1)
    spoke = {failure.rank for failure in evidence.failures} | (
        {evidence.first_failure.rank} if evidence.first_failure else set()
    )
    reason = (f"{root.node}: {root.description}" if root.node else root.description) + last_output_line(
        evidence, root.rank
    )
    if root.rule != "program-unreadable" and (root.rank in spoke or nodes == 1):
        return make_cause(
            "user", "likely", reason, rank=root.rank, exit_code=root.exit_code, fingerprint=root.fingerprint
        )
    if nodes > 1 and len(alike - {""}) >= nodes:
        reason = f"{reason}; the same on every node"
        return make_cause(
            "user", "likely", reason, rank=root.rank, exit_code=root.exit_code, fingerprint=root.fingerprint
        )
    reason = f"{reason}: this node cannot start a program that other nodes can"
    return make_cause(
        "node",
        "likely",
        reason,
        rank=root.rank,
        exit_code=root.exit_code,
        fingerprint=root.fingerprint,
        nodes=(root.node,) if root.node else (),
    )


def _first_fault(seen: AttemptEvidence, order: FaultTimeline) -> Cause | None:
    root = order.root
    if root is None:
        return None
    task = root.rank
    if "/logs/stage." in root.source:  # its tasks are nodes, not ranks
        root = msgspec.structs.replace(root, rank=None)
    where = " on ".join(part for part in (f"rank {root.rank}" if root.rank is not None else "", root.node) if part)
    because = patterns.exit_reason(root.rule)
    reason = f"{where}: {root.description}" if where else root.description
    reason += f" ({because})" if because else ""
    if root.kind == "unknown" and not root.is_exception and root.rule != "stage-refused":
        reason += last_output_line(seen, task)
    code, is_own = root.exit_code, _is_on_own_disk(root, seen)
    if root.rule == "stage-refused" and is_own and _is_on_every_node(seen, root.rule):
        return make_cause(
            "user", "likely", f"{reason}; the same on every node: see paths.nvme of the site", exit_code=code
        )
    if root.rule == "stage-refused":
        root = (
            msgspec.structs.replace(root, kind="storage")
            if is_own
            else msgspec.structs.replace(root, confidence="guess")
        )
    return make_cause(
        root.kind,
        root.confidence,
        reason,
        rank=root.rank,
        exit_code=code,
        nodes=timeline.blamable_nodes([root.node], seen)
        if root.is_local or (is_own and root.kind == "storage")
        else (),
        signal=code - 128 if code is not None and 128 < code < 128 + 65 else 0,
        fingerprint=root.fingerprint,
    )


def _is_on_every_node(seen: AttemptEvidence, rule: str) -> bool:
    """Whether a rule matched on every node of a job with several."""
    nodes = max(len(set(seen.hosts)), seen.started_record.nodes if seen.started_record else 1)
    return nodes > 1 and len({one.node for one in seen.evidence if one.rule == rule} - {""}) >= nodes


def _is_on_own_disk(root: RankExit, seen: AttemptEvidence) -> bool:
    """Whether a path in the fault's message is on the node's own disk."""
    own = (*patterns.load_table().local_paths, *([seen.nvme] if len(seen.nvme) > 1 else []))
    found = re.search(r"(?<![\w.])(/[^\s'\":,]+)", root.description)
    shared = seen.shared_path.rstrip("/") + "/"
    return found is not None and found[1].startswith(own) and not (found[1] + "/").startswith(shared)


def classify_signals(evidence: AttemptEvidence, order: FaultTimeline) -> Cause | None:
    """The cause by the signals that the job received: time limit, preemption or cancel."""
    stopped = evidence.exit_code == exit_codes.STOPPED_FOR_RESUME
    term = next((one for one in evidence.signals if one.signal == "SIGTERM"), None)
    warned = next((one for one in evidence.signals if one.signal in ("SIGUSR2", "SIGUSR1")), None)
    for sent in (warned, term):
        if sent and _is_time_limit_signal(sent, evidence):
            sure: Confidence = "certain" if stopped else "likely"
            return make_cause(
                "time-limit", sure, f"{sent.signal} with {sent.seconds_to_limit:.0f} s left of the time limit"
            )
    if sent := term or warned:
        sane = sent.seconds_to_limit is not None and sent.seconds_to_limit > CLOCK_ERROR_S
        rest = f"{sent.seconds_to_limit:.0f} s left" if sane else "no time limit known"
        return make_cause(
            "preempted", "guess", f"{sent.signal} with {rest}: preempted or cancelled, by Slurm's state of the job"
        )
    if any(one.signal == "SIGINT" for one in evidence.signals):
        return make_cause("cancelled", "likely", "SIGINT: interrupted")
    if evidence.exit_code in exit_codes.STOPPED_CODES and _ended_at_time_limit(evidence):
        return make_cause(
            "time-limit", "likely", f"the ranks received a signal {evidence.notice_s:.0f} s before the time limit"
        )
    if stopped or any(end.role == "warning" for end in order.rank_exits):
        return make_cause(
            "time-limit",
            "likely",
            "saved and stopped, to be continued"
            if stopped
            else "ended by the signal before the time limit, which the program does not catch",
        )
    return None


def _is_time_limit_signal(sent: SignalRecord, seen: AttemptEvidence) -> bool:
    """Whether the signal was sent at the time limit, or as the requested notice before it."""
    notice = seen.notice_s if sent.signal == seen.notice_signal else 0.0
    return sent.seconds_to_limit is not None and CLOCK_ERROR_S < sent.seconds_to_limit <= notice + LIMIT_S


def _ended_at_time_limit(seen: AttemptEvidence) -> bool:
    """Whether the attempt ended at the time limit or after its notice, which Slurm sends to the ranks only."""
    left_s = (
        log_timestamps.seconds_between(seen.ended, seen.started_record.time_limit_at) if seen.started_record else None
    )
    return left_s is not None and CLOCK_ERROR_S < left_s <= seen.notice_s + LIMIT_S


def _cascade(_seen: AttemptEvidence, order: FaultTimeline) -> Cause | None:
    """The cause of complaints about lost peers without an earlier fault: an unreachable node, or the network."""
    if not order.cascade:
        return None
    lead = order.cascade[0]
    said = f"rank {lead.rank}: {lead.description}" if lead.rank is not None else lead.description
    if len(order.silent_nodes) == 1:
        reason = f"{said}; no end is reported of the ranks on {order.silent_nodes[0]}"
        return make_cause("node", "likely", reason, nodes=order.silent_nodes, fingerprint=lead.fingerprint)
    suspect = f"; {_ranks(order.silent_ranks)} reported nothing" if order.silent_ranks else ""
    return make_cause(
        "network",
        "guess" if order.silent_ranks else "likely",
        f"{said}; no earlier fault{suspect}",
        rank=order.silent_ranks[0] if len(order.silent_ranks) == 1 else None,
        fingerprint=lead.fingerprint,
    )


def _vanished(seen: AttemptEvidence, order: FaultTimeline) -> Cause:
    code = seen.exit_code
    if code is None and seen.restarted:
        reason = "no exit record, and Slurm restarted the job: a node failed, or the job was preempted"
        return make_cause("node", "guess", reason, nodes=order.lost_nodes)
    if code is None:
        return make_cause("unknown", "guess", "no exit record")
    if code == exit_codes.ATTEMPT_NOT_STARTED:
        return make_cause("unknown", "guess", f"the attempt did not start{last_output_line(seen, None)}")
    if 128 < code < 128 + 65:
        return make_cause("unknown", "guess", f"ended by signal {code - 128}, of unknown origin", signal=code - 128)
    return make_cause(
        "unknown",
        "guess",
        f"exit code {code}, without an error message{last_output_line(seen, None)}",
        fingerprint=fingerprint.fingerprint_exit(f"exit code {code}"),
    )


def _ranks(ranks: Iterable[int]) -> str:
    some = list(ranks)
    text = ", ".join(map(str, some[:8])) + (", …" if len(some) > 8 else "")
    return f"rank{'s' if len(some) != 1 else ''} {text}"


def make_cause(kind: CauseKind, sure: Confidence, reason: str, **more: object) -> Cause:
    """Return a cause, without the fields that `_with_common_fields` sets."""
    return msgspec.structs.replace(Cause(attempt="", kind=kind, confidence=sure, reason=reason), **more)


def last_output_line(evidence: AttemptEvidence, rank: int | None) -> str:
    """Return the last line of a rank's output (None: of the job's) as the end of a reason; "" without one."""
    line = evidence.last_lines.get(rank, "")
    return f"; its output ends: {line}" if line else ""


def _with_common_fields(seen: AttemptEvidence, order: FaultTimeline, cause: Cause) -> Cause:
    """Return the cause with the fields that every cause has."""
    before = seen.started_record.saved_steps if seen.started_record else 0
    return msgspec.structs.replace(
        cause,
        attempt=seen.attempt,
        saved_steps=seen.saved_steps,
        progressed=seen.saved_steps > before,
        steps=max((step + 1 for step, _ in seen.last_step.values()), default=0),
        state=seen.accounting.state if seen.accounting else seen.state,
        exit_code=cause.exit_code if cause.exit_code is not None else seen.exit_code,
        evidence=_evidence(seen, order, cause),
    )


def _evidence(seen: AttemptEvidence, order: FaultTimeline, cause: Cause) -> tuple[Evidence, ...]:
    """The most important pieces of evidence: the deciding one first, the rest by time; one per rule and rank."""
    root = [timeline.to_evidence(order.root)] if order.root else []
    own = [
        one for one in (*root, *([order.slurm_statement] if order.slurm_statement else [])) if one.kind == cause.kind
    ][:1]
    pieces = [*own, *root, *map(timeline.to_evidence, order.rank_exits), *seen.evidence, *_job_evidence(seen)]
    unique = {(one.source, one.rule, one.rank): one for one in reversed(pieces)}
    ranked = sorted(unique.values(), key=lambda one: (one not in own, _ROLE_ORDER[one.role], one.t or "~", one.source))
    return tuple(sorted(ranked[:_MAX_EVIDENCE], key=lambda one: (one not in own, one.t or "~", one.source)))


def _job_evidence(seen: AttemptEvidence) -> Iterable[Evidence]:
    """Yield evidence about the attempt as a whole."""
    place = f"attempts/{seen.attempt}"
    for one in seen.signals[:8]:
        left = (
            f" with {one.seconds_to_limit:.0f} s left"
            if one.seconds_to_limit is not None and one.seconds_to_limit > CLOCK_ERROR_S
            else ""
        )
        yield Evidence(
            t=one.t,
            source=f"{place}/signals.jsonl",
            text=f"{one.signal}{left}",
            kind="unknown",
            role="warning",
            rule="signal",
        )
    if seen.hang:
        yield Evidence(
            t=seen.hang.t,
            source=f"{place}/hang.json",
            text=f"no step after step {seen.hang.step}",
            kind="hang",
            rule="hang",
        )
    if seen.accounting:
        text = f"{seen.accounting.state}, exit code {seen.accounting.exit_code}:{seen.accounting.signal}"
        yield Evidence(
            t=seen.accounting.end, source="sacct", text=text, kind="unknown", role="slurm-statement", rule="state"
        )
    if seen.exit_code is not None:
        yield Evidence(
            t=seen.ended,
            source=f"{place}/exit.json",
            text=f"exit code {seen.exit_code}",
            kind="unknown",
            role="end",
            rule="exit",
        )
    if seen.cancelled:
        yield Evidence(t=seen.cancelled, source="events.jsonl", text="cancel", kind="cancelled", rule="cancel")
