"""The policy: a TOML file of teams, members, tiers and users, for one or several sites.

    [tiers.urgent]                       a QOS: priority, whom it preempts, limits
    [teams.vision]                       an account: parent, shares, tiers, members, limits
    [teams.vision.members.ann]           what differs for one member
    [users.ann]                          default team, administrator
    [sites.alpha]                        a site, and what differs there

Keys of limits are Slurm's options in snake case. Times are Slurm's (`2-00:00:00`, minutes alone), memory `16G`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from pitools.core.errors import ConfigError, suggest
from pitools.core.strict_toml import convert_tables, read_toml

Tres = dict[str, int | str]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A table whose unknown keys are errors."""


class _Association(_Table, frozen=True, kw_only=True):
    """What an account and a user's association may both have. None: Slurm's own, or what the team above has.

    tiers: names of tiers; with a sign (`+urgent`, `-scavenger`) a change to those of the team above.
    """

    shares: int | Literal["parent"] | None = None
    priority: int | None = None
    tiers: list[str] | None = None
    default_tier: str | None = None
    gpu_hours: int | None = None
    grp_tres: Tres = {}
    grp_tres_mins: Tres = {}
    grp_tres_run_mins: Tres = {}
    grp_jobs: int | None = None
    grp_jobs_accrue: int | None = None
    grp_submit: int | None = None
    grp_wall: str | None = None
    max_tres: Tres = {}
    max_tres_per_node: Tres = {}
    max_tres_mins: Tres = {}
    max_jobs: int | None = None
    max_jobs_accrue: int | None = None
    max_submit: int | None = None
    max_wall: str | None = None
    min_prio_thresh: int | None = None


class Member(_Association, frozen=True, kw_only=True):
    """What differs for one user of a team. partitions: rows that count in one partition alone."""

    partitions: dict[str, _Association] = {}


class Team(_Association, frozen=True, kw_only=True):
    """An account. users: who may submit in it. leads: its coordinators. gpu_hours: the budget, as GrpTRESMins."""

    parent: str | None = None
    description: str | None = None
    organization: str | None = None
    users: list[str] = []
    leads: list[str] = []
    members: dict[str, Member] = {}


class Tier(_Table, frozen=True, kw_only=True):
    """A QOS. preempts: the tiers whose jobs it may preempt. grace_time: what they have left then."""

    priority: int | None = None
    preempts: list[str] = []
    preempt_mode: str | None = None
    preempt_exempt_time: str | None = None
    grace_time: str | None = None
    flags: list[str] = []
    usage_factor: float | None = None
    usage_threshold: float | None = None
    limit_factor: float | None = None
    grp_tres: Tres = {}
    grp_tres_mins: Tres = {}
    grp_tres_run_mins: Tres = {}
    grp_jobs: int | None = None
    grp_jobs_accrue: int | None = None
    grp_submit: int | None = None
    grp_wall: str | None = None
    max_tres: Tres = {}
    max_tres_per_node: Tres = {}
    max_tres_mins: Tres = {}
    max_wall: str | None = None
    min_tres: Tres = {}
    max_tres_per_user: Tres = {}
    max_tres_per_account: Tres = {}
    max_tres_run_mins_per_user: Tres = {}
    max_jobs_per_user: int | None = None
    max_jobs_per_account: int | None = None
    max_submit_per_user: int | None = None
    max_submit_per_account: int | None = None
    max_jobs_accrue_per_user: int | None = None
    max_jobs_accrue_per_account: int | None = None
    min_prio_thresh: int | None = None


class User(_Table, frozen=True, kw_only=True):
    """A user. default_team: needed by a member of several. admin: AdminLevel."""

    default_team: str | None = None
    admin: Literal["Operator", "Administrator"] | None = None


class Policy(_Table, frozen=True, kw_only=True):
    """What one site's accounting is to have. manage: `all` removes what the policy does not name, `listed` keeps it."""

    manage: Literal["all", "listed"] = "listed"
    tiers: dict[str, Tier] = {}
    teams: dict[str, Team] = {}
    users: dict[str, User] = {}


class _Site(_Table, frozen=True, kw_only=True):
    """A site. without: keys that are left out there, with dots between tables."""

    without: list[str] = []
    tiers: dict[str, Any] = {}
    teams: dict[str, Any] = {}
    users: dict[str, Any] = {}


def load_policies(path: Path, sites: Sequence[str] = (), default: str = "local") -> dict[str, Policy]:
    """Read the policy of each site: of those named, else of all in its [sites], else of the default.

    A policy without [sites] holds for any site. Raises ConfigError.
    """
    tables = read_toml(path)
    own = tables.get("sites", {})
    return {name: policy_of(tables, name if own else "", str(path)) for name in sites or own or [default]}


