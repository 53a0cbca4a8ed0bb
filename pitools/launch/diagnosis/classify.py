"""Classify why an attempt ended: the earliest fault of all ranks, and Slurm's statements.

The first of these rules that applies decides:
 1. the program's exit with code 0, and Slurm's state of the job;
 2. a user's cancel, a failed preflight, the hang watch, Slurm's statements in its messages;
 3. a save after the notice before the time limit, and an end of the program's own;
 4. the earliest fault of all ranks; complaints about lost peers and the termination of ranks are no faults;
 5. the signals that the job received;
 6. complaints about lost peers without an earlier fault;
 7. no evidence.
Pure: reads only the gathered evidence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from pitools.launch import exit_codes, fingerprint
from pitools.launch.diagnosis import log_timestamps, patterns, timeline
from pitools.launch.diagnosis.evidence import AttemptEvidence
from pitools.launch.diagnosis.symptoms import Symptom
from pitools.launch.diagnosis.timeline import FaultTimeline
from pitools.run.attempt_records import Cause, CauseKind, Confidence, Evidence, SignalRecord

_MAX_EVIDENCE = 40  # the most pieces of evidence in a cause
_STALLED_S = 600.0
LIMIT_S = 90.0  # Slurm checks time limits every 30 to 60 s, and then signals without delay
CLOCK_ERROR_S = -3600.0
_UNSTARTED = ("code-126", "code-127", "program-unreadable")
_ROLE_ORDER = {"slurm-statement": 0, "fault": 0, "warning": 1, "cascade": 2, "end": 3}


def classify(evidence: AttemptEvidence) -> Cause:
    """Return the cause of an attempt: the first rule that applies."""
    faults = timeline.build_timeline(evidence)
    rules = (
        _classify_succeeded,
        _classify_slurm_state,
        _classify_cancelled,
        _classify_preflight,
        _classify_hang,
        _classify_slurm_statement,
        classify_unstartable,
        _classify_saved_after_notice,
        _classify_first_fault,
        classify_signals,
        _classify_cascade,
    )
    for rule in rules:
        if cause := rule(evidence, faults):
            return _with_common_fields(evidence, faults, cause)
    return _with_common_fields(evidence, faults, _classify_no_evidence(evidence, faults))


def _classify_succeeded(evidence: AttemptEvidence, _faults: FaultTimeline) -> Cause | None:
    if evidence.exit_code == 0:
        if evidence.signals:
            return make_cause("succeeded", "likely", "the program ended with code 0, after a signal")
        return make_cause("succeeded", "certain", "the program ended with code 0")
    if evidence.exit_code is None and evidence.accounting and evidence.accounting.state == "COMPLETED":
        return make_cause("succeeded", "certain", "Slurm's state is COMPLETED")
    return None


def _classify_slurm_state(evidence: AttemptEvidence, faults: FaultTimeline) -> Cause | None:
    """The cause by Slurm's state of the job; None if the state leaves the cause open, as FAILED does."""
    state, source = (evidence.accounting.state, "Slurm") if evidence.accounting else (evidence.state, "the supervisor")
    kind = patterns.load_table().states.get(state)
    if evidence.accounting and evidence.accounting.signal == 125:
        kind = "memory"
    if kind is None or kind == "succeeded":
        return None
    reason = f"{source}'s state is {state}"
    if kind == "time-limit":
        return (
            _classify_hang(evidence, faults)
            or _classify_earlier_failure(evidence, faults)
            or _classify_stalled(evidence)
            or make_cause(kind, "certain", reason)
        )
    if kind == "cancelled" and evidence.accounting and evidence.accounting.cancelled_by_uid is not None:
        return make_cause(kind, "certain", f"{reason} by uid {evidence.accounting.cancelled_by_uid}")
    if kind == "node":
        nodes = faults.lost_nodes or faults.unreported_nodes
        return make_cause(kind, "certain", reason + (f": {', '.join(nodes)}" if nodes else ""), nodes=nodes)
    return make_cause(kind, "certain", reason)


def _job_ended_at(evidence: AttemptEvidence) -> str:
    return evidence.ended or (evidence.accounting.end if evidence.accounting else "")


def _classify_earlier_failure(evidence: AttemptEvidence, faults: FaultTimeline) -> Cause | None:
    """The cause by a rank that failed long before the time limit, while the others waited for it."""
    gap_s = log_timestamps.seconds_between(faults.root.t, _job_ended_at(evidence)) if faults.root else None
    return _classify_first_fault(evidence, faults) if gap_s is not None and gap_s > 2 * LIMIT_S else None


