"""Exclude faulty nodes from the next jobs of all runs of a user at a site, with the evidence and an expiry time.

<runs>/.exclusions.<uid>.jsonl      pit.exclusion/1: the last record of a node is valid; one file for each user

A record is appended. It is removed by a later append once it has expired for _KEEP_FOR.

At most a share of a partition is excluded, so that wrong diagnoses cannot leave a run without nodes: the most certain
exclusions come first, of those the nodes that were excluded most often, and of those the newest.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from pitools.core import hostlist, timestamps, units
from pitools.core.errors import UsageError
from pitools.core.fs import from_os_error, open_regular, write_atomic
from pitools.core.locks import lock, not_owner_error
from pitools.core.record import Record, decode_json
from pitools.launch.plan import Plan
from pitools.node.site_suspicion import suspicions_of_site
from pitools.run.attempt_records import DOUBT, Cause, CauseKind, Confidence
from pitools.site.schema import Site

_MAX_NODES_OF_UNKNOWN_SIZE = 4  # the limit for a partition without `nodes` in the site file
_LOCK_TIMEOUT_S = 10.0
_KEEP_FOR = timedelta(days=30)  # `pit launch why NODE` also shows expired records
_APPEND_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NODE = re.compile(r"[A-Za-z0-9][\w.\-]{0,254}")

PartitionNodes = Callable[[], Collection[str] | None]
"""Returns the nodes of the job's partitions; None if they are not known."""


class Exclusion(Record, frozen=True, kw_only=True, tag="pit.exclusion/1"):
    """A node that runs must not use, and why. until: when the exclusion expires; in the past after `include`."""

    node: str
    site: str
    t: str
    until: str
    kind: CauseKind
    reason: str
    run: str = ""
    attempt: str = ""
    confidence: Confidence = "certain"
    evidence: tuple[str, ...] = ()


def exclusions_path(runs: Path) -> Path:
    """Return the path of this user's exclusions in a folder of runs, which several users may share."""
    return runs / f".exclusions.{os.geteuid()}.jsonl"


def exclude_nodes(runs: Path, site: Site, nodes: Iterable[str], cause: Cause, run: str) -> list[Exclusion]:
    """Exclude nodes for the site's `exclude_for`, and return the records. Raises TryLater, ClusterError or NoSpace."""
    now = datetime.now(UTC)
    until = timestamps.to_rfc3339(now + timedelta(seconds=units.parse_duration(site.recovery.exclude_for)))
    exclusions = [
        Exclusion(
            node=node,
            site=site.name,
            t=timestamps.to_rfc3339(now),
            until=until,
            kind=cause.kind,
            reason=cause.reason,
            run=run,
            attempt=cause.attempt,
            confidence=cause.confidence,
            evidence=tuple(f"{line.t} {line.source}: {line.text}".strip()[:300] for line in cause.evidence[:5]),
        )
        for node in nodes
        if _NODE.fullmatch(node)  # the name becomes part of an sbatch argument
    ]
    _append_records(runs, exclusions)
    return exclusions


def include_node(runs: Path, site: Site, node: str) -> Exclusion:
    """Remove a node from the exclusion list. Raises UsageError if the node is not excluded."""
    last = next((entry for entry in reversed(read_exclusions(runs, site.name)) if entry.node == node), None)
    if last is None or not is_active(last):
        excluded = ", ".join(sorted(entry.node for entry in active_exclusions(runs, site)))
        hint = f"excluded nodes: {excluded or 'none'}"
        raise UsageError(f'node "{node}" is not excluded', where=str(exclusions_path(runs)), hint=hint)
    now = timestamps.now_rfc3339()
    included = msgspec.structs.replace(last, t=now, until=now, reason=f"included again; excluded for: {last.reason}")
    _append_records(runs, [included])
    return included


def _append_records(runs: Path, exclusions: Sequence[Exclusion]) -> None:
    if not exclusions:
        return
    path = exclusions_path(runs)
    lines = b"".join(msgspec.json.encode(entry) + b"\n" for entry in exclusions)
    with lock(path.with_suffix(".lock"), "the list of exclusions", timeout_s=_LOCK_TIMEOUT_S, is_own=True):
        records = _read_records(path)
        oldest = timestamps.to_rfc3339(datetime.now(UTC) - _KEEP_FOR)
        kept = [entry for entry in records if entry.until > oldest]
        if len(kept) < len(records):
            write_atomic(path, b"".join(msgspec.json.encode(entry) + b"\n" for entry in kept) + lines, mode=0o600)
            return
        try:
            with os.fdopen(os.open(path, _APPEND_FLAGS, 0o600), "a+b", buffering=0) as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():
                    raise not_owner_error(path, "the list of exclusions")
                # A line that a full disk truncated must not damage the next line.
                truncated = file.seek(0, 2) and file.seek(-1, 2) and file.read(1) != b"\n"
                file.write((b"\n" if truncated else b"") + lines)
        except OSError as error:
            raise from_os_error(error, path) from error


