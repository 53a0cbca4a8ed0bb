"""What teams used against their shares, over sites and months."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.core.subprocesses import Completed
from pitools.monitor.usage.report import UsageRow
from pitools.slurm.parse_shares import FairShare
from pitools.slurm.transport import Transport
from pitools.tenancy.report import SiteShares, TeamRow, read_shares, report_rows

WINDOW = ("2026-11-01T00:00:00.000Z", "2026-12-01T00:00:00.000Z")
_VALUES: dict[str, Any] = {
    **dict.fromkeys(("since", "until", "resource", "currency"), ""),
    **dict.fromkeys(("jobs", "starts", "gpu_hours", "cpu_hours", "node_hours", "useful_hours", "efficiency_known"), 0),
    **dict.fromkeys(("cost", "cost_per_hour", "cost_per_useful_hour", "efficiency", "wait_p50_s", "wait_p95_s")),
    "waste_hours": {},
}
SHARES = (
    FairShare(account="root"),
    FairShare(
        account="dept", parent="root", shares=3, grp_tres_mins={"gres/gpu": "6000"}, tres_mins={"gres/gpu": "600"}
    ),
    FairShare(account="vision", parent="dept", shares=1, level_fs=1.5),
    FairShare(account="vision", user="ann", parent="vision", shares=1, fair_share=0.4),
    FairShare(account="vision", user="bob", parent="vision"),
    FairShare(account="speech", parent="dept", shares=1),
    FairShare(account="robots", parent="root", shares=1),
)
FACTORS = {"urgent": 2.0, "scavenger": 0.0}


def use(team: str, hours: float, site: str = "alpha", user: str = "", qos: str = "", **values: Any) -> UsageRow:
    values = {**_VALUES, "gpu_hours": hours, "jobs": 1, **values}
    return UsageRow(by="account,site,user,qos", group=f"{team},{site},{user},{qos}", **values)


def report(
    details: list[UsageRow], *by: str, granted: Mapping[str, SiteShares] | None = None, **options: Any
) -> list[TeamRow]:
    """The report of uses by site, team, user and QOS, grouped as the store does."""
    groups: dict[str, UsageRow] = {}
    keys = ["account", *(key for key in ("site", "user") if key in by)]
    for one in details:
        names = dict(zip(one.by.split(","), one.group.split(","), strict=True))
        group = ",".join(names[key] for key in keys)
        before = groups.get(group, UsageRow(by=",".join(keys), group=group, **_VALUES))
        jobs, gpu_hours = before.jobs + one.jobs, before.gpu_hours + one.gpu_hours
        groups[group] = msgspec.structs.replace(before, jobs=jobs, gpu_hours=gpu_hours)
    granted = granted or {"alpha": SiteShares(SHARES, FACTORS, has_gpus=True)}
    options = {"is_current": True, **options}
    return report_rows(WINDOW, list(groups.values()), details, granted, by=by, **options)


DETAILS = [
    use("vision", 30.0, user="ann", qos="urgent"),
    use("vision", 10.0, user="bob", qos="normal"),
    use("robots", 60.0, user="eve", qos="scavenger"),
]


def test_use_against_share_with_the_teams_below() -> None:
    """Shares multiply down the tree; use counts the teams below, hours and charge only a team's own jobs."""
    rows = {row.team: row for row in report(DETAILS)}
    assert {team: (row.share, row.use) for team, row in rows.items()} == {
        "robots": (0.25, 0.6),
        "dept": (0.75, 0.4),
        "vision": (0.375, 0.4),
        "speech": (0.375, 0.0),
    }
    assert (rows["vision"].gpu_hours, rows["vision"].charged_gpu_hours) == (40.0, 70.0)
    assert (rows["dept"].gpu_hours, rows["dept"].charged_gpu_hours, rows["robots"].charged_gpu_hours) == (0.0, 0.0, 0.0)
    assert (rows["dept"].budget_hours, rows["dept"].budget_left_hours) == (100.0, 90.0)
    assert rows["vision"].level_fs == 1.5


def test_what_is_below_a_team_that_shares_as_a_parent_are_siblings_of_it() -> None:
    """As fair share counts them: lab and sub have no shares of their own, and divide none."""
    teams = (("lab", "root", None), ("vla", "lab", 3), ("sub", "lab", None), ("speech", "sub", 1), ("zoo", "root", 4))
    rows = [FairShare(account=name, parent=parent, shares=shares) for name, parent, shares in teams]
    granted = {"alpha": SiteShares([FairShare(account="root"), *rows], FACTORS, has_gpus=True)}
    shares = {row.team: row.share for row in report([], granted=granted)}
    assert shares == {"zoo": 0.5, "vla": 0.375, "speech": 0.125, "lab": None, "sub": None}


def test_users_of_teams() -> None:
    """A user with hours; one whose share is the account's has none of its own."""
    rows = {(row.team, row.user): row for row in report(DETAILS, "user")}
    assert list(rows) == [("robots", "eve"), ("vision", "ann"), ("vision", "bob")]
    ann, bob = rows["vision", "ann"], rows["vision", "bob"]
    assert (ann.share, ann.use, ann.charged_gpu_hours, ann.fair_share) == (0.375, 0.3, 60.0, 0.4)
    assert (bob.share, bob.use) == (None, 0.1)


