"""What makes a policy untrue at a site: drift, with who made it; settings that take its effect away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from pitools.core.subprocesses import Completed
from pitools.site.schema import Site
from pitools.slurm.client import Client
from pitools.slurm.parse_cluster import parse_config
from pitools.slurm.parse_transactions import Transaction
from pitools.slurm.records import Config, Partition
from pitools.tenancy import check, drift
from pitools.tenancy.changed_by import AccountingChanges, parse_changes
from pitools.tenancy.cluster_state import ClusterState, Key, Values
from pitools.tenancy.policy import Policy
from pitools.tenancy.read import SiteAccounting
from tests.tenancy.states import states

NOBODY = AccountingChanges(transactions=(), keys={})
POLICY: dict[Key, Values] = {
    ("tier", "urgent"): {"Priority": "9", "Preempt": "low", "MaxTRESPU": "gres/gpu=4"},
    ("tier", "low"): {},
    ("team", "vision"): {"Fairshare": "7", "QOS": "low,urgent", "GrpTRESMins": "gres/gpu=6000"},
    ("member", "vision", "ann", ""): {},
    ("user", "ann"): {},
}
SOUND = {
    "AccountingStorageEnforce": "associations,limits,qos,safe",
    "AccountingStorageTRES": "cpu,mem,gres/gpu",
    "PriorityType": "priority/multifactor",
    "PriorityWeightFairShare": "1000",
    "PriorityWeightQOS": "1000",
    "PriorityDecayHalfLife": "00:00:00",
    "PriorityUsageResetPeriod": "MONTHLY",
    "PreemptType": "preempt/qos",
    "PreemptMode": "REQUEUE",
    "JobRequeue": "1",
}


def state(objects: dict[Key, Values]) -> ClusterState:
    return ClusterState(cluster="alpha", objects=objects)


def config(**changes: str) -> Config:
    return Config(cluster="alpha", version=(22, 5), values={**SOUND, **changes})


@given(states(), states())
@settings(max_examples=15, deadline=None)
def test_drift_is_each_object_that_differs(now: ClusterState, then: ClusterState) -> None:
    """Each object that differs is one finding with its name, and equal states have none."""
    found = list(drift.find_drift(now, then, NOBODY, "alpha"))
    keys = {key for key in (*now.objects, *then.objects) if now.objects.get(key) != then.objects.get(key)}
    assert len(found) == len(keys)
    assert list(drift.find_drift(now, now, NOBODY, "alpha")) == []


@pytest.fixture
def recorded(repo: Path) -> AccountingChanges:
    """The history of a real database: see tests/replay/README.md."""
    replay = repo / "tests/replay/slurm-22.05"
    names = ("transactions", "transactions_cluster", "assoc_ids")
    return parse_changes([(replay / f"{name}.txt").read_text() for name in names])


@pytest.mark.parametrize(
    ("key", "policy", "site", "at"),
    [
        (("team", "vision"), {}, {"MaxWall": "1-00:00:00"}, "08:14:36"),
        (("team", "vision"), {}, {"Description": "eyes"}, "08:14:39"),
        (("team", "vision"), None, {}, "08:14:32"),
        (("team", "vision"), {"Parent": "lab"}, {"Parent": "infra"}, ""),  # Slurm does not write it down
        (("member", "vision", "bob", ""), {}, {"MaxJobs": "5"}, "08:14:36"),
        (("member", "gone", "bob", ""), {}, None, "08:14:38"),
        (("member", "vision", "ann", "main"), None, {}, "08:14:34"),
        (("tier", "low"), {}, {"MaxTRESPU": "gres/gpu=4"}, "08:14:37"),
        (("tier", "low"), {}, {"UsageFactor": "2"}, ""),
        (("tier", "temp"), {}, None, "08:14:40"),
        (("user", "ann"), {}, {"AdminLevel": "Operator"}, "08:14:37"),
        (("user", "root"), {"DefaultAccount": "infra"}, {"DefaultAccount": "lab"}, "08:14:05"),
        (("lead", "vision", "ann"), {}, None, "08:14:38"),
    ],
)
def test_who_made_it_differ(
    recorded: AccountingChanges, key: Key, policy: Values | None, site: Values | None, at: str
) -> None:
    """The last change of just what differs is named, and none where accounting has none."""
    now, then = (state({key: values} if values is not None else {}) for values in (site, policy))
    (finding,) = drift.find_drift(now, then, recorded, "alpha")
    assert [each.at[11:19] for each in finding.changes[:1]] == ([at] if at else [])
    assert ("root at " in finding.message) == bool(at)


def test_the_newest_change_comes_first() -> None:
    """Of several changes of the same value, at most three, the newest first."""
    times = [f"2026-11-27T08:0{minute}:00.000Z" for minute in range(5)]
    changes = [
        Transaction(at=at, actor="eve", action="modify", kind="qos", names=("low",), fields=("priority",))
        for at in times
    ]
    made_by = AccountingChanges(transactions=tuple(changes), keys={})
    now, then = state({("tier", "low"): {"Priority": "2"}}), state({("tier", "low"): {}})
    (finding,) = drift.find_drift(now, then, made_by, "alpha")
    assert [each.at for each in finding.changes] == times[:1:-1]
    assert finding.message == f"priority 0 → 2 (eve at {times[-1]})"


def test_a_sound_configuration_has_no_finding(repo: Path) -> None:
    """What the policy needs is set; and a policy that uses nothing needs nothing."""
    assert list(drift.find_ineffective(config(), state(POLICY))) == []
    assert list(drift.find_notes(config(), state(POLICY))) == []
    bare = parse_config((repo / "tests/replay/slurm-22.05/config.txt").read_text())
    bare = msgspec.structs.replace(bare, values={**bare.values, "AccountingStorageEnforce": "none"})
    assert list(drift.find_ineffective(bare, state({("team", "vision"): {}}))) == []
    no_budget = state({key: values for key, values in POLICY.items() if key[0] != "team"})
    assert list(drift.find_ineffective(config(AccountingStorageEnforce="associations,limits,qos"), no_budget)) == []
    assert list(drift.find_notes(config(PriorityUsageResetPeriod="NONE"), no_budget)) == []


@pytest.mark.parametrize(
    ("changes", "objects"),
    [
        ({"AccountingStorageEnforce": "none"}, ["AccountingStorageEnforce"] * 4),
        ({"AccountingStorageEnforce": "associations,limits,qos"}, ["AccountingStorageEnforce"]),
        ({"AccountingStorageTRES": "cpu,mem"}, ["AccountingStorageTRES"]),
        ({"PriorityType": "priority/basic"}, ["PriorityType"]),
        ({"PriorityWeightFairShare": "0"}, ["PriorityWeightFairShare"]),
        ({"PriorityWeightQOS": "0"}, ["PriorityWeightQOS"]),
    ],
)
def test_a_setting_that_takes_the_effect_away(changes: dict[str, Any], objects: list[str]) -> None:
    """Each is found, alone, where the policy uses what it takes away."""
    assert [name for name, _, _ in drift.find_ineffective(config(**changes), state(POLICY))] == objects


def test_qos_outside_the_policy_that_set_limits_aside() -> None:
    """A usable QOS with a flag, and the QOS of a partition that comes before a tier; not the policy's own."""
    policy = {key: values for key, values in POLICY.items() if key[0] != "team"}
    policy["team", "vision"] = {"QOS": "urgent,other"}
    other: Values = {"Flags": "DenyOnLimit,OverPartQOS", "MaxTRESPU": "gres/gpu=9"}
    now = state({**policy, ("tier", "other"): other})
    partitions = [Partition(partition="gpu", state="UP", qos="other"), Partition(partition="cpu", state="UP")]
    found = list(drift.find_bypasses(now, now, {"urgent", "low"}, partitions))
    assert [name for name, _, _ in found] == ["tier other", "partition gpu"]
    assert "MaxTRESPU=gres/gpu of tier urgent" in found[1][1]
    assert list(drift.find_bypasses(now, now, {"urgent", "low", "other"}, partitions)) == []


