"""Nodes that runs keep away from, with the evidence, until a time.

<runs>/.exclusions.jsonl        pit.exclusion/1: only ever appended to; the last word on a node holds

Shared by all of a user's runs on a site. Only part of a partition is ever left out, so that a wrong judgement, or a bad
day, cannot leave a run without nodes: the least certain and the oldest give way.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import msgspec

from pitools.core import hostlist, timestamps, units
from pitools.core.errors import UsageError
from pitools.core.fs import from_os_error
from pitools.core.locks import lock, open_lock_file
from pitools.core.record import Record, decode_json
from pitools.launch.plan import Plan
from pitools.run.attempt_records import Cause, CauseKind
from pitools.site.schema import Site

EXCLUSIONS_FILE = ".exclusions.jsonl"
_ASSUMED_NODES = 4  # of a partition whose nodes the site file does not count, so many are left out at most
_LOCK_WAIT_S = 10.0
_NODE = re.compile(r"[A-Za-z0-9][\w.\-]{0,254}")
_CONFIDENCE_ORDER = {"certain": 0, "likely": 1, "guess": 2}


class Exclusion(Record, frozen=True, kw_only=True, tag="pit.exclusion/1"):
    """Why runs keep away from a node. until: not after; in the past once the node is allowed again."""

    node: str
    site: str
    t: str
    until: str
    kind: CauseKind
    reason: str
    run: str = ""
    attempt: str = ""
    confidence: Literal["certain", "likely", "guess"] = "certain"
    evidence: tuple[str, ...] = ()


def exclude_nodes(runs: Path, site: Site, nodes: Iterable[str], cause: Cause, run: str) -> list[Exclusion]:
    """Keep away from these nodes for the site's time. Raises what writing to the runs' folder raises."""
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
            evidence=tuple(f"{one.t} {one.source}: {one.text}".strip()[:300] for one in cause.evidence[:5]),
        )
        for node in nodes
        if _NODE.fullmatch(node)  # it becomes a flag of sbatch's
    ]
    _append_records(runs, exclusions)
    return exclusions


def allow_node(runs: Path, site: Site, node: str) -> Exclusion:
    """Let runs have a node again. Raises UsageError for one that is not left out."""
    last = next((one for one in reversed(read_exclusions(runs, site.name)) if one.node == node), None)
    if last is None or not is_active(last):
        out = sorted(one.node for one in active_exclusions(runs, site))
        hint = f"left out are: {', '.join(out)}" if out else "none is left out"
        raise UsageError(f'node "{node}" is not left out', where=str(runs / EXCLUSIONS_FILE), hint=hint)
    now = timestamps.now_rfc3339()
    allowed = msgspec.structs.replace(last, t=now, until=now, reason=f"allowed again; it was: {last.reason}")
    _append_records(runs, [allowed])
    return allowed


def _append_records(runs: Path, exclusions: Sequence[Exclusion]) -> None:
    if not exclusions:
        return
    path = runs / EXCLUSIONS_FILE
    with lock(runs / f"{EXCLUSIONS_FILE}.lock", "the list of exclusions", wait_s=_LOCK_WAIT_S):
        try:
            with os.fdopen(open_lock_file(path, os.O_APPEND), "a+b", buffering=0) as file:
                # A line that a full disk cut short must not take the next one with it.
                cut = file.seek(0, 2) and file.seek(-1, 2) and file.read(1) != b"\n"
                file.write((b"\n" if cut else b"") + b"".join(msgspec.json.encode(one) + b"\n" for one in exclusions))
        except OSError as error:
            raise from_os_error(error, path) from error


def read_exclusions(runs: Path, site: str) -> list[Exclusion]:
    """All that was ever said of a site's nodes, oldest first; what is no record of ours is passed over."""
    try:
        lines = (runs / EXCLUSIONS_FILE).read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            found.append(decode_json(line, Exclusion))
    return [one for one in found if one.site == site and _NODE.fullmatch(one.node)]


def is_active(exclusion: Exclusion) -> bool:
    """Whether it still holds."""
    return exclusion.until > timestamps.now_rfc3339()


def active_exclusions(runs: Path, site: Site) -> list[Exclusion]:
    """What holds now, the most certain and newest first, before any share is taken into account."""
    newest_first: dict[str, Exclusion] = {}
    for one in reversed(read_exclusions(runs, site.name)):
        newest_first.setdefault(one.node, one)
    return sorted(filter(is_active, newest_first.values()), key=lambda one: _CONFIDENCE_ORDER[one.confidence])


def exclusions_for_next_job(
    runs: Path, site: Site, plan: Plan, *, existing_nodes: Collection[str] | None = None
) -> tuple[str, ...]:
    """Nodes that the plan's next job leaves out: no more than the site's share, and enough stay for it to run.

    existing_nodes: the cluster's nodes, where they are known: no others then, for sbatch refuses a name that it does
    not know.
    """
    own = _expand_nodes(plan.job.exclude)
    wanted = _expand_nodes(plan.job.nodelist)
    usable = [one.node for one in active_exclusions(runs, site) if one.node not in own | wanted]
    usable = [node for node in usable if existing_nodes is None or node in existing_nodes]
    part = site.partitions.get(plan.job.partition)
    size = part.nodes if part else 0
    most = max(1, int(site.recovery.exclude_share * size)) if size else _ASSUMED_NODES
    spare = size - plan.nodes - len(own) if size else most
    return tuple(usable[: max(0, min(most, spare)) if site.recovery.exclude_share else 0])


def sbatch_exclude_args(
    runs: Path, site: Site, plan: Plan, *, existing_nodes: Collection[str] | None = None
) -> tuple[str, ...]:
    """The flag of sbatch's that leaves them out, with those of the request's own: it goes before the script's."""
    nodes = exclusions_for_next_job(runs, site, plan, existing_nodes=existing_nodes)
    return (f"--exclude={hostlist.fold([*nodes, *_expand_nodes(plan.job.exclude)])}",) if nodes else ()


def _expand_nodes(folded: str) -> set[str]:
    return set(hostlist.expand(folded)) if folded else set()
