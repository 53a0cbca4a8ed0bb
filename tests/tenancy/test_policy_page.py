"""The keys of a policy, and the page that lists them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from pitools.tenancy.cluster_state import ClusterState
from pitools.tenancy.columns import COLUMNS, FLAGS
from pitools.tenancy.desired import desired_state
from pitools.tenancy.lock_outs import lock_outs
from pitools.tenancy.policy import Member, Team, Tier, User, policy_of
from pitools.tenancy.refusals import require_possible

PAGE = (Path(__file__).parents[2] / "docs" / "tenancy.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| ([a-z, ]+) \| (.+) \| (.+) \| `(.+)` \|$", PAGE, re.MULTILINE)
FORMS = {"tres": "amounts", "count": "number", "time": "time", "list": "list", "number": "decimal", "text": "text"}
KINDS = {"team": "teams.x", "member": "teams.x.members.y", "tier": "tiers.x", "user": "users.y"}
EMPTY = ClusterState(cluster="alpha", objects={})


def test_page_has_each_key() -> None:
    """With its tables, its option of sacctmgr and its form, as the code has them."""
    forms = {(c.key, c.option): FORMS[c.kind] for kind in KINDS for c in COLUMNS[kind]}
    forms["shares", "Fairshare"] = 'number or "parent"'
    expected = {(kind, c.key, c.option, forms[c.key, c.option]) for kind in KINDS for c in COLUMNS[kind]}
    listed = {(kind, key, option, form) for key, kinds, option, form, _ in ROWS for kind in kinds.split(", ")}
    own = {(kind, key) for kind, key, *_ in listed - expected}
    assert expected <= listed
    assert own == {("team", "users"), ("team", "leads"), ("team", "gpu_hours"), ("member", "gpu_hours")}
    tables = {"team": Team, "member": Member, "tier": Tier, "user": User}
    fields = {(kind, key) for kind, table in tables.items() for key in table.__struct_fields__}
    assert fields == {(kind, key) for kind, key, *_ in listed} | {("team", "members"), ("member", "partitions")}
    assert set(FLAGS) <= set(re.findall(r"`(\w+)`", PAGE))


@pytest.mark.parametrize(("key", "kind", "example"), [(r[0], kind, r[4]) for r in ROWS for kind in r[1].split(", ")])
def test_example_of_a_key_changes_it(key: str, kind: str, example: str) -> None:
    """As the page writes it."""
    before = "teams = { x = { users = ['y'] }, vision = { users = ['y'] } }\nusers.y.default_team = 'x'"
    tables = tomllib.loads(before)
    table = tables
    for name in KINDS[kind].split("."):
        table = table.setdefault(name, {})
    table[key] = tomllib.loads(f"x = {example}")["x"]
    if key == "users":
        tables["users"] = {"y": {}}
    states = [desired_state(policy_of(each, "", "p"), EMPTY).objects for each in (tomllib.loads(before), tables)]
    assert states[0] != states[1]


def test_policy_of_the_page_is_possible() -> None:
    """On a cluster that has nothing yet, also with what its sites have besides."""
    policy, sites = re.findall(r"^```toml.*?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    tables = tomllib.loads(policy + sites)
    alpha, beta = (desired_state(policy_of(tables, site, "p"), EMPTY) for site in ("alpha", "beta"))
    require_possible(EMPTY, alpha, "p")
    assert not lock_outs(EMPTY, alpha)
    assert alpha.objects["team", "vision"]["GrpTRESMins"] == "gres/gpu=60000"
    assert beta.objects["team", "vision"].keys() == alpha.objects["team", "vision"].keys() - {"GrpTRESMins"}
