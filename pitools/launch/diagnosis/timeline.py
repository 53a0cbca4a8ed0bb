"""Find the earliest fault of all ranks, although the clocks of nodes differ slightly.

`first_failure` is created once, by the first rank that fails, and srun prints its messages as ranks end: both give an
order that needs no common clock. Times of different nodes are compared with a tolerance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from pitools.launch import fingerprint
from pitools.launch.diagnosis import log_timestamps, patterns, symptoms
from pitools.launch.diagnosis.evidence import AttemptEvidence
from pitools.launch.diagnosis.symptoms import Symptom
from pitools.run.attempt_records import DOUBT, Evidence

_EXPLAINS_S = 600.0  # a line that is older than this at a rank's exit does not explain the exit
_LAST_ORDER = 1 << 30
_LOST_NODE_RULES = ("srun-node-failure", "node-unreachable")
_SRUN_LINE = re.compile(r"/srun\.err:(\d+)$")


class FaultTimeline(NamedTuple):
    """An attempt's faults in order.

    root: the earliest. slurm_statement: the earliest statement of Slurm. cascade: complaints about lost peers, the
    earliest first. silent_ranks: ranks without a complaint or fault while others complained. unreported_nodes: nodes of
    whose ranks srun reports no exit. lost_nodes: nodes that Slurm, or the job's first node, cannot reach.
    rank_exits: how each rank ended.
    """

    root: Symptom | None
    slurm_statement: Evidence | None
    cascade: tuple[Symptom, ...]
    silent_ranks: tuple[int, ...]
    unreported_nodes: tuple[str, ...]
    lost_nodes: tuple[str, ...]
    rank_exits: tuple[Symptom, ...]


def build_timeline(evidence: AttemptEvidence) -> FaultTimeline:
    """Return the order of the faults in the evidence."""
    statement = min(
        (piece for piece in evidence.evidence if piece.role == "slurm-statement"),
        key=lambda piece: piece.t or "~",
        default=None,
    )
    complaining_ranks = {
        piece.rank for piece in evidence.evidence if piece.role == "cascade" and piece.rank is not None
    }
    exits = [
        _as_cascade(_as_reaction(end, _signalled_at(evidence, statement)), complaining_ranks)
        for end in _one_exit_per_rank(evidence)
    ]
    lines = [
        _symptom_from_evidence(piece)
        for piece in evidence.evidence
        if piece.role == "fault" and not _is_outranked(piece, exits)
    ]
    lines = [line for line in lines if _as_reaction(line, _signalled_at(evidence, statement)).role == "fault"]
    cascade = [end for end in exits if end.role == "cascade"]
    cascade += [_symptom_from_evidence(piece) for piece in evidence.evidence if piece.role == "cascade"]
    lost_nodes = [line.node for line in lines if line.rule in _LOST_NODE_RULES and line.node]
    return FaultTimeline(
        root=_root_fault(exits, lines, evidence),
        slurm_statement=statement,
        cascade=tuple(sorted(cascade, key=lambda end: end.t or "~")),
        silent_ranks=_silent_ranks(exits, cascade, evidence),
        unreported_nodes=_unreported_nodes(exits, evidence),
        lost_nodes=blamable_nodes(lost_nodes, evidence),
        rank_exits=tuple(exits),
    )


def blamable_nodes(nodes: Iterable[str], evidence: AttemptEvidence) -> tuple[str, ...]:
    """Return the nodes to blame; () instead of all nodes of a job with several."""
    unique = tuple(sorted(set(nodes) - {""}))
    return () if 1 < len(set(evidence.hosts)) <= len(unique) else unique


def _root_fault(exits: Sequence[Symptom], lines: Sequence[Symptom], evidence: AttemptEvidence) -> Symptom | None:
    """Return the earliest fault: of the ranks' exits, explained by log lines; of log lines alone if there is none."""
    faults = [_with_log_line(end, lines) for end in exits if end.role == "fault"]
    lost_node_lines = [line for line in lines if line.rule in _LOST_NODE_RULES]
    root = earliest_fault(faults, evidence)
    if lost_node_lines and (root is None or root.confidence != "certain"):
        return earliest_fault(lost_node_lines, evidence)
    return root or earliest_fault([line for line in lines if not patterns.explained_codes(line.rule)], evidence)


