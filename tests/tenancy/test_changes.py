"""Changes from one state to another: Slurm accepts each, in this order, and the last leads to the desired state."""

from __future__ import annotations

from hypothesis import given, settings

from pitools.tenancy.changes import Change, command, order_changes
from pitools.tenancy.cluster_state import ClusterState, parse_state
from pitools.tenancy.words import describe
from tests.tenancy.sacctmgr_model import Sacctmgr
from tests.tenancy.states import states


@given(states())
@settings(max_examples=50, deadline=None)
def test_state_is_read_as_printed(state: ClusterState) -> None:
    """What sacctmgr prints of a state is read as this state."""
    assert parse_state("alpha", Sacctmgr(state).answers()).objects == state.objects


@given(states(has_signed_teams=False), states(has_signed_teams=False))
@settings(max_examples=100, deadline=None)
def test_changes_are_accepted_in_order(now: ClusterState, then: ClusterState) -> None:
    """Each call is accepted and changes something; after the last, sacctmgr prints the desired state."""
    slurm = Sacctmgr(now)
    for change in order_changes(now, then):
        slurm.run(command(change, "alpha"))
    assert parse_state("alpha", slurm.answers()).objects == then.objects


@given(states())
@settings(max_examples=10, deadline=None)
def test_same_state_needs_no_change(state: ClusterState) -> None:
    """A state needs no change to become itself."""
    assert order_changes(state, state) == []


def test_changes_are_said_in_words() -> None:
    """A change names the object, each key of the policy, from and to."""
    member = ("member", "vision", "ann", "gpu")
    assert describe(Change(key=member, before=None, after={"MaxJobs": "3"})) == (
        "add ann in team vision, partition gpu: max_jobs 3"
    )
    assert describe(Change(key=("team", "a"), before={"MaxJobs": "3"}, after={"Fairshare": "7"})) == (
        "team a: shares 1 → 7, max_jobs 3 removed"
    )
    assert describe(Change(key=("lead", "a", "ann"), before=None, after={})) == "add lead ann of team a"
