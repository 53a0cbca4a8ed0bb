"""Find the slow ranks of a run, by its step logs, traces and events, and report their nodes to `pit node`.

They end no attempt, and so are no cause of one: `pit launch why` prints them beside it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pitools.core import hostlist
from pitools.core.errors import PitError
from pitools.core.record import decode_json
from pitools.node.site_suspicion import report_cause
from pitools.run import run_folder
from pitools.run.attempt_records import Cause, CauseKind, Decision, Evidence
from pitools.site.connect import client
from pitools.site.schema import Site

if TYPE_CHECKING:
    from pitools.perf.stragglers import Straggler

_MAX_BYTES = 64 << 20  # of step logs, or traces, that are read to explain a run
_DAY_S = 86400.0  # as long as a suspicion lasts
# `host` is not among them: rank 0 alone writes logs and checkpoints.
_OF_NODE: dict[str, CauseKind] = {"compute": "node", "input": "node", "network": "network"}


def hardware_classes(nodes: Set[str], site: Site) -> tuple[dict[str, str], str]:
    """Return the GPUs and CPUs of each node, none where Slurm does not say, and a note for the user, "" without one."""
    if site.scheduler != "slurm" or not nodes:
        return {}, ""
    try:
        known = client(site).nodes(hostlist.fold(nodes))
    except PitError as error:
        return {}, f"all nodes count as one kind of hardware: {error.message}"
    classes = {node.node: f"{node.gpus} GPUs {node.gpu_type}, {node.cpus} CPUs" for node in known if node.node in nodes}
    kinds = len(set(classes.values()))
    return classes, f"{kinds} kinds of hardware, compared apart" if kinds > 1 else ""


def describe_slow_ranks(run_dir: Path, site: Site) -> Iterator[str]:
    """Yield a line for each slow rank of a run's last attempt, with its node. Large logs and traces are not read."""
    attempt = run_folder.last_attempt(run_dir)
    if attempt is None:
        return
    described: set[int] = set()
    for rank, line in (
        *_by_step_logs(run_dir, attempt, site),
        *_by_traces(run_dir, attempt),
        *_by_events(run_dir, attempt),
    ):
        if rank not in described:
            described.add(rank)
            yield line


def _by_step_logs(run_dir: Path, attempt: Path, site: Site) -> Iterator[tuple[int, str]]:
    logs = list((attempt / "steps").glob("*.jsonl"))
    if len(logs) < 2 or _size(logs) > _MAX_BYTES:
        return
    from pitools.perf.stragglers import find_stragglers, read_rank_times

    with contextlib.suppress(PitError):  # too few steps
        times = read_rank_times(run_dir)
        classes, _ = hardware_classes(set(times.nodes.values()), site)
        for one in find_stragglers(times, classes=classes):
            text = f"its {one.cause} takes {one.effect:.1%} of a step longer, in {one.steps} steps"
            yield one.rank, f"rank {one.rank}{_on(one.node)} is slow: {text}; see: pit perf stragglers {run_dir.name}"


def _by_traces(run_dir: Path, attempt: Path) -> Iterator[tuple[int, str]]:
    windows = [path for path in (attempt / "traces").glob("*-*") if re.fullmatch(r"\d+-\d+", path.name)]
    if not windows:
        return
    newest = max(windows, key=lambda path: int(path.name.partition("-")[0]))
    if _size(newest.iterdir()) > _MAX_BYTES:
        return
    from pitools.perf.attribute.buckets import split_steps
    from pitools.perf.attribute.verdict import judge
    from pitools.perf.read.files import find_files
    from pitools.perf.read.read import read_table
    from pitools.perf.stragglers import read_nodes

    with contextlib.suppress(PitError):
        verdict = judge(split_steps(read_table(find_files([newest]))))
        if verdict.rank is not None:
            node = read_nodes(run_dir).get(verdict.rank, "")
            text = f"{verdict.evidence[0]}, in {verdict.steps} traced steps"
            yield verdict.rank, f"rank {verdict.rank}{_on(node)} is slow: {text}; see: pit perf attribute {newest}"


def _by_events(run_dir: Path, attempt: Path) -> Iterator[tuple[int, str]]:
    for detail in _straggler_events(run_dir, attempt):
        times = f"{detail['own_s']:g} s of its own a step, the others {detail['others_s']:g} s"
        rank, node = int(detail["rank"]), str(detail["node"])
        yield rank, f"rank {rank}{_on(node)} was slow at step {detail['step']}: {times}"


def _straggler_events(run_dir: Path, attempt: Path) -> Iterator[dict[str, int | float | str]]:
    """Yield what the job itself recorded of slow ranks, see `launch/job/straggler.py`."""
    with contextlib.suppress(OSError), (run_dir / "events.jsonl").open("rb") as file:
        for line in file:
            if b'"straggler"' in line:
                with contextlib.suppress(msgspec.DecodeError):
                    event = decode_json(line, run_folder.Event)
                    is_whole = {"rank", "node", "step", "own_s", "others_s"} <= event.detail.keys()
                    if event.event == "straggler" and event.detail.get("attempt") == attempt.name and is_whole:
                        yield event.detail


def report_events(site: Site, run_dir: Path, attempt: Path) -> None:
    """Report the nodes that an attempt's job itself recorded as slow. Never raises."""
    nodes = {str(detail["node"]) for detail in _straggler_events(run_dir, attempt)}
    _report(site, run_dir, attempt, nodes, "node", "slow-rank")


def report_stragglers(site: Site, run_dir: Path, stragglers: Iterable[Straggler]) -> set[str]:
    """Report the nodes of slow ranks of a run of this user's that ran in the last day; return them. Never raises."""
    attempt = run_folder.last_attempt(run_dir)
    try:
        newest = max((path.stat().st_mtime for path in attempt.glob("steps/*.jsonl")), default=0) if attempt else 0
        is_own = run_dir.stat().st_uid == os.geteuid()
    except OSError:
        return set()
    reported: set[str] = set()
    if attempt and is_own and time.time() - newest < _DAY_S:
        for one in stragglers:
            if one.node and one.cause in _OF_NODE:
                reported |= _report(site, run_dir, attempt, {one.node}, _OF_NODE[one.cause], f"slow-{one.cause}")
    return reported


def _report(site: Site, run_dir: Path, attempt: Path, nodes: set[str], kind: CauseKind, rule: str) -> set[str]:
    """Report nodes as a guess: the program may give them more work; return them.

    All nodes of a run are none, and a node that the run blames for a failure has a record that weighs more, which this
    one would replace.
    """
    nodes = nodes - {""}
    with contextlib.suppress(OSError):
        if nodes < set((attempt / "hostfile").read_text().split()) and (nodes := nodes - _blamed_nodes(run_dir)):
            evidence = Evidence(t="", source="steps", text="", kind=kind, rule=rule)
            cause = Cause(attempt=attempt.name, kind=kind, confidence="guess", reason="slow", evidence=(evidence,))
            report_cause(site, nodes, cause, run_dir.name)
            return nodes
    return set()


def _blamed_nodes(run_dir: Path) -> set[str]:
    blamed: set[str] = set()
    for attempt in run_folder.attempt_dirs(run_dir):
        if cause := run_folder.read_or_none(attempt / "cause.json", Cause):
            blamed.update(cause.nodes)
        if decision := run_folder.read_or_none(attempt / "decision.json", Decision):
            blamed.update(decision.exclude)
    return blamed


def _on(node: str) -> str:
    return f" on {node}" if node else ""


def _size(paths: Iterable[Path]) -> int:
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in paths)
    return 0
