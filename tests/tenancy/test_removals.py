"""What unfinished jobs use stays for now: also a tier that only their association is to lose."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from pitools.core.subprocesses import Completed
from pitools.site.schema import Site
from pitools.slurm.client import Client
from pitools.slurm.records import Config
from pitools.tenancy import removals
from pitools.tenancy.changes import ObjectChange, effective_tiers
from pitools.tenancy.cluster_state import ClusterState, Key, Values
from pitools.tenancy.read import SiteAccounting
from pitools.tenancy.removals import Kept, keep_used, read_unfinished_jobs

OBJECTS: dict[Key, Values] = {
    ("tier", "normal"): {},
    ("tier", "urgent"): {},
    ("team", "root"): {"QOS": "normal"},
    ("team", "lab"): {"QOS": "+urgent"},
    ("team", "vla"): {},
    ("member", "lab", "ann", ""): {},
    ("member", "lab", "bob", ""): {"DefaultQOS": "urgent"},
    ("member", "vla", "bob", ""): {},
    ("user", "ann"): {"DefaultAccount": "lab"},
    ("user", "bob"): {"DefaultAccount": "vla"},
}
NOW = ClusterState(cluster="alpha", objects=OBJECTS)
ANN: Key = ("member", "lab", "ann", "")
BOB: Key = ("member", "lab", "bob", "")


def kept(squeue: str, then: dict[Key, Values], monkeypatch: pytest.MonkeyPatch) -> Kept:
    """What stays of a state with these jobs, as `squeue` prints them."""

    def run(_: object, commands: Sequence[Sequence[str]]) -> list[Completed]:
        return [Completed(tuple(command), 0, squeue, "") for command in commands]

    monkeypatch.setattr(removals, "run_queries", run)
    config = Config(cluster="alpha", version=(22, 5), values={})
    accounting = SiteAccounting(site=Site(name="a"), client=Client(), config=config, state=NOW)
    state = msgspec.structs.replace(NOW, objects=then)
    return keep_used(NOW, state, read_unfinished_jobs(accounting, state))


def test_tier_that_a_team_loses_stays_with_the_members_whose_jobs_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm would hold their pending jobs (InvalidQOS). Other members lose it at once."""
    then = {**OBJECTS, ("team", "lab"): {}, BOB: {}}
    left = kept("lab|bob|urgent|7\nlab|bob|normal|8\nvla|bob|normal|9\n", then, monkeypatch)
    assert left.for_jobs == ["tier urgent of bob in team lab stays for now: unfinished jobs 7"]
    assert left.state.objects == {**then, BOB: {"QOS": "normal,urgent"}}
    assert left.postponed == [ObjectChange(key=BOB, before={"QOS": "normal,urgent"}, after={})]
    assert kept("lab|bob|normal|8\n", then, monkeypatch) == Kept(msgspec.structs.replace(NOW, objects=then), [], [], [])


def test_member_who_stays_keeps_the_tier_of_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although its team loses it, and with it the default tier of the member."""
    then = {key: values for key, values in OBJECTS.items() if "bob" not in key} | {("team", "lab"): {}}
    left = kept("lab|bob|urgent|7\n", then, monkeypatch).state
    assert effective_tiers(left, BOB) == {"normal", "urgent"}
    assert effective_tiers(left, ANN) == {"normal"}


def test_default_team_of_a_user_who_stays_is_the_present_one_if_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs without an account go on in it; another team is the default only if this one goes."""
    then = {key: values for key, values in OBJECTS.items() if "bob" not in key}
    jobs = {"lab|bob|normal|7\n": "lab", "lab|bob|normal|7\nvla|bob|normal|8\n": "vla"}
    for squeue, team in jobs.items():
        assert kept(squeue, then, monkeypatch).state.objects["user", "bob"] == {"DefaultAccount": team}
