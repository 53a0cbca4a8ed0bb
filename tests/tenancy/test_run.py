"""`pit tenancy run` over sites: one run for all of them, its undo, and what it keeps for now."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from pitools.commands.tenancy import group
from pitools.core.errors import ClusterError
from pitools.core.subprocesses import Completed
from pitools.site.schema import Site
from pitools.slurm.client import Client
from pitools.slurm.records import Config
from pitools.tenancy import removals, site_plan
from pitools.tenancy.apply import journal_path
from pitools.tenancy.cluster_state import ClusterState, Key, Values
from pitools.tenancy.read import SiteAccounting
from pitools.tenancy.removals import keep_used
from pitools.tenancy.words import forgotten_usage
from tests.tenancy.sacctmgr_model import Sacctmgr
from tests.tenancy.test_changes import read

OBJECTS: dict[Key, Values] = {
    ("tier", "normal"): {},
    ("team", "root"): {"QOS": "normal"},
    ("team", "lab"): {},
    ("member", "lab", "ann", ""): {},
    ("member", "lab", "bob", ""): {},
    ("user", "ann"): {"DefaultAccount": "lab"},
    ("user", "bob"): {"DefaultAccount": "lab", "AdminLevel": "Operator"},
}
ANN: Key = ("member", "lab", "ann", "")
LESS = "teams.lab.tiers = ['normal']\n"
Pit = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def jobs() -> list[str]:
    """What squeue prints at each site."""
    return []


@pytest.fixture
def slurms(jobs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Sacctmgr]:
    """The accounting of the sites a and b, each with a database of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    models = {name: Sacctmgr(OBJECTS) for name in ("a", "b")}

    def read_site(site: Site) -> SiteAccounting:
        def run_once(argv: list[str], *_: object) -> Completed:
            models[site.name].run(argv)
            return Completed((), 0, " Done", "")

        client = Client()
        monkeypatch.setattr(client, "run_once", run_once)
        config = Config(cluster="alpha", version=(22, 5), values={})
        others: dict[str, frozenset[Key]] = {"alpha": frozenset()} if models["a"] is models["b"] else {}
        state = msgspec.structs.replace(
            read(models[site.name]), others=others, runner=models[site.name].runner or "root"
        )
        return SiteAccounting(site=site, client=client, config=config, state=state)

    answers = Completed((), 0, "", "")
    monkeypatch.setattr(
        removals, "run_queries", lambda _, calls: [answers._replace(stdout="".join(jobs)) for _ in calls]
    )
    for module in ("read", "site_plan"):
        monkeypatch.setattr(f"pitools.tenancy.{module}.read_site", read_site)
    monkeypatch.setattr(site_plan, "read_again", lambda each, kind: read(models[each.site.name], kind))
    monkeypatch.setattr("pitools.site.load.load_site", lambda name: Site(name=name))
    return models


@pytest.fixture
def pit(slurms: dict[str, Sacctmgr], tmp_path: Path) -> Pit:
    """Runs `pit tenancy`, with a policy text for `run`; returns the exit code and the records."""

    def call(command: str, policy: str, *words: str) -> tuple[int, list[dict[str, Any]]]:
        path = tmp_path / "policy.toml"
        path.write_text(policy)
        path.chmod(0o600)
        done = CliRunner().invoke(group, [command, *([str(path)] if policy else []), *words, "--format", "jsonl"])
        return getattr(done.exception, "exit_code", done.exit_code), [
            json.loads(row) for row in done.stdout.split("\n") if row
        ]

    return call


def test_one_run_over_several_sites_is_undone_as_one(pit: Pit, slurms: dict[str, Sacctmgr]) -> None:
    """One ID for all sites; `--site` restricts the undo, and a site that the run did not change is none of it."""
    policy = "teams.lab.max_jobs = 3\nsites.a = {}\nsites.b = {}\n"
    code, rows = pit("run", policy)
    (run,) = {row["run"] for row in rows}
    assert (code, [row["site"] for row in rows]) == (0, ["a", "b"])
    assert pit("run", policy, "--lock-out", "c")[0] == 2
    assert pit("run", "", "--undo", run, "--site", "c")[0] == 2
    assert [row["site"] for row in pit("run", "", "--undo", run, "--site", "b")[1]] == ["b"]
    assert [slurm.objects == OBJECTS for slurm in slurms.values()] == [False, True]
    assert [row["site"] for row in pit("run", "", "--undo", run)[1]] == ["a"]
    assert slurms["a"].objects == OBJECTS
    done = CliRunner().invoke(group, ["run", "--undo", run])
    assert (done.exit_code, done.stdout, done.stderr.count("nothing left")) == (0, "", 1)