def _classify_stalled(evidence: AttemptEvidence) -> Cause | None:
    """A hang that lasted until the time limit."""
    last_step_t = max((t for _, t in evidence.last_step.values()), default="")
    gap_s = log_timestamps.seconds_between(last_step_t, _job_ended_at(evidence))
    if gap_s is None or gap_s < _STALLED_S:
        return None
    return make_cause("hang", "likely", f"no step for {gap_s:.0f} s before the time limit")


def _classify_cancelled(evidence: AttemptEvidence, _faults: FaultTimeline) -> Cause | None:
    return make_cause("cancelled", "certain", "cancelled by `pit launch cancel`") if evidence.cancelled else None


def _classify_preflight(evidence: AttemptEvidence, _faults: FaultTimeline) -> Cause | None:
    """The nodes that failed the preflight, for which no rank was started."""
    if evidence.preflight is None or not evidence.preflight.failures:
        return None
    first, *others = evidence.preflight.failures
    nodes = tuple(dict.fromkeys(failure.node for failure in evidence.preflight.failures))
    more = f" (and {len(others)} more)" if others else ""
    checks = {failure.check for failure in evidence.preflight.failures}
    confidence: Confidence = (
        "guess" if "all-reduce-pair" in checks else "likely" if "all-reduce" in checks else "certain"
    )
    reason = f"{first.node}: {first.check}: {first.message}{more}"
    return make_cause("preflight", confidence, reason, nodes=nodes)


def _classify_hang(evidence: AttemptEvidence, faults: FaultTimeline) -> Cause | None:
    """A hang that the hang watch ended, unless an earlier fault explains the hang."""
    hang, root = evidence.hang, faults.root
    if hang is None:
        return (
            make_cause("hang", "likely", "ended by the hang watch") if evidence.exit_code == exit_codes.HUNG else None
        )
    gap_s = log_timestamps.seconds_between(root.t, hang.t) if root else None
    if root and root.confidence != "guess" and gap_s is not None and gap_s > log_timestamps.TOLERANCE_S:
        return _classify_first_fault(evidence, faults)
    slow_ranks = sorted(hang.slow_ranks)
    nodes = {evidence.node_of(rank) for rank in slow_ranks} - {""}
    blamed = timeline.blamable_nodes(nodes, evidence) if len(nodes) == 1 and len(set(evidence.hosts)) > 1 else ()
    slow_text = f"; behind: {_format_ranks(slow_ranks)}" if slow_ranks else ""
    place = f"after step {hang.step} (usual: {hang.median_step_s:.3g} s)" if hang.step >= 0 else "before the first one"
    reason = f"no step for {hang.stalled_s:.0f} s {place}{slow_text}"
    return make_cause("hang", "certain", reason, nodes=blamed, rank=slow_ranks[0] if len(slow_ranks) == 1 else None)


def _classify_slurm_statement(_evidence: AttemptEvidence, faults: FaultTimeline) -> Cause | None:
    """The cause that Slurm's messages state, unless a rank had failed before."""
    statement, root = faults.slurm_statement, faults.root
    if statement is None:
        return None
    gap_s = log_timestamps.seconds_between(root.t, statement.t) if root else None
    if (
        root
        and root.kind != "unknown"
        and gap_s is not None
        and gap_s > log_timestamps.TOLERANCE_S
        and root.kind != statement.kind
    ):
        return None
    # Slurm writes into a rank's output, but the program may write the same text there.
    confidence: Confidence = "likely" if statement.rank is not None else patterns.confidence_of(statement.rule)
    nodes = (faults.lost_nodes or faults.unreported_nodes) if statement.kind == "node" else ()
    return make_cause(statement.kind, confidence, f"Slurm: {statement.text}", nodes=nodes)


