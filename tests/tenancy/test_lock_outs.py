"""What a desired state would lock out is said: users, administrators, who runs it, partitions."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.slurm.records import Partition
from pitools.tenancy.cluster_state import ClusterState, Key, Values
from pitools.tenancy.lock_outs import lock_outs, partition_lock_outs
from tests.tenancy.states import TIERS, states

OBJECTS: dict[Key, Values] = {
    ("tier", "normal"): {},
    ("team", "root"): {"QOS": "normal"},
    ("team", "lab"): {},
    ("member", "lab", "ann", ""): {},
    ("member", "lab", "bob", ""): {},
    ("user", "ann"): {"DefaultAccount": "lab", "AdminLevel": "Administrator"},
    ("user", "bob"): {"DefaultAccount": "lab"},
}
NOW = ClusterState(cluster="alpha", objects=OBJECTS)
ANN: Key = ("member", "lab", "ann", "")
BOB: Key = ("member", "lab", "bob", "")
NOTHING = "ann, bob could run nothing in team lab:"
LAB = 'account "lab"'


def _with(*gone: Key, **values: Values) -> ClusterState:
    """Return the state without some objects, and with values of the root account, the team or the tier."""
    keys: dict[str, Key] = {"root": ("team", "root"), "lab": ("team", "lab"), "normal": ("tier", "normal"), "bob": BOB}
    changed = {keys[name]: {**OBJECTS[keys[name]], **new} for name, new in values.items()}
    objects = {key: own for key, own in {**OBJECTS, **changed}.items() if key not in gone}
    return ClusterState(cluster="alpha", objects=objects)


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (NOW, []),
        (_with(BOB), []),
        (_with(ANN, BOB), ["nobody but the root account could submit: no user is left in any team"]),
        (_with(("user", "ann")), ["no administrator is left (now: ann)"]),
        (_with(root={"QOS": ""}), ["ann, bob could run nothing in team lab: no tier is left"]),
        (_with(lab={"MaxSubmit": "0"}), [f"{NOTHING} 1 job (at most 0 running or pending for all of {LAB})"]),
        (_with(root={"GrpSubmit": "0"}), [f'{NOTHING} 1 job (at most 0 running or pending for all of account "root")']),
        (
            _with(lab={"MaxJobs": "0"}, bob={"MaxJobs": "3"}),
            [f"ann could run nothing in team lab: 1 job (at most 0 running for all of {LAB})"],
        ),
        (
            _with(root={"GrpJobs": "0"}, lab={"GrpJobs": "3"}),
            [f'{NOTHING} 1 job (at most 0 running for all of account "root")'],
        ),
        (_with(root={"QOS": "normal,urgent"}, normal={"MaxJobsPA": "0"}), []),
        (
            _with(bob={"MaxJobs": "0"}),
            [f"bob could run nothing in team lab: 1 job (at most 0 running for all of bob in {LAB})"],
        ),
        (
            _with(normal={"MaxJobsPU": "0"}),
            [f'{NOTHING} 1 job (at most 0 running for one user of QOS "normal")'],
        ),
        (_with(lab={"MaxJobs": "0"}, normal={"MaxJobsPU": "5"}), []),
        (_with(lab={"GrpTRES": "gres/gpu=0"}, normal={"MinTRES": "cpu=4", "Flags": "RequiresReservation"}), []),
        (
            _with(lab={"MaxTRES": "cpu=8"}, normal={"LimitFactor": "0.1"}),
            [f"{NOTHING} 1 CPU (at most 0 for a job of {LAB})"],
        ),
        (_with(normal={"MinTRES": "gres/gpu=8", "MaxTRES": "gres/gpu=8"}), []),
        (_with(normal={"MinTRES": "gres/gpu=8", "MaxTRESPerNode": "gres/gpu=4"}), []),  # of two nodes
        (
            _with(normal={"MinTRES": "gres/gpu=8", "MaxTRES": "gres/gpu=4"}),
            [f'{NOTHING} 8 GPUs (at most 4 for a job of QOS "normal")'],
        ),
        (
            _with(lab={"MaxTRES": "cpu=2"}, normal={"MinTRES": "node=3"}),
            [f"{NOTHING} 3 CPUs (at most 2 for a job of {LAB})"],
        ),
        (_with(lab={"GrpTRES": "node=0"}), [f"{NOTHING} 1 node (at most 0 for all of {LAB})"]),
        (_with(root={"MaxTRES": "cpu=0"}), [f'{NOTHING} 1 CPU (at most 0 for a job of account "root")']),
        (_with(lab={"MaxWall": "00:00:00"}), [f"{NOTHING} time limit 00:01:00 (at most 00:00:00 in {LAB})"]),
        (
            _with(normal={"GrpWall": "00:00:00"}),
            [f'{NOTHING} time limit 00:01:00 (at most 00:00:00 for all of QOS "normal")'],
        ),
    ],
)
def test_lock_out_is_said(then: ClusterState, said: list[str]) -> None:
    """Nobody left, no administrator, no tier, a limit of 0 that counts; and once it is so, nothing."""
    assert lock_outs(NOW, then) == said
    assert lock_outs(then, then) == []


def test_user_of_several_rows_is_named_once() -> None:
    """One for all partitions, and one for each of some."""
    now, then = ({**state.objects, (*ANN[:3], "gpu"): {}} for state in (NOW, _with(root={"QOS": ""})))
    said = lock_outs(*(ClusterState(cluster="alpha", objects=objects) for objects in (now, then)))
    assert said == [f"{NOTHING} no tier is left"]


def test_administrator_of_another_cluster_of_the_database_is_one() -> None:
    """None is lacking while she has her rights there; and who runs the changes as such is not removed by them."""
    elsewhere = {"runner": "eve", "other_rights": {"eve": {"AdminLevel": "Administrator"}}}
    now, then = (msgspec.structs.replace(each, **elsewhere) for each in (NOW, _with(("user", "ann"))))
    assert lock_outs(now, then) == []


def test_new_member_of_a_closed_team_is_not_said() -> None:
    """Who parked the team knows it."""
    now = _with(lab={"MaxJobs": "0"})
    assert lock_outs(now, msgspec.structs.replace(now, objects={**now.objects, ("member", "lab", "eve", ""): {}})) == []


def test_more_than_half_of_the_users_and_who_makes_the_changes_are_said() -> None:
    """The changes cannot be finished by an administrator whom they remove."""
    many = {("member", "lab", f"u{i}", ""): {} for i in range(9)}
    now = msgspec.structs.replace(NOW, objects={**OBJECTS, **many}, runner="ann")
    then = _with(ANN, ("user", "ann"))
    then.objects["user", "bob"] = {"DefaultAccount": "lab", "AdminLevel": "Administrator"}
    assert lock_outs(now, then) == [
        'user "ann", who makes the changes, is removed by them, and cannot make the rest',
        "10 users (ann, u0, u1, u2, u3, ...) of 11 would be in no team any more",
    ]


@given(states(), states(), st.sampled_from(TIERS), st.sampled_from(["alpha", "beta"]))
@settings(max_examples=20, deadline=None)
def test_tier_of_a_partition_is_not_removed_unsaid(
    now: ClusterState, then: ClusterState, qos: str, cluster: str
) -> None:
    """Neither of this cluster nor of another, nor if the other does not answer."""
    partition = Partition(partition="train", state="up", qos=qos)
    is_removed = ("tier", qos) in {*now.objects} - {*then.objects}
    said = list(partition_lock_outs(now, then, {cluster: [partition]}))
    assert [qos in text and cluster in text for text in said] == [True] * is_removed
    assert not is_removed or list(partition_lock_outs(now, then, {"alpha": [], "beta": None}))


def test_lists_of_a_partition_are_not_emptied_unsaid() -> None:
    """AllowQos and AllowAccounts, if each of their names goes; accounts of another cluster are its own."""
    lists = Partition(partition="train", state="up", allow_qos=("normal",), allow_accounts=("lab", "infra"))
    then = _with(("tier", "normal"), ("team", "lab"))
    said = "nobody could use partition train of cluster {}: each tier that it allows is removed (normal)"
    assert list(partition_lock_outs(NOW, then, {"alpha": [lists]})) == [said.format("alpha")]
    lists = msgspec.structs.replace(lists, allow_accounts=("lab",))
    assert len(list(partition_lock_outs(NOW, then, {"alpha": [lists]}))) == 2
    assert list(partition_lock_outs(NOW, then, {"beta": [lists]})) == [said.format("beta")]
