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
from pitools.launch.diagnosis import log_timestamps, patterns, rank_exits
from pitools.launch.diagnosis.evidence import AttemptEvidence
from pitools.launch.diagnosis.rank_exits import RankExit
from pitools.run.attempt_records import Evidence

_CONFIDENCE_ORDER = {"certain": 0, "likely": 1, "guess": 2}
_EXPLAINS_S = 600.0  # a line that is older than this at a rank's exit does not explain the exit
_LAST_ORDER = 1 << 30
_LOST_NODE_RULES = ("srun-node-failure", "node-unreachable")
_SRUN_LINE = re.compile(r"/srun\.err:(\d+)$")


class FaultTimeline(NamedTuple):
    """An attempt's faults in order.

    root: the earliest. slurm_statement: the earliest statement of Slurm. cascade: complaints about lost peers, the
    earliest first. silent_ranks: ranks without a complaint or fault while others complained. silent_nodes: nodes of
    whose ranks srun reports no exit. lost_nodes: nodes that Slurm, or the job's first node, cannot reach.
    rank_exits: how each rank ended.
    """

    root: RankExit | None
    slurm_statement: Evidence | None
    cascade: tuple[RankExit, ...]
    silent_ranks: tuple[int, ...]
    silent_nodes: tuple[str, ...]
    lost_nodes: tuple[str, ...]
    rank_exits: tuple[RankExit, ...]


def build_timeline(evidence: AttemptEvidence) -> FaultTimeline:
    """Return the order of the faults in the evidence."""
    word = min(
        (one for one in evidence.evidence if one.role == "slurm-statement"), key=lambda one: one.t or "~", default=None
    )
    complained = {one.rank for one in evidence.evidence if one.role == "cascade" and one.rank is not None}
    merged = [
        _as_cascade(_as_reaction(end, _signalled_at(evidence, word)), complained)
        for end in _one_exit_per_rank(evidence)
    ]
    lines = [
        _exit_from_evidence(one) for one in evidence.evidence if one.role == "fault" and not _is_outranked(one, merged)
    ]
    lines = [line for line in lines if _as_reaction(line, _signalled_at(evidence, word)).role == "fault"]
    cascade = [end for end in merged if end.role == "cascade"]
    cascade += [_exit_from_evidence(one) for one in evidence.evidence if one.role == "cascade"]
    lost = [line.node for line in lines if line.rule in _LOST_NODE_RULES and line.node]
    return FaultTimeline(
        root=_root_fault(merged, lines, evidence),
        slurm_statement=word,
        cascade=tuple(sorted(cascade, key=lambda end: end.t or "~")),
        silent_ranks=_silent_ranks(merged, cascade, evidence),
        silent_nodes=_silent_nodes(merged, evidence),
        lost_nodes=blamable_nodes(lost, evidence),
        rank_exits=tuple(merged),
    )


def blamable_nodes(nodes: Iterable[str], evidence: AttemptEvidence) -> tuple[str, ...]:
    """Return the nodes to blame; () instead of all nodes of a job with several."""
    unique = tuple(sorted(set(nodes) - {""}))
    return () if 1 < len(set(evidence.hosts)) <= len(unique) else unique


def _root_fault(merged: Sequence[RankExit], lines: Sequence[RankExit], seen: AttemptEvidence) -> RankExit | None:
    """Return the earliest fault: of the ranks' exits, explained by log lines; of log lines alone if there is none."""
    faults = [_with_log_line(end, lines) for end in merged if end.role == "fault"]
    lost = [line for line in lines if line.rule in _LOST_NODE_RULES]
    root = earliest_fault(faults, seen)
    if lost and (root is None or root.confidence != "certain"):
        return earliest_fault(lost, seen)
    return root or earliest_fault([line for line in lines if not patterns.explained_codes(line.rule)], seen)


def earliest_fault(faults: Sequence[RankExit], evidence: AttemptEvidence) -> RankExit | None:
    """Return the earliest fault: by `first_failure`, else by srun's order, else by confidence and time."""
    if not faults:
        return None
    earliest = min((end.t for end in faults if end.t), default="")
    near = [
        end for end in faults if (log_timestamps.seconds_between(earliest, end.t) or 0.0) <= log_timestamps.TOLERANCE_S
    ]
    leader = next((end for end in near if evidence.first_failure and end.rank == evidence.first_failure.rank), None)
    if leader:
        # A rank that was killed left no failure record, but srun reported its exit.
        before = [end for end in near if 0 <= end.order < leader.order and _is_uninformative(end, evidence)]
        return min(before, key=lambda end: end.order, default=leader)
    if all(end.order >= 0 for end in near):
        return min(near, key=lambda end: (end.order, _CONFIDENCE_ORDER[end.confidence]))
    return min(
        near,
        key=lambda end: (_CONFIDENCE_ORDER[end.confidence], end.order if end.order >= 0 else _LAST_ORDER, end.t or "~"),
    )


def _is_uninformative(end: RankExit, seen: AttemptEvidence) -> bool:
    return all(failure.rank != end.rank for failure in seen.failures)


def _signalled_at(seen: AttemptEvidence, word: Evidence | None) -> str:
    """Return when Slurm or a user terminated the ranks; "" if unknown."""
    told = [one.t for one in seen.signals if one.signal in ("SIGTERM", "SIGINT")]
    return min([*told, *([word.t] if word and word.t else [])], default="")