def classify_unstartable(evidence: AttemptEvidence, faults: FaultTimeline) -> Cause | None:
    """The cause of a program that was not found or cannot be run: of kind `program` or `node`.

    `program` if it fails on every node, or if the rank left a failure record: then pitools itself could start there.
    Otherwise `node`: the same interpreter had just started on the job's first node.
    """
    root = faults.root
    if root is None or root.rule not in _UNSTARTED:
        return None
    failing_nodes = {end.node for end in faults.rank_exits if end.rule in _UNSTARTED or end.exit_code in (126, 127)}
    failing_nodes |= {piece.node for piece in evidence.evidence if piece.rule == root.rule}
    node_count = max(len(set(evidence.hosts)), evidence.started_record.nodes if evidence.started_record else 1)
    recorded_ranks = {failure.rank for failure in evidence.failures} | (
        {evidence.first_failure.rank} if evidence.first_failure else set()
    )
    reason = (f"{root.node}: {root.description}" if root.node else root.description) + last_output_line(
        evidence, root.rank
    )
    details = {"rank": root.rank, "exit_code": root.exit_code, "fingerprint": root.fingerprint}
    if root.rule != "program-unreadable" and (root.rank in recorded_ranks or node_count == 1):
        return make_cause("program", "likely", reason, **details)
    if node_count > 1 and len(failing_nodes - {""}) >= node_count:
        return make_cause("program", "likely", f"{reason}; the same on every node", **details)
    reason = f"{reason}: this node cannot start a program that other nodes can"
    return make_cause("node", "likely", reason, nodes=(root.node,) if root.node else (), **details)


def _classify_saved_after_notice(evidence: AttemptEvidence, faults: FaultTimeline) -> Cause | None:
    """The time limit, of a program that saved after its notice, and ended with any code or exception of its own.

    A fault that is not the answer to the notice comes again in the next job, without progress.
    """
    start, root = evidence.started_record, faults.root
    if not evidence.exit_code or not evidence.saved_at or (root and root.kind not in ("unknown", "program")):
        return None
    if start is None or evidence.saved_steps <= start.saved_steps:
        return None
    received = next((record for record in evidence.signals if record.signal == evidence.notice_signal), None)
    if received and _is_time_limit_signal(received, evidence):
        since_notice_s = log_timestamps.seconds_between(received.t, evidence.saved_at)
    elif evidence.notice_signal and _ended_at_time_limit(evidence):
        # Slurm sends the notice to the ranks only, and up to LIMIT_S early.
        left_s = log_timestamps.seconds_between(evidence.saved_at, start.time_limit_at)
        since_notice_s = evidence.notice_s + LIMIT_S - left_s if left_s is not None else None
    else:
        return None
    if since_notice_s is None or since_notice_s < -log_timestamps.TOLERANCE_S:
        return None
    ending = root.description if root else f"exit code {evidence.exit_code}"
    return make_cause("time-limit", "likely", f"saved after the notice before the time limit, then ended: {ending}")


def _classify_first_fault(evidence: AttemptEvidence, faults: FaultTimeline) -> Cause | None:
    root = faults.root
    if root is None:
        return None
    task = root.rank
    if "/logs/stage." in root.source:  # its tasks are nodes, not ranks
        root = msgspec.structs.replace(root, rank=None)
    location = " on ".join(part for part in (f"rank {root.rank}" if root.rank is not None else "", root.node) if part)
    explanation = patterns.exit_reason(root.rule)
    reason = f"{location}: {root.description}" if location else root.description
    reason += f" ({explanation})" if explanation else ""
    if root.kind == "unknown" and not root.is_exception and root.rule != "stage-refused":
        reason += last_output_line(evidence, task)
    code, is_own = root.exit_code, _is_on_own_disk(root, evidence)
    if root.rule == "stage-refused" and is_own and _is_on_every_node(evidence, root.rule):
        return make_cause(
            "program", "likely", f"{reason}; the same on every node: see paths.nvme of the site", exit_code=code
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
        nodes=timeline.blamable_nodes([root.node], evidence)
        if root.blames_node or (is_own and root.kind == "storage")
        else (),
        signal=code - 128 if code is not None and 128 < code < 128 + 65 else 0,
        fingerprint=root.fingerprint,
    )


def _is_on_every_node(evidence: AttemptEvidence, rule: str) -> bool:
    """Whether a rule matched on every node of a job with several."""
    node_count = max(len(set(evidence.hosts)), evidence.started_record.nodes if evidence.started_record else 1)
    return 1 < node_count <= len({piece.node for piece in evidence.evidence if piece.rule == rule} - {""})


def _is_on_own_disk(root: Symptom, evidence: AttemptEvidence) -> bool:
    """Whether a path in the fault's message is on the node's own disk."""
    local_roots = (*patterns.load_table().local_paths, *([evidence.nvme] if len(evidence.nvme) > 1 else []))
    match = re.search(r"(?<![\w.])(/[^\s'\":,]+)", root.description)
    shared_root = evidence.shared_path.rstrip("/") + "/"
    return match is not None and match[1].startswith(local_roots) and not (match[1] + "/").startswith(shared_root)


