"""Suspicion: what speaks against a node that is not drained. It moves the choice of nodes, and never drains one. Pure.

The blames of a user's runs suspect at most MAX_NODES_OF_USER nodes, and alone never strongly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from pitools.core.output import printable
from pitools.core.record import Record
from pitools.node.bench.compare import BenchResult
from pitools.node.blames import MAX_NODES_OF_USER, NodeBlame
from pitools.node.control.incidents import EntryKind, Incident
from pitools.node.types import NodeReport, age_s, is_at_least
from pitools.run.attempt_records import Confidence

STRONG = 0.75

DAY_S = 86400.0
"""A blame fades to nothing in this time; older results of benches are none."""

_WEIGHTS: dict[Confidence, float] = {"certain": 0.5, "likely": 0.3, "guess": 0.1}
_MAX_OF_SOURCE = 0.5  # what one user, or one report without a finding that drains, adds to a score at most
_DRAINS, _WATCHED, _WARNED, _SLOW = 1.0, 0.4, 0.2, 0.4

Source = Literal["report", "incident", "bench", "run"]


class SuspicionReason(Record, frozen=True, kw_only=True, tag="pit.node-suspicion/1"):
    """One thing that speaks against a node. user: whose run found it, else "". weight: what it adds, at most."""

    node: str
    source: Source
    weight: float
    at: str
    message: str
    user: str = ""


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """All that speaks against a node. score: 0 to about 4. users: how many suspect it. reasons: the newest first.

    is_drained: an incident keeps jobs away from it already.
    """

    node: str
    score: float
    users: int
    reasons: tuple[SuspicionReason, ...]
    is_drained: bool = False

    @property
    def is_strong(self) -> bool:
        """Whether something drains it, or its data were wrong, or several users suspect it."""
        return self.score >= STRONG and (self.users > 1 or any(one.weight >= _DRAINS for one in self.reasons))

    @property
    def other_reasons(self) -> list[SuspicionReason]:
        """The reasons that are neither a finding of the node's report nor an incident."""
        return [one for one in self.reasons if one.source in ("run", "bench")]

    @property
    def summary(self) -> str:
        """How many users suspect it, and the newest of the other reasons, else of all."""
        return f"users: {self.users}; {(self.other_reasons or self.reasons)[0].message}"


def suspicions(
    now: str,
    reports: Mapping[str, NodeReport],
    incidents: Iterable[Incident],
    bench: Iterable[BenchResult],
    blames: Iterable[NodeBlame],
) -> dict[str, Suspicion]:
    """Return the suspected nodes. Pure. reports: fresh ones. bench, blames: oldest first, of any age.

    Reasons older than the node's last return are dropped.
    """
    incidents = list(incidents)
    returned = {one.node: one.over_at for one in incidents if one.outcome == EntryKind.RETURNED}
    drained = {one.node for one in incidents if one.phase not in ("opening", "over")}
    reasons = [*_of_site(now, reports, incidents, bench), *_of_runs(now, blames)]
    by_node: dict[str, list[SuspicionReason]] = {}
    for one in sorted(reasons, key=lambda one: one.at, reverse=True):
        if one.weight and one.at > returned.get(one.node, ""):
            by_node.setdefault(one.node, []).append(one)
    return {node: _suspicion(node, found, is_drained=node in drained) for node, found in by_node.items()}


def _suspicion(node: str, reasons: Sequence[SuspicionReason], *, is_drained: bool) -> Suspicion:
    by_source: dict[tuple[str, str], list[float]] = {}
    for one in reasons:
        by_source.setdefault((one.source, one.user), []).append(one.weight)
    score = sum(max(*weights, min(_MAX_OF_SOURCE, sum(weights))) for weights in by_source.values())
    users = len({one.user for one in reasons if one.source == "run"})
    return Suspicion(node=node, score=round(score, 3), users=users, reasons=tuple(reasons), is_drained=is_drained)


def _of_site(
    now: str, reports: Mapping[str, NodeReport], incidents: Iterable[Incident], bench: Iterable[BenchResult]
) -> Iterator[SuspicionReason]:
    """Yield failed findings, open incidents, and measures whose newest result is slow or wrong.

    A check that drains nothing, and fails on more than half of several nodes, says nothing of a node.
    """

    def reason(node: str, source: Source, weight: float, at: str, message: str) -> SuspicionReason:
        return SuspicionReason(node=node, source=source, weight=weight, at=at, message=printable(message)[:200])

    failed = {
        (node, one.check): one
        for node, report in reports.items()
        for one in report.findings
        if one.state == "failed" and not one.is_shadow and is_at_least(one.action, "report")
    }
    nodes_of = Counter(check for _, check in failed)
    for (node, check), one in failed.items():
        drains = is_at_least(one.action, "drain-after-job")
        if drains or not 2 * nodes_of[check] > len(reports) > 1:
            weight = _DRAINS if drains else _WATCHED if one.level == "critical" else _WARNED
            yield reason(node, "report", weight, one.evidence_at, f"{check}: {one.message}")
    for case in incidents:
        if case.phase != "over":
            yield reason(case.node, "incident", _DRAINS, case.opened_at, f"{case.incident}: {case.message}")
    newest = {(one.node, one.measure): one for one in bench if age_s(one.measured_at, now) < DAY_S}
    for result in newest.values():
        if result.verdict in ("slow", "wrong"):
            weight = _DRAINS if result.verdict == "wrong" else _SLOW
            yield reason(result.node, "bench", weight, result.measured_at, f"{result.measure} is {result.verdict}")


def _of_runs(now: str, blames: Iterable[NodeBlame]) -> Iterator[SuspicionReason]:
    """Yield the newest blame of each run and node, of at most MAX_NODES_OF_USER nodes of a user, the newest first."""
    recent = sorted((one for one in blames if age_s(one.at, now) < DAY_S), key=lambda one: one.at)
    newest = {(one.user, one.run, one.node): one for one in recent}
    nodes_of: dict[str, set[str]] = {}
    for one in sorted(newest.values(), key=lambda one: one.at, reverse=True):
        nodes = nodes_of.setdefault(one.user, set())
        if one.node in nodes or len(nodes) < MAX_NODES_OF_USER:
            nodes.add(one.node)
            weight = round(_WEIGHTS[one.confidence] * min(1.0, 1.0 - age_s(one.at, now) / DAY_S), 3)
            message = f"{one.kind}, {one.confidence}{f': {one.rule}' if one.rule else ''}, run {one.run}"
            yield SuspicionReason(node=one.node, source="run", weight=weight, at=one.at, message=message, user=one.user)
