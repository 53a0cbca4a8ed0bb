"""Order the changes from one state to another so that Slurm accepts each, and each leaves a usable state.

Slurm refuses a change after which an association's default QOS, its own or inherited, is not among those it may use.
So a list of QOS that changes together with a default, or with a parent, is first widened by what is needed on the way,
then the defaults and parents change, then the list gets its final value. The order:

    1 tiers      new QOS, then the values of all: a QOS may name another
    2 widen      lists of QOS of existing associations, where 3 and 4 need it
    3 defaults   new default QOS
    4 place      accounts, parents first: new, moved, inheriting again; then all other values; then users
    5 users      default accounts, new rights of administrators and operators, coordinators
    6 remove     users' associations, then accounts, children first
    7 narrow     lists of QOS to their final values
    8 forget     QOS that nothing names any more
    9 revoke     rights of administrators and operators; those of the user who makes the changes last

So there is an administrator at each point, and who makes the changes may make all of them.
To replace a full QOS list by a change (`+urgent`), it is first cleared. Until then each association below has an
explicit list.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import TopologicalSorter

from pitools.core.record import Record
from pitools.slurm.fields import comma_list
from pitools.tenancy.cluster_state import ClusterState, Key, Values, teams_top_down
from pitools.tenancy.columns import COLUMNS, setting

_TIERS, _DEFAULT, _PARENT, _PREEMPT = "QOS", "DefaultQOS", "Parent", "Preempt"
_ACCOUNT, _LEVEL = "DefaultAccount", "AdminLevel"
_OF_RECORD = ("Description", "Organization")
_LEVELS = ("", "Operator", "Administrator")


class ObjectChange(Record, frozen=True, kw_only=True, tag="pit.tenancy-object/1"):
    """What an object has and gets. before: None makes it, after: None removes it."""

    key: Key
    before: Values | None
    after: Values | None


def order_changes(now: ClusterState, then: ClusterState) -> list[ObjectChange]:
    """Return the changes that make one state the other, in an order in which Slurm accepts each."""
    walk = _Walk(now, then)
    first = (walk.tiers, walk.widen, walk.defaults, walk.place, walk.users)
    changes = [change for stage in (*first, walk.remove, walk.narrow, walk.forget, walk.revoke) for change in stage()]
    assert walk.objects == then.objects, "the changes do not lead to the desired state"
    return changes


class _Walk:
    """The state on the way, and the stages that change it."""

    def __init__(self, now: ClusterState, then: ClusterState) -> None:
        self.now, self.then = now, then
        self.objects = {key: dict(values) for key, values in now.objects.items()}
        self.teams = teams_top_down(then)
        self.old_teams = teams_top_down(now)

    def put(self, key: Key, after: Values | None) -> Iterator[ObjectChange]:
        """Yield the change of an object to these values, unless it has them."""
        before = self.objects.get(key)
        if before == after:
            return
        if after is None:
            del self.objects[key]
        else:
            self.objects[key] = dict(after)
        yield ObjectChange(key=key, before=before, after=after)

    def update(self, key: Key, **values: str) -> Iterator[ObjectChange]:
        """Yield the change of some values of an object; "" unsets one."""
        both = {**self.objects[key], **values}
        yield from self.put(key, {option: text for option, text in both.items() if text})

    def tiers(self) -> Iterator[ObjectChange]:
        """Make new QOS, and let others preempt no more than before and after: no loop; then set all values."""
        wanted = {key: values for key, values in self.then.objects.items() if key[0] == "tier"}
        for key, values in wanted.items():
            if key not in self.objects:
                yield from self.put(key, {option: text for option, text in values.items() if option != _PREEMPT})
            else:
                old, new = (names.get(_PREEMPT, "").split(",") for names in (self.objects[key], values))
                yield from self.update(key, Preempt=",".join(name for name in old if name in new))
        for key, values in wanted.items():
            yield from self.put(key, values)

    def rows(self, state: ClusterState, teams: list[str]) -> list[Key]:
        """Return the associations of a state: each account, then its users."""
        members: dict[str, list[Key]] = {}
        for key in sorted(state.objects):
            if key[0] == "member":
                members.setdefault(key[1], []).append(key)
        return [key for team in teams for key in (("team", team), *members.get(team, []))]

    def widen(self) -> Iterator[ObjectChange]:
        """Let existing associations use what they had, what they will have, and each default on the way."""
        inherited = [
            (key, option) for key in self.rows(self.now, self.old_teams) for option in (_TIERS, _DEFAULT, _PARENT)
        ]
        old, new = self.now.objects, self.then.objects
        if all(old[key].get(option) == new.get(key, old[key]).get(option) for key, option in inherited):
            return
        for key in dict.fromkeys(key for key, _ in inherited):
            tiers = [state.get(key, {}).get(_TIERS, "") for state in (old, new)]
            # `+urgent` is set last, after the lists above are narrow: until then the association has one of its own.
            # What it may inherit now, it may not once an account above is moved: a list that it will have comes first.
            is_moved = key in new and old[key].get(_PARENT) != new[key].get(_PARENT)
            needs_own = is_moved or self.is_cleared(key) or (tiers[1] and tiers[1][0] not in "+-")
            if needs_own or any(tiers):
                need = self.need(key)
                if needs_own or not need <= effective_tiers(ClusterState(cluster="", objects=self.objects), key):
                    yield from self.update(key, QOS=",".join(sorted(need)))

    def need(self, key: Key) -> set[str]:
        """Return what an association had, what it will have, and each default on the way."""
        return effective_tiers(self.now, key) | effective_tiers(self.then, key) | self.defaults_near(key)

    def is_cleared(self, key: Key) -> bool:
        """Return whether the list of an association, or of one above, becomes a change to the inherited one."""
        old, new = (state.objects.get(key, {}).get(_TIERS, "") for state in (self.now, self.then))
        higher = above(self.then, key)
        is_own = key in self.now.objects and old != new and new[:1] in ("+", "-")
        return is_own or (higher is not None and self.is_cleared(higher))

    def defaults_near(self, key: Key) -> set[str]:
        """Return each default QOS that an association may inherit on the way: of all old and new accounts above it."""
        names, keys = set[str](), [key]
        for each in keys:
            for state in (self.now, self.then):
                names.add(state.objects.get(each, {}).get(_DEFAULT, ""))
                higher = above(state, each)
                keys += [higher] if higher and higher not in keys else []
        return {name for name in names if ("tier", name) in self.objects}

    def defaults(self) -> Iterator[ObjectChange]:
        """Set the new default QOS of existing associations."""
        for key in reversed(self.rows(self.now, self.old_teams)):
            if new := self.then.objects.get(key, {}).get(_DEFAULT, ""):
                yield from self.update(key, DefaultQOS=new)

    def place(self) -> Iterator[ObjectChange]:
        """Make and move accounts, parents first, then users' associations; with all values but the lists of QOS."""
        for key in self.rows(self.then, self.teams):
            values = self.then.objects[key]
            if key in self.objects:
                own = {_TIERS: self.objects[key].get(_TIERS, "")}
                values = {option: text for option, text in {**values, **own}.items() if text}
                parent = values.get(_PARENT, "")
                if parent != self.objects[key].get(_PARENT, ""):
                    yield from self.update(key, Parent=parent)
            elif self.is_cleared(key):  # a new association has a list of its own until the one above is set
                values = {**values, _TIERS: ",".join(sorted(self.need(key)))}
            if key not in self.objects and key[0] == "team" and key[1] in self.now.records:
                plain = {option: text for option, text in values.items() if option not in _OF_RECORD}
                yield from self.put(key, {**plain, **self.now.records[key[1]]})  # which it does not change
            yield from self.put(key, values)
            if key[0] == "member" and ("user", key[2]) not in self.objects:
                rights = self.now.other_rights.get(key[2], {})
                self.objects["user", key[2]] = {_ACCOUNT: key[1], **rights}  # as Slurm does with a user's first

    def users(self) -> Iterator[ObjectChange]:
        """Take coordinators away, then set default accounts, rights that grow, and coordinators.

        In this order, as a coordinator of an account is shown as one of each account below.
        """
        for key in [key for key in self.objects if key[0] == "lead" and key not in self.then.objects]:
            yield from self.put(key, None)
        for key, values in self.then.objects.items():
            if key[0] == "user":
                levels = [each.get(_LEVEL, "") for each in (self.objects[key], values)]
                yield from self.update(key, **{**values, _LEVEL: max(levels, key=_LEVELS.index)})
            elif key in self.now.other_leads:  # of an account that is new on this cluster alone
                self.objects[key] = values
            elif key[0] == "lead":
                yield from self.put(key, values)

    def remove(self) -> Iterator[ObjectChange]:
        """Remove users' associations, those of the default account last; then accounts, children first.

        Slurm marks one association of a new user as the default, and all of the account if it is set: it is set again
        where the marked one may go and another of the account stays. A user goes with the last association.
        """
        gone = [key for key in self.objects if key[0] == "member" and key not in self.then.objects]
        for user in dict.fromkeys(key[2] for key in gone if self.is_default(key)):
            if ("user", user) in self.then.objects:
                values = dict(self.objects["user", user])
                unset = {option: text for option, text in values.items() if option != _ACCOUNT}
                yield ObjectChange(key=("user", user), before=unset, after=values)
        for key in sorted(gone, key=self.is_default):
            yield from self.put(key, None)
            if not any(row[0] == "member" and row[2] == key[2] for row in self.objects):
                del self.objects["user", key[2]]
        for key in reversed(self.rows(self.now, self.old_teams)):
            if key in self.objects and key not in self.then.objects:
                yield from self.put(key, None)

    def is_default(self, key: Key) -> bool:
        """Return whether an association is one of the user's default account."""
        return self.objects["user", key[2]].get(_ACCOUNT) == key[1]

    def narrow(self) -> Iterator[ObjectChange]:
        """Give the lists of QOS their final values: own lists from below, then what is inherited from above.

        A list becomes a change to the inherited one (`+urgent`) only by way of no list, and so without the default.
        """
        keys = self.rows(self.then, self.teams)
        final = {key: self.then.objects[key].get(_TIERS, "") for key in keys}
        for key in reversed(keys):  # but for those that may inherit another default for a moment
            if final[key] and final[key][0] not in "+-" and not self.is_cleared(key):
                yield from self.update(key, QOS=final[key])
        for key in keys:
            if final[key][:1] in ("+", "-") and self.objects[key].get(_TIERS) not in (None, final[key]):
                yield from self.update(key, QOS="", DefaultQOS="")
            yield from self.update(key, QOS=final[key], DefaultQOS=self.then.objects[key].get(_DEFAULT, ""))

    def forget(self) -> Iterator[ObjectChange]:
        """Remove QOS; first what they may preempt, which may be one of them."""
        keys = [key for key in self.objects if key[0] == "tier" and key not in self.then.objects]
        for key in keys:
            yield from self.update(key, Preempt="")
        for key in keys:
            yield from self.put(key, None)

    def revoke(self) -> Iterator[ObjectChange]:
        """Take rights of administrators and operators away; the runner's own last."""
        keys = [key for key in self.objects if key[0] == "user"]
        for key in sorted(keys, key=lambda key: key[1] == self.now.runner):
            yield from self.put(key, self.then.objects[key])


