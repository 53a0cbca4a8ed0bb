"""A model of sacctmgr and its database: it refuses what the real one refuses, and cascades where the real one does.

It shares no code with the product. An object is a key, as in `cluster_state`, and texts as they were given to sacctmgr.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Key = tuple[str, ...]
Values = dict[str, str]

KINDS = {"qos": "tier", "account": "team", "user": "member", "coordinator": "lead", "assoc": "member"}
# What sacctmgr prints of an option that was never set; setting it to this unsets it.
UNSET = {
    "Fairshare": "1",
    "GraceTime": "00:00:00",
    "PreemptMode": "cluster",
    "UsageFactor": "1.000000",
    "AdminLevel": "None",
    "Parent": "root",
}
UNSET_QOS = {**UNSET, "Priority": "0"}
ABOUT = ("Description", "Organization")
FLAGS = ("DenyOnLimit", "EnforceUsageThreshold", "NoReserve", "OverPartQOS", "PartitionTimeLimit")
NUMBERS = ("UsageFactor", "UsageThres", "LimitFactor")


class RefusedError(Exception):
    """sacctmgr's refusal of a call, which changes nothing."""


class Sacctmgr:
    """Accounting of the cluster alpha, changed and shown by argv, by a runner with rights ("": root)."""

    def __init__(self, objects: Mapping[Key, Values], runner: str = "") -> None:
        self.objects: dict[Key, Values] = {key: dict(values) for key, values in objects.items()}
        self.runner = runner
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
            if self.runner and self.level(self.runner) != "Administrator":
                raise RefusedError("Access/permission denied")
            getattr(self, f"_{verb}")(KINDS[what], words)
            self._check_defaults()
            self._check_preemption()
        except RefusedError:
            self.objects = before
            raise

    def level(self, user: str) -> str:
        """Return a user's AdminLevel."""
        return self.objects.get(("user", user), {}).get("AdminLevel", "None")

    def _add(self, kind: str, words: list[str]) -> None:
        if kind == "lead":
            given = dict(word.split("=", 1) for word in words)
            self._require(("team", given["account"]))
            self._require(("user", given["names"]))
            self.objects["lead", given["account"], given["names"]] = {}
            return
        name, *rest = words
        given = dict(word.split("=", 1) for word in rest)
        if kind != "tier" and given.pop("cluster") != "alpha":
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
                assert not any(k[0] == "member" and k[1] == key[1] for k in self.objects), "members vanish with a team"
                assert not any(v.get("Parent") == key[1] for v in self.objects.values()), "teams vanish with one above"
            if kind == "tier":
                links = [
                    v.get(option, "") for v in self.objects.values() for option in ("QOS", "DefaultQOS", "Preempt")
                ]
                assert key[1] not in {name.lstrip("+-") for link in links for name in link.split(",")}, "QOS in use"
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
        values = self.objects[key]
        for option, text in given.items():
            new = text.replace('"', "`").replace("'", "`")
            if option in ABOUT and new == key[1]:
                new = ""
            if "TRES" in option:
                both = dict(pair.split("=") for pair in f"{values.get(option, '')},{new}".split(",") if pair)
                new = ",".join(f"{name}={amount}" for name, amount in both.items() if amount != "-1")
            elif new == "-1":
                new = ""
            if option in ("QOS", "DefaultQOS", "Preempt"):
                for name in filter(None, new.split(",")):
                    self._require(("tier", name.lstrip("+-")))
            if option == "QOS" and new.startswith(("+", "-")) and values.get("QOS", "+")[0] not in "+-":
                raise RefusedError("would change the list, not replace it")
            if option == "Parent":
                self._require(("team", new))
                if ("team", key[1]) in self.chain(("team", new)):
                    raise RefusedError("an account below itself")
            if option == "DefaultAccount":
                if not any(k[:3] == ("member", new, key[1]) for k in self.objects):
                    raise RefusedError("no association for the default account")
                self.marked = {k for k in self.marked if k[2] != key[1]}
                self.marked |= {k for k in self.objects if k[:3] == ("member", new, key[1])}
            if option == "GraceTime":
                minutes, seconds = divmod(int(new), 60)
                days, hours = divmod(minutes // 60, 24)
                new = (f"{days}-" if days else "") + f"{hours:02}:{minutes % 60:02}:{seconds:02}"
            if option == "Flags":
                new = ",".join(flag for flag in FLAGS if flag.lower() in new.lower().split(","))
            if option in NUMBERS and new:
                new = f"{float(new):f}"
            values[option] = new
            if new in ("", (UNSET_QOS if key[0] == "tier" else UNSET).get(option)):
                del values[option]

    def chain(self, key: Key) -> list[Key]:
        """Return an association and those above it, up to that of the root account."""
        keys = [key] if key[0] == "team" else [key, ("team", key[1])]
        while keys[-1][1] != "root":
            keys.append(("team", self.objects[keys[-1]].get("Parent", "root")))
        return keys

    def usable(self, key: Key) -> set[str]:
        """Return the QOS that an association may use."""
        names: set[str] = set()
        for row in reversed(self.chain(key)):
            own = [name for name in self.objects[row].get("QOS", "").split(",") if name]
            if own and own[0][0] not in "+-":
                names = set(own)
            for name in own:
                names |= {name[1:]} if name[0] == "+" else set()
                names -= {name[1:]} if name[0] == "-" else set()
        return names

    def _check_defaults(self) -> None:
        """Refuse a default QOS that an association, its own or inherited, may not use."""
        for key in self.objects:
            if key[0] in ("team", "member"):
                default = next((d for row in self.chain(key) if (d := self.objects[row].get("DefaultQOS"))), "")
                if default and default not in self.usable(key):
                    raise RefusedError(f"{key} has no access to its default qos {default}")

    def _check_preemption(self) -> None:
        """Refuse a loop of QOS that preempt each other."""
        tiers = {key[1]: values.get("Preempt", "") for key, values in self.objects.items() if key[0] == "tier"}
        left = {name: set(preempted.split(",")) for name, preempted in tiers.items()}
        while ends := [name for name, preempted in left.items() if not preempted & left.keys()]:
            for name in ends:
                del left[name]
        if left:
            raise RefusedError("QOS Preemption loop detected")

    def show(self, argv: Sequence[str]) -> str:
        """Return what `sacctmgr -n -P show WHAT ... format=COLUMNS` prints."""
        what, *words = argv[4:]
        columns = words[-1].removeprefix("format=").split(",")
        kind = "user" if what == "user" else KINDS.get(what, what)
        if kind == "tres":
            return "cpu|\ngres|gpu\n"
        keys = [key for key in self.objects if key[0] == kind or (what, key[0]) == ("assoc", "team")]
        if "onlydefaults" in words:
            keys = [key for key in keys if key in self.marked]
        return "".join("|".join(self._column(key, option) for option in columns) + "\n" for key in keys)

    def _column(self, key: Key, option: str) -> str:
        values, is_member = self.objects[key], key[0] == "member"
        if option == "Coordinators":
            above = {row[1] for row in self.chain(key)}
            return ",".join(lead[2] for lead in self.objects if lead[0] == "lead" and lead[1] in above)
        names = {"Cluster": "alpha", "Name": key[1], "Account": key[1], "User": "", "Partition": ""}
        if is_member or key[0] == "user":
            names |= {"User": key[2] if is_member else key[1], "Partition": key[3] if is_member else ""}
        if option == "ParentName":
            return "" if is_member or key[1] == "root" else values.get("Parent", "root")
        unset = key[1] if option in ABOUT else (UNSET_QOS if key[0] == "tier" else UNSET).get(option, "")
        return names.get(option) or values.get(option, unset)