def earliest_fault(faults: Sequence[Symptom], evidence: AttemptEvidence) -> Symptom | None:
    """Return the earliest fault: by `first_failure`, else by srun's order, else by confidence and time."""
    if not faults:
        return None
    earliest = min((end.t for end in faults if end.t), default="")
    simultaneous = [
        end for end in faults if (log_timestamps.seconds_between(earliest, end.t) or 0.0) <= log_timestamps.TOLERANCE_S
    ]
    leader = next(
        (end for end in simultaneous if evidence.first_failure and end.rank == evidence.first_failure.rank), None
    )
    if leader:
        # A rank that was killed left no failure record, but srun reported its exit.
        earlier = [
            end for end in simultaneous if 0 <= end.order < leader.order and _has_no_failure_record(end, evidence)
        ]
        return min(earlier, key=lambda end: end.order, default=leader)
    if all(end.order >= 0 for end in simultaneous):
        return min(simultaneous, key=lambda end: (end.order, DOUBT[end.confidence]))
    return min(
        simultaneous,
        key=lambda end: (DOUBT[end.confidence], end.order if end.order >= 0 else _LAST_ORDER, end.t or "~"),
    )


def _has_no_failure_record(end: Symptom, evidence: AttemptEvidence) -> bool:
    return all(failure.rank != end.rank for failure in evidence.failures)


def _signalled_at(evidence: AttemptEvidence, statement: Evidence | None) -> str:
    """Return when Slurm or a user terminated the ranks; "" if unknown."""
    times = [record.t for record in evidence.signals if record.signal in ("SIGTERM", "SIGINT")]
    return min([*times, *([statement.t] if statement and statement.t else [])], default="")


def _as_reaction(end: Symptom, signalled_at: str) -> Symptom:
    """Give a fault after the termination signal the role `end`: it is a consequence."""
    gap = log_timestamps.seconds_between(signalled_at, end.t)
    if end.role == "fault" and gap is not None and gap > -0.5 and end.kind not in ("node", "gpu"):
        return msgspec.structs.replace(end, role="end")
    return end


def _as_cascade(end: Symptom, complaining_ranks: set[int]) -> Symptom:
    """Give an unexplained exit the role `cascade` if the rank complained about a lost peer."""
    if end.role == "fault" and end.kind == "unknown" and not end.is_exception and end.rank in complaining_ranks:
        return msgspec.structs.replace(end, role="cascade", kind="network")
    return end


def _with_log_line(end: Symptom, lines: Sequence[Symptom]) -> Symptom:
    """Complete an exit without an explanation from a log line of the same rank or node, or of Slurm."""
    if end.confidence != "guess":
        return end
    matches = [line for line in lines if _matches_exit(line, end)]
    best = min(matches, key=lambda line: (line.rank != end.rank, DOUBT[line.confidence]), default=None)
    if best is None or DOUBT[best.confidence] > DOUBT[end.confidence]:
        return end
    return msgspec.structs.replace(
        end,
        kind=best.kind,
        confidence=best.confidence,
        rule=best.rule,
        description=best.description,
        source=best.source,
        t=end.t or best.t,
        blames_node=best.blames_node and (best.rank is not None or bool(best.node)),
        node=best.node or end.node,
        fingerprint=best.fingerprint,
    )


def _matches_exit(line: Symptom, end: Symptom) -> bool:
    if (codes := patterns.explained_codes(line.rule)) and end.exit_code not in codes:
        return False
    gap = log_timestamps.seconds_between(line.t, end.t)
    if gap is not None and not -log_timestamps.TOLERANCE_S <= gap <= _EXPLAINS_S:
        return False
    if line.rank is not None:
        return line.rank == end.rank
    return not line.node or not end.node or line.node == end.node