def effective_tiers(state: ClusterState, key: Key) -> set[str]:
    """Return the QOS that an association may use, its own or inherited; empty for none of the state's."""
    if key not in state.objects:
        return set()
    names = [name for name in state.objects[key].get(_TIERS, "").split(",") if name]
    signed = [name for name in names if name[0] in "+-"]
    if names and not signed:
        return set(names)
    higher = above(state, key)
    inherited = effective_tiers(state, higher) if higher else set()
    added = {name[1:] for name in signed if name[0] == "+"}
    return (inherited | added) - {name[1:] for name in signed if name[0] == "-"}


def above(state: ClusterState, key: Key) -> Key | None:
    """Return the account above an association; None for that of the root account."""
    if key not in state.objects or key == ("team", "root"):
        return None
    return ("team", key[1]) if key[0] == "member" else ("team", state.objects[key].get(_PARENT, "root"))


def command(change: ObjectChange, state: ClusterState) -> list[str]:
    """Return the call of sacctmgr that makes a change of a cluster's state."""
    verb = "add" if change.before is None else "delete" if change.after is None else "modify"
    before, after = change.before or {}, change.after or {}
    differing = [column for column in COLUMNS[change.key[0]] if before.get(column.option) != after.get(column.option)]
    settings = [setting(c, before.get(c.option, ""), after.get(c.option, ""), change.key[1]) for c in differing]
    what, names, where = _target(change.key, state.cluster)
    if change.key[0] == "lead":  # removed from the account, not the user: a coordinator is no object of its own
        return ["sacctmgr", "-i", verb, what, names, *where]
    if verb == "delete":
        if change.key[0] == "team" and not any(change.key in used for used in state.others.values()):
            where = []  # no other cluster has it: the account too, not only its association
        return ["sacctmgr", "-i", verb, what, f"name={names}", *where]
    if verb == "modify":
        return ["sacctmgr", "-i", verb, what, "where", f"name={names}", *where, "set", *settings]
    if change.key[0] == "team":  # Slurm would take the account above as the organization
        settings += [f"{option}={change.key[1]}" for option in _OF_RECORD if option not in after]
    return ["sacctmgr", "-i", verb, what, names, *where, *settings]