def classify_signals(evidence: AttemptEvidence, faults: FaultTimeline) -> Cause | None:
    """The cause by the signals that the job received: time limit, preemption or cancel."""
    stopped = evidence.exit_code == exit_codes.STOPPED_FOR_RESUME
    sigterm = next((record for record in evidence.signals if record.signal == "SIGTERM"), None)
    notice = next((record for record in evidence.signals if record.signal in ("SIGUSR2", "SIGUSR1")), None)
    for received in (notice, sigterm):
        if received and _is_time_limit_signal(received, evidence):
            confidence: Confidence = "certain" if stopped else "likely"
            return make_cause(
                "time-limit",
                confidence,
                f"{received.signal} with {received.seconds_to_limit:.0f} s left of the time limit",
            )
    if received := sigterm or notice:
        is_plausible = received.seconds_to_limit is not None and received.seconds_to_limit > CLOCK_ERROR_S
        time_left = f"{received.seconds_to_limit:.0f} s left" if is_plausible else "no time limit known"
        return make_cause(
            "preempted",
            "guess",
            f"{received.signal} with {time_left}: preempted or cancelled, by Slurm's state of the job",
        )
    if any(record.signal == "SIGINT" for record in evidence.signals):
        return make_cause("cancelled", "likely", "SIGINT: interrupted")
    if evidence.exit_code in exit_codes.STOPPED_CODES and _ended_at_time_limit(evidence):
        return make_cause(
            "time-limit", "likely", f"the ranks received a signal {evidence.notice_s:.0f} s before the time limit"
        )
    if stopped or any(end.role == "warning" for end in faults.rank_exits):
        return make_cause(
            "time-limit",
            "likely",
            "saved and stopped, to be continued"
            if stopped
            else "ended by the signal before the time limit, which the program does not catch",
        )
    return None


def _is_time_limit_signal(record: SignalRecord, evidence: AttemptEvidence) -> bool:
    """Whether the signal was sent at the time limit, or as the requested notice before it."""
    notice_s = evidence.notice_s if record.signal == evidence.notice_signal else 0.0
    return record.seconds_to_limit is not None and CLOCK_ERROR_S < record.seconds_to_limit <= notice_s + LIMIT_S


def _ended_at_time_limit(evidence: AttemptEvidence) -> bool:
    """Whether the attempt ended at the time limit or after its notice, which Slurm sends to the ranks only."""
    left_s = (
        log_timestamps.seconds_between(evidence.ended, evidence.started_record.time_limit_at)
        if evidence.started_record
        else None
    )
    return left_s is not None and CLOCK_ERROR_S < left_s <= evidence.notice_s + LIMIT_S


def _classify_cascade(_evidence: AttemptEvidence, faults: FaultTimeline) -> Cause | None:
    """The cause of complaints about lost peers without an earlier fault: an unreachable node, or the network."""
    if not faults.cascade:
        return None
    first = faults.cascade[0]
    complaint = f"rank {first.rank}: {first.description}" if first.rank is not None else first.description
    if len(faults.unreported_nodes) == 1:
        reason = f"{complaint}; no end is reported of the ranks on {faults.unreported_nodes[0]}"
        return make_cause("node", "likely", reason, nodes=faults.unreported_nodes, fingerprint=first.fingerprint)
    suspect = f"; {_format_ranks(faults.silent_ranks)} reported nothing" if faults.silent_ranks else ""
    return make_cause(
        "network",
        "guess" if faults.silent_ranks else "likely",
        f"{complaint}; no earlier fault{suspect}",
        rank=faults.silent_ranks[0] if len(faults.silent_ranks) == 1 else None,
        fingerprint=first.fingerprint,
    )


def _classify_no_evidence(evidence: AttemptEvidence, faults: FaultTimeline) -> Cause:
    code = evidence.exit_code
    if code is None and evidence.restarted:
        reason = "no exit record, and Slurm restarted the job: a node failed, or the job was preempted"
        return make_cause("node", "guess", reason, nodes=faults.lost_nodes)
    if code is None:
        return make_cause("unknown", "guess", "no exit record")
    if code == exit_codes.ATTEMPT_NOT_STARTED:
        return make_cause("unknown", "guess", f"the attempt did not start{last_output_line(evidence, None)}")
    if 128 < code < 128 + 65:
        return make_cause("unknown", "guess", f"ended by signal {code - 128}, of unknown origin", signal=code - 128)
    return make_cause(
        "unknown",
        "guess",
        f"exit code {code}, without an error message{last_output_line(evidence, None)}",
        fingerprint=fingerprint.fingerprint_exit(f"exit code {code}"),
    )