def policy_of(tables: dict[str, Any], site: str, where: str) -> Policy:
    """Return the policy of a site, with what differs there. site: "" for the part that all sites share.

    Raises ConfigError for an unknown site or key, a wrong value, and names that nothing defines.
    """
    common = {key: value for key, value in tables.items() if key != "sites"}
    sites = tables.get("sites", {})
    if not isinstance(sites, dict) or (site and site not in sites):
        raise ConfigError(f'no site "{site}" in the policy', where=where, hint=suggest(site, sites), key="sites")
    if site:
        here = convert_tables(sites[site], _Site, f"{where}: sites.{site}")
        for path in here.without:
            _remove(common := _copy(common), _parse_path(path, where), path, where)
        common = _merged(common, {"tiers": here.tiers, "teams": here.teams, "users": here.users})
    policy = convert_tables(common, Policy, where)
    _check_names(policy, where)
    return policy


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(base[key], over[key]) for key in base if _is_table(base[key]) and _is_table(over.get(key))}
    return {**base, **over, **both}


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _copy(table: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in table.items()}


def _parse_path(path: str, where: str) -> list[str]:
    try:
        table: Any = tomllib.loads(f"{path} = 0")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f'"{path}" is not a key', where=where, hint="write teams.NAME.max_jobs") from error
    keys = []
    while isinstance(table, dict):
        keys.append(next(iter(table)))
        table = table[keys[-1]]
    return keys


def _remove(table: dict[str, Any], keys: list[str], path: str, where: str) -> None:
    for key in keys[:-1]:
        table = table[key] if isinstance(table.get(key), dict) else {}
    if keys[-1] not in table:
        raise ConfigError(f'without "{path}": no such key', where=where, hint=suggest(keys[-1], table))
    del table[keys[-1]]


def _check_names(policy: Policy, where: str) -> None:
    """Raise ConfigError for a name that the policy uses and does not define, and for a user in no team."""
    for name, team in policy.teams.items():
        key = f"teams.{name}"
        rows = [(key, team), *((f"{key}.members.{user}", row) for user, row in team.members.items())]
        for row_key, row in rows:
            tiers = [tier.lstrip("+-") for tier in row.tiers or []] + [row.default_tier or ""]
            for tier in filter(None, tiers):
                _require(tier, policy.tiers, "tier", row_key, policy, where)
            if row.shares == 0:
                problem = f'key "{row_key}.shares": 0 lets no job of it start before the others (expected 1 or more)'
                raise ConfigError(problem, where=where, hint='"parent" shares what the team above has', key=row_key)
        if team.parent and team.parent != "root":
            _require(team.parent, policy.teams, "team", f"{key}.parent", policy, where)
        for user in team.members:
            if user not in team.users and not team.members[user].partitions:
                hint = suggest(user, team.users)
                raise ConfigError(f'key "{key}.members.{user}": no user of the team', where=where, hint=hint, key=key)
        _require_no_cycle(name, policy, where)
    for name, tier_table in policy.tiers.items():
        for tier in tier_table.preempts:
            _require(tier, policy.tiers, "tier", f"tiers.{name}.preempts", policy, where)
    _check_users(policy, where)


def _check_users(policy: Policy, where: str) -> None:
    teams_of: dict[str, list[str]] = {}
    for name, team in policy.teams.items():
        for user in dict.fromkeys((*team.users, *team.members)):
            teams_of.setdefault(user, []).append(name)
    for name, user_table in policy.users.items():
        key = f"users.{name}"
        if name not in teams_of:
            raise ConfigError(f'key "{key}": in no team', where=where, hint=suggest(name, teams_of), key=key)
        if user_table.default_team and user_table.default_team not in teams_of[name]:
            problem = f'key "{key}.default_team": not a member of "{user_table.default_team}"'
            raise ConfigError(problem, where=where, hint=f"one of: {', '.join(teams_of[name])}", key=key)
    for name, teams in teams_of.items():
        if len(teams) > 1 and not policy.users.get(name, User()).default_team:
            problem = f'user "{name}" is in several teams: {", ".join(teams)}'
            hint = f'[users.{name}] default_team = "{teams[0]}"'
            raise ConfigError(problem, where=where, hint=hint, key=f"users.{name}")


def _require(name: str, names: dict[str, Any], kind: str, key: str, policy: Policy, where: str) -> None:
    if name not in names and policy.manage == "all":
        raise ConfigError(f'key "{key}": no {kind} "{name}"', where=where, hint=suggest(name, names), key=key)


def _require_no_cycle(name: str, policy: Policy, where: str) -> None:
    seen = [name]
    while (parent := policy.teams[seen[-1]].parent or "root") in policy.teams and parent != "root":
        if parent in seen:
            raise ConfigError(f'team "{name}" is below itself: {" → ".join([*seen, parent])}', where=where)
        seen.append(parent)