def preempt_renewals(state: ClusterState) -> Iterator[list[str]]:
    """Yield calls of sacctmgr that change nothing, after which slurmdbd knows again which tiers preempt which.

    slurmdbd 22.05 adds a QOS 0 in memory, which is none, to a list that it empties or takes a name from, and keeps a
    QOS that was removed. It then refuses as a loop that another tier preempts this one. A list that is set is as set;
    an empty one is so once a name is taken from it that it has not.
    """
    tiers = {key[1]: comma_list(values.get(_PREEMPT, "")) for key, values in state.objects.items() if key[0] == "tier"}
    for name in TopologicalSorter(tiers).static_order():  # a tier after those that it preempts
        modify = ["sacctmgr", "-i", "modify", "qos", "where", f"name={name}", "set"]
        yield [*modify, f"Preempt={','.join(tiers[name])}"]
        if not tiers[name]:
            yield [*modify, f"Preempt-={name}"]


def _target(key: Key, cluster: str) -> tuple[str, str, list[str]]:
    """Return sacctmgr's word for an object, its name, and what narrows it down."""
    kind, name, *rest = key
    if kind == "tier":
        return "qos", name, []
    if kind in ("team", "user"):
        return "account" if kind == "team" else kind, name, [f"cluster={cluster}"]
    if kind == "lead":
        return "coordinator", f"account={name}", [f"names={rest[0]}"]
    # Without a partition, modify and delete would take the rows of each partition too.
    return "user", rest[0], [f"account={name}", f"cluster={cluster}", f"partition={rest[1]}"]
