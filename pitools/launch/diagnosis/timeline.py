"""What came first, over all ranks: from clocks that differ a little, and from orders that need none.

`first_failure` is made by whoever is first, and srun's messages come as ranks end: both are orders on one clock. Times
of different nodes are compared with a tolerance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from pitools.launch import fingerprint
from pitools.launch.diagnosis import log_timestamps, patterns, rank_exits
from pitools.launch.diagnosis.evidence import Seen
from pitools.launch.diagnosis.rank_exits import End
from pitools.run.attempt_records import Evidence

_SURE = {"certain": 0, "likely": 1, "guess": 2}
_EXPLAINS_S = 600.0  # a line that was written longer before an end has nothing to do with it
_LAST = 1 << 30
_SRUN_LINE = re.compile(r"/srun\.err:(\d+)$")


class Order(NamedTuple):
    """An attempt's faults in order.

    root: the first of all. word: Slurm's own statement, the earliest. cascade: complaints about others, first first.
    silent: ranks that said nothing while others complained; silent_nodes: nodes whose ranks' ends not even srun
    reports. lost_nodes: those that Slurm, or the job's first node, cannot reach. ends: how each rank ended.
    """

    root: End | None
    word: Evidence | None
    cascade: tuple[End, ...]
    silent: tuple[int, ...]
    silent_nodes: tuple[str, ...]
    lost_nodes: tuple[str, ...]
    ends: tuple[End, ...]


def of(seen: Seen) -> Order:
    """The order of what was seen."""
    word = min((one for one in seen.evidence if one.role == "word"), key=lambda one: one.t or "~", default=None)
    complained = {one.rank for one in seen.evidence if one.role == "cascade" and one.rank is not None}
    merged = [_aborted(_echo(end, _told_at(seen, word)), complained) for end in _by_rank(seen)]
    lines = [_as_end(one) for one in seen.evidence if one.role == "fault" and not _is_outranked(one, merged)]
    lines = [line for line in lines if _echo(line, _told_at(seen, word)).role == "fault"]
    cascade = [end for end in merged if end.role == "cascade"]
    cascade += [_as_end(one) for one in seen.evidence if one.role == "cascade"]
    lost = [line.node for line in lines if line.rule in ("srun-node-failure", "node-silent") and line.node]
    return Order(
        root=_root(merged, lines, seen),
        word=word,
        cascade=tuple(sorted(cascade, key=lambda end: end.t or "~")),
        silent=_silent(merged, cascade, seen),
        silent_nodes=_silent_nodes(merged, seen),
        lost_nodes=some(lost, seen),
        ends=tuple(merged),
    )


def some(nodes: Iterable[str], seen: Seen) -> tuple[str, ...]:
    """Nodes to blame: never all of a job that has several."""
    unique = tuple(sorted(set(nodes) - {""}))
    return () if 1 < len(set(seen.hosts)) <= len(unique) else unique


def _root(merged: Sequence[End], lines: Sequence[End], seen: Seen) -> End | None:
    """The first fault. What a rank's end leaves open, a line in a log may explain; alone it decides only at last."""
    faults = [_explained(end, lines) for end in merged if end.role == "fault"]
    lost = [line for line in lines if line.rule in ("srun-node-failure", "node-silent")]
    root = first(faults, seen)
    if lost and (root is None or root.sure != "certain"):
        return first(lost, seen)
    return root or first([line for line in lines if not patterns.codes(line.rule)], seen)


def first(faults: Sequence[End], seen: Seen) -> End | None:
    """The first of some faults: by who was first on one clock, else by time, else by which says most."""
    if not faults:
        return None
    earliest = min((end.t for end in faults if end.t), default="")
    near = [
        end for end in faults if (log_timestamps.seconds_between(earliest, end.t) or 0.0) <= log_timestamps.TOLERANCE_S
    ]
    leader = next((end for end in near if seen.first and end.rank == seen.first.rank), None)
    if leader:
        # A rank that was killed left no word, but srun saw it go.
        before = [end for end in near if 0 <= end.order < leader.order and _is_wordless(end, seen)]
        return min(before, key=lambda end: end.order, default=leader)
    if all(end.order >= 0 for end in near):
        return min(near, key=lambda end: (end.order, _SURE[end.sure]))
    return min(near, key=lambda end: (_SURE[end.sure], end.order if end.order >= 0 else _LAST, end.t or "~"))


def _is_wordless(end: End, seen: Seen) -> bool:
    return all(failure.rank != end.rank for failure in seen.failures)


def _told_at(seen: Seen, word: Evidence | None) -> str:
    """When the ranks were told to end, by Slurm or a person; "" if that is not known."""
    told = [one.t for one in seen.signals if one.signal in ("SIGTERM", "SIGINT")]
    return min([*told, *([word.t] if word and word.t else [])], default="")


def _echo(end: End, told_at: str) -> End:
    """A fault that follows on being told to end is how that rank ended, and no beginning."""
    gap = log_timestamps.seconds_between(told_at, end.t)
    if end.role == "fault" and gap is not None and gap > -0.5 and end.kind not in ("node", "gpu"):
        return msgspec.structs.replace(end, role="end")
    return end


