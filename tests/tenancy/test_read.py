"""Reading the accounting of sites: from recorded answers, with a site that does not answer or is another's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from pitools.core import subprocesses
from pitools.core.errors import ClusterError, ConfigError, Unreachable
from pitools.site.schema import Site, Slurm
from pitools.slurm.client import Client
from pitools.slurm.records import Config
from pitools.slurm.transport import Transport
from pitools.tenancy import read
from pitools.tenancy.cluster_state import parse_state
from pitools.tenancy.columns import ASSOCIATION
from pitools.tenancy.desired import desired_state, policy_tables
from pitools.tenancy.policy import policy_of

NAMES = ("qos", "assoc", "parents", "defaults", "users", "accounts", "tres")


@pytest.fixture
def answers(repo: Path) -> list[str]:
    """What sacctmgr 22.05 printed."""
    return [(repo / "tests" / "replay" / "slurm-22.05" / f"tenancy_{name}.txt").read_text() for name in NAMES]


def test_recorded_accounting_is_read(answers: list[str]) -> None:
    """Own values without inherited ones, the other cluster apart, and an import that changes nothing."""
    state = parse_state("alpha", answers)
    assert state.objects["team", "kt3"] == {"QOS": "k1,k2", "DefaultQOS": "k2", "MaxJobs": "4"}
    assert state.objects["member", "kt3", "ku3a", ""] == {"MaxJobs": "9"}
    assert state.objects["member", "kt3", "ku3b", ""] == {}
    assert state.objects["user", "ku3b"] == {"DefaultAccount": "kt3", "AdminLevel": "Operator"}
    assert state.objects["tier", "k2"]["Preempt"] == "k1"
    assert parse_state("beta", answers).other_rights["ku3b"] == {"AdminLevel": "Operator"}
    assert {("team", "lab"), ("tier", "high")} <= state.others["beta"]
    assert ("team", "kt3") not in state.others["beta"]
    assert "gres/gpu" in state.resources
    bare = msgspec.structs.replace(state, objects={})
    assert desired_state(policy_of(policy_tables(state), "", "p"), bare).objects == state.objects


def test_bar_in_the_description_of_an_account_makes_no_lead(answers: list[str]) -> None:
    """Ann leads lab, and no physics does; any other row with more or fewer values than asked for is an error."""
    lines = answers[5].replace("lab|pit|pit|", "lab|R|D group|physics|ann")
    state = parse_state("alpha", [*answers[:5], lines, answers[6]])
    assert [key for key in state.objects if key[:2] == ("lead", "lab")] == [("lead", "lab", "ann")]
    about = {"Description": "R|D group", "Organization": "physics"}
    assert state.objects["team", "lab"] == {**parse_state("alpha", answers).objects["team", "lab"], **about}
    for i, answer in enumerate(answers):
        for wrong in ("lone\n", answer.replace("|", "|x|", 1) if i != 5 else "a|b\n"):
            with pytest.raises(ClusterError):
                parse_state("alpha", [*answers[:i], wrong, *answers[i + 1 :]])


def test_lead_who_is_inherited_on_another_cluster_is_none_of_this_one() -> None:
    """sim is below robotics here and below lab there, which bob leads: Slurm shows him as a lead of sim on both."""
    pairs = [("a", "robotics", "root"), ("a", "sim", "robotics"), ("b", "lab", "root"), ("b", "sim", "lab")]
    parents = "".join(f"{cluster}|{account}||{parent}\n" for cluster, account, parent in pairs)
    rows = "".join(f"{cluster}|{account}||" + "|" * len(ASSOCIATION) + "\n" for cluster, account, _ in pairs)
    accounts = "robotics|robotics|robotics|\nsim|sim|sim|bob\nlab|lab|lab|bob\n"
    answers = ["", rows, parents, "", "", accounts, ""]
    for cluster, leads in (("a", set()), ("b", {("lead", "lab", "bob")})):
        state = parse_state(cluster, answers)
        assert {key for key in state.objects if key[0] == "lead"} == leads
        tables = policy_tables(state)
        tables["teams"]["sim"]["leads"] = ["bob"]
        assert desired_state(policy_of(tables, "", "p"), state).objects == state.objects


def test_sites_are_read_apart(answers: list[str], repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that does not answer, or has another cluster than its file says, is an error of its own."""
    config = (repo / "tests" / "replay" / "slurm-22.05" / "config.txt").read_text().replace("= gamma", "= alpha")

    def run(transport: Transport, commands: Sequence[Sequence[str]]) -> list[subprocesses.Completed]:
        if transport.host:
            raise Unreachable("no answer within 30 s")
        texts = zip(commands, [config, "root\n", *answers], strict=True)
        return [subprocesses.Completed(tuple(command), 0, text, "") for command, text in texts]

    monkeypatch.setattr(read, "run_queries", run)
    away = msgspec.structs.replace(Site(name="away").connection, kind="ssh", host="away")
    sites = [Site(name="a"), Site(name="away", connection=away), Site(name="b", slurm=Slurm(cluster="beta"))]
    found = read.read_sites(sites)
    assert [type(answer) for answer in found.values()] == [read.SiteAccounting, Unreachable, ConfigError]
    accounting = found["a"]
    assert isinstance(accounting, read.SiteAccounting)
    assert accounting.state.runner == "root"


def test_partitions_are_those_of_each_cluster_of_the_database(
    answers: list[str], repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of a cluster that does not answer."""
    text = (repo / "tests" / "replay" / "slurm-22.05" / "partitions_o.txt").read_text()

    def run(transport: Transport, commands: Sequence[Sequence[str]]) -> list[subprocesses.Completed]:
        return [subprocesses.Completed(tuple(c), "beta" in c, "" if "beta" in c else text, "") for c in commands]

    monkeypatch.setattr(read, "run_queries", run)
    state, config = parse_state("alpha", answers), Config(cluster="alpha", version=(22, 5), values={})
    accounting = read.SiteAccounting(site=Site(name="a"), client=Client(), config=config, state=state)
    partitions = read.read_partitions(accounting)
    assert list(partitions) == ["alpha", "beta"]
    assert partitions["alpha"]
    assert partitions["beta"] is None