def read_exclusions(runs: Path, site: str) -> list[Exclusion]:
    """Return all exclusion records of a site, oldest first, also expired ones; other lines are skipped."""
    return [entry for entry in _read_records(exclusions_path(runs)) if entry.site == site]


def _read_records(path: Path) -> list[Exclusion]:
    """Return the records of a file; [] for a file of another user, who could choose this user's nodes."""
    try:
        with open_regular(path) as file:
            lines = file.read().splitlines() if os.fstat(file.fileno()).st_uid == os.geteuid() else []
    except OSError:
        return []
    exclusions = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            exclusions.append(decode_json(line, Exclusion))
    return [entry for entry in exclusions if _NODE.fullmatch(entry.node)]


def is_active(exclusion: Exclusion) -> bool:
    """Whether the exclusion has not expired."""
    return exclusion.until > timestamps.now_rfc3339()


def active_exclusions(runs: Path, site: Site) -> list[Exclusion]:
    """Return the active exclusions of a site, in the order of their use; without the share's limit."""
    newest_first: dict[str, Exclusion] = {}
    entries = read_exclusions(runs, site.name)
    for entry in reversed(entries):
        newest_first.setdefault(entry.node, entry)
    times = Counter(entry.node for entry in filter(is_active, entries))
    active = filter(is_active, newest_first.values())
    return sorted(active, key=lambda entry: (DOUBT[entry.confidence], -times[entry.node]))


def exclusions_for_next_job(
    runs: Path, site: Site, plan: Plan, partition_nodes: PartitionNodes = lambda: None
) -> tuple[str, ...]:
    """Return the nodes to exclude from the plan's next job: at most the site's share, leaving enough nodes for the job.

    First those that this user excludes, then those that are strongly suspected at the site: see node/suspicion.py. One
    that the controller drained gets no job: it is left out, or, if this user excludes it, comes last.

    partition_nodes: called if there is a node to exclude. If they are known, no other takes of the share: a suspected
    node may be of another partition, an excluded one may be gone, and sbatch rejects its name.
    """
    plan_excludes = _expand_nodes(plan.job.exclude)
    handled = plan_excludes | _expand_nodes(plan.job.nodelist)
    suspected = sorted(suspicions_of_site(site).values(), key=lambda one: -one.score)
    drained = {one.node for one in suspected if one.is_drained}
    nodes = [entry.node for entry in active_exclusions(runs, site)]
    nodes += [one.node for one in suspected if one.is_strong and not one.is_drained]
    nodes = [node for node in sorted(dict.fromkeys(nodes), key=drained.__contains__) if node not in handled]
    existing = partition_nodes() if nodes else None
    nodes = [node for node in nodes if existing is None or node in existing]
    partition = site.partitions.get(plan.job.partition)
    size = partition.nodes if partition else 0
    limit = max(1, int(site.recovery.exclude_share * size)) if size else _MAX_NODES_OF_UNKNOWN_SIZE
    spare = size - plan.nodes - len(plan_excludes) if size else limit
    return tuple(nodes[: max(0, min(limit, spare)) if site.recovery.exclude_share else 0])


def sbatch_exclude_args(
    runs: Path, site: Site, plan: Plan, partition_nodes: PartitionNodes = lambda: None
) -> tuple[str, ...]:
    """Return sbatch's `--exclude` argument for `exclusions_for_next_job` and the request's own nodes.

    () if the exclusions add none. sbatch's command line takes precedence over the script's directives.
    """
    nodes = exclusions_for_next_job(runs, site, plan, partition_nodes)
    return (f"--exclude={hostlist.fold([*nodes, *_expand_nodes(plan.job.exclude)])}",) if nodes else ()


def _expand_nodes(folded: str) -> set[str]:
    return set(hostlist.expand(folded)) if folded else set()