def _aborted(end: End, complained: set[int]) -> End:
    """An end that says nothing by itself, of a rank that complained about others: their doing."""
    if end.role == "fault" and end.kind == "unknown" and not end.is_exception and end.rank in complained:
        return msgspec.structs.replace(end, role="cascade", kind="network")
    return end


def _explained(end: End, lines: Sequence[End]) -> End:
    """An end that says little, with what a line of the same rank or node, or of Slurm, says of it."""
    if end.sure != "guess":
        return end
    fitting = [line for line in lines if _fits(line, end)]
    best = min(fitting, key=lambda line: (line.rank != end.rank, _SURE[line.sure]), default=None)
    if best is None or _SURE[best.sure] > _SURE[end.sure]:
        return end
    return msgspec.structs.replace(
        end,
        kind=best.kind,
        sure=best.sure,
        rule=best.rule,
        what=best.what,
        source=best.source,
        t=end.t or best.t,
        is_local=best.is_local and (best.rank is not None or bool(best.node)),
        node=best.node or end.node,
        fingerprint=best.fingerprint,
    )


def _fits(line: End, end: End) -> bool:
    if (codes := patterns.codes(line.rule)) and end.exit_code not in codes:
        return False
    gap = log_timestamps.seconds_between(line.t, end.t)
    if gap is not None and not -log_timestamps.TOLERANCE_S <= gap <= _EXPLAINS_S:
        return False
    if line.rank is not None:
        return line.rank == end.rank
    return not line.node or not end.node or line.node == end.node


def _is_outranked(line: Evidence, merged: Sequence[End]) -> bool:
    """Whether the rank that wrote a line had a last word, which goes over any line that it wrote before."""
    return line.rank is not None and any(
        end.rank == line.rank and end.is_exception and end.role == "fault" for end in merged
    )


def _silent(merged: Sequence[End], cascade: Sequence[End], seen: Seen) -> tuple[int, ...]:
    """Ranks that had nothing to say while others complained, if those are the few."""
    if not cascade:
        return ()
    spoke = {end.rank for end in cascade} | {end.rank for end in merged if end.role == "fault"}
    silent = [rank for rank in range(len(seen.hosts)) if rank not in spoke]
    return tuple(silent) if len(silent) <= max(1, len(seen.hosts) // 2) else ()


def _silent_nodes(merged: Sequence[End], seen: Seen) -> tuple[str, ...]:
    """Nodes of whose ranks nobody has reported an end, where srun reported that of others."""
    reported = {end.rank for end in merged}
    if not any(end.order >= 0 for end in merged) or len(seen.hosts) > 100_000:
        return ()
    heard = {seen.hosts[rank] for rank in reported if rank is not None and rank < len(seen.hosts)}
    return some(set(seen.hosts) - heard, seen)


def _by_rank(seen: Seen) -> list[End]:
    """One end for each rank: its exception where there is one, with the time and order that others know."""
    place = f"attempts/{seen.attempt}"
    words = [rank_exits.of_failure(one, f"{place}/failures/{one.rank}.json") for one in seen.failures]
    if seen.first and all(end.rank != seen.first.rank for end in words):
        code, rank, node = seen.first
        words.append(rank_exits.of_code(code, rank, node, "", f"{place}/first_failure"))
    known: dict[int | None, list[End]] = {}
    for end in [*words, *seen.ends]:
        known.setdefault(end.rank, []).append(end)
    nameless = known.pop(None, [])
    return [*nameless, *map(_merged, known.values())]


def _merged(group: Sequence[End]) -> End:
    """What several sources say of one rank's end, as one."""
    exceptions = [end for end in group if end.is_exception]
    coded = [end for end in group if end.exit_code is not None]
    best = exceptions[0] if exceptions else min(coded or group, key=lambda end: _SURE[end.sure])
    known = [end.t for end in group if end.t]
    return msgspec.structs.replace(
        best,
        t=min((end.t for end in coded if end.t), default=min(known, default="")),
        order=max(end.order for end in group),
        exit_code=best.exit_code if best.exit_code is not None else next((end.exit_code for end in coded), None),
        node=best.node or next((end.node for end in group if end.node), ""),
    )


def _as_end(one: Evidence) -> End:
    at = _SRUN_LINE.search(one.source)
    return End(
        rank=one.rank,
        node=one.node,
        t=one.t,
        source=one.source,
        what=one.what,
        kind=one.kind,
        role=one.role,
        sure=patterns.sure_of(one.rule),
        rule=one.rule,
        is_local=patterns.is_local(one.rule),
        order=int(at[1]) if at else -1,
        fingerprint=fingerprint.of_end(fingerprint.normal(one.what)),
    )


def as_evidence(end: End) -> Evidence:
    """An end as evidence."""
    return Evidence(
        t=end.t,
        source=end.source,
        what=end.what,
        kind=end.kind,
        rank=end.rank,
        node=end.node,
        role=end.role,
        rule=end.rule,
    )
