"""Changes from one state to another: Slurm accepts each, in this order, and the last leads to the desired state."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.core.errors import ConfigError
from pitools.tenancy.changes import ObjectChange, command, order_changes
from pitools.tenancy.cluster_state import QUERIES_OF, ClusterState, Key, Values, parse_state, queries
from pitools.tenancy.desired import desired_state, policy_tables
from pitools.tenancy.policy import policy_of
from pitools.tenancy.refusals import require_possible
from pitools.tenancy.words import describe
from tests.tenancy.sacctmgr_model import Sacctmgr
from tests.tenancy.states import states


def read(slurm: Sacctmgr, kind: str = "") -> ClusterState:
    """Read all accounting, or what has each object of a kind whole."""
    texts = [slurm.show(q) if not kind or i in QUERIES_OF[kind] else "" for i, q in enumerate(queries())]
    return parse_state("alpha", texts)


def _administrators(state: ClusterState) -> set[str]:
    return {key[1] for key, values in state.objects.items() if values.get("AdminLevel") == "Administrator"}


@given(states())
@settings(max_examples=50, deadline=None)
def test_state_is_read_as_printed(state: ClusterState) -> None:
    """What sacctmgr prints of a state is read as this state, and of one kind as its objects of this kind."""
    slurm = Sacctmgr(state.objects)
    assert read(slurm).objects == state.objects
    for kind in QUERIES_OF:
        wanted = {key: values for key, values in state.objects.items() if key[0] == kind}
        assert {key: v for key, v in read(slurm, kind).objects.items() if key[0] == kind} == wanted


def _walk(now: ClusterState, then: ClusterState) -> None:
    """Make all changes, by an administrator who stays one of the users if there is one, and check each state."""
    runner = next((user for user in sorted(_administrators(now)) if ("user", user) in then.objects), "")
    now, slurm = msgspec.structs.replace(now, runner=runner), Sacctmgr(now.objects, runner)
    ends = [Sacctmgr(state.objects) for state in (now, then)]
    kept = {key for key in now.objects if key[0] == "member" and key in then.objects}
    kept = {key for key in kept if all(end.usable(key) for end in ends)}
    for change in order_changes(now, then):
        assert read(slurm, change.key[0]).objects.get(change.key) in (change.before, change.after)
        slurm.run(command(change, now))
        assert all(slurm.usable(key) for key in kept)
        assert _administrators(read(slurm, "user")) or not (_administrators(now) and _administrators(then))
    assert read(slurm).objects == then.objects


@given(states(), states())
@settings(max_examples=60, deadline=None)
def test_changes_are_accepted_in_order(now: ClusterState, then: ClusterState) -> None:
    """Each call is accepted, and finds its object as it expects; the last leads to the desired state.

    On the way nobody lacks each QOS, and there is an administrator, where it is so before and after.
    """
    _walk(now, then)


@given(states(), states(), st.data())
@settings(max_examples=40, deadline=None)
def test_part_of_a_policy_is_accepted_too(now: ClusterState, other: ClusterState, data: st.DataObject) -> None:
    """So are those of a policy of some teams with some of their keys, which leaves the others alone."""
    tables = {**policy_tables(other), "manage": "listed"}
    for name in data.draw(st.lists(st.sampled_from(sorted(tables["teams"])), unique=True)):
        del tables["teams"][name]
    for team in tables["teams"].values():
        for key in data.draw(st.lists(st.sampled_from(sorted(team) or ["users"]), unique=True)):
            team.pop(key, None)
    try:
        then = desired_state(policy_of(tables, "", "p"), now)
        require_possible(now, then, "p")
    except ConfigError:
        return
    _walk(now, then)


def test_list_that_becomes_a_change_to_a_narrowed_one_is_accepted() -> None:
    """Ann keeps the default that her team loses, by a change to the team's new list."""

    def state(team: Values, member: Values) -> ClusterState:
        rows: dict[Key, Values] = {("tier", "low"): {}, ("tier", "urgent"): {}, ("team", "root"): {}}
        rows |= {
            ("team", "lab"): team,
            ("member", "lab", "ann", ""): member,
            ("user", "ann"): {"DefaultAccount": "lab"},
        }
        return ClusterState(cluster="alpha", objects=rows)

    now = state({"QOS": "urgent", "DefaultQOS": "urgent"}, {"DefaultQOS": "urgent"})
    _walk(now, state({"QOS": "low"}, {"QOS": "+urgent", "DefaultQOS": "urgent"}))


