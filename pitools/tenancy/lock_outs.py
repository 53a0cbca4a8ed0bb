"""Find whom and what a desired state would lock out, that Slurm would not refuse."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from pitools.slurm.records import Partition
from pitools.tenancy.changes import above, effective_tiers
from pitools.tenancy.cluster_state import ClusterState, Key
from pitools.tenancy.columns import COLUMNS
from pitools.tenancy.words import name_of

# With 0, no job is accepted, or none starts. Grp limits bind at each account, of Max limits the first definition.
_CLOSING = re.compile(r"GrpJobs|GrpSubmit|MaxJobs(P[UA])?|MaxSubmit(JobsP[UA])?")
_NAMED = 5  # users in a sentence


def lock_outs(now: ClusterState, then: ClusterState) -> list[str]:
    """Return how a desired state would lock users or administrators out, as sentences."""
    problems = []
    rows = {name: _rows(state) for name, state in (("now", now), ("then", then))}
    if rows["now"] and not rows["then"]:
        problems.append("nobody but the root account could submit: no user is left in any team")
    if _administrators(now) and not _administrators(then):
        problems.append(f"no administrator is left (now: {', '.join(_administrators(now))})")
    if now.runner in _administrators(now) and ("user", now.runner) not in then.objects and now.runner != "root":
        problems.append(f'user "{now.runner}", who makes the changes, is removed by them, and cannot make the rest')
    closed: dict[str, list[str]] = {}
    for key in rows["then"]:
        needs_tier = bool(effective_tiers(now, key))
        reason = _closed_by(then, key, needs_tier=needs_tier)
        before = key if key in now.objects else ("team", key[1])
        if reason and not _closed_by(now, before, needs_tier=needs_tier):
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
    names = sorted(users)
    return ", ".join(names) if len(names) <= _NAMED else f"{len(names)} users ({', '.join(names[:_NAMED])}, ...)"


def _administrators(state: ClusterState) -> list[str]:
    users = sorted(key[1] for key in state.objects if key[0] == "user")
    return [user for user in users if state.objects["user", user].get("AdminLevel") == "Administrator"]


def _closed_by(state: ClusterState, key: Key, *, needs_tier: bool) -> str:
    """Return why no job of an association could run, "" if one could."""
    tiers = sorted(effective_tiers(state, key))
    if needs_tier and not tiers:
        return "no tier is left"
    zeros = [_zero_limit(state, ("tier", name)) for name in tiers]
    if tiers and all(zeros):
        return f"{zeros[0]} (of its tiers)"
    row: Key | None = key
    defined: set[str] = set()
    while row:
        if zero := _zero_limit(state, row, defined):
            return zero
        defined |= {option for option in state.objects.get(row, {}) if option.startswith("Max")}
        row = above(state, row)
    return ""


def _zero_limit(state: ClusterState, key: Key, set_aside: Collection[str] = ()) -> str:
    """Return the first limit of 0 that lets no job of an object run, as text; "" for none."""
    values = state.objects.get(key, {})
    closing = [
        column for column in COLUMNS[key[0]] if _CLOSING.fullmatch(column.option) and column.option not in set_aside
    ]
    return next((f"{c.key} 0 of {name_of(key)}" for c in closing if values.get(c.option) == "0"), "")
