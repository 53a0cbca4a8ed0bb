"""A policy: read strictly, and the exact image of a cluster's accounting."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from pitools.core.errors import ConfigError
from pitools.tenancy.changes import ObjectChange
from pitools.tenancy.cluster_state import ClusterState, Key, Values
from pitools.tenancy.desired import desired_state, policy_tables
from pitools.tenancy.policy import administrators, load_policies, policy_of
from pitools.tenancy.policy_text import policy_text, site_tables
from pitools.tenancy.refusals import require_possible, users_without_team
from pitools.tenancy.words import describe
from tests.tenancy.states import states

EMPTY = ClusterState(cluster="alpha", objects={})


@given(states())
@settings(max_examples=120, deadline=None)
def test_import_is_exact(state: ClusterState) -> None:
    """The policy that a state is asks for this state, through its text."""
    tables = tomllib.loads(policy_text(policy_tables(state)))
    assert desired_state(policy_of(tables, "", "policy"), EMPTY).objects == state.objects
    assert desired_state(policy_of({**tables, "manage": "listed"}, "", "policy"), state).objects == state.objects
    shared = msgspec.structs.replace(state, others={"beta": frozenset(state.objects)})
    kept = desired_state(policy_of({"manage": "all"}, "", "policy"), shared).objects
    assert {key for key in state.objects if key[0] == "tier"} <= kept.keys()  # which beta uses


TABLES = """
[tiers.normal]
[tiers.urgent]
priority = 100
preempts = ["normal"]
[teams.vision]
users = ["ann"]
tiers = ["normal", "urgent"]
grp_tres = { "gres/gpu" = 16, mem = "1T" }
gpu_hours = 500
[teams.vision.members.ann]
max_jobs = 3
[sites.alpha]
[sites.beta]
without = ["teams.vision.members.ann.max_jobs", "tiers.urgent.preempts"]
[sites.beta.teams.vision]
shares = 7
"""


def _tables() -> dict[str, Any]:
    return tomllib.loads(TABLES)


def test_sites_differ_where_they_say() -> None:
    """A site has the common policy, less what it leaves out, with what it sets."""
    alpha = desired_state(policy_of(_tables(), "alpha", "p"), EMPTY).objects
    beta = desired_state(policy_of(_tables(), "beta", "p"), EMPTY).objects
    assert alpha["team", "vision"]["GrpTRES"] == "gres/gpu=16,mem=1048576M"
    assert alpha["team", "vision"]["GrpTRESMins"] == "gres/gpu=30000"
    assert alpha["member", "vision", "ann", ""] == {"MaxJobs": "3"}
    assert beta["member", "vision", "ann", ""] == {}
    assert (alpha["tier", "urgent"], beta["tier", "urgent"]) == (
        {"Priority": "100", "Preempt": "normal"},
        {"Priority": "100"},
    )
    assert beta["team", "vision"] == {**alpha["team", "vision"], "Fairshare": "7"}


@pytest.mark.parametrize(("amounts", "expected"), [({}, None), ({"cpu": 50}, "cpu=50")])
def test_amounts_of_a_site_replace_all_that_it_had(amounts: dict[str, int], expected: str | None) -> None:
    """Also none of them; the policy folded from what both sites then have gives each the same."""
    tables = _tables()
    tables["sites"]["alpha"] = {"teams": {"vision": {"grp_tres": amounts}}}
    made = {site: desired_state(policy_of(tables, site, "p"), EMPTY) for site in ("alpha", "beta")}
    assert made["alpha"].objects["team", "vision"].get("GrpTRES") == expected
    folded = tomllib.loads(policy_text(site_tables({site: policy_tables(state) for site, state in made.items()})))
    for site, state in made.items():
        assert desired_state(policy_of(folded, site, "p"), EMPTY).objects == state.objects


@given(states(), states())
@settings(max_examples=30, deadline=None)
def test_listed_policy_leaves_alone_what_it_does_not_name(now: ClusterState, other: ClusterState) -> None:
    """One key of each team changes that key alone; a new team takes no default team and no right from its users."""
    users = sorted({key[2] for key in (*now.objects, *other.objects) if key[0] == "member"})
    teams = {key[1]: {"grp_jobs": 7} for key in now.objects if key[0] == "team"}
    policy = policy_of({"teams": {**teams, "new": {"users": users}}}, "", "p")
    expected = {key: {**v, "GrpJobs": "7"} if key[0] == "team" else v for key, v in now.objects.items()}
    expected["team", "new"] = {}
    for user in users:
        expected["member", "new", user, ""] = {}
        expected.setdefault(("user", user), {"DefaultAccount": "new"})
    assert desired_state(policy, now).objects == expected


NOW = ClusterState(
    cluster="alpha",
    objects={
        ("tier", "normal"): {},
        ("tier", "urgent"): {"Preempt": "normal", "PreemptMode": "requeue", "Flags": "DenyOnLimit,NoDecay"},
        ("team", "root"): {"QOS": "normal"},
        ("team", "lab"): {"Description": "a lab", "GrpTRESMins": "cpu=5,gres/gpu=60", "MaxWall": "01:00:00"},
        ("team", "sub"): {"Parent": "lab", "GrpJobs": "4", "QOS": "normal,urgent", "DefaultQOS": "urgent"},
        ("lead", "lab", "ann"): {},
        ("member", "lab", "ann", ""): {},
        ("member", "lab", "bob", ""): {},
        ("member", "lab", "bob", "gpu"): {},
        ("user", "ann"): {"DefaultAccount": "lab", "AdminLevel": "Administrator"},
        ("user", "bob"): {"DefaultAccount": "lab"},
    },
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("teams.lab.users = ['ann']", {("member", "lab", "bob", ""): None, ("member", "lab", "bob", "gpu"): None}),
        ("teams.lab.leads = []", {("lead", "lab", "ann"): None}),
        ("teams.lab.gpu_hours = 2", {("team", "lab"): {"GrpTRESMins": "cpu=5,gres/gpu=120"}}),
        ("teams.lab.gpu_hours = -1", {("team", "lab"): {"GrpTRESMins": "cpu=5"}}),
        ("teams.lab.grp_tres_mins = {}", {("team", "lab"): {"GrpTRESMins": ""}}),
        ("teams.lab = { max_wall = '', shares = 3 }", {("team", "lab"): {"MaxWall": "", "Fairshare": "3"}}),
        ("teams.sub = { grp_jobs = -1, tiers = [], default_tier = '' }", {("team", "sub"): {"Parent": "lab"}}),
        ("tiers.urgent = { preempt_mode = 'REQUEUE', flags = ['nodecay', 'DENYONLIMIT'] }", {}),
        ("tiers.urgent.preempt_mode = 'OFF'", {("tier", "urgent"): {"PreemptMode": ""}}),
        ("teams.lab.description = 'A Lab'", {}),
        ("users.ann.admin = 'None'", {("user", "ann"): {"AdminLevel": ""}}),
    ],
)
def test_listed_table_changes_the_keys_that_it_names(text: str, expected: dict[Key, Values | None]) -> None:
    """A list is wholly what is written; -1, "", [] and {} unset; capitals that Slurm does not keep are no change."""
    then = desired_state(policy_of(tomllib.loads(text), "", "p"), NOW).objects
    for key, values in expected.items():
        assert (values is None) == (key not in then)
        assert {option: then[key].get(option, "") for option in values or {}} == (values or {})
    users = {("user", "bob")} if ("member", "lab", "bob", "") in expected else set[Key]()
    assert {key for key in NOW.objects if then.get(key) != NOW.objects[key]} == {*expected} | users
    assert users_without_team(NOW, ClusterState(cluster="alpha", objects=then)) == [user[1] for user in users]


@pytest.mark.parametrize("manage", ["all", "listed"])
@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        (("teams", "vision", "max_job"), 1, "teams.vision.max_job"),
        (("teams", "vision", "members", "ann", "max_job"), 1, "teams.vision.members.ann.max_job"),
        (("sites", "gamma"), {"teams": {"x": {"members": {"y": {"tiers": 1}}}}}, "sites.gamma.teams.x.members.y.tiers"),
        (("teams", "vision", "shares"), 0, "teams.vision"),
        (("teams", "vision", "shares"), -4, "teams.vision"),
        (("teams", "vision", "max_jobs"), -3, "teams.vision"),
        (("teams", "vision", "gpu_hours"), -3, "teams.vision"),
        (("tiers", "urgent", "usage_factor"), float("nan"), "tiers.urgent"),
        (("teams", "vision", "tiers"), ["urgnt"], "teams.vision"),
        (("teams", "vision", "default_tier"), "urgnt", "teams.vision"),
        (("teams", "vision", "parent"), "nowhere", "teams.vision"),
        (("teams", "vision", "parent"), "vision", "teams.vision"),
        (("teams", "vision", "parent"), "root,root", "teams.vision"),
        (("teams", "vision", "parent"), "none", "teams.vision"),
        (("teams", "root"), {"parent": "vision"}, "teams.root"),
        (("teams", "vision", "parent"), "sub", "teams.vision"),
        (("teams", "vision", "leads"), ["zoe"], "teams.vision"),
        (("teams", "vision", "users"), ["ann", "dan,eve"], "teams.vision.members.dan,eve"),
        (("teams", "vision", "users"), ["ann", " -x"], "teams.vision.members. -x"),
        (("teams", "vision", "users"), ["ann", ""], "teams.vision.members."),
        (("teams", "vision", "users"), ["ann", "a b"], "teams.vision.members.a b"),
        (("teams", "vision", "leads"), ["a:b"], "teams.vision"),
        (("teams", "vision", "users"), ["ann", "ann"], "teams.vision"),
        (("teams", "account=b"), {}, "teams.account=b"),
        (("teams", "where"), {}, "teams.where"),
        (("teams", "a "), {}, "teams.a "),
        (("teams", "日本"), {}, "teams.日本"),
        (("teams", "vision", "description"), "日本", "teams.vision"),
        (("teams", "Speech"), {}, "teams.Speech"),
        (("tiers", "Long"), {}, "tiers.Long"),
        (("teams", "vision", "description"), "a|b", "teams.vision"),
        (("teams", "vision", "grp_tres"), {"cpu=1,gres/gpu": 3}, "teams.vision"),
        (("users",), {"zoe": {}}, "users.zoe"),
        (("users",), {"ann": {"default_team": "speech"}}, "users.ann"),
        (("teams", "speech"), {"users": ["ann"]}, "users.ann"),
        (("teams", "vision", "members", "bob"), {}, "teams.vision.members.bob"),
        (("tiers", "urgent", "preempts"), ["norml"], "tiers.urgent"),
        (("tiers", "urgent", "flags"), ["DenyOnLimits"], "tiers.urgent"),
        (("tiers", "urgent", "preempt_mode"), "kill", "tiers.urgent"),
        (("sites", "gamma"), {"without": ["teams.vision.grp_wall"]}, ""),
        (("sites", "gamma"), 3, "sites.gamma"),
        (("sites",), 3, "sites"),
        (("sites",), ["gamma"], "sites"),
        (("tiers",), 3, "tiers"),
        (("teams", "vision", "max_wall"), "soon", "teams.vision"),
        (("teams", "vision", "grp_tres"), {"cpu": "many"}, "teams.vision"),
        (("teams", "vision", "grp_tres_mins"), {"gres/gpu": 5}, "teams.vision"),
        (("sites", "gamma"), {"teams": {"vision": {"grp_tres_mins": {"gres/gpu": 5}}}}, "teams.vision"),
    ],
)
def test_wrong_policy_is_refused(path: tuple[str, ...], value: object, key: str, manage: str) -> None:
    """With the key: names that nothing defines or Slurm cannot have, values out of range, a user without a default."""
    tables = {**_tables(), "manage": manage}
    table = tables
    for name in path[:-1]:
        table = table[name]
    table[path[-1]] = value
    now = ClusterState(cluster="alpha", objects={("team", "sub"): {"Parent": "vision"}})

    def plan() -> None:
        policy = policy_of(tables, "gamma" if path[0] == "sites" else "", "p")
        require_possible(now, desired_state(policy, now), "p")

    with pytest.raises(ConfigError) as caught:
        plan()
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("key", "value", "form"),
    [
        ("grp_tres", {"gpu": 8}, '"gres/gpu"'),
        ("grp_tres", {"mem": "2X"}, "memory as 16G"),
        ("grp_tres", {"mem": 2.5}, '"gres/gpu" = 8'),
        ("shares", "4", "without quotes"),
        ("max_wall", "2 days", "2h"),
        ("max_wall", 60, '"2h"'),
        ("users", "ann", '["a", "b"]'),
        ("priority", 1.5, "a whole number"),
    ],
)
def test_wrong_value_names_the_accepted_form(key: str, value: object, form: str) -> None:
    """In the hint of its error."""
    now = msgspec.structs.replace(NOW, resources=frozenset({"cpu", "mem", "gres/gpu"}))
    with pytest.raises(ConfigError) as caught:
        require_possible(now, desired_state(policy_of({"teams": {"lab": {key: value}}}, "", "p"), now), "p")
    assert form in caught.value.hint


def test_wrong_value_of_a_tier_names_the_form_of_its_key() -> None:
    """Not that of `tiers`, which associations have."""
    with pytest.raises(ConfigError) as caught:
        policy_of({"tiers": {"normal": {"priority": "x"}}}, "", "p")
    assert "a whole number" in caught.value.hint


def test_default_tier_is_refused_where_it_is_set() -> None:
    """Not at the row of a partition that inherits it, and that the policy does not name."""
    rows = {("member", "lab", "ann", "gpu"): dict[str, str](), **NOW.objects}
    now = msgspec.structs.replace(NOW, objects=rows)
    tables = {"teams": {"lab": {"tiers": [], "default_tier": "new"}}, "tiers": {"new": {}}}
    with pytest.raises(ConfigError) as caught:
        require_possible(now, desired_state(policy_of(tables, "", "p"), now), "p")
    assert caught.value.key == "teams.lab"


def test_site_may_have_what_a_policy_may_not_add() -> None:
    """Odd names, shares of zero and flags of a newer Slurm of a site: their import asks for no change."""
    objects: dict[Key, Values] = {("tier", "low"): {"Flags": "NewFlag"}}
    objects |= {("team", "pa`b"): {"Fairshare": "0"}, ("team", "a=b"): {"Description": "日本"}}
    now = ClusterState(cluster="alpha", objects=objects)
    then = desired_state(policy_of(policy_tables(now), "", "p"), now)
    require_possible(now, then, "p")
    assert then.objects == objects


def test_user_without_a_default_team_keeps_none() -> None:
    """So sacctmgr may show a user of several teams: an import asks for no change, a policy of others neither."""
    objects: dict[Key, Values] = {("team", "lab"): {}, ("team", "vla"): {}, ("user", "ann"): {}}
    objects |= {("member", "lab", "ann", ""): {}, ("member", "vla", "ann", ""): {}}
    now = ClusterState(cluster="alpha", objects=objects)
    for tables in (policy_tables(now), {"teams": {"lab": {}}}):
        assert desired_state(policy_of(tables, "", "p"), now).objects == objects
    named = {"users": {"ann": {"default_team": "vla"}}}
    assert desired_state(policy_of(named, "", "p"), now).objects["user", "ann"] == {"DefaultAccount": "vla"}


def test_user_who_leaves_the_default_team_needs_another() -> None:
    """Which one of those that the policy does not list, it must say."""
    objects: dict[Key, Values] = {("user", "ann"): {"DefaultAccount": "lab"}}
    objects |= {("member", team, "ann", ""): {} for team in ("lab", "vla", "zoo")}
    now = ClusterState(cluster="alpha", objects={**objects, **{("team", team): {} for team in ("lab", "vla", "zoo")}})
    with pytest.raises(ConfigError, match=r"in several teams \(vla, zoo\)"):
        desired_state(policy_of({"teams": {"lab": {"users": []}}}, "", "p"), now)


def test_rights_are_those_of_a_database() -> None:
    """A user to whom the policy of another site of the database gives rights is an administrator of the policy."""
    sites = {"alpha": {"users": {"zoe": {"admin": "Operator"}}}, "beta": {}}
    policy = policy_of({"users": {"ann": {"admin": "Administrator"}}, "sites": sites}, "beta", "p")
    assert administrators(policy, shares_database=True) == {"ann", "zoe"}
    assert administrators(policy, shares_database=False) == {"ann"}


def test_words_of_a_new_object_are_its_values() -> None:
    """A new team has no values before; a changed one has Slurm's."""
    change = ObjectChange(key=("team", "lab"), before=None, after={"Fairshare": "7"})
    assert describe(change) == "add team lab: shares 7"
    assert describe(msgspec.structs.replace(change, before={})) == "team lab: shares 1 → 7"


def test_a_policy_is_for_the_sites_that_are_named(tmp_path: Path) -> None:
    """Else for its own, else for the default one; without [sites] it is for any."""
    path = tmp_path / "p.toml"
    path.write_text(TABLES)
    assert [list(load_policies(path, sites)) for sites in ([], ["beta"])] == [["alpha", "beta"], ["beta"]]
    path.write_text("[tiers.a]\n")
    assert [list(load_policies(path, sites)) for sites in ([], ["any"])] == [["local"], ["any"]]
