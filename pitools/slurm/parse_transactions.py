"""Parse `sacctmgr -n -P show transactions`: who changed accounting when, of the objects that its texts name."""

from __future__ import annotations

import re
from datetime import tzinfo

from pitools.core.record import Record
from pitools.slurm.fields import parse_slurm_time

_COLUMNS = "time,action,actor,where,info"
# The text of a condition has `||` inside; a newline in a description goes on with the row before.
_ROW = re.compile(r"(\d{4}-\d\d-\d\dT[\d:]{8})\|([A-Z][^|]*)\|([^|]*)\|((?:[^|]|\|\|)*)\|(.*)", re.DOTALL)
_NEW_ROW = re.compile(r"\n(?=\d{4}-\d\d-\d\dT[\d:]{8}\|[A-Z])")
_ID = re.compile(r"\bid(?:_assoc)?='?(\d+)")
_NAME = re.compile(r"\b(?:name|user)='([^']*)'")
_ACCOUNT = re.compile(r"\bacct='([^']*)'")
_NEW_ASSOCIATION = re.compile(r"(?:^|, )`?(acct|user|partition)`?='([^']*)'")
_FIELD = re.compile(r"(?:^|, )`?([a-z_]+)`? ?=")
_OBJECTS = {"qos": "qos", "accounts": "account", "users": "user", "associations": "association"}


class Transaction(Record, frozen=True, kw_only=True, tag="pit.accounting-transaction/1"):
    """A change of accounting. kind: of its objects: qos, account, user, association, coordinator, or Slurm's word.

    names: of a QOS, an account, a user or a coordinator; of a new association account, user and partition. accounts:
    of a coordinator. ids: of associations, and of a removed QOS. fields: changed columns of the database; () of a new
    object.
    """

    at: str
    actor: str
    action: str
    kind: str
    names: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


def transactions(since: str, cluster: str = "") -> list[str]:
    """List changes since a time, such as `now-90days`: of a cluster's associations, or of every object there is."""
    only = [f"clusters={cluster}"] if cluster else []
    return ["sacctmgr", "-n", "-P", "show", "transactions", f"start={since}", *only, f"format={_COLUMNS}"]


def parse_transactions(text: str, zone: tzinfo | None = None) -> list[Transaction]:
    """Return the changes, oldest first. zone: of the times. What is no change of a known form is left out."""
    rows = (_ROW.fullmatch(row.rstrip("\n")) for row in _NEW_ROW.split(text))
    return [_parse(match, zone) for match in rows if match]


def _parse(row: re.Match[str], zone: tzinfo | None) -> Transaction:
    time, action, actor, where, info = row.groups()
    verb, _, what = action.lower().partition(" ")
    kind = "coordinator" if what.startswith("account coord") else _OBJECTS.get(what, what)
    if (verb, kind) == ("add", "association"):
        new = dict(_NEW_ASSOCIATION.findall(info))
        names = tuple(new.get(key, "") for key in ("acct", "user", "partition"))
    else:
        names = tuple(_NAME.findall(where)) if "=" in where else tuple(where.split(","))
    accounts = _ACCOUNT.findall(where) if "=" in where else info.split(",")
    fields = _FIELD.findall(info)
    return Transaction(
        at=parse_slurm_time(time, zone),
        actor=actor,
        action=verb,
        kind=kind,
        names=names,
        accounts=tuple(accounts) if kind == "coordinator" else (),
        ids=tuple(_ID.findall(where)),
        fields=() if verb == "add" or kind == "coordinator" else tuple(dict.fromkeys(fields)),
    )