def test_administrators_and_notes() -> None:
    """Administrators that the policy does not name; budgets without a period, and a plugin, as notes."""
    levels = {"root": "Administrator", "ann": "Operator", "eve": "Operator", "bob": "None"}
    assert [name for name, _, _ in drift.find_administrators(levels, {"ann"})] == ["user eve"]
    changes = {"PriorityDecayHalfLife": "7-00:00:00", "JobSubmitPlugins": "lua"}
    notes = [name for name, _, _ in drift.find_notes(config(**changes), state(POLICY))]
    assert notes == ["PriorityDecayHalfLife", "JobSubmitPlugins"]
    for_ever = drift.find_notes(config(PriorityUsageResetPeriod="NONE"), state(POLICY))
    assert [name for name, _, _ in for_ever] == ["PriorityUsageResetPeriod"]
    man = ("member", "vision", "man")
    rows: dict[Key, Values] = {(*man, ""): {"MaxJobs": "1", "QOS": "-b"}, (*man, "gpu"): {"QOS": "-b", "MaxWall": "60"}}
    ((name, message, _),) = drift.find_notes(config(), state({**POLICY, **rows, (*man, "dev"): rows[*man, ""]}))
    assert (name, message.split(" of ")[0]) == ("man in team vision, partition gpu", "without max_jobs 1")


