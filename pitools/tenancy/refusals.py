"""What Slurm would refuse of a desired state, or change in silence: found before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import chain

from pitools.core.errors import ConfigError, suggest
from pitools.slurm.fields import comma_list, parse_tres
from pitools.tenancy.changes import above, effective_tiers
from pitools.tenancy.cluster_state import LINKS, ClusterState, Key, teams_top_down
from pitools.tenancy.columns import COLUMNS, FLAGS, is_line, is_name, is_user_name
from pitools.tenancy.policy import table_name

_Problems = Iterator[tuple[Key, str, str]]  # object, problem, hint
_NAMES = {**LINKS, "Flags": "flag", "PreemptMode": "mode"}
_MODES = {"cancel", "cluster", "gang", "off", "requeue", "suspend", "within"}


def require_possible(now: ClusterState, then: ClusterState, where: str) -> None:
    """Raise ConfigError for values that Slurm refuses and names that it alters. Existing names are not checked."""
    found = chain(_wrong_names(now, then), _unknown_names(now, then), _cycles(now, then), lost_defaults(then))
    for key, problem, hint in found:  # the first ends it: the later ones rely on names without it
        table = table_name(key)
        raise ConfigError(f'key "{table}": {problem}', where=where, hint=hint, key=table)


def _wrong_names(now: ClusterState, then: ClusterState) -> _Problems:
    has_capitals = any(key[0] == "user" and key[1] != key[1].lower() for key in now.objects)
    for key in [key for key in then.objects if key not in now.objects]:
        for i, name in enumerate(key[1:]):
            is_user = key[0] == "user" or i == 1
            if not is_name(name) and not (i == 2 and not name):  # a row for all partitions
                yield key, f"{name!r} is no name that Slurm keeps", "without commas, quotes, brackets, =, | and signs"
            if is_user and not is_user_name(name):
                yield key, f"{name!r} is no name of a user", "without blanks, colons and slashes"
            if name != name.lower() and not (has_capitals and is_user):
                yield key, f'"{name}" has capitals (expected "{name.lower()}")', "Slurm has lower case alone"


def _unknown_names(now: ClusterState, then: ClusterState) -> _Problems:
    """Yield names that nothing defines (of tiers, resources …), leads who are no users, root's parent, shares of 0."""
    names = {kind: {key[1] for key in then.objects if key[0] == kind} for kind in ("tier", "team", "user")}
    names["team"].add("root")
    names["mode"] = _MODES
    names["flag"] = {*FLAGS, *(flag for values in now.objects.values() for flag in comma_list(values.get("Flags", "")))}
    for key, values in then.objects.items():
        for column in COLUMNS[key[0]]:
            kind, text = _NAMES.get(column.option, ""), values.get(column.option, "")
            for name in _split(column.option, text) if kind else ():
                plain = name.lstrip("+-") if column.option == "QOS" else name
                if plain not in names[kind]:
                    yield key, f'{column.key}: no {kind} "{plain}"', suggest(plain, names[kind])
            for resource in parse_tres(text) if column.kind == "tres" and now.resources else ():
                if resource not in now.resources:
                    of_type = sorted(name for name in now.resources if name.endswith(f"/{resource}"))
                    hint = f"{suggest(resource, now.resources)} add it to AccountingStorageTRES in slurm.conf"
                    hint = f'did you mean "{of_type[0]}"?' if of_type else hint
                    yield key, f'{column.key}: the cluster counts no "{resource}"', hint
            if column.kind == "text" and not is_line(text) and text != now.objects.get(key, {}).get(column.option):
                yield key, f"{column.key}: {text!r} is no line of Latin-1", "without | and control characters"
        if key == ("team", "root") and "Parent" in values:
            yield key, f'parent: root is above all teams, "{values["Parent"]}" too', "leave it out"
        if values.get("Fairshare") == "0" and now.objects.get(key, {}).get("Fairshare") != "0":
            problem = "shares: 0 lets no job of it start before the others (expected 1 or more)"
            yield key, problem, '"parent" shares what the team above has'
        if key[0] == "lead" and key[2] not in names["user"] and not now.others:
            yield key, f'leads: "{key[2]}" is in no team', suggest(key[2], names["user"])


def _split(option: str, text: str) -> tuple[str, ...]:
    """Return the names of a value: of Parent and DefaultQOS at most one, which may be any text."""
    return comma_list(text) if option not in ("Parent", "DefaultQOS") else (text,) if text else ()


def _cycles(now: ClusterState, then: ClusterState) -> _Problems:
    """Yield a team that is below itself, and a tier that preempts itself, also by way of others: a changed one."""
    for kind, option, problem in (("team", "Parent", "parent: below itself"), ("tier", "Preempt", "preempts: a loop")):
        of_kind = {key[1]: values.get(option, "") for key, values in then.objects.items() if key[0] == kind}
        links = {name: _split(option, text) for name, text in of_kind.items()}
        try:
            TopologicalSorter(links).prepare()
        except CycleError as error:
            names = error.args[1][::-1]
            changed = (name for name in names if then.objects[kind, name] != now.objects.get((kind, name)))
            yield (kind, next(changed, names[0])), f"{problem}: {' → '.join(names)}", ""


def lost_defaults(then: ClusterState) -> _Problems:
    """Yield associations whose default QOS is none that they may use."""
    members = sorted(key for key in then.objects if key[0] == "member")
    for key in (*(("team", name) for name in teams_top_down(then)), *members):  # what others inherit first
        default, tiers = default_tier(then, key), effective_tiers(then, key)
        if default and default not in tiers:
            problem = f'default_tier "{default}" is none of its tiers'
            yield key, f"{problem} (expected one of {', '.join(sorted(tiers)) or 'none'})", "add it to tiers"


def users_without_team(now: ClusterState, then: ClusterState) -> list[str]:
    """Return the users who are in no team any more."""
    return sorted(key[1] for key in now.objects if key[0] == "user" and key not in then.objects)


def default_tier(state: ClusterState, key: Key) -> str:
    """Return the default QOS of an association, its own or inherited."""
    higher = above(state, key)
    return state.objects.get(key, {}).get("DefaultQOS") or (default_tier(state, higher) if higher else "")
