"""Random states of a cluster's accounting, such as Slurm lets stand: for the tests of a policy and of its changes."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from pitools.tenancy.cluster_state import ClusterState, Key, Values, without_inherited_leads
from pitools.tenancy.columns import ASSOCIATION, COLUMNS, QOS, Column, canonical

TEAMS = ("vision", "speech", "robots", "lab-7", "d.ept")
USERS = ("ann", "bob", "c.d", "eve")
TIERS = ("normal", "urgent", "scavenger", "long")
PARTITIONS = ("", "", "gpu", "big.mem")
LINKS = ("QOS", "DefaultQOS", "Preempt", "Parent", "DefaultAccount", "AdminLevel")

_tres = st.dictionaries(
    st.sampled_from(["cpu", "node", "gres/gpu", "billing", "mem"]), st.integers(1, 9000), min_size=1, max_size=3
)
_TEXTS = {
    "tres": _tres.map(lambda d: ",".join(f"{n}={v}{'G' if n == 'mem' else ''}" for n, v in d.items())),
    "count": st.integers(0, 10**6).map(str),
    "time": st.integers(0, 10**5).map(
        lambda minutes: f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"
    ),
    "number": st.sampled_from(["0.5", "2", "1.25", "0"]),
}
_OF = {
    "Fairshare": st.sampled_from(["1", "5", "100", "parent"]),
    "PreemptMode": st.sampled_from(["cluster", "REQUEUE", "suspend,gang"]),
    "Flags": st.sampled_from(["denyonlimit", "DENYONLIMIT,OverPartQOS", "NoReserve"]),
    "Description": st.sampled_from(["", "a team", 'say "hi"', "größe \\ x"]),
    "Organization": st.sampled_from(["", "dept"]),
}


@st.composite
def _values(draw: Any, columns: tuple[Column, ...]) -> Values:
    free = [column for column in columns if column.option not in LINKS]
    chosen = draw(st.lists(st.sampled_from(free), max_size=4, unique=True)) if free else []
    texts = {c.option: canonical(c, draw(_OF[c.option] if c.option in _OF else _TEXTS[c.kind])) for c in chosen}
    return {option: text for option, text in texts.items() if text}


@st.composite
def states(draw: Any) -> ClusterState:
    """A state in which each association's default QOS is among those that it has."""
    tiers = draw(st.lists(st.sampled_from(TIERS), min_size=1, unique=True))  # each preempts only those before it
    objects: dict[Key, Values] = {}
    for i, tier in enumerate(tiers):
        objects["tier", tier] = draw(_values(QOS))
        if i and (preempt := draw(st.lists(st.sampled_from(tiers[:i]), max_size=2, unique=True))):
            objects["tier", tier]["Preempt"] = ",".join(sorted(preempt))
    teams = ["root", *draw(st.lists(st.sampled_from(TEAMS), unique=True))]
    lists: dict[str, set[str]] = {}
    defaults: dict[str, str] = {}
    for i, team in enumerate(teams):
        parent = teams[draw(st.integers(0, i - 1))] if i else ""
        values = draw(_values(COLUMNS["team"] if i else ()))
        if parent not in ("", "root"):
            values["Parent"] = parent
        lists[team], defaults[team] = _tiers(draw, tiers, lists.get(parent, set()), defaults.get(parent, ""), values)
        objects["team", team] = values
        for user in draw(st.lists(st.sampled_from(USERS), max_size=3, unique=True)):
            for partition in draw(st.lists(st.sampled_from(PARTITIONS), min_size=1, max_size=2, unique=True)):
                row = draw(_values(ASSOCIATION))
                _tiers(draw, tiers, lists[team], defaults[team], row)
                objects["member", team, user, partition] = row
        for lead in draw(st.lists(st.sampled_from(USERS), max_size=1)):
            objects["lead", team, lead] = {}
    for user in {key[2] for key in objects if key[0] == "member"}:
        of_user = sorted({key[1] for key in objects if key[0] == "member" and key[2] == user})
        objects["user", user] = {"DefaultAccount": draw(st.sampled_from(of_user))}
        if draw(st.booleans()):
            objects["user", user]["AdminLevel"] = draw(st.sampled_from(["Operator", "Administrator"]))
    objects = {key: values for key, values in objects.items() if key[0] != "lead" or ("user", key[2]) in objects}
    return without_inherited_leads(ClusterState(cluster="alpha", objects=objects))


def _tiers(draw: Any, tiers: list[str], above: set[str], default: str, values: Values) -> tuple[set[str], str]:
    """Draw an association's own QOS and default, consistent with those above it; return what counts then."""
    kind = draw(st.sampled_from(["inherit", "inherit", "list", "change"]))
    chosen = draw(st.lists(st.sampled_from(tiers), min_size=1, unique=True))
    if kind == "list":
        own = {*chosen, *filter(None, [default])}
        values["QOS"] = ",".join(sorted(own))
    elif kind == "change" and above:
        signed = {name: draw(st.sampled_from("+-")) for name in chosen if name != default}
        own = (above | {n for n, sign in signed.items() if sign == "+"}) - {n for n, s in signed.items() if s == "-"}
        if signed:
            values["QOS"] = ",".join(sorted(sign + name for name, sign in signed.items()))
    else:
        own = above
    if own and draw(st.booleans()):
        default = draw(st.sampled_from(sorted(own)))
        values["DefaultQOS"] = default
    return own, default


def large_change() -> tuple[ClusterState, ClusterState]:
    """Return two states with more than 40 changes between them: objects of each kind are made, changed and removed."""

    def state(tiers: dict[str, str], teams: dict[str, str], parent: str, admin: str) -> ClusterState:
        objects: dict[Key, Values] = {("tier", name): {"Priority": value} for name, value in tiers.items()}
        objects["team", "root"] = {"QOS": "normal"}
        for name, users in teams.items():
            objects["team", name] = {"Parent": parent} if name != parent else {"QOS": ",".join(sorted(tiers))}
            objects |= {("member", name, user, ""): {"MaxJobs": str(len(teams))} for user in users.split()}
            objects |= {("user", user): {"DefaultAccount": name} for user in users.split()}
            objects["lead", name, users.split()[0]] = {}
        objects["user", admin]["AdminLevel"] = "Administrator"
        return ClusterState(cluster="alpha", objects=objects)

    before = {"lab": "ann bob ian joe", "gone": "cat dan kim lee", "moved": "eve max"}
    after = {"infra": "bob fay ned", "moved": "eve gus ole pam", "lab": "ann hal max ron", "new": "sam tom"}
    now = state({"normal": "1", "old": "2", "both": "3"}, before, "lab", "ann")
    return now, state({"normal": "3", "new": "4", "both": "5"}, after, "infra", "hal")
