"""The policy: a TOML file of teams, members, tiers and users, for one or several sites.

    [tiers.urgent]                       a QOS: priority, whom it preempts, limits
    [teams.vision]                       an account: parent, shares, tiers, members, limits
    [teams.vision.members.ann]           what differs for one member
    [users.ann]                          default team, administrator
    [sites.alpha]                        a site, and what differs there

All keys are in docs/tenancy.md, from `columns.py`. Times are Slurm's (`2-00:00:00`, minutes alone), memory `16G`. With
`manage = "listed"`, the default, whatever a policy does not name stays: a team, a key of a team's table, and without
`users` its members. A key is unset by -1, "", [] or {}.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pitools.core.errors import ConfigError, suggest
from pitools.core.strict_toml import convert_tables, read_toml
from pitools.tenancy.columns import COLUMNS

_TYPES: dict[str, Any] = {"count": int, "number": float, "list": list[str], "tres": dict[str, int | str]}  # others: str
_FORMS = {
    "count": "a whole number, without quotes",
    "number": "a number such as 0.5, without quotes",
    "list": 'a list: ["a", "b"]',
    "tres": 'amounts: { "gres/gpu" = 8, mem = "16G" }',
    "time": 'a time in quotes: "30m", "2h", "1d12h" or "2-00:00:00"',
    "text": "text in quotes",
}
_KINDS: dict[str, str] = {column.key: column.kind for columns in COLUMNS.values() for column in columns}
_KINDS |= {"users": "list", "leads": "list", "without": "list", "gpu_hours": "count", "shares": "count"}
AMOUNTS = {key for key, kind in _KINDS.items() if kind == "tres"}


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A table whose unknown keys are errors. None: a key that it does not name."""

    def __post_init__(self) -> None:
        """Raise ValueError if it says twice how many GPU hours there are, or lists a name twice."""
        if getattr(self, "gpu_hours", None) is not None and "gres/gpu" in (getattr(self, "grp_tres_mins", None) or ()):
            raise ValueError('gpu_hours and the "gres/gpu" of grp_tres_mins are the same limit (expected one of them)')
        for key in self.__struct_fields__:
            names = getattr(self, key)
            if isinstance(names, list) and (twice := sorted({name for name in names if names.count(name) > 1})):
                raise ValueError(f'{key}: "{twice[0]}" is listed twice')


def _with_columns(kind: str) -> type[msgspec.Struct]:
    """Return a table with the keys of an object's columns, and for associations with the budget as `gpu_hours`."""
    types = {column.key: _TYPES.get(column.kind, str) for column in COLUMNS[kind]}
    if kind != "tier":
        types |= {"shares": int | str, "gpu_hours": int}
    fields = [(key, type_ | None, None) for key, type_ in types.items()]
    return msgspec.defstruct(kind, fields, bases=(_Table,), frozen=True, kw_only=True, forbid_unknown_fields=True)


if TYPE_CHECKING:
    _Association = _Table
    _Account = _Table
    Tier = _Table
else:
    _Association, _Account, Tier = map(_with_columns, ("member", "team", "tier"))


class Member(_Association, frozen=True, kw_only=True):
    """What differs for one user of a team. partitions: rows that count in one partition alone."""

    partitions: dict[str, _Association] = {}


class Team(_Account, frozen=True, kw_only=True):
    """An account. users: who may submit in it. leads: its coordinators. members: what differs for some."""

    users: list[str] | None = None
    leads: list[str] | None = None
    members: dict[str, Member] = {}


class User(_Table, frozen=True, kw_only=True):
    """A user. default_team: needed by a new member of several. admin: AdminLevel."""

    default_team: str | None = None
    admin: Literal["None", "Operator", "Administrator"] | None = None


class _Objects(_Table, frozen=True, kw_only=True):
    """The tables of a policy, or of a site in it."""

    tiers: dict[str, Tier] = {}
    teams: dict[str, Team] = {}
    users: dict[str, User] = {}


class Site(_Objects, frozen=True, kw_only=True):
    """What differs at a site. without: keys that are left out there, with dots between tables."""

    without: list[str] = []


class Policy(_Objects, frozen=True, kw_only=True):
    """What one site's accounting is to have. manage: `all` removes what the policy does not name, `listed` keeps it."""

    manage: Literal["all", "listed"] = "listed"
    sites: dict[str, Site] = {}


def load_policies(path: Path, sites: Sequence[str] = (), default: str = "local") -> dict[str, Policy]:
    """Read the policy of each site: of those named, else of all in its [sites], else of the default.

    A policy without [sites] holds for any site. Raises ConfigError.
    """
    tables = read_toml(path)
    own = policy_of(tables, "", str(path)).sites
    return {name: policy_of(tables, name if own else "", str(path)) for name in sites or own or [default]}


def policy_of(tables: dict[str, Any], site: str, where: str) -> Policy:
    """Return the policy of a site, with what differs there. site: "" for the part that all sites share.

    Raises ConfigError for an unknown site or key, and a value of a wrong type.
    """
    policy = _convert(tables, where)
    if not site:
        return policy
    if site not in policy.sites:
        raise ConfigError(f'no site "{site}" in the policy', where=where, hint=suggest(site, policy.sites), key="sites")
    common, own = _copy(tables), {**tables["sites"][site]}
    for path in own.pop("without", []):
        _remove(common, _parse_path(path, where), path, where)
    return _convert(_merged(common, own), where)


def _convert(tables: dict[str, Any], where: str) -> Policy:
    try:
        return convert_tables(tables, Policy, where)
    except ConfigError as error:
        kinds = [
            _KINDS[key] for key in re.split(r"[.\[]", error.key) if key in _KINDS
        ]  # amounts have keys of their own
        raise (error.with_hint(f"write {_FORMS[kinds[-1]]}") if kinds and not error.hint else error) from error


def administrators(policy: Policy, *, shares_database: bool) -> set[str]:
    """Return the users to whom a policy gives rights; also at its other sites, whose users may be in the database."""
    tables = (policy, *policy.sites.values()) if shares_database else (policy,)
    return {name for table in tables for name, user in table.users.items() if user.admin}


def table_name(key: tuple[str, ...]) -> str:
    """Return the table of a policy that has an object of accounting: `teams.vision.members.ann`."""
    kind, name, *rest = key
    parts = [f"{kind}s" if kind in ("tier", "user") else "teams", name]
    if kind == "member":
        parts += ["members", rest[0], *(["partitions", rest[1]] if rest[1] else [])]
    return ".".join(parts)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return a table with what differs in another one: tables key by key, lists and amounts wholly."""
    tables = [key for key in base.keys() & over.keys() - AMOUNTS if isinstance(base[key], dict)]
    return {**base, **over, **{key: _merged(base[key], over[key]) for key in tables if isinstance(over[key], dict)}}


def _copy(table: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in table.items()}


def _parse_path(path: str, where: str) -> list[str]:
    try:
        table: Any = tomllib.loads(f"[{path}]")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f'"{path}" is not a key', where=where, hint="write teams.NAME.max_jobs") from error
    keys = []
    while table:
        keys.append(next(iter(table)))
        table = table[keys[-1]]
    return keys


def _remove(table: dict[str, Any], keys: list[str], path: str, where: str) -> None:
    for key in keys[:-1]:
        table = table[key] if isinstance(table.get(key), dict) else {}
    if keys[-1] not in table:
        raise ConfigError(f'without "{path}": no such key', where=where, hint=suggest(keys[-1], table))
    del table[keys[-1]]