def change(at: int, action: str, kind: str, **values: Any) -> Transaction:
    return Transaction(at=f"2026-11-27T08:0{at}:00.000Z", actor=f"no{at}", action=action, kind=kind, **values)


@pytest.mark.parametrize(
    ("transactions", "who"),
    [
        ([], ""),
        ([change(1, "remove", "qos", ids=("4",)), change(2, "remove", "qos", ids=("4",))], "perhaps removed by no2 "),
        ([change(1, "remove", "qos", ids=("4",)), change(2, "remove", "qos", ids=("5",))], ""),
        ([change(1, "remove", "qos", ids=("4",)), change(2, "add", "qos", names=("low",))], ""),
        ([change(1, "add", "qos", names=("low",)), change(2, "remove", "qos", ids=("5",))], "perhaps removed by no2 "),
    ],
)
def test_nobody_is_blamed_for_a_tier_that_another_removed(transactions: list[Transaction], who: str) -> None:
    """Accounting keeps the number of a removed QOS alone: somebody is named, as perhaps, where there is one removal."""
    made_by = AccountingChanges(transactions=tuple(transactions), keys={})
    (finding,) = drift.find_drift(state({}), state({("tier", "low"): {}}), made_by, "alpha")
    assert (who or "accounting does not tell who") in finding.message


def test_who_brought_a_user_to_a_cluster() -> None:
    """Not who added the user to the database for another one; a later change of what differs counts too."""
    new = change(2, "add", "association", names=("lab", "ann", ""), ids=("7",))
    everywhere = change(1, "add", "user", names=("ann",))
    level = change(3, "modify", "user", names=("ann",), fields=("admin_level",))
    made_by = AccountingChanges(transactions=(everywhere, new, level), keys={"7": ("member", "lab", "ann", "")})
    for values, actors in (({}, ["no2"]), ({"AdminLevel": "Operator"}, ["no3", "no2"])):
        (finding,) = drift.find_drift(state({("user", "ann"): values}), state({}), made_by, "alpha")
        assert [each.actor for each in finding.changes] == actors
    gone = change(4, "remove", "association", ids=("7",))
    made_by = msgspec.structs.replace(made_by, transactions=(change(1, "remove", "user", names=("ann",)), gone))
    (finding,) = drift.find_drift(state({}), state({("user", "ann"): {}}), made_by, "alpha")
    assert finding.changes[0].actor == "no4"


def test_an_association_of_another_cluster_is_none_of_this_one() -> None:
    """Its number may be that of one here."""
    elsewhere = "2026-11-27T08:14:04|Modify Associations|eve|(id_assoc=3)|max_jobs=5\n"
    made_by, team = parse_changes([elsewhere, "", "3|vision||\n"]), ("team", "vision")
    (finding,) = drift.find_drift(state({team: {"MaxJobs": "5"}}), state({team: {}}), made_by, "a")
    assert finding.changes == ()


def test_a_right_that_the_policy_takes_away_is_drift_alone(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With who gave it; one of a user whom the policy does not name is ineffective."""
    now, then = state({("user", "ann"): {"AdminLevel": "Operator"}}), state({("user", "ann"): {}})
    names = ("partitions_o", "transactions", "transactions_cluster", "assoc_ids")
    texts = [(repo / f"tests/replay/slurm-22.05/{name}.txt").read_text() for name in names]
    answers = [Completed((), 0, text, "") for text in ("ann|Operator\nzoe|Operator\n", *texts)]
    monkeypatch.setattr(check, "run_queries", lambda _, commands: answers[: len(commands)])
    accounting = SiteAccounting(site=Site(name="a"), client=Client(), config=config(), state=now)
    found = check.check_site(accounting, Policy(), then)
    assert [(each.kind, each.object) for each in found] == [("drift", "user ann"), ("ineffective", "user zoe")]
    assert found[0].changes[0].actor == "root"
