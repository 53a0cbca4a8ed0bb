"""A model of sacctmgr and its database: it refuses what the real one refuses, and cascades where the real one does."""

from __future__ import annotations

from collections.abc import Sequence

from pitools.core import units
from pitools.core.errors import UsageError
from pitools.slurm.fields import parse_tres
from pitools.tenancy.changes import effective_tiers
from pitools.tenancy.cluster_state import ClusterState, Key, Values, teams_above
from pitools.tenancy.columns import ACCOUNT, ASSOCIATION, COLUMNS, QOS, canonical

KINDS = {"qos": "tier", "account": "team", "user": "member", "coordinator": "lead"}


class RefusedError(Exception):
    """sacctmgr's refusal of a call, which changes nothing."""


class Sacctmgr:
    """Accounting of one cluster, changed and shown by argv."""

    def __init__(self, state: ClusterState) -> None:
        self.cluster = state.cluster
        self.objects: dict[Key, Values] = {key: dict(values) for key, values in state.objects.items()}
        # Slurm marks a user's first association as the default, and all of an account that is set as the default.
        self.marked = {
            next(key for key in self.objects if key[:3] == ("member", values["DefaultAccount"], user[1]))
            for user, values in self.objects.items()
            if user[0] == "user"
        }

    def run(self, argv: Sequence[str]) -> None:
        """Carry out `sacctmgr -i VERB WHAT ...`, or refuse it."""
        program, option, verb, what, *words = argv
        assert (program, option) == ("sacctmgr", "-i")
        before = {key: dict(values) for key, values in self.objects.items()}
        try:
            getattr(self, f"_{verb}")(KINDS[what], words)
            self._check(before)
            self._check_preemption()
        except RefusedError:
            self.objects = before
            raise

    def _add(self, kind: str, words: list[str]) -> None:
        if kind == "lead":
            given = dict(word.split("=", 1) for word in words)
            self._require(("team", given["account"]))
            self._require(("user", given["names"]))
            self.objects["lead", given["account"], given["names"]] = {}
            return
        name, *rest = words
        given = dict(word.split("=", 1) for word in rest)
        if kind != "tier" and given.pop("cluster") != self.cluster:
            raise RefusedError("no such cluster")
        key: Key = (kind, name)
        if kind == "member":
            account = given.pop("account")
            key = (kind, account, name, given.pop("partition", ""))
            self._require(("team", account))
            if ("user", name) not in self.objects:
                self.objects["user", name] = {"DefaultAccount": account}
                self.marked.add(key)
        if key in self.objects:
            raise RefusedError("nothing new added")
        self.objects[key] = {}
        self._set(key, given)

    def _modify(self, kind: str, words: list[str]) -> None:
        cut = words.index("set")
        where = dict(word.split("=", 1) for word in words[1:cut])
        given = dict(word.split("=", 1) for word in words[cut + 1 :])
        assert given, "a call that changes nothing"
        if kind == "member" and "account" not in where:
            kind = "user"
        for key in self._matching(kind, where):
            self._set(key, given)

    def _delete(self, kind: str, words: list[str]) -> None:
        where = dict(word.split("=", 1) for word in words)
        if kind == "lead":
            self._require(("lead", where["account"], where["names"]))
            del self.objects["lead", where["account"], where["names"]]
            return
        for key in self._matching(kind, where):
            del self.objects[key]
            self.marked.discard(key)
            if kind == "team":
                for lead in [k for k in self.objects if k[0] == "lead" and k[1] == key[1]]:
                    del self.objects[lead]
                cascade = [k for k in self.objects if k[0] == "member" and k[1] == key[1]]
                assert not cascade, "members would vanish with their account"
                children = [k for k, v in self.objects.items() if k[0] == "team" and v.get("Parent") == key[1]]
                assert not children, "accounts would vanish with the one above"
            if kind == "tier" and any(
                key[1] in value.replace("+", "").replace("-", "").split(",")
                for values in self.objects.values()
                for option in ("QOS", "DefaultQOS", "Preempt")
                for value in [values.get(option, "")]
            ):
                raise AssertionError("a QOS in use is removed")
        for key in [key for key in self.objects if key[0] == "user"]:
            rows = [row[1] for row in self.objects if row[0] == "member" and row[2] == key[1]]
            if not rows:
                del self.objects[key]
                for lead in [k for k in self.objects if k[0] == "lead" and k[2] == key[1]]:
                    del self.objects[lead]
            elif self.objects[key]["DefaultAccount"] not in rows:
                raise RefusedError("cannot remove a default account")

    def _matching(self, kind: str, where: Values) -> list[Key]:
        if kind in ("team", "tier", "user"):
            keys = [(kind, where["name"])]
        else:
            keys = [
                key
                for key in self.objects
                if key[0] == kind and key[2] == where["name"]
                if key[1] == where.get("account", key[1]) and key[3] == where.get("partition", key[3])
            ]
        if not keys or any(key not in self.objects for key in keys):
            raise RefusedError("nothing matches")
        return keys

    def _require(self, key: Key) -> None:
        if key not in self.objects:
            raise RefusedError(f"no {key}")

    def _set(self, key: Key, given: Values) -> None:
        columns = {column.option: column for column in COLUMNS[key[0]]}
        values = self.objects[key]
        for option, text in given.items():
            column = columns[option]
            if option in ("Description", "Organization") and text == key[1]:
                text = ""
            if column.kind == "tres":
                both = {**parse_tres(values.get(option, "")), **parse_tres(text)}
                text = ",".join(f"{name}={amount}" for name, amount in both.items() if amount != "-1")
            elif text == "-1":
                text = ""
            if option in ("QOS", "DefaultQOS", "Preempt"):
                for name in filter(None, text.split(",")):
                    self._require(("tier", name.lstrip("+-")))
            if option == "QOS" and text.startswith(("+", "-")) and values.get("QOS", "+")[0] not in "+-":
                raise RefusedError("would change the list, not replace it")
            if option == "Parent":
                self._require(("team", text))
                if key[1] in (text, *teams_above(self._state(), text)):
                    raise RefusedError("an account below itself")
            if option == "DefaultAccount" and not any(k[:3] == ("member", text, key[1]) for k in self.objects):
                raise RefusedError("no association for the default account")
            if option == "DefaultAccount":
                self.marked = {k for k in self.marked if k[2] != key[1]}
                self.marked |= {k for k in self.objects if k[:3] == ("member", text, key[1])}
            if option == "GraceTime":
                text = units.to_slurm_time(int(text))
            try:
                values[option] = canonical(column, text)
            except UsageError as error:
                raise RefusedError(str(error)) from error
            if not values[option]:
                del values[option]

    def _state(self) -> ClusterState:
        return ClusterState(cluster=self.cluster, objects=self.objects)

    def _check(self, before: dict[Key, Values]) -> None:
        """Refuse a default QOS that an association may not use; let nobody who keeps an account lose each QOS."""
        state = self._state()
        for key in self.objects:
            if key[0] not in ("team", "member"):
                continue
            chain = [key, *([("team", key[1])] if key[0] == "member" else [])]
            chain += [("team", team) for team in teams_above(state, key[1]) if key[1] != "root"]
            default = next((d for k in chain if (d := self.objects[k].get("DefaultQOS"))), "")
            if default and default not in effective_tiers(state, key):
                raise RefusedError(f"{key} has no access to its default qos {default}")

    def _check_preemption(self) -> None:
        """Refuse a loop of QOS that preempt each other."""
        left = {
            key[1]: set(filter(None, v.get("Preempt", "").split(",")))
            for key, v in self.objects.items()
            if key[0] == "tier"
        }
        while ends := [name for name, preempted in left.items() if not preempted & left.keys()]:
            for name in ends:
                del left[name]
        if left:
            raise RefusedError("QOS Preemption loop detected")

    def answers(self) -> list[str]:
        """Return what sacctmgr prints for `cluster_state.queries`."""
        rows: list[list[list[str]]] = [[], [], [], [], [], [], [["cpu", ""], ["gres", "gpu"]]]
        for key, values in self.objects.items():
            kind, name, *rest = key
            if kind == "tier":
                rows[0].append([name, *(values.get(c.option, c.unset) for c in QOS)])
            elif kind in ("team", "member"):
                user, partition = rest or ("", "")
                rows[1].append(
                    [self.cluster, name, user, partition, *(values.get(c.option, c.unset) for c in ASSOCIATION)]
                )
                parent = "" if user or name == "root" else values.get("Parent", "root")
                rows[2].append([self.cluster, name, user, parent])
            elif kind == "user":
                if any(key[2] == name for key in self.marked):
                    rows[3].append([self.cluster, name, values["DefaultAccount"]])
                rows[4].append([name, values.get("AdminLevel", "None")])
        leads = [key for key in self.objects if key[0] == "lead"]
        for kind, name, *_ in [key for key in self.objects if key[0] == "team"]:
            above = {name, *teams_above(self._state(), name)} if name != "root" else {name}
            here = ",".join(lead[2] for lead in leads if lead[1] in above)
            values = self.objects[kind, name]
            about = [values.get(column.option) or name for column in ACCOUNT[1:3]]
            rows[5].append([name, *about, here])
        return ["".join("|".join(row) + "\n" for row in table) for table in rows]