def _is_outranked(line: Evidence, exits: Sequence[Symptom]) -> bool:
    """Whether the rank that wrote a line ended with an exception, which outranks its earlier lines."""
    return line.rank is not None and any(
        end.rank == line.rank and end.is_exception and end.role == "fault" for end in exits
    )


def _silent_ranks(exits: Sequence[Symptom], cascade: Sequence[Symptom], evidence: AttemptEvidence) -> tuple[int, ...]:
    """Return the ranks without a complaint or fault while others complained, if they are at most half."""
    if not cascade:
        return ()
    reporting_ranks = {end.rank for end in cascade} | {end.rank for end in exits if end.role == "fault"}
    ranks = [rank for rank in range(len(evidence.hosts)) if rank not in reporting_ranks]
    return tuple(ranks) if len(ranks) <= max(1, len(evidence.hosts) // 2) else ()


def _unreported_nodes(exits: Sequence[Symptom], evidence: AttemptEvidence) -> tuple[str, ...]:
    """Return the nodes without a reported exit of a rank, if srun reported exits of other nodes."""
    reported = {end.rank for end in exits}
    if not any(end.order >= 0 for end in exits) or len(evidence.hosts) > 100_000:
        return ()
    reported_nodes = {evidence.hosts[rank] for rank in reported if rank is not None and rank < len(evidence.hosts)}
    return blamable_nodes(set(evidence.hosts) - reported_nodes, evidence)


def _one_exit_per_rank(evidence: AttemptEvidence) -> list[Symptom]:
    """Return one exit per rank: its exception if there is one, with the time and order of other sources."""
    attempt_path = f"attempts/{evidence.attempt}"
    recorded = [
        symptoms.symptom_of_failure(failure, f"{attempt_path}/failures/{failure.rank}.json")
        for failure in evidence.failures
    ]
    if evidence.first_failure and all(end.rank != evidence.first_failure.rank for end in recorded):
        code, rank, node = evidence.first_failure
        recorded.append(symptoms.symptom_of_code(code, rank, node, "", f"{attempt_path}/first_failure"))
    by_rank: dict[int | None, list[Symptom]] = {}
    for end in [*recorded, *evidence.rank_exits]:
        by_rank.setdefault(end.rank, []).append(end)
    without_rank = by_rank.pop(None, [])
    return [*without_rank, *map(_merge_exits, by_rank.values())]


def _merge_exits(group: Sequence[Symptom]) -> Symptom:
    """Merge the exits of one rank from several sources."""
    exceptions = [end for end in group if end.is_exception]
    coded = [end for end in group if end.exit_code is not None]
    best = exceptions[0] if exceptions else min(coded or group, key=lambda end: DOUBT[end.confidence])
    times = [end.t for end in group if end.t]
    return msgspec.structs.replace(
        best,
        t=min((end.t for end in coded if end.t), default=min(times, default="")),
        order=max(end.order for end in group),
        exit_code=best.exit_code if best.exit_code is not None else next((end.exit_code for end in coded), None),
        node=best.node or next((end.node for end in group if end.node), ""),
    )


def _symptom_from_evidence(piece: Evidence) -> Symptom:
    match = _SRUN_LINE.search(piece.source)
    return Symptom(
        rank=piece.rank,
        node=piece.node,
        t=piece.t,
        source=piece.source,
        description=piece.text,
        kind=piece.kind,
        role=piece.role,
        confidence=patterns.confidence_of(piece.rule),
        rule=piece.rule,
        blames_node=patterns.blames_node(piece.rule),
        order=int(match[1]) if match else -1,
        fingerprint=fingerprint.fingerprint_exit(fingerprint.normalize_message(piece.text)),
    )


def to_evidence(end: Symptom) -> Evidence:
    """Convert a rank's exit to evidence."""
    return Evidence(
        t=end.t,
        source=end.source,
        text=end.description,
        kind=end.kind,
        rank=end.rank,
        node=end.node,
        role=end.role,
        rule=end.rule,
    )