def test_run_with_a_damaged_journal_changes_nothing(pit: Pit, slurms: dict[str, Sacctmgr]) -> None:
    """It could not be undone; the hint of the error is a command."""
    pit("run", "teams.lab.max_jobs = 3", "--site", "a")
    journal = journal_path()
    journal.write_text("{broken\n" + journal.read_text())
    assert pit("run", "teams.lab.max_jobs = 4", "--site", "a") == (5, [])
    assert slurms["a"].objects["team", "lab"] == {"MaxJobs": "3"}
    journal.rename(f"{journal}.damaged")
    assert pit("run", "teams.lab.max_jobs = 4", "--site", "a")[0] == 0


def test_history_of_an_unknown_site_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without changes yet has none."""
    for name, folder in (("XDG_STATE_HOME", "state"), ("PIT_SITE_PATH", "sites")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "alpha.toml").write_text('name = "alpha"\n')
    found = [CliRunner().invoke(group, ["history", "--site", site]) for site in ("alpha", "alhpa")]
    assert [getattr(each.exception, "exit_code", each.exit_code) for each in found] == [0, 2]


def test_runner_gives_rights_up_at_the_last_site_of_a_database(pit: Pit, slurms: dict[str, Sacctmgr]) -> None:
    """Ann may make the changes of the second one, too."""
    slurm = slurms["b"] = slurms["a"]
    slurm.runner = "ann"
    for user in ("ann", "bob"):
        slurm.objects["user", user]["AdminLevel"] = "Administrator"
    policy = "teams.lab.max_jobs = 3\nusers.ann.admin = 'None'\nsites.a = {}\nsites.b.teams.lab.grp_jobs = 4\n"
    code, rows = pit("run", policy)
    assert (code, [(row["site"], row["key"][0]) for row in rows]) == (0, [("a", "team"), ("b", "team"), ("b", "user")])


def test_what_unfinished_jobs_use_is_removed_later(pit: Pit, slurms: dict[str, Sacctmgr], jobs: list[str]) -> None:
    """Bob stays a member, without rights, and all else is done: exit 75, until the job has ended."""
    policy = "teams.lab = { max_jobs = 3, users = ['ann'] }\n"
    jobs.append("lab|bob|normal|17\n")
    for changes in (["lab", "bob"], []):
        code, rows = pit("run", policy, "--site", "a")
        assert (code, [row["key"][1] for row in rows]) == (75, changes)
    assert slurms["a"].objects["user", "bob"] == {"DefaultAccount": "lab"}
    jobs.clear()
    code, rows = pit("run", policy, "--site", "a")
    assert (code, [row["change"] for row in rows]) == (0, ["remove bob in team lab"])


def test_emptied_list_is_no_loop(pit: Pit, slurms: dict[str, Sacctmgr], monkeypatch: pytest.MonkeyPatch) -> None:
    """slurmdbd 22.05 takes a tier for one whose list was emptied, until a name is taken from the empty list."""
    slurm, stale = slurms["a"], {"normal"}
    plain = slurm.run
    slurm.objects |= {("tier", "low"): {}, ("tier", "high"): {"Preempt": "low,normal"}}
    slurm.objects["tier", "normal"]["Preempt"] = "low"

    def run(argv: list[str]) -> None:
        if argv[-1] == "Preempt-=normal" and "Preempt" not in slurm.objects["tier", "normal"]:
            return stale.clear()
        if argv[-1] == "Preempt=normal" and stale:
            raise ClusterError("QOS Preemption loop detected")
        return plain(argv)

    monkeypatch.setattr(slurm, "run", run)
    code, rows = pit("run", "tiers.normal.preempts = []\ntiers.high.preempts = ['normal']\n", "--site", "a")
    assert (code, [row["key"][1] for row in rows]) == (0, ["normal", "high"])
    assert slurm.objects["tier", "high"] == {"Preempt": "normal"}


def test_usage_that_goes_with_an_association_is_said(tmp_path: Path, slurms: dict[str, Sacctmgr]) -> None:
    """By a plan: of a member, or of a team and so of its members; but not of one that stays."""
    for policy, said in (("teams.lab.users = ['bob']", ["ann in team lab"]), ("teams.new.users = ['ann']", [])):
        (tmp_path / "p.toml").write_text(policy)
        done = CliRunner().invoke(group, ["plan", str(tmp_path / "p.toml"), "--site", "a"])
        assert [line.split(": ")[-1] for line in done.stderr.splitlines() if "forgotten" in line] == said
    assert forgotten_usage(OBJECTS, [])[0].endswith(": team lab, team root")


@pytest.fixture
def run_id(pit: Pit, slurms: dict[str, Sacctmgr], jobs: list[str]) -> str:
    """A run that took a tier from a team but, for an unfinished job, not from ann; the job has ended."""
    slurms["a"].objects |= {("tier", "urgent"): {}, ("team", "lab"): {"QOS": "normal,urgent"}}
    jobs.append("lab|ann|urgent|7\n")
    code, rows = pit("run", LESS, "--site", "a")
    assert (code, slurms["a"].objects[ANN]) == (75, {"QOS": "normal,urgent"})
    assert pit("run", LESS, "--site", "a") == (75, [])
    assert pit("run", LESS + "tiers.urgent.priority = 5\n", "--site", "a")[0] == 75
    jobs.clear()
    return str(rows[0]["run"])


def test_tier_of_unfinished_jobs_is_taken_later(pit: Pit, slurms: dict[str, Sacctmgr], run_id: str) -> None:
    """Although the policy does not name the member; also after an undo of that. Both undone, all is as before."""
    for _ in range(2):
        code, (row,) = pit("run", LESS, "--site", "a")
        assert (code, row["change"], slurms["a"].objects[ANN]) == (
            0,
            "ann in team lab: tiers normal,urgent removed",
            {},
        )
        assert pit("plan", LESS, "--site", "a") == (0, [])
        assert pit("run", "", "--undo", row["run"])[0] == 0
        assert slurms["a"].objects[ANN] == {"QOS": "normal,urgent"}
    assert pit("run", "", "--undo", run_id)[0] == 0
    assert pit("run", LESS + "teams.lab.max_jobs = 5\n", "--site", "a")[0] == 0
    assert slurms["a"].objects[ANN] == {}


@pytest.mark.parametrize("by_hand", ["urgent", "", "normal"])
def test_tier_that_somebody_gave_since_stays(pit: Pit, slurms: dict[str, Sacctmgr], run_id: str, by_hand: str) -> None:
    """By hand, or by a policy that names the member's tiers, although these are what it has; not another value."""
    if by_hand:
        slurms["a"].objects[ANN]["QOS"] = by_hand
    else:
        assert pit("run", LESS + "teams.lab.members.ann.tiers = ['normal', 'urgent']\n", "--site", "a") == (0, [])
    slurms["a"].objects[ANN]["MaxJobs"] = "7"
    assert pit("run", LESS, "--site", "a") == (0, [])
    assert slurms["a"].objects[ANN] == {"QOS": by_hand or "normal,urgent", "MaxJobs": "7"}


