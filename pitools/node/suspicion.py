"""Suspicion: what speaks against a node that is not drained. It moves the choice of nodes, and never drains one.

SPOOL/suspicions/UID.*.jsonl    pit.node-run-record/1: what a run of a user found, written by the user's own processes

The controller makes the folder, with mode 1777: `chmod 0755` on it ends what users report. Who owns a file is its user,
whatever its name; nobody can take a name before, as a part of it is random. A user's records suspect at most
_MAX_NODES_OF_USER nodes, and alone never strongly. A user who fills the file system ends all reports, as quotas or a
file system of the folder's own prevent.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import takewhile
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from pitools.core import timestamps, trust, units
from pitools.core.output import printable
from pitools.core.record import Record, decode_json
from pitools.node import spool as spool_folder
from pitools.node.bench.compare import BenchResult
from pitools.node.bench.history import read_past
from pitools.node.check.config import CONFIG_PATH, NodeConfig, load_config
from pitools.node.control.incidents import EntryKind, Incident, read_incidents
from pitools.node.types import NAME, NodeReport, age_s, is_at_least
from pitools.run.attempt_records import Cause, CauseKind, Confidence
from pitools.site.schema import Site

STRONG = 0.75
COST_OF_SCORE = 10.0
"""Added node cost of a weak suspicion, for each point of its score; a strong one leaves the node out if it can."""

_DAY_S = 86400.0  # a run's record fades to nothing in this time; older results of benches are none
_WEIGHTS: dict[Confidence, float] = {"certain": 0.5, "likely": 0.3, "guess": 0.1}
_MAX_OF_SOURCE = 0.5  # what one user, or one report without a finding that drains, adds to a score at most
_DRAINS, _WATCHED, _WARNED, _SLOW = 1.0, 0.4, 0.2, 0.4
_MAX_NODES_OF_USER = 8
_TIMEOUT_S, _READ_S = 5.0, 1.0
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)

Source = Literal["report", "incident", "bench", "run"]
Value = TypeVar("Value")


class RunRecord(Record, frozen=True, kw_only=True, tag="pit.node-run-record/1"):
    """What the recovery of a run found: a cause that blames this node.

    rule: the name of the pattern that matched, or Slurm's state; never a line of a log, as every user can read it.
    user: by the file's owner, whatever the line says.
    """

    node: str
    kind: CauseKind
    confidence: Confidence
    run: str
    at: str
    rule: str = ""
    user: str = ""


class SuspicionReason(Record, frozen=True, kw_only=True, tag="pit.node-suspicion/1"):
    """One thing that speaks against a node. user: whose run found it, else "". weight: what it adds, at most."""

    node: str
    source: Source
    weight: float
    at: str
    message: str
    user: str = ""


class Suspicion(Record, frozen=True, kw_only=True, tag="pit.suspected-node/1"):
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
    runs: Iterable[RunRecord],
) -> dict[str, Suspicion]:
    """Return the suspected nodes. Pure. reports: fresh ones. bench, runs: oldest first, of any age.

    What was found before a node returned from its last incident, with its checks passed, counts no more.
    """
    incidents = list(incidents)
    returned = {one.node: one.over_at for one in incidents if one.outcome == EntryKind.RETURNED}
    drained = {one.node for one in incidents if one.phase not in ("opening", "over")}
    reasons = [*_of_site(now, reports, incidents, bench), *_of_runs(now, runs)]
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
    newest = {(one.node, one.measure): one for one in bench if age_s(one.measured_at, now) < _DAY_S}
    for result in newest.values():
        if result.verdict in ("slow", "wrong"):
            weight = _DRAINS if result.verdict == "wrong" else _SLOW
            yield reason(result.node, "bench", weight, result.measured_at, f"{result.measure} is {result.verdict}")


def _of_runs(now: str, records: Iterable[RunRecord]) -> Iterator[SuspicionReason]:
    """Yield the newest record of each run and node, of at most _MAX_NODES_OF_USER nodes of a user, the newest first."""
    recent = sorted((one for one in records if age_s(one.at, now) < _DAY_S), key=lambda one: one.at)
    newest = {(one.user, one.run, one.node): one for one in recent}
    nodes_of: dict[str, set[str]] = {}
    for one in sorted(newest.values(), key=lambda one: one.at, reverse=True):
        nodes = nodes_of.setdefault(one.user, set())
        if one.node in nodes or len(nodes) < _MAX_NODES_OF_USER:
            nodes.add(one.node)
            weight = round(_WEIGHTS[one.confidence] * min(1.0, 1.0 - age_s(one.at, now) / _DAY_S), 3)
            message = f"{one.kind}, {one.confidence}{f': {one.rule}' if one.rule else ''}, run {one.run}"
            yield SuspicionReason(node=one.node, source="run", weight=weight, at=one.at, message=message, user=one.user)


def read_suspicions(config: NodeConfig, nodes: Collection[str] | None = None) -> dict[str, Suspicion]:
    """Return the suspected nodes of a cluster. nodes: those that exist; None for those that ever reported.

    Raises PitError, also for a spool that others than this user and root could have written.
    """
    folder, now = Path(config.spool), timestamps.now_rfc3339()
    known = spool_folder.reported_nodes(folder) if nodes is None else set(nodes)
    reports, _ = spool_folder.read_reports(folder, known)
    max_age_s = units.parse_duration(config.control.max_report_age)
    fresh = {node: one for node, one in reports.items() if age_s(one.checked_at, now) <= max_age_s}
    journal = read_incidents(folder / "control" / "journal.jsonl")
    incidents = [one for one in journal.incidents.values() if one.node in known]
    bench = read_past(folder, known.intersection(_benched_nodes(folder)))
    return suspicions(now, fresh, incidents, bench, read_run_records(folder, known))


def _benched_nodes(spool: Path) -> list[str]:
    """Return the nodes with results of the last day."""
    with contextlib.suppress(OSError), os.scandir(spool / "bench") as entries:
        return [Path(one.name).stem for one in entries if one.stat().st_mtime > time.time() - _DAY_S]
    return []


def read_run_records(spool: Path, nodes: Collection[str]) -> list[RunRecord]:
    """Return what users' runs found of these nodes; what is foreign, damaged or hostile is left out.

    After twice _READ_S what was not read yet is left out, too: no user's files keep a run from the rest.
    """
    kept, _ = spool_folder.suspicion_files(spool, time.monotonic() + _READ_S)
    until = time.monotonic() + _READ_S
    in_time = takewhile(lambda _: time.monotonic() <= until, kept)
    return [record for uid, path in in_time for record in _read_file(path, uid, nodes)]


def _read_file(path: Path, uid: int, nodes: Collection[str]) -> list[RunRecord]:
    try:
        lines = spool_folder.read_owned(path, (uid,), spool_folder.MAX_SUSPICION_BYTES).splitlines()
    except (OSError, ValueError):
        return []
    records: list[RunRecord] = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):
            one = decode_json(line, RunRecord)
            if one.node in nodes and NAME.fullmatch(one.run) and _TIME.fullmatch(one.at):
                records.append(one)
    user = trust.user_name(uid) if records else ""
    return [msgspec.structs.replace(one, rule=printable(one.rule)[:80], user=user) for one in records]


def suspicions_of_site(site: Site, nodes: Collection[str] | None = None) -> dict[str, Suspicion]:
    """Return the suspected nodes of a site; {} without a spool, or with one that cannot be read, which is printed.

    nodes: as in `read_suspicions`.
    """
    problem = "no suspicion of nodes is known"
    return _with_config(site, lambda config: read_suspicions(config, nodes), problem) or {}


def costs_at_site(site: Site, nodes: Collection[str]) -> dict[str, float]:
    """Return the cost to add to each suspected node in a choice of these; infinity for a strong suspicion."""
    suspected = suspicions_of_site(site, nodes)
    return {node: math.inf if one.is_strong else COST_OF_SCORE * one.score for node, one in suspected.items()}


def report_cause(site: Site, nodes: Iterable[str], cause: Cause, run: str) -> None:
    """Record in the site's spool, if it has one, that a run blames these nodes. Never raises, never takes long."""
    rule = (cause.evidence[0].rule if cause.evidence else "") or cause.state
    now = timestamps.now_rfc3339()
    records = [
        RunRecord(node=node, kind=cause.kind, confidence=cause.confidence, run=run, at=now, rule=rule)
        for node in nodes
        if NAME.fullmatch(node)
    ]
    if records:
        _with_config(
            site, lambda config: write_run_records(Path(config.spool), records), "other users' runs are not warned"
        )


