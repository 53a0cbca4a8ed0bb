"""Find whom and what a desired state would lock out, that Slurm would not refuse."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from pitools.core.units import parse_duration
from pitools.limits.judge import first_limit, raised_to_minimums
from pitools.limits.records import JobRequest, LimitState
from pitools.slurm.fields import comma_list, parse_tres
from pitools.slurm.records import Association, Partition, Qos
from pitools.tenancy.changes import above, effective_tiers
from pitools.tenancy.cluster_state import ClusterState, Key
from pitools.tenancy.columns import COLUMNS

_PARSERS: dict[str, Callable[[str], object]] = {"tres": parse_tres, "time": parse_duration, "list": comma_list}
_Limited = TypeVar("_Limited", Association, Qos)
_ZERO = re.compile(r"(^|=)0+(:00:00|M)?(,|$)")
_CLOSING = ("LimitFactor", "MinTRES")
_NAMED = 5  # users in a sentence


def lock_outs(now: ClusterState, then: ClusterState) -> list[str]:
    """Return how a desired state would lock users or administrators out, as sentences."""
    problems = []
    rows = {name: _rows(state) for name, state in (("now", now), ("then", then))}
    if rows["now"] and not rows["then"]:
        problems.append("nobody but the root account could submit: no user is left in any team")
    if _administrators(now) and not _administrators(then):
        problems.append(f"no administrator is left (now: {', '.join(_administrators(now))})")
    removed = {key[1] for key in now.objects.keys() - then.objects.keys() if key[0] == "user"} - {"root"}
    if now.runner in removed.intersection(_administrators(now)):
        problems.append(f'user "{now.runner}", who makes the changes, is removed by them, and cannot make the rest')
    closed: dict[str, list[str]] = {}
    for key in rows["then"]:
        needs_tier = bool(effective_tiers(now, key))
        reason = _closed_by(then, key, needs_tier=needs_tier)
        if reason and not _closed_by(now, key, needs_tier=needs_tier):
            closed.setdefault(f"in team {key[1]}: {reason}", []).append(key[2])
    problems += [f"{_users(users)} could run nothing {reason}" for reason, users in closed.items()]
    users = {key[2] for key in rows["now"]}
    gone = users - {key[2] for key in rows["then"]}
    if rows["then"] and 2 * len(gone) > len(users):
        problems.append(f"{_users(gone)} of {len(users)} would be in no team any more")
    return problems


def partition_lock_outs(
    now: ClusterState, then: ClusterState, partitions: Mapping[str, Sequence[Partition] | None]
) -> Iterator[str]:
    """Yield which partitions need a tier or team that a state removes. partitions: `read.read_partitions`.

    slurmctld does not start if the QOS of a partition is missing.
    """
    for cluster, each in partitions.items():
        kinds = ("tier", "team") if cluster == now.cluster else ("tier",)
        gone = {kind: {key[1] for key in {*now.objects} - {*then.objects} if key[0] == kind} for kind in kinds}
        if each is None and gone["tier"]:
            names = ", ".join(sorted(gone["tier"]))
            yield f"tiers are removed ({names}), and cluster {cluster} does not say which its partitions use"
        for row in each or ():
            name = f"partition {row.partition} of cluster {cluster}"
            if row.qos in gone["tier"]:
                yield f"tier {row.qos} is removed, the QOS of {name}: its slurmctld would not start again"
            for kind, allowed in (("tier", row.allow_qos), ("team", row.allow_accounts)):
                if allowed and set(allowed) <= gone.get(kind, set()):
                    yield f"nobody could use {name}: each {kind} that it allows is removed ({', '.join(allowed)})"


def _rows(state: ClusterState) -> list[Key]:
    """Return the associations of users but those of the root account, which every accounting has."""
    return [key for key in sorted(state.objects) if key[0] == "member" and key[1] != "root"]


def _users(users: Sequence[str] | set[str]) -> str:
    names = sorted({*users})  # a user may have rows of several partitions
    return ", ".join(names) if len(names) <= _NAMED else f"{len(names)} users ({', '.join(names[:_NAMED])}, ...)"


def _administrators(state: ClusterState) -> list[str]:
    """Return the administrators of the database, also those that only other clusters have."""
    levels = state.other_rights | {key[1]: values for key, values in state.objects.items() if key[0] == "user"}
    return sorted(user for user, values in levels.items() if values.get("AdminLevel") == "Administrator")


def _closed_by(state: ClusterState, key: Key, *, needs_tier: bool) -> str:
    """Return why no job of an association could run, "" if one could; of a new one as of another of its team."""
    tiers = sorted(effective_tiers(state, key if key in state.objects else ("team", key[1])))
    if needs_tier and not tiers:
        return "no tier is left"
    path = [key, ("team", key[1])]
    while higher := above(state, path[-1]):
        path.append(higher)
    limited = [state.objects.get(row, {}) for row in (*path, *(("tier", name) for name in tiers))]
    if not any(name in _CLOSING or _ZERO.search(text) for values in limited for name, text in values.items()):
        return ""  # without a value of 0, which blocks all jobs, any other limit lets a small one run
    limits = LimitState(
        enforced=("limits",),
        associations=tuple(_record(state, row, Association, *row[1:]) for row in path),
        qos=tuple(_record(state, ("tier", name), Qos) for name in tiers),
    )
    job = JobRequest(user=key[2], account=key[1], partition=key[3], time_s=60, in_reservation=True)
    jobs = [msgspec.structs.replace(job, qos=tier) for tier in tiers or [""]]
    limits_of = [first_limit(raised_to_minimums(job, limits), limits) for job in jobs]
    return limits_of[0].message if limits_of[0] and all(limits_of) else ""


def _record(state: ClusterState, key: Key, kind: type[_Limited], account: str = "", *names: str) -> _Limited:
    """Return the limits of a tier, team or member as the record that is judged."""
    fields: dict[str, object] = {"qos": key[1]} if key[0] == "tier" else {"cluster": "", "account": account}
    fields |= {"parent": "root", **dict(zip(("user", "partition"), names, strict=False))}
    for column in COLUMNS[key[0]]:
        if text := state.objects.get(key, {}).get(column.option):
            name = f"{column.key}_s" if column.kind == "time" else column.key
            fields[name] = _PARSERS.get(column.kind, str)(text)
    return msgspec.convert(fields, kind, strict=False)
