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
from pitools.core.fs import os_error
from pitools.core.locks import held, open_shared
from pitools.core.record import Record, decode_json
from pitools.launch.plan import Plan
from pitools.run.attempt_records import Cause, Kind
from pitools.site.schema import Site

NAME = ".exclusions.jsonl"
_UNKNOWN_SIZE = 4  # of a partition whose nodes the site file does not count, so many are left out at most
_LOCK_WAIT_S = 10.0
_NODE = re.compile(r"[A-Za-z0-9][\w.\-]{0,254}")
_CERTAINTY = {"certain": 0, "likely": 1, "guess": 2}


class Exclusion(Record, frozen=True, kw_only=True, tag="pit.exclusion/1"):
    """Why runs keep away from a node. until: not after; in the past for one that was lifted."""

    node: str
    site: str
    t: str
    until: str
    kind: Kind
    reason: str
    run: str = ""
    attempt: str = ""
    confidence: Literal["certain", "likely", "guess"] = "certain"
    evidence: tuple[str, ...] = ()


def add(runs: Path, site: Site, nodes: Iterable[str], cause: Cause, run: str) -> list[Exclusion]:
    """Keep away from these nodes for the site's time. Raises what writing to the runs' folder raises."""
    now = datetime.now(UTC)
    until = timestamps.text(now + timedelta(seconds=units.seconds(site.recover.exclude_for)))
    made = [
        Exclusion(
            node=node,
            site=site.name,
            t=timestamps.text(now),
            until=until,
            kind=cause.kind,
            reason=cause.reason,
            run=run,
            attempt=cause.attempt,
            confidence=cause.confidence,
            evidence=tuple(f"{one.t} {one.source}: {one.what}".strip()[:300] for one in cause.evidence[:5]),
        )
        for node in nodes
        if _NODE.fullmatch(node)  # it becomes a flag of sbatch's
    ]
    _append(runs, made)
    return made


def lift(runs: Path, site: Site, node: str) -> Exclusion:
    """Let runs have a node again. Raises UsageError for one that is not left out."""
    last = next((one for one in reversed(read(runs, site.name)) if one.node == node), None)
    if last is None or not in_force(last):
        out = sorted(one.node for one in of(runs, site))
        hint = f"left out are: {', '.join(out)}" if out else "none is left out"
        raise UsageError(f'node "{node}" is not left out', where=str(runs / NAME), hint=hint)
    now = timestamps.now()
    lifted = msgspec.structs.replace(last, t=now, until=now, reason=f"lifted; it was: {last.reason}")
    _append(runs, [lifted])
    return lifted


def _append(runs: Path, made: Sequence[Exclusion]) -> None:
    if not made:
        return
    path = runs / NAME
    with held(runs / f"{NAME}.lock", "the list of exclusions", wait_s=_LOCK_WAIT_S):
        try:
            with os.fdopen(open_shared(path, os.O_APPEND), "a+b", buffering=0) as file:
                # A line that a full disk cut short must not take the next one with it.
                cut = file.seek(0, 2) and file.seek(-1, 2) and file.read(1) != b"\n"
                file.write((b"\n" if cut else b"") + b"".join(msgspec.json.encode(one) + b"\n" for one in made))
        except OSError as error:
            raise os_error(error, path) from error


def read(runs: Path, site: str) -> list[Exclusion]:
    """All that was ever said of a site's nodes, oldest first; what is no record of ours is passed over."""
    try:
        lines = (runs / NAME).read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            found.append(decode_json(line, Exclusion))
    return [one for one in found if one.site == site and _NODE.fullmatch(one.node)]


def in_force(one: Exclusion) -> bool:
    """Whether it still holds."""
    return one.until > timestamps.now()


def of(runs: Path, site: Site) -> list[Exclusion]:
    """What holds now, the most certain and newest first, before any share is taken into account."""
    newest_first: dict[str, Exclusion] = {}
    for one in reversed(read(runs, site.name)):
        newest_first.setdefault(one.node, one)
    return sorted(filter(in_force, newest_first.values()), key=lambda one: _CERTAINTY[one.confidence])


def current(runs: Path, site: Site, plan: Plan, *, there: Collection[str] | None = None) -> tuple[str, ...]:
    """Nodes that the plan's next job leaves out: no more than the site's share, and enough stay for it to run.

    there: the cluster's nodes, where they are known: no others then, for sbatch refuses a name that it does not know.
    """
    own = _expanded(plan.job.exclude)
    wanted = _expanded(plan.job.nodelist)
    usable = [one.node for one in of(runs, site) if one.node not in own | wanted]
    usable = [node for node in usable if there is None or node in there]
    part = site.partitions.get(plan.job.partition)
    size = part.nodes if part else 0
    most = max(1, int(site.recover.exclude_share * size)) if size else _UNKNOWN_SIZE
    spare = size - plan.nodes - len(own) if size else most
    return tuple(usable[: max(0, min(most, spare)) if site.recover.exclude_share else 0])


def args(runs: Path, site: Site, plan: Plan, *, there: Collection[str] | None = None) -> tuple[str, ...]:
    """The flag of sbatch's that leaves them out, with those of the request's own: it goes before the script's."""
    nodes = current(runs, site, plan, there=there)
    return (f"--exclude={hostlist.fold([*nodes, *_expanded(plan.job.exclude)])}",) if nodes else ()


def _expanded(folded: str) -> set[str]:
    return set(hostlist.expand(folded)) if folded else set()