def test_kept_member_keeps_what_it_needs() -> None:
    """Its team, the team above, their tiers; another team becomes the default, a default tier that is lost goes."""
    above: dict[Key, Values] = {("team", "top"): {"QOS": "old"}, ("tier", "old"): {}, ("tier", "unused"): {}}
    gone: dict[Key, Values] = {("team", "sub"): {"Parent": "top"}, ("member", "sub", "bob", ""): {}}
    now = ClusterState(cluster="alpha", objects={**OBJECTS, **above, **gone, ("lead", "sub", "ann"): {}})
    then = ClusterState(cluster="alpha", objects={key: OBJECTS[key] for key in [*OBJECTS][:4]})
    kept = keep_used(now, then, {("member", "sub", "bob"): ["1", "1", "2"]})
    assert kept.for_jobs == ["bob in team sub stays for now: unfinished jobs 1, 2"]
    del above["tier", "unused"]
    assert kept.state.objects == {**then.objects, **above, **gone, ("user", "bob"): {"DefaultAccount": "sub"}}
    now.objects["member", "lab", "bob", ""] = {"DefaultQOS": "old", "QOS": "+old"}
    then.objects["team", "root"] = {"QOS": "normal", "DefaultQOS": "normal"}
    now.objects["member", "lab", "bob", ""] = {"QOS": "old"}
    assert keep_used(now, then, {("member", "lab", "bob"): ["1"]}).state.objects["member", "lab", "bob", ""] == {}


def test_tier_of_jobs_and_of_another_cluster_stays() -> None:
    """The former for now, with its jobs of any cluster; the latter until that cluster does without."""
    tiers: dict[Key, Values] = {("tier", name): {} for name in ("a", "b", "c")}
    now = ClusterState(cluster="alpha", objects=tiers, others={"beta": frozenset({("tier", "b")})})
    kept = keep_used(now, ClusterState(cluster="alpha", objects={}), {("tier", "a"): ["7"]})
    assert sorted(kept.state.objects) == [("tier", "a"), ("tier", "b")]
    assert (kept.for_jobs, kept.for_clusters) == (
        ["tier a stays for now: unfinished jobs 7"],
        ["tier b stays: in use on beta"],
    )


def test_what_alone_stays_for_jobs_is_noted(pit: Pit, slurms: dict[str, Sacctmgr], jobs: list[str]) -> None:
    """By a run that changes nothing else; the next takes it, also where its policy does not name it any more."""
    slurms["a"].objects |= {("tier", "urgent"): {}, ANN: {"QOS": "normal,urgent"}}
    jobs.append("lab|ann|urgent|7\n")
    assert pit("run", "teams.lab.members.ann.tiers = ['normal']\n", "--site", "a") == (75, [])
    jobs.clear()
    assert pit("run", "teams.lab.max_jobs = 5\n", "--site", "a")[0] == 0
    assert slurms["a"].objects[ANN] == {"QOS": "normal"}