def _format_ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    text = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) != 1 else ''} {text}"


def make_cause(kind: CauseKind, confidence: Confidence, reason: str, **fields: object) -> Cause:
    """Return a cause, without the fields that `_with_common_fields` sets."""
    return msgspec.structs.replace(Cause(attempt="", kind=kind, confidence=confidence, reason=reason), **fields)


def last_output_line(evidence: AttemptEvidence, rank: int | None) -> str:
    """Return the last line of a rank's output (None: of the job's) as the end of a reason; "" without one."""
    line = evidence.last_lines.get(rank, "")
    return f"; its output ends: {line}" if line else ""


def _with_common_fields(evidence: AttemptEvidence, faults: FaultTimeline, cause: Cause) -> Cause:
    """Return the cause with the fields that every cause has."""
    saved_before = evidence.started_record.saved_steps if evidence.started_record else 0
    return msgspec.structs.replace(
        cause,
        attempt=evidence.attempt,
        saved_steps=evidence.saved_steps,
        progressed=evidence.saved_steps > saved_before,
        steps=max((step + 1 for step, _ in evidence.last_step.values()), default=0),
        state=evidence.accounting.state if evidence.accounting else evidence.state,
        exit_code=cause.exit_code if cause.exit_code is not None else evidence.exit_code,
        evidence=_select_evidence(evidence, faults, cause),
    )


def _select_evidence(evidence: AttemptEvidence, faults: FaultTimeline, cause: Cause) -> tuple[Evidence, ...]:
    """The most important pieces of evidence: the deciding one first, the rest by time; one per rule and rank."""
    root_evidence = [timeline.to_evidence(faults.root)] if faults.root else []
    deciding = [
        piece
        for piece in (*root_evidence, *([faults.slurm_statement] if faults.slurm_statement else []))
        if piece.kind == cause.kind
    ][:1]
    pieces = [
        *deciding,
        *root_evidence,
        *map(timeline.to_evidence, faults.rank_exits),
        *evidence.evidence,
        *_job_evidence(evidence),
    ]
    unique = {(piece.source, piece.rule, piece.rank): piece for piece in reversed(pieces)}
    ranked = sorted(
        unique.values(),
        key=lambda piece: (piece not in deciding, _ROLE_ORDER[piece.role], piece.t or "~", piece.source),
    )
    return tuple(
        sorted(ranked[:_MAX_EVIDENCE], key=lambda piece: (piece not in deciding, piece.t or "~", piece.source))
    )


def _job_evidence(evidence: AttemptEvidence) -> Iterable[Evidence]:
    """Yield evidence about the attempt as a whole."""
    attempt_path = f"attempts/{evidence.attempt}"
    for record in evidence.signals[:8]:
        time_left = (
            f" with {record.seconds_to_limit:.0f} s left"
            if record.seconds_to_limit is not None and record.seconds_to_limit > CLOCK_ERROR_S
            else ""
        )
        yield Evidence(
            t=record.t,
            source=f"{attempt_path}/signals.jsonl",
            text=f"{record.signal}{time_left}",
            kind="unknown",
            role="warning",
            rule="signal",
        )
    for failure in evidence.preflight.failures if evidence.preflight else ():
        yield Evidence(
            t=evidence.preflight.t if evidence.preflight else "",
            source=f"{attempt_path}/preflight.json",
            text=f"{failure.check}: {failure.message}",
            kind="preflight",
            node=failure.node,
            rule=f"preflight-{failure.node}-{failure.check}",
        )
    if evidence.hang:
        yield Evidence(
            t=evidence.hang.t,
            source=f"{attempt_path}/hang.json",
            text=f"no step after step {evidence.hang.step}",
            kind="hang",
            rule="hang",
        )
    if evidence.accounting:
        text = f"{evidence.accounting.state}, exit code {evidence.accounting.exit_code}:{evidence.accounting.signal}"
        yield Evidence(
            t=evidence.accounting.end, source="sacct", text=text, kind="unknown", role="slurm-statement", rule="state"
        )
    if evidence.exit_code is not None:
        yield Evidence(
            t=evidence.ended,
            source=f"{attempt_path}/exit.json",
            text=f"exit code {evidence.exit_code}",
            kind="unknown",
            role="end",
            rule="exit",
        )
    if evidence.cancelled:
        yield Evidence(t=evidence.cancelled, source="events.jsonl", text="cancel", kind="cancelled", rule="cancel")
