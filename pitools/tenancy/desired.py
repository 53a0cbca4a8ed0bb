"""The state that a policy asks for, and the policy that a state is: each the other's inverse."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from pitools.core.errors import ConfigError, UsageError, suggest
from pitools.slurm.fields import parse_tres
from pitools.tenancy.cluster_state import ClusterState, Key, Values, without_inherited_leads
from pitools.tenancy.columns import COLUMNS, Column, TomlValue, canonical, from_toml, to_toml
from pitools.tenancy.policy import Member, Policy, Team, User, table_name

_GPU = "gres/gpu"
_MINUTES = "GrpTRESMins"
_HOURS = Column("", "gpu_hours", "count")


def desired_state(policy: Policy, now: ClusterState, where: str = "policy") -> ClusterState:
    """Return what the cluster is to have. now: what stays where a policy with `manage = "listed"` names nothing.

    Raises ConfigError for a value that Slurm cannot have, and for a user in no team or without a default team.
    """
    objects = _kept(policy, now)

    def put(key: Key, table: msgspec.Struct) -> None:
        new = now.other_rights.get(key[1], {}) if key[0] == "user" else {}
        before = now.objects.get(key, new) if policy.manage == "listed" else {}
        objects[key] = _values(key, table, before, where)

    for name, tier in policy.tiers.items():
        put(("tier", name), tier)
    for name, team in policy.teams.items():
        put(("team", name), team)
        for key in [key for key in objects if key[1] == name and _is_left_out(key, team)]:
            del objects[key]
        objects |= {("lead", name, lead): {} for lead in team.leads or ()}
        for user in dict.fromkeys((*(team.users or ()), *team.members)):
            member = team.members.get(user, Member())
            key = ("member", name, user, "")
            if user in (team.users or ()) or key in objects:
                put(key, member)
            elif not member.partitions:
                hint = suggest(user, team.users or ())
                raise _error(f'no user of team "{name}"', key, where, hint)
            for partition, row in member.partitions.items():
                put((*key[:3], partition), row)
    teams_of: dict[str, set[str]] = {user: set() for user in policy.users}
    for kind, name, *rest in objects:
        if kind == "member":
            teams_of.setdefault(rest[0], set()).add(name)
    for user, teams in teams_of.items():
        if user in policy.users or teams & policy.teams.keys():
            put(("user", user), policy.users.get(user, User()))
        else:
            objects["user", user] = dict(now.objects.get(("user", user), {}))
        if default := _default_team(user, teams, policy, now, where):
            objects["user", user]["DefaultAccount"] = default
    return without_inherited_leads(msgspec.structs.replace(now, objects=objects))


def _kept(policy: Policy, now: ClusterState) -> dict[Key, Values]:
    """Return what the policy leaves alone: the root account, tiers that other clusters of the database use.

    With `listed` all but users, whose default team depends on the rest.
    """
    used_elsewhere = frozenset[Key]().union(*now.others.values())
    is_root_kept = "root" not in policy.teams
    return {
        key: values
        for key, values in now.objects.items()
        if key[0] != "user"
        if policy.manage == "listed"
        or (key in used_elsewhere if key[0] == "tier" else key[1] == "root" and is_root_kept)
    }


def _is_left_out(key: Key, team: Team) -> bool:
    """Return whether a team's table has a list of users or leads, without this one."""
    if key[0] == "lead":
        return team.leads is not None and key[2] not in team.leads
    if key[0] == "member" and team.users is not None and key[2] not in team.users:
        return not key[3] or key[2] not in team.members
    return False