def test_several_sites_together_and_apart() -> None:
    """Together a share weighs by what was used at its site; what holds at one site alone is left out."""
    beta = SiteShares(
        (FairShare(account="root"), FairShare(account="vision", parent="root", shares=1)), {}, has_gpus=True
    )
    granted = {"alpha": SiteShares(SHARES, FACTORS, has_gpus=True), "beta": beta}
    details = [*DETAILS, use("vision", 300.0, site="beta", user="ann", qos="normal")]
    (together,) = (row for row in report(details, granted=granted) if row.team == "vision")
    assert (together.site, together.share, together.use, together.level_fs) == ("", (0.375 + 3.0) / 4, 0.85, None)
    assert [row.share for row in report([], granted=granted) if row.team == "vision"] == [(0.375 + 1.0) / 2]
    apart = [(row.site, row.use) for row in report(details, "site", granted=granted) if row.team == "vision"]
    assert apart == [("alpha", 0.4), ("beta", 1.0)]


CPU_SITE = SiteShares(
    (
        FairShare(account="root"),
        FairShare(account="vision", parent="root", grp_tres_mins={"cpu": "600"}, tres_mins={"cpu": "60"}),
    ),
    FACTORS,
    has_gpus=False,
)
CPU_JOB = use("vision", 0, site="beta", user="ann", qos="urgent", cpu_hours=500.0)


def test_gpu_hours_and_cpu_hours_are_never_added() -> None:
    """What a site counts is Slurm's, not what ran: a first GPU job changes no charge; a site of CPUs no use of GPUs."""
    for more in ([], [use("robots", 1.0, qos="normal")]):
        jobs = [*more, use("vision", 0, user="ann", qos="urgent", cpu_hours=500.0)]
        rows = {row.team: row for row in report(jobs)}
        assert (rows["vision"].charged_cpu_hours, rows["vision"].charged_gpu_hours) == (1000.0, 0.0)
        assert (rows["vision"].resource, rows["vision"].use) == ("gpu", 0.0 if more else None)
    both = {"alpha": SiteShares(SHARES, FACTORS, has_gpus=True), "beta": CPU_SITE}
    rows = {row.team: row for row in report([*DETAILS, CPU_JOB], granted=both)}
    assert (rows["vision"].use, rows["robots"].use, rows["vision"].share) == (0.4, 0.6, 0.375)
    assert (rows["vision"].charged_cpu_hours, rows["vision"].charged_gpu_hours) == (1000.0, 70.0)


def test_a_site_of_cpus_and_a_past_period_has_no_budget() -> None:
    """Shares and budgets are of CPUs there; what holds now is left out of what is past."""
    (row,) = report([CPU_JOB], granted={"beta": CPU_SITE})
    assert (row.resource, row.use, row.budget_hours, row.budget_left_hours) == ("cpu", 1.0, 10.0, 9.0)
    (row,) = report([CPU_JOB], granted={"beta": CPU_SITE}, is_current=False)
    assert (row.use, row.charged_cpu_hours, row.budget_hours) == (1.0, 1000.0, None)
    assert {row.level_fs for row in report(DETAILS, is_current=False)} == {None}


def test_an_account_that_was_moved_has_its_new_parent(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sshare still lists it at its old place; the associations tell."""
    answers = [
        "Account|User|RawShares|RawUsage\nroot|||0\n lab||1|0\n  vla||1|0\n robotics||3|0\n",
        "normal|0||00:00:00||||\n",
        "".join(f"c|{name}|||||||{above}\n" for name, above in (("lab", "root"), ("vla", "robotics")))
        + "other|vla|||||||lab\n",
        "ClusterName = c\nSLURM_VERSION = 22.05.8\n",
        (repo / "tests/replay/slurm-22.05/partitions_o.txt").read_text().replace("gres/gpu", "none", 2),
    ]
    monkeypatch.setattr(
        "pitools.tenancy.report.run_queries", lambda *_: [Completed((), 0, text, "") for text in answers]
    )
    granted = read_shares(Transport())
    assert granted.has_gpus
    shares = {row.team: row.share for row in report([], granted={"alpha": granted})}
    assert shares == {"lab": 0.25, "robotics": 0.75, "vla": 0.75}


_teams = st.sampled_from(["vision", "speech", "dept", "robots", "gone"])
_uses = st.builds(
    use,
    _teams,
    st.floats(0, 1e6),
    site=st.sampled_from(["alpha", "beta"]),
    user=st.sampled_from(["ann", "bob"]),
    qos=st.sampled_from(["urgent", "normal"]),
)


@given(st.lists(_uses, max_size=20), st.lists(st.sampled_from(["user", "site"]), unique=True))
@settings(max_examples=50, deadline=None)
def test_no_hour_is_lost_or_counted_twice(details: list[UsageRow], by: list[str]) -> None:
    """However it is grouped, the rows add up to all hours and all charge."""
    granted = dict.fromkeys(("alpha", "beta"), SiteShares(SHARES, FACTORS, has_gpus=True))
    rows = report(details, *by, granted=granted)
    assert sum(row.gpu_hours for row in rows) == pytest.approx(sum(one.gpu_hours for one in details))
    charge = sum(one.gpu_hours * FACTORS.get(one.group.split(",")[3], 1.0) for one in details)
    assert sum(row.charged_gpu_hours for row in rows) == pytest.approx(charge)
    assert all(row.use is None or -1e-9 <= row.use <= 1 + 1e-9 for row in rows)


def test_budget_of_a_user_that_is_overdrawn() -> None:
    """It is a row before the user has used anything, with nothing left; other users without use have none."""
    hours = {"grp_tres_mins": {"gres/gpu": "60"}, "tres_mins": {"gres/gpu": "90"}}
    bob = FairShare(account="vision", user="bob", parent="vision", **hours)
    granted = {"alpha": SiteShares([*SHARES, bob], FACTORS, has_gpus=True)}
    (row,) = report([], "user", granted=granted)
    assert (row.user, row.budget_hours, row.budget_left_hours) == ("bob", 1.0, 0.0)
