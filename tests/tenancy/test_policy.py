"""A policy: read strictly, and the exact image of a cluster's accounting."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings

from pitools.core.errors import ConfigError
from pitools.tenancy.cluster_state import ClusterState
from pitools.tenancy.desired import desired_state, policy_tables
from pitools.tenancy.policy import policy_of
from pitools.tenancy.policy_text import policy_text
from tests.tenancy.states import states

EMPTY = ClusterState(cluster="alpha", objects={})


@given(states())
@settings(max_examples=120, deadline=None)
def test_import_is_exact(state: ClusterState) -> None:
    """The policy that a state is asks for this state, through its text."""
    tables = tomllib.loads(policy_text(policy_tables(state)))
    assert desired_state(policy_of(tables, "", "policy"), EMPTY).objects == state.objects
    assert desired_state(policy_of({**tables, "manage": "listed"}, "", "policy"), state).objects == state.objects


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


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        (("teams", "vision", "max_job"), 1, "teams.vision.max_job"),
        (("teams", "vision", "shares"), 0, "teams.vision"),
        (("teams", "vision", "default_tier"), "urgnt", "teams.vision"),
        (("teams", "vision", "parent"), "nowhere", "teams.vision.parent"),
        (("users",), {"zoe": {}}, "users.zoe"),
        (("users",), {"ann": {"default_team": "speech"}}, "users.ann"),
        (("teams", "speech"), {"users": ["ann"]}, "users.ann"),
        (("teams", "vision", "members", "bob"), {}, "teams.vision"),
        (("tiers", "urgent", "preempts"), ["norml"], "tiers.urgent.preempts"),
        (("sites", "gamma"), {"without": ["teams.vision.grp_wall"]}, ""),
        (("teams", "vision", "parent"), "vision", ""),
        (("teams", "vision", "max_wall"), "soon", ""),
        (("teams", "vision", "grp_tres"), {"cpu": "many"}, ""),
    ],
)
def test_wrong_policy_is_refused(path: tuple[str, ...], value: object, key: str) -> None:
    """An unknown key or name, a share of zero, a user in no team or without a default: with the key."""
    tables = {**_tables(), "manage": "all"}
    table = tables
    for name in path[:-1]:
        table = table[name]
    table[path[-1]] = value
    with pytest.raises(ConfigError) as caught:
        desired_state(policy_of(tables, "gamma" if "gamma" in tables["sites"] else "", "p"), EMPTY)
    assert caught.value.key == key
