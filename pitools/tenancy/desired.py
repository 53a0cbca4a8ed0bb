"""The state that a policy asks for, and the policy that a state is: each the other's inverse."""

from __future__ import annotations

from typing import Any

import msgspec

from pitools.slurm.fields import parse_tres
from pitools.tenancy.cluster_state import ClusterState, Key, Values, without_inherited_leads
from pitools.tenancy.columns import COLUMNS, TomlValue, canonical, from_toml, to_toml
from pitools.tenancy.policy import Policy

_GPU = "gres/gpu"
_MINUTES = "GrpTRESMins"


def desired_state(policy: Policy, now: ClusterState, where: str = "policy") -> ClusterState:
    """Return what the cluster is to have. now: keeps what a policy with `manage = "listed"` does not name.

    Raises ConfigError for a value that is no limit of Slurm's.
    """
    objects: dict[Key, Values] = {}
    first_team: dict[str, str] = {}
    for name, tier in policy.tiers.items():
        objects["tier", name] = _values("tier", tier, f"{where}: tiers.{name}")
    for name, team in policy.teams.items():
        place = f"{where}: teams.{name}"
        objects["team", name] = _values("team", team, place)
        for lead in team.leads:
            objects["lead", name, lead] = {}
        for user in dict.fromkeys((*team.users, *team.members)):
            first_team.setdefault(user, name)
            member = team.members.get(user)
            if user in team.users:
                objects["member", name, user, ""] = _values("member", member, place) if member else {}
            for partition, row in (member.partitions if member else {}).items():
                objects["member", name, user, partition] = _values("member", row, place)
    for user, team_name in first_team.items():
        table = policy.users.get(user)
        values = _values("user", table, f"{where}: users.{user}") if table else {}
        objects["user", user] = {"DefaultAccount": team_name, **values}
    objects = _with_unlisted(policy, objects, now)
    return without_inherited_leads(ClusterState(cluster=now.cluster, objects=objects))


def _with_unlisted(policy: Policy, objects: dict[Key, Values], now: ClusterState) -> dict[Key, Values]:
    """Add what the policy leaves alone: the root account, tiers that other clusters of the database use.

    With `listed` also what it does not name, with members.
    """
    used_elsewhere = frozenset[Key]().union(*now.others.values())
    kept = {
        key: values
        for key, values in now.objects.items()
        if key[0] != "user" and key[1] not in (policy.tiers if key[0] == "tier" else policy.teams)
        if policy.manage == "listed" or (key in used_elsewhere if key[0] == "tier" else key[1] == "root")
    }
    teams_of: dict[str, list[str]] = {}
    for key in (*objects, *kept):
        if key[0] == "member":
            teams_of.setdefault(key[2], []).append(key[1])
    users = {key: values for key, values in now.objects.items() if key[0] == "user" and key[1] in teams_of}
    both = {**users, **objects, **kept}
    for key, values in users.items():  # a default team outside the policy stays, unless the policy names another
        table, default = policy.users.get(key[1]), values.get("DefaultAccount", "")
        still_in = any(row[0] == "member" and row[1:3] == (default, key[1]) for row in kept)
        if still_in and not (table and table.default_team):
            both[key] = {**both[key], "DefaultAccount": default}
        elif both[key].get("DefaultAccount") not in teams_of[key[1]]:
            both[key] = {**both[key], "DefaultAccount": min(teams_of[key[1]])}
    return both


def _values(kind: str, table: msgspec.Struct, where: str) -> Values:
    raw: dict[str, TomlValue] = {
        key: value for key, value in msgspec.structs.asdict(table).items() if value is not None
    }
    hours = raw.pop("gpu_hours", None)
    if isinstance(hours, int):
        minutes = raw.get("grp_tres_mins", {})
        raw["grp_tres_mins"] = {**(minutes if isinstance(minutes, dict) else {}), _GPU: hours * 60}
    columns = {column.key: column for column in COLUMNS[kind]}
    texts = {columns[key].option: from_toml(columns[key], raw[key], where) for key in raw if key in columns}
    return {option: text for option, text in texts.items() if text}


def policy_tables(state: ClusterState) -> dict[str, Any]:
    """Return the tables of the policy that a cluster has now: `desired_state` of it is this state."""
    tiers = {key[1]: _tables("tier", values) for key, values in state.objects.items() if key[0] == "tier"}
    teams = {key[1]: _tables("team", values) for key, values in state.objects.items() if key[0] == "team"}
    users: dict[str, dict[str, Any]] = {}
    teams_of: dict[str, set[str]] = {}
    for key, values in sorted(state.objects.items()):
        if key[0] == "lead":
            teams[key[1]].setdefault("leads", []).append(key[2])
        elif key[0] == "member":
            _, team, user, partition = key
            teams_of.setdefault(user, set()).add(team)
            members = teams[team].setdefault("members", {})
            if partition:
                rows = members.setdefault(user, {}).setdefault("partitions", {})
                rows[partition] = _tables("member", values)
            else:
                teams[team].setdefault("users", []).append(user)
                if values:
                    members[user] = {**_tables("member", values), **members.get(user, {})}
    for team_tables in teams.values():
        if not team_tables.get("members", True):
            del team_tables["members"]
    for key, values in sorted(state.objects.items()):
        if key[0] == "user":
            table = _tables("user", values)
            if len(teams_of.get(key[1], ())) == 1:
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
