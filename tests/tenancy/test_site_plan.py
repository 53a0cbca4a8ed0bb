"""Plans over sites: what is refused, what a plan's records lead to, and what several sites share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings

from pitools.commands import tenancy_check, tenancy_plan
from pitools.commands.tenancy_run import run
from pitools.core.errors import ClusterError, ConfigError, TryLater, Unreachable
from pitools.core.subprocesses import Completed
from pitools.site.schema import Site
from pitools.slurm.client import Client
from pitools.slurm.records import Config
from pitools.tenancy import site_plan
from pitools.tenancy.apply import apply_changes, journal_path, lock_journal
from pitools.tenancy.cluster_state import ClusterState, Key, Values
from pitools.tenancy.desired import desired_state, policy_tables
from pitools.tenancy.drift import Finding
from pitools.tenancy.policy import policy_of
from pitools.tenancy.policy_text import site_tables
from pitools.tenancy.read import SiteAccounting
from pitools.tenancy.refusals import require_possible
from pitools.tenancy.site_plan import history, plan_rows, planned_states, require_agreement, shared_changes
from pitools.tenancy.undo import undone_state
from tests.tenancy.sacctmgr_model import Sacctmgr
from tests.tenancy.states import states
from tests.tenancy.test_changes import read


@given(states(), states())
@settings(max_examples=20, deadline=None)
def test_one_policy_of_several_sites_is_exact(one: ClusterState, other: ClusterState) -> None:
    """Each site's part of the policy of two sites asks for what that site has."""
    tables = site_tables({"a": policy_tables(one), "b": policy_tables(other)})
    for site, state in (("a", one), ("b", other)):
        empty = ClusterState(cluster="alpha", objects={})
        assert desired_state(policy_of(tables, site, "p"), empty).objects == state.objects


def _accounting(cluster: str, other: str) -> SiteAccounting:
    others: dict[str, frozenset[Key]] = {other: frozenset()} if other else {}
    state = ClusterState(cluster=cluster, objects={}, others=others)
    config = Config(cluster=cluster, version=(22, 5), values={})
    return SiteAccounting(site=Site(name=cluster), client=Client(), config=config, state=state)


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"tiers": {"low": {"priority": 6}}}, "tiers.low"),
        ({"tiers": {"low": {"grace_time": "2"}}}, ""),
        ({"tiers": {"low": {"max_wall": "01:00:00", "preempts": ["b", "a"]}}}, ""),
        ({"teams": {"lab": {"leads": ["bob"]}}}, "teams.lab.leads"),
        ({"teams": {"lab": {"organization": "b"}}}, "teams.lab.organization"),
        ({"users": {"ann": {"admin": "Operator"}}}, "users.ann.admin"),
        ({"teams": {"lab": {"shares": 6}}}, ""),
    ],
)
def test_sites_of_one_database_must_agree(tables: dict[str, Any], key: str) -> None:
    """On QOS, coordinators and administrators, which a database has once; not on shares."""
    low = {"priority": 5, "max_wall": "60", "preempts": ["a", "b"]}
    common: dict[str, Any] = {"tiers": {"low": low}, "teams": {"lab": {"users": ["ann"], "leads": []}}}
    common["users"], common["teams"]["lab"]["organization"] = {"ann": {"admin": "None"}}, "a"
    policy = {**common, "sites": {"a": {}, "b": tables}}
    wanted = {site: partial(desired_state, policy_of(policy, site, "p")) for site in ("a", "b")}
    require_agreement({"a": _accounting("a", ""), "b": _accounting("b", "")}, wanted, "p")
    shared = {"a": _accounting("a", "b"), "b": _accounting("b", "a")}
    if not key:
        require_agreement(shared, wanted, "p")
        return
    with pytest.raises(ConfigError) as caught:
        require_agreement(shared, wanted, "p")
    assert caught.value.key == key


