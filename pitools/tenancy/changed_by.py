"""Find who changed an object of accounting, in the transactions that slurmdbd keeps.

slurmdbd does not record that an account got another parent, and records only the id of a removed QOS. A removal is
attributed to a tier if it is the only one since the tier was last mentioned.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC

import msgspec

from pitools.slurm.parse_transactions import Transaction, parse_transactions, transactions
from pitools.tenancy.changes import ObjectChange
from pitools.tenancy.cluster_state import Key
from pitools.tenancy.columns import COLUMNS

_SINCE = "now-90days"
_MAX_CHANGES = 3
# A column of Slurm's database → the key of a policy, where that is another; and what the ends of columns mean.
_KEYS = {
    "qos": "tiers",
    "delta_qos": "tiers",
    "def_qos_id": "default_tier",
    "is_def": "default_team",
    "parent_acct": "parent",
    "preempt": "preempts",
    "usage_thres": "usage_threshold",
    "admin_level": "admin",
    "max_wall_duration_per_job": "max_wall",
}
_ENDS = {"_pj": "", "_pn": "_per_node", "_pa": "_per_account", "_pu": "_per_user"}


class AccountingChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The last changes of a cluster's accounting, oldest first. keys: id → key of an association."""

    transactions: tuple[Transaction, ...]
    keys: dict[str, Key]

    def of(self, change: ObjectChange) -> tuple[Transaction, ...]:
        """Return the last changes of an object's differing values, newest first; () where accounting does not tell."""
        differing = {
            column.key
            for column in COLUMNS[change.key[0]]
            if (change.before or {}).get(column.option) != (change.after or {}).get(column.option)
        }
        action = "remove" if change.after is None else "add" if change.before is None else "modify"
        found = [
            each
            for each in reversed(self.transactions)
            if self._is_of(each, change.key)
            and (each.action == action or (each.action, action) == ("modify", "add"))
            and (each.action != "modify" or differing & {_key_of(field) for field in each.fields})
        ]
        if change.key[0] == "tier" and action == "remove":
            naming = (each.at for each in self.transactions if each.kind == "qos" and change.key[1] in each.names)
            last = max(naming, default="")
            found = [each for each in found if each.at >= last]
            if len({each.ids for each in found}) > 1:
                return ()
        return tuple(found[:_MAX_CHANGES])

    def _is_of(self, each: Transaction, key: Key) -> bool:
        kind, name, *rest = key
        if each.kind == "association":
            keys = [self.keys.get(number) for number in each.ids]
            # A user is at a cluster from the first association there to the last: others may have "Add Users" before.
            is_users = kind == "user" and ("is_def" in each.fields or each.action != "modify")
            return key in keys or (is_users and any(row and row[0] == "member" and row[2] == name for row in keys))
        if kind == "lead":
            return each.kind == "coordinator" and name in each.accounts and rest[0] in each.names
        if (kind, each.kind, each.action) == ("tier", "qos", "remove"):
            return True  # by its id alone
        if each.action == "add" and kind != "tier":
            return False  # of the database, perhaps for another cluster: its association here tells
        return (kind, each.kind) in {("tier", "qos"), ("team", "account"), ("user", "user")} and name in each.names


def queries(cluster: str) -> list[list[str]]:
    """Return the commands whose answers `parse_changes` reads. The first is for QOS, accounts and users."""
    ids = ["sacctmgr", "-n", "-P", "show", "assoc", f"cluster={cluster}", "withdeleted"]
    return [transactions(_SINCE), transactions(_SINCE, cluster), [*ids, "format=ID,Account,User,Partition"]]


def parse_changes(answers: Sequence[str]) -> AccountingChanges:
    """Parse the answers to `queries`, with times in UTC."""
    everywhere, here, ids = answers
    rows = (line.split("|") for line in ids.split("\n") if line.count("|") == 3)
    keys = {number: _association_key(*names) for number, *names in rows}
    changes = parse_transactions(here, UTC)
    for each in changes:
        if (each.action, each.kind) == ("add", "association"):
            keys |= {number: _association_key(*each.names) for number in each.ids}
    changes += [each for each in parse_transactions(everywhere, UTC) if each.kind != "association"]
    return AccountingChanges(transactions=tuple(sorted(changes, key=lambda each: each.at)), keys=keys)


def _key_of(field: str) -> str:
    plain = field.replace("submit_jobs", "submit")
    return _KEYS.get(field) or plain[:-3] + _ENDS.get(plain[-3:], plain[-3:])


def _association_key(account: str, user: str, partition: str) -> Key:
    return ("member", account, user, partition) if user else ("team", account)