def write_run_records(spool: Path, records: Sequence[RunRecord]) -> None:
    """Write a new file of this user, with as many records as count. Raises OSError."""
    path = spool / spool_folder.SUSPICIONS / f"{os.geteuid()}.{secrets.token_hex(8)}.jsonl"
    lines = [msgspec.json.encode(record) + b"\n" for record in records[:_MAX_NODES_OF_USER]]
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except (FileNotFoundError, PermissionError):  # this site does not collect them
        return
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o644)  # under any umask
        file.writelines(lines)


def _config_of_site(site: Site) -> NodeConfig | None:
    """Return the site's file of checks; None if it has none with a spool here."""
    path = Path(site.node.config) if site.node.config else CONFIG_PATH
    if site.scheduler != "slurm" or not (site.node.config or (site.connection.kind == "local" and path.exists())):
        return None
    config = load_config(path)
    return config if config.spool else None


def _with_config(site: Site, function: Callable[[NodeConfig], Value], problem: str) -> Value | None:
    """Return the function's value for the site's file of checks; None without one, after an error, or after _TIMEOUT_S.

    The file system may hang, and a run must not.
    """
    result: Future[Value | None] = Future()

    def call() -> None:
        try:
            config = _config_of_site(site)
            result.set_result(function(config) if config else None)
        except Exception as error:  # noqa: BLE001  # raised by Future.result
            result.set_exception(error)

    threading.Thread(target=call, name="suspicion", daemon=True).start()
    try:
        return result.result(timeout=_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001  # a run does without
        print(f"pit: {problem}: {str(error) or f'no answer within {_TIMEOUT_S:g} s'}", file=sys.stderr)
        return None