def _as_reaction(end: RankExit, told_at: str) -> RankExit:
    """Give a fault after the termination signal the role `end`: it is a consequence."""
    gap = log_timestamps.seconds_between(told_at, end.t)
    if end.role == "fault" and gap is not None and gap > -0.5 and end.kind not in ("node", "gpu"):
        return msgspec.structs.replace(end, role="end")
    return end


def _as_cascade(end: RankExit, complained: set[int]) -> RankExit:
    """Give an unexplained exit the role `cascade` if the rank complained about a lost peer."""
    if end.role == "fault" and end.kind == "unknown" and not end.is_exception and end.rank in complained:
        return msgspec.structs.replace(end, role="cascade", kind="network")
    return end


def _with_log_line(end: RankExit, lines: Sequence[RankExit]) -> RankExit:
    """Complete an exit without an explanation from a log line of the same rank or node, or of Slurm."""
    if end.confidence != "guess":
        return end
    fitting = [line for line in lines if _matches_exit(line, end)]
    best = min(fitting, key=lambda line: (line.rank != end.rank, _CONFIDENCE_ORDER[line.confidence]), default=None)
    if best is None or _CONFIDENCE_ORDER[best.confidence] > _CONFIDENCE_ORDER[end.confidence]:
        return end
    return msgspec.structs.replace(
        end,
        kind=best.kind,
        confidence=best.confidence,
        rule=best.rule,
        description=best.description,
        source=best.source,
        t=end.t or best.t,
        is_local=best.is_local and (best.rank is not None or bool(best.node)),
        node=best.node or end.node,
        fingerprint=best.fingerprint,
    )


def _matches_exit(line: RankExit, end: RankExit) -> bool:
    if (codes := patterns.explained_codes(line.rule)) and end.exit_code not in codes:
        return False
    gap = log_timestamps.seconds_between(line.t, end.t)
    if gap is not None and not -log_timestamps.TOLERANCE_S <= gap <= _EXPLAINS_S:
        return False
    if line.rank is not None:
        return line.rank == end.rank
    return not line.node or not end.node or line.node == end.node


def _is_outranked(line: Evidence, merged: Sequence[RankExit]) -> bool:
    """Whether the rank that wrote a line ended with an exception, which outranks its earlier lines."""
    return line.rank is not None and any(
        end.rank == line.rank and end.is_exception and end.role == "fault" for end in merged
    )


def _silent_ranks(merged: Sequence[RankExit], cascade: Sequence[RankExit], seen: AttemptEvidence) -> tuple[int, ...]:
    """Return the ranks without a complaint or fault while others complained, if they are at most half."""
    if not cascade:
        return ()
    spoke = {end.rank for end in cascade} | {end.rank for end in merged if end.role == "fault"}
    silent = [rank for rank in range(len(seen.hosts)) if rank not in spoke]
    return tuple(silent) if len(silent) <= max(1, len(seen.hosts) // 2) else ()


def _silent_nodes(merged: Sequence[RankExit], seen: AttemptEvidence) -> tuple[str, ...]:
    """Return the nodes without a reported exit of a rank, if srun reported exits of other nodes."""
    reported = {end.rank for end in merged}
    if not any(end.order >= 0 for end in merged) or len(seen.hosts) > 100_000:
        return ()
    heard = {seen.hosts[rank] for rank in reported if rank is not None and rank < len(seen.hosts)}
    return blamable_nodes(set(seen.hosts) - heard, seen)


def _one_exit_per_rank(seen: AttemptEvidence) -> list[RankExit]:
    """Return one exit per rank: its exception if there is one, with the time and order of other sources."""
    place = f"attempts/{seen.attempt}"
    words = [rank_exits.exit_from_failure(one, f"{place}/failures/{one.rank}.json") for one in seen.failures]
    if seen.first_failure and all(end.rank != seen.first_failure.rank for end in words):
        code, rank, node = seen.first_failure
        words.append(rank_exits.exit_from_code(code, rank, node, "", f"{place}/first_failure"))
    known: dict[int | None, list[RankExit]] = {}
    for end in [*words, *seen.rank_exits]:
        known.setdefault(end.rank, []).append(end)
    nameless = known.pop(None, [])
    return [*nameless, *map(_merge_exits, known.values())]


def _merge_exits(group: Sequence[RankExit]) -> RankExit:
    """Merge the exits of one rank from several sources."""
    exceptions = [end for end in group if end.is_exception]
    coded = [end for end in group if end.exit_code is not None]
    best = exceptions[0] if exceptions else min(coded or group, key=lambda end: _CONFIDENCE_ORDER[end.confidence])
    known = [end.t for end in group if end.t]
    return msgspec.structs.replace(
        best,
        t=min((end.t for end in coded if end.t), default=min(known, default="")),
        order=max(end.order for end in group),
        exit_code=best.exit_code if best.exit_code is not None else next((end.exit_code for end in coded), None),
        node=best.node or next((end.node for end in group if end.node), ""),
    )


def _exit_from_evidence(one: Evidence) -> RankExit:
    at = _SRUN_LINE.search(one.source)
    return RankExit(
        rank=one.rank,
        node=one.node,
        t=one.t,
        source=one.source,
        description=one.text,
        kind=one.kind,
        role=one.role,
        confidence=patterns.confidence_of(one.rule),
        rule=one.rule,
        is_local=patterns.blames_node(one.rule),
        order=int(at[1]) if at else -1,
        fingerprint=fingerprint.fingerprint_exit(fingerprint.normalize_message(one.text)),
    )


def to_evidence(end: RankExit) -> Evidence:
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