def test_list_is_accepted_below_an_account_that_moves_or_has_none_for_a_moment() -> None:
    """Ann's list comes before her team is moved, and gets its final value after the team's."""

    def state(root: Values, lab: Values, sub: Values, ann: Values) -> ClusterState:
        rows: dict[Key, Values] = {("tier", name): {} for name in ("low", "normal")}
        rows |= {("team", "root"): root, ("team", "lab"): lab, ("team", "sub"): sub}
        rows |= {("member", "sub", "ann", ""): ann, ("user", "ann"): {"DefaultAccount": "sub"}}
        return ClusterState(cluster="alpha", objects=rows)

    own: Values = {"QOS": "normal", "DefaultQOS": "normal"}
    _walk(state({}, {}, {"Parent": "lab"}, {}), state({}, {"QOS": "low,normal", "Parent": "sub"}, {}, own))
    signed: Values = {"QOS": "+low", "DefaultQOS": "low"}
    _walk(state({}, {}, {}, {"QOS": "normal"}), state(own, {}, signed, {"QOS": "low"}))


@given(states())
@settings(max_examples=10, deadline=None)
def test_same_state_needs_no_change(state: ClusterState) -> None:
    """A state needs no change to become itself."""
    assert order_changes(state, state) == []


def test_rights_are_given_first_and_the_runner_loses_them_last() -> None:
    """A hand-over from ann, who makes it, to bob, with eve's rights taken and a tier removed."""
    rows: dict[Key, Values] = {("team", "root"): {}, ("team", "lab"): {}}
    rows |= {("member", "lab", user, ""): {} for user in ("ann", "bob", "eve")}

    def state(**levels: str) -> ClusterState:
        users = {("user", user): {"DefaultAccount": "lab"} for user in ("ann", "bob", "eve")}
        given = {("user", user): {"DefaultAccount": "lab", "AdminLevel": level} for user, level in levels.items()}
        return ClusterState(cluster="alpha", objects={**rows, **users, **given}, runner="ann")

    now, then = state(ann="Administrator", eve="Administrator"), state(bob="Administrator")
    now.objects["tier", "old"] = {}
    assert [change.key for change in order_changes(now, then)] == [
        ("user", "bob"),
        ("tier", "old"),
        ("user", "eve"),
        ("user", "ann"),
    ]
    _walk(now, then)


def test_rights_of_another_cluster_come_with_a_user() -> None:
    """An operator there is one here: joining a team is all that changes, unless the policy takes the right away."""
    objects: dict[Key, Values] = {("team", "root"): {}, ("team", "lab"): {}}
    now = ClusterState(cluster="alpha", objects=objects, other_rights={"eve": {"AdminLevel": "Operator"}})
    kept = {"teams": {"lab": {"users": ["eve"]}}}
    for tables, calls in ((kept, 1), ({**kept, "users": {"eve": {"admin": "None"}}}, 2)):
        then = desired_state(policy_of(tables, "", "p"), now)
        assert [change.key for change in order_changes(now, then)] == [("member", "lab", "eve", ""), ("user", "eve")][
            :calls
        ]


def test_changes_are_said_in_words() -> None:
    """A change names the object, each key of the policy, from and to."""
    member = ("member", "vision", "ann", "gpu")
    assert describe(ObjectChange(key=member, before=None, after={"MaxJobs": "3"})) == (
        "add ann in team vision, partition gpu: max_jobs 3"
    )
    assert describe(ObjectChange(key=("team", "a"), before={"MaxJobs": "3"}, after={"Fairshare": "7"})) == (
        "team a: shares 1 → 7, max_jobs 3 removed"
    )
    assert describe(ObjectChange(key=("lead", "a", "ann"), before=None, after={})) == "add lead ann of team a"