def _default_team(user: str, teams: set[str], policy: Policy, now: ClusterState, where: str) -> str:
    """Return the default team that the policy names, else that of now ("": none), else the only one (listed)."""
    named = policy.users.get(user, User()).default_team
    old = now.objects.get(("user", user), {}).get("DefaultAccount", "")
    listed = [team for team in policy.teams if team in teams] or sorted(teams)
    if not teams:
        raise _error("in no team", ("user", user), where)
    if named and named not in teams:
        hint = f"one of: {', '.join(sorted(teams))}"
        raise _error(f'default_team: no member of "{named}"', ("user", user), where, hint)
    if not named and ("user", user) in now.objects and not old:
        return ""
    if not named and len(listed) > 1 and (old not in teams or policy.manage == "all"):
        hint = f'[users.{user}] default_team = "{listed[0]}"'
        raise _error(f"in several teams ({', '.join(listed)}), and none is the default", ("user", user), where, hint)
    return named or (old if old in teams else listed[0])


def _error(problem: str, key: Key, where: str, hint: str = "") -> ConfigError:
    table = table_name(key)
    return ConfigError(f'key "{table}": {problem}', where=where, hint=hint, key=table)


def _values(key: Key, table: msgspec.Struct, before: Values, where: str) -> Values:
    """Return the values of an object: those that its table names, and of the others those of before."""
    raw: dict[str, TomlValue] = {
        name: value for name, value in msgspec.structs.asdict(table).items() if value is not None
    }
    values = dict(before)
    for column in COLUMNS[key[0]]:
        try:
            if column.key in raw:
                values[column.option] = from_toml(column, raw[column.key])
            if column.option == _MINUTES and "gpu_hours" in raw:
                hours = from_toml(_HOURS, raw["gpu_hours"])
                minutes = {**parse_tres(values.get(_MINUTES, "")), _GPU: str(60 * int(hours or 0))}
                kept = [f"{name}={amount}" for name, amount in minutes.items() if name != _GPU or hours]
                values[_MINUTES] = canonical(column, ",".join(kept))
        except (UsageError, ValueError) as error:
            raise _error(f"{column.key}: {error}", key, where, getattr(error, "hint", "")) from error
    return {option: text for option, text in values.items() if text}


def policy_tables(state: ClusterState) -> dict[str, Any]:
    """Return the tables of the policy that a cluster has now: `desired_state` of it is this state."""
    tiers = {key[1]: _tables("tier", values) for key, values in state.objects.items() if key[0] == "tier"}
    teams = {key[1]: _tables("team", values) for key, values in state.objects.items() if key[0] == "team"}
    users: dict[str, dict[str, Any]] = {}
    memberships = Counter(user for _, user in {key[1:3] for key in state.objects if key[0] == "member"})
    for key, values in sorted(state.objects.items()):
        if key[0] == "lead":
            teams[key[1]].setdefault("leads", []).append(key[2])
        elif key[0] == "member":
            _, team, user, partition = key
            if partition:
                member = teams[team].setdefault("members", {}).setdefault(user, {})
                member.setdefault("partitions", {})[partition] = _tables("member", values)
            else:
                teams[team].setdefault("users", []).append(user)
                if values:
                    teams[team].setdefault("members", {})[user] = _tables("member", values)
        elif key[0] == "user":
            table = _tables("user", values)
            if memberships[key[1]] == 1:
                table.pop("default_team", None)
            users |= {key[1]: table} if table else {}
    filled = {"tiers": tiers, "teams": teams, "users": users}
    return {"manage": "all", **{name: tables for name, tables in filled.items() if tables}}


def _tables(kind: str, values: Values) -> dict[str, Any]:
    """Return the values of an object as a policy writes them; GPU minutes of whole hours are `gpu_hours`."""
    table: dict[str, Any] = {}
    minutes = parse_tres(values.get(_MINUTES, ""))
    if kind != "tier" and minutes.get(_GPU, "").isdecimal() and int(minutes[_GPU]) % 60 == 0:
        table["gpu_hours"] = int(minutes.pop(_GPU)) // 60
        values = {**values, _MINUTES: ",".join(f"{name}={value}" for name, value in minutes.items())}
    for column in COLUMNS[kind]:
        if text := values.get(column.option, ""):
            table[column.key] = to_toml(column, canonical(column, text))
    return table
