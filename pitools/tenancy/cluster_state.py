"""What accounting has of a cluster: QOS, accounts, users, their associations; read from sacctmgr, as flat objects.

An object is a key and its set values, by sacctmgr's option. Keys: ("tier", QOS), ("team", account),
("member", account, user, partition), ("user", name), ("lead", account, user). A member is an association of a user;
a lead is a coordinator. Values are canonical, and unset ones are left out: so two states differ only where Slurm's do.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pitools.core.errors import UsageError
from pitools.slurm.fields import comma_list, parse_error
from pitools.tenancy.columns import ASSOCIATION, QOS, Column, canonical

Key = tuple[str, ...]
Values = dict[str, str]

# For each kind of object, the queries by whose answers it is known whole, and accounts and QOS where they are in use.
QUERIES_OF = {"tier": (0, 1), "team": (1, 2, 5), "member": (1,), "user": (1, 3, 4), "lead": (1, 2, 5)}
# Options that name other objects, and their kind.
LINKS = {"QOS": "tier", "DefaultQOS": "tier", "Preempt": "tier", "Parent": "team"}
_ASSOCIATION_KEY = ("Cluster", "Account", "User", "Partition")


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """The accounting of one cluster.

    others: each cluster that shares its database, and so QOS and accounts → those in use there, as keys. records: each
    account of the database → its description and organization. resources: that limits may name; empty if unknown.
    runner: the user by whose rights accounting is changed. other_parents: account → those above it on other clusters.
    other_leads, other_rights: the leads of accounts, and the AdminLevel of users, that only others have.
    """

    cluster: str
    objects: dict[Key, Values]
    others: dict[str, frozenset[Key]] = {}
    records: dict[str, Values] = {}
    resources: frozenset[str] = frozenset()
    runner: str = ""
    other_parents: dict[str, frozenset[str]] = {}
    other_leads: frozenset[Key] = frozenset()
    other_rights: dict[str, Values] = {}


def queries() -> list[list[str]]:
    """Return the commands whose answers `parse_state` reads, in order; of all clusters that share the database.

    WOPInfo, WOPLimits and WithRawQOSLevel show each association's own values: sacctmgr otherwise adds those that it
    inherits. The second query has the parents that WOPInfo leaves out.
    """
    show = ["sacctmgr", "-n", "-P", "show"]
    columns = ",".join((*_ASSOCIATION_KEY, *(column.option for column in ASSOCIATION)))
    return [
        [*show, "qos", "format=" + ",".join(("Name", *(column.option for column in QOS)))],
        [*show, "assoc", "wopinfo", "woplimits", "withrawqoslevel", f"format={columns}"],
        [*show, "assoc", "format=Cluster,Account,User,ParentName"],
        [*show, "assoc", "onlydefaults", "format=Cluster,User,Account"],
        [*show, "user", "format=User,AdminLevel"],
        [*show, "account", "withcoordinators", "format=Account,Description,Organization,Coordinators"],
        [*show, "tres", "format=Type,Name"],
    ]


def parse_state(cluster: str, answers: Sequence[str]) -> ClusterState:
    """Parse the answers to `queries`. Raises ClusterError.

    Users and accounts without an association on this cluster are left out: other clusters have them, or none.
    """
    qos, associations, parents, defaults, users, accounts, tres = map(_rows, queries(), answers)
    resources = frozenset("/".join(filter(None, row)) for row in tres)
    objects: dict[Key, Values] = {}
    others: dict[str, frozenset[Key]] = {}
    for name, *texts in qos:
        objects["tier", name] = _values(QOS, texts, "show qos")
    parent_of = {account: parent for of, account, user, parent in parents if of == cluster and not user}
    other_parents: dict[str, frozenset[str]] = {}
    for of, team, user, above in parents:
        if of != cluster and not user and above:
            other_parents[team] = other_parents.get(team, frozenset()) | {above}
    records = {row[0]: _record(row) for row in accounts}
    coordinators = {row[0]: row[3] for row in accounts}
    for of, account, user, partition, *texts in associations:
        values = _values(ASSOCIATION, texts, "show assoc")
        if of != cluster:
            others[of] = others.get(of, frozenset()) | {("team", account), *needs(("team", account), values)}
            continue
        if user:
            objects["member", account, user, partition] = values
            objects["user", user] = {}
            continue
        parent = {"Parent": parent_of.get(account, "")} if parent_of.get(account) not in (None, "", "root") else {}
        objects["team", account] = {**parent, **records.get(account, {}), **values}
        for lead in comma_list(coordinators.get(account, "")):
            objects["lead", account, lead] = {}
    for of, user, account in defaults:
        if of == cluster and ("user", user) in objects:
            objects["user", user]["DefaultAccount"] = account
    rights = {user: {"AdminLevel": level} for user, level in users if level not in ("", "None")}
    for user in [user for user in rights if ("user", user) in objects]:
        objects["user", user] |= rights.pop(user)
    leads = {("lead", team, user) for team, users in coordinators.items() for user in comma_list(users)}
    other_leads = frozenset(lead for lead in leads if ("team", lead[1]) not in objects)
    of_others = {"others": others, "other_parents": other_parents, "other_leads": other_leads, "other_rights": rights}
    state = ClusterState(cluster=cluster, objects=objects, records=records, resources=resources)
    return without_inherited_leads(msgspec.structs.replace(state, **of_others))


def without_inherited_leads(state: ClusterState) -> ClusterState:
    """Return the state without leads of a team that also lead a team above, on any cluster: Slurm shows both alike."""
    kept = {key: values for key, values in state.objects.items() if key[0] != "lead" or not leads_above(state, key)}
    return msgspec.structs.replace(state, objects=kept)


def leads_above(state: ClusterState, lead: Key) -> bool:
    """Return whether the user of a lead leads an account above its own, too, on this cluster or another."""
    names = [lead[1]]
    for name in names:
        own = state.objects.get(("team", name), {}).get("Parent", "root")
        names += [each for each in {own, *state.other_parents.get(name, ())} if each not in names]
    above = [("lead", name, lead[2]) for name in names[1:]]
    return any(key in state.objects or key in state.other_leads for key in above)


def needs(key: Key, values: Values) -> set[Key]:
    """Return the objects that an object cannot be without."""
    pairs = [(kind, name) for option, kind in LINKS.items() for name in comma_list(values.get(option, ""))]
    links = {(kind, name.lstrip("+-") if kind == "tier" else name) for kind, name in pairs}
    links |= {("team", key[1])} if key[0] in ("member", "lead") else set()
    return links | ({("user", key[2])} if key[0] == "member" else set())


def teams_top_down(state: ClusterState) -> list[str]:
    """Return the accounts, parents first."""
    children: dict[str, list[str]] = {}
    for kind, name, *_ in sorted(state.objects):
        if kind == "team" and name != "root":
            children.setdefault(state.objects[kind, name].get("Parent", "root"), []).append(name)
    names = ["root"]
    for name in names:
        names += children.get(name, [])
    return [name for name in names if ("team", name) in state.objects]


def _record(row: Sequence[str]) -> Values:
    """Return an account's description and organization, without those that are its name, as `add` sets them."""
    named = {"Description": row[1], "Organization": row[2]}
    return {option: text for option, text in named.items() if text not in ("", row[0])}


def _rows(query: Sequence[str], text: str) -> list[list[str]]:
    """Return the rows of an answer. Raises ClusterError for one with another number of values than asked for.

    An account's description may contain `|`: its name and its leads, the first and the last value, are sure.
    """
    width = query[-1].count(",") + 1
    rows = [line.split("|") for line in text.split("\n") if line]
    for row in rows:
        end = len(row) - width + 2
        if "Description" in query[-1] and end > 2:
            row[1:end] = ["|".join(row[1:end])]
        if len(row) != width:
            raise parse_error(" ".join(query), f"{len(row)} values (expected {width})", "|".join(row))
    return rows


def _values(columns: Sequence[Column], texts: Sequence[str], command: str) -> Values:
    try:
        pairs = [(column.option, canonical(column, text)) for column, text in zip(columns, texts, strict=True)]
    except (ValueError, UsageError) as error:
        raise parse_error(f"sacctmgr {command}", str(error), "|".join(texts)) from error
    return {option: text for option, text in pairs if text}