@pytest.mark.parametrize("command", [tenancy_check.check, tenancy_plan.plan])
def test_disagreement_of_sites_is_no_drift(
    command: click.Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run can mend it: an error of the policy, for a check as for a plan."""
    policy = tmp_path / "p.toml"
    policy.write_text("[tiers.low]\npriority = 5\n[sites.a]\n[sites.b.tiers.low]\npriority = 6\n")
    shared = {"a": _accounting("a", "b"), "b": _accounting("b", "a")}
    for module in (tenancy_check, tenancy_plan):
        monkeypatch.setattr(module, "read_accounting", lambda _: (shared, []))
    monkeypatch.setattr("pitools.tenancy.check.check_site", lambda *_: [])
    error = CliRunner().invoke(command, [str(policy)]).exception
    assert isinstance(error, ConfigError)
    assert error.key == "tiers.low"


def test_plan_of_one_database_has_a_shared_tier_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second site finds it; a tier that both give up is removed by the last of them."""
    monkeypatch.setattr(site_plan, "read_unfinished_jobs", lambda *_: {})
    empty = {"a": _accounting("a", "b"), "b": _accounting("b", "a")}
    teams: dict[Key, Values] = {("team", "root"): {"QOS": "low"}}
    full = msgspec.structs.replace(empty["a"].state, objects={("tier", "low"): {}, **teams})

    def changes(accounting: dict[str, SiteAccounting], tables: dict[str, Any]) -> list[list[Key]]:
        wanted = {site: partial(desired_state, policy_of(tables, "", "p")) for site in accounting}
        planned = planned_states(accounting, wanted, "p")
        return [[row.key for row in plan_rows("s", each.state, kept.state)] for each, kept in planned]

    assert changes(empty, policy_tables(full)) == [[("tier", "low"), ("team", "root")], [("team", "root")]]
    for site, each in empty.items():
        used = {other: frozenset({("tier", "low")}) for other in each.state.others}
        state = msgspec.structs.replace(full, cluster=site, others=used)
        empty[site] = msgspec.structs.replace(each, state=state)
    bare = {"manage": "all", "teams": {"root": {}}}
    assert changes(empty, bare) == [[("team", "root")], [("team", "root"), ("tier", "low")]]
    lab = {"users": ["ann"], "leads": ["ann"], "description": "x"}
    first = [("team", "lab"), ("member", "lab", "ann", ""), ("lead", "lab", "ann"), ("user", "ann")]
    plan = changes(empty, {"teams": {"lab": lab}, "users": {"ann": {"admin": "Operator"}}})
    assert plan == [first, first[:2]]


@pytest.mark.parametrize("of_b", [["ann", "bob"], ["bob"]])
def test_who_makes_the_changes_loses_rights_at_the_last_site_that_takes_them(
    of_b: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that share a database: the rights are needed until then."""
    monkeypatch.setattr(site_plan, "read_unfinished_jobs", lambda *_: {})
    accounting = {"a": _accounting("a", "b"), "b": _accounting("b", "a")}
    for site, users in (("a", ["ann", "bob"]), ("b", of_b)):
        objects: dict[Key, Values] = {("team", "root"): {}, ("team", "lab"): {}}
        objects |= {("member", "lab", user, ""): {} for user in users}
        objects |= {("user", user): {"DefaultAccount": "lab", "AdminLevel": "Administrator"} for user in users}
        state = msgspec.structs.replace(accounting[site].state, objects=objects, runner="ann")
        accounting[site] = msgspec.structs.replace(accounting[site], state=state)
    tables = {"teams": {"lab": {"shares": 5}}, "users": {"ann": {"admin": "None"}}}
    wanted = {"a": partial(desired_state, policy_of(tables, "", "p"))}
    wanted["b"] = (
        wanted["a"] if "ann" in of_b else partial(desired_state, policy_of({"teams": tables["teams"]}, "", "p"))
    )
    planned = planned_states(accounting, wanted, "p")
    rows = [[row.key for row in plan_rows(each.site.name, each.state, kept.state)] for each, kept in planned]
    assert rows == [[("team", "lab")], [("team", "lab"), ("user", "ann")]]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        (("team", "lab"), {"GrpTRES": "gres/tpu=4"}),
        (("team", "lab"), {"DefaultQOS": "urgent", "QOS": "normal"}),
        (("member", "lab", "ann", ""), {"QOS": "urgent"}),
        (("tier", "normal"), {"Preempt": "urgent"}),
        (("tier", "normal"), {"Preempt": "normal"}),
    ],
)
def test_what_slurm_refuses_is_refused_first(key: Key, values: Values) -> None:
    """A resource that the cluster does not count, a lost default QOS, tiers that preempt each other."""
    objects: dict[Key, Values] = {
        ("tier", "normal"): {},
        ("tier", "urgent"): {"Preempt": "normal"},
        ("team", "root"): {"QOS": "normal"},
        ("team", "lab"): {"DefaultQOS": "normal", "GrpTRES": "gres/gpu=4"},
        ("member", "lab", "ann", ""): {},
        ("user", "ann"): {"DefaultAccount": "lab"},
    }
    now = ClusterState(cluster="alpha", objects=objects, resources=frozenset({"cpu", "gres/gpu"}))
    require_possible(now, now, "p")
    with pytest.raises(ConfigError):
        require_possible(now, msgspec.structs.replace(now, objects={**objects, key: values}), "p")


def test_changed_tier_of_other_clusters_is_said() -> None:
    """A new one is none of theirs yet, and one that they do not use is not said."""
    low, high = ("tier", "low"), ("tier", "high")
    others = {"beta": frozenset({low}), "gamma": frozenset({high})}
    now = ClusterState(cluster="alpha", objects={low: {}, high: {}}, others=others)
    then = ClusterState(cluster="alpha", objects={low: {"MaxJobsPU": "0"}, high: {}, ("tier", "new"): {}})
    assert list(shared_changes(now, then)) == ["what changes of tier low holds on cluster beta, too"]


def test_history_is_private_and_names_a_call_that_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose run ended in it is unknown, not one whose run ended after it; two runs at once are not let."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    now = ClusterState(cluster="alpha", objects={})
    then = ClusterState(cluster="alpha", objects={("tier", "a"): {}, ("tier", "b"): {}})

    def refuse(argv: Sequence[str]) -> None:
        raise ClusterError("no")

    def lose(argv: Sequence[str]) -> None:
        raise Unreachable("no answer")

    with lock_journal():
        runs = partial(apply_changes, now, then, read_again=lambda _: now, journal=journal_path())
        for _ in runs(call=lambda _: None, run="1", site="s", user="ann"):
            pass
        next(iter(runs(call=lambda _: None, run="2", site="t", user="bob")))
        for name, call in (("3", refuse), ("4", lose)):
            with pytest.raises((ClusterError, Unreachable)):
                list(runs(call=call, run=name, site="r", user="eve"))
        with pytest.raises(TryLater), lock_journal():
            pass
    assert [(row.site, row.user, row.state) for row in history()] == [
        ("s", "ann", "done"),
        ("s", "ann", "done"),
        ("t", "bob", "done"),
        ("r", "eve", "refused"),
        ("r", "eve", "unknown"),
    ]
    assert [row.site for row in history(["t"])] == ["t"]
    assert journal_path().stat().st_mode & 0o777 == 0o600
    assert journal_path().parent.stat().st_mode & 0o777 == 0o700


def test_lead_that_a_team_above_hides_is_removed_by_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm shows a team's own lead and one of a team above alike; what then comes to light is removed, too.

    What somebody else changes elsewhere meanwhile stays.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SUDO_USER", "ann")  # whom the history names
    teams: dict[Key, Values] = {("team", "root"): {}, ("team", "lab"): {}, ("team", "vla"): {"Parent": "lab"}}
    member: dict[Key, Values] = {("member", "lab", "ann", ""): {}, ("user", "ann"): {"DefaultAccount": "lab"}}
    member |= {("member", "lab", "bob", ""): {}, ("user", "bob"): {"DefaultAccount": "lab"}}
    foreign: dict[Key, Values] = {("member", "vla", "bob", ""): {}, ("lead", "vla", "bob"): {}}
    slurm = Sacctmgr({**teams, **member, ("lead", "lab", "ann"): {}, ("lead", "vla", "ann"): {}})

    def run_once(argv: Sequence[str], *_: object) -> Completed:
        slurm.run(argv)
        slurm.objects |= foreign
        return Completed((), 0, " Done", "a warning")

    now = msgspec.structs.replace(_accounting("alpha", ""), state=read(slurm))
    monkeypatch.setattr(now.client, "run_once", run_once)
    assert ("lead", "vla", "ann") not in now.state.objects
    monkeypatch.setattr(site_plan, "read_site", lambda _: msgspec.structs.replace(now, state=read(slurm)))
    monkeypatch.setattr(site_plan, "read_again", lambda _, kind: read(slurm, kind))
    then = ClusterState(cluster="alpha", objects={**teams, **member})
    assert len(list(site_plan.run_changes(now, then, "1"))) == 2
    assert read(slurm).objects == {**then.objects, **foreign}
    undone = undone_state(read(slurm), journal_path(), "1", "alpha")
    assert list(undone.objects.keys() - then.objects.keys() - foreign.keys()) == [("lead", "lab", "ann")]
    assert {row.user for row in history()} == {"ann"}


def test_refusal_with_exit_code_0_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So sacctmgr refuses a list without the default QOS of an association: on stderr alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    now = _accounting("alpha", "")
    monkeypatch.setattr(now.client, "run_once", lambda *_: Completed((), 0, "\n", " These have no\n access to it."))
    monkeypatch.setattr(site_plan, "read_again", lambda *_: now.state)
    then = ClusterState(cluster="alpha", objects={("tier", "a"): {}})
    with pytest.raises(ClusterError, match="These have no access to it"):
        list(site_plan.run_changes(now, then, "1"))
    assert [row.state for row in history()] == ["refused"]


def test_a_policy_that_others_may_write_is_not_run(tmp_path: Path) -> None:
    """Such a policy could make anybody an administrator; no site is asked."""
    policy = tmp_path / "policy.toml"
    policy.write_text('[users.eve]\nadmin = "Administrator"\n')
    policy.chmod(0o666)
    error = CliRunner().invoke(run, [str(policy)]).exception
    assert isinstance(error, ConfigError)
    assert "everybody" in error.message


@pytest.mark.parametrize(("kinds", "code"), [(["drift", "note"], 1), (["note", "note"], 0), (["ineffective"], 1)])
def test_exit_code_of_a_check(kinds: list[Any], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 for what is no note, at any site; a site that does not answer is an error after the records of the others."""
    policy, errors = tmp_path / "p.toml", list[Unreachable]()
    policy.write_text("[tiers.a]\n")
    found = {str(i): Finding(site=str(i), kind=kind, object="x", message="y") for i, kind in enumerate(kinds)}
    accounting = {name: msgspec.structs.replace(_accounting(name, ""), site=Site(name=name)) for name in found}
    for module in (tenancy_check, tenancy_plan):
        monkeypatch.setattr(module, "read_accounting", lambda _: (accounting, errors))
    monkeypatch.setattr("pitools.tenancy.check.check_site", lambda each, *_: [found[each.site.name]])
    words = [str(policy), *(f"--site={name}" for name in found)]
    assert CliRunner().invoke(tenancy_check.check, words).exit_code == code
    errors.append(Unreachable("no answer"))
    for command in (tenancy_check.check, tenancy_plan.plan):
        done = CliRunner().invoke(command, words)
        assert (done.exception, len(done.stdout.splitlines())) == (errors[0], len(found))


def test_lock_out_is_refused_unless_it_is_allowed_there() -> None:
    """Leave for another site is none. An undo may take members away, but not the last administrator."""
    now = ClusterState(cluster="a", objects={("team", "lab"): {}, ("member", "lab", "ann", ""): {}})
    then = ClusterState(cluster="a", objects={("team", "lab"): {}})
    refuse = partial(site_plan.require_no_lock_out, msgspec.structs.replace(_accounting("a", ""), state=now), then)
    refuse(["a"], is_undo=False)
    refuse([], is_undo=True)
    with pytest.raises(ConfigError):
        refuse(["b"], is_undo=False)
    now.objects["user", "ann"] = {"AdminLevel": "Administrator"}
    with pytest.raises(ConfigError, match="no administrator is left"):
        refuse([], is_undo=True)
