"""What Slurm would refuse of a desired state, or change in silence: found before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator

from pitools.core.errors import ConfigError, suggest
from pitools.slurm.fields import parse_tres
from pitools.tenancy.changes import above, effective_tiers
from pitools.tenancy.cluster_state import ClusterState, Key
from pitools.tenancy.columns import COLUMNS
from pitools.tenancy.words import name_of


def require_possible(now: ClusterState, then: ClusterState, where: str) -> None:
    """Raise ConfigError if Slurm would not let a state stand."""
    for problem, hint in _problems(now, then):
        raise ConfigError(problem, where=where, hint=hint)


def _problems(now: ClusterState, then: ClusterState) -> Iterator[tuple[str, str]]:
    has_capitals = any(key[0] == "user" and key[1] != key[1].lower() for key in now.objects)
    for key, values in then.objects.items():
        names = key[1:2] if has_capitals else key[1:3]
        for name in names:
            if name != name.lower():
                yield f'{name_of(key)}: "{name}" has capitals (expected "{name.lower()}")', "Slurm has lower case alone"
        for column in COLUMNS[key[0]]:
            for resource in parse_tres(values.get(column.option, "")) if column.kind == "tres" else ():
                if now.resources and resource not in now.resources:
                    problem = f'{name_of(key)}: {column.key}: the cluster counts no "{resource}"'
                    yield problem, f"{suggest(resource, now.resources)} add it to AccountingStorageTRES in slurm.conf"
        if key[0] in ("team", "member"):
            default, tiers = _default_tier(then, key), effective_tiers(then, key)
            if default and default not in tiers:
                problem = f'{name_of(key)}: default_tier "{default}" is none of its tiers'
                yield f"{problem} (expected one of {', '.join(sorted(tiers)) or 'none'})", "add it to tiers"
    yield from _loops(then)


def _default_tier(state: ClusterState, key: Key) -> str:
    """Return the default QOS of an association, its own or inherited."""
    while not (default := state.objects.get(key, {}).get("DefaultQOS", "")):
        higher = above(state, key)
        if not higher:
            return ""
        key = higher
    return default


def _loops(state: ClusterState) -> Iterator[tuple[str, str]]:
    """Yield an error if tiers preempt each other."""
    left = {key[1]: set(v.get("Preempt", "").split(",")) for key, v in state.objects.items() if key[0] == "tier"}
    while ends := [name for name, preempted in left.items() if not preempted & left.keys()]:
        for name in ends:
            del left[name]
    if left:
        yield f"tiers that preempt each other, or one that does: {', '.join(sorted(left))}", "preempts must have an end"
