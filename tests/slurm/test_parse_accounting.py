"""Accounting, associations and QOS from recorded answers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import ClusterError
from pitools.slurm import parse_accounting
from pitools.slurm.parse_accounting import ACCOUNTING_FORMAT
from pitools.slurm.records import Association, Qos

Recorded = Callable[[str], str]


def test_recorded_accounting(recorded: Recorded) -> None:
    """All 12 jobs of each version; the failed, the killed, a task and a pending one in detail."""
    jobs = {job.job_id: job for job in parse_accounting.parse_sacct(recorded("sacct_portable.txt"), zone=UTC)}
    assert list(jobs) == ["1", "2", "3", "4", "5", "7", "11+0", "11+1", "6_0", "6_1", "6_2", "19"]
    assert (jobs["1"].state, jobs["1"].exit_code, jobs["1"].signal) == ("FAILED", 3, 0)
    assert (jobs["3"].state, jobs["3"].exit_code, jobs["3"].signal, jobs["3"].time_limit_s) == ("FAILED", 0, 9, 60)
    assert (jobs["6_2"].raw_id, jobs["6_2"].node_list, jobs["6_2"].end) == ("15", "a02", "")
    assert jobs["4"].alloc_tres == {
        "billing": "64",
        "cpu": "64",
        "gres/gpu:h100": "32",
        "gres/gpu": "32",
        "mem": "6400M",
        "node": "4",
    }
    assert (jobs["19"].start, jobs["19"].node_list, jobs["19"].nodes, jobs["19"].alloc_tres) == ("", "", 6, {})
    assert jobs["2"].start.startswith("2026-11-21T01:2")
    assert all(job.restarts is None for job in jobs.values())


def test_recorded_accounting_with_a_later_column(repo: object, recorded: Recorded, version: str) -> None:
    """24.11 added Restarts, in the middle: it is read where it is, and the rest is as without it."""
    text = recorded("sacct.txt")
    if version != "25.05":
        assert text == ""
        with pytest.raises(ClusterError, match="column JobID"):
            parse_accounting.parse_sacct(text)
        return
    jobs = parse_accounting.parse_sacct(text, zone=UTC)
    assert {job.restarts for job in jobs} == {0}
    plain = parse_accounting.parse_sacct(recorded("sacct_portable.txt"), zone=UTC)
    assert [(job.job_id, job.state, job.submit) for job in jobs] == [(j.job_id, j.state, j.submit) for j in plain]


def test_a_missing_column_is_named(recorded: Recorded) -> None:
    """A header without what we need is an error that names the columns."""
    with pytest.raises(ClusterError, match="JobIDRaw, JobName, User"):
        parse_accounting.parse_sacct(recorded("sacct_gone.txt"))


@pytest.mark.parametrize("spoil", [lambda text: text[:-5], lambda text: text.replace("|FAILED|3:0|", "|FAILED|")])
def test_half_a_row_is_refused(recorded: Recorded, spoil: Callable[[str], str]) -> None:
    """A row that is cut short, or lacks a value, is an error and not a shifted record."""
    with pytest.raises(ClusterError, match="the output of sacct"):
        parse_accounting.parse_sacct(spoil(recorded("sacct_portable.txt")))


@given(st.text(), st.text())
def test_any_name_and_comment_come_back(name: str, comment: str) -> None:
    """Whatever a user wrote, it is one job; who cancelled it is told apart from its state."""
    row = dict.fromkeys(ACCOUNTING_FORMAT, "")
    row |= {"JobID": "7", "JobIDRaw": "7", "State": "CANCELLED by 1001", "ExitCode": "0:15", "ElapsedRaw": "5"}
    row |= {"JobName": name, "Comment": comment, "TimelimitRaw": "UNLIMITED"}
    text = "|7f3a9c|".join(ACCOUNTING_FORMAT) + "\n" + "|7f3a9c|".join(row.values()) + "\n"
    if text.count("|7f3a9c|") != 2 * (len(ACCOUNTING_FORMAT) - 1):
        return
    (job,) = parse_accounting.parse_sacct(text, "|7f3a9c|")
    assert (job.name, job.comment) == (name, comment)
    assert (job.state, job.cancelled_by_uid, job.signal, job.time_limit_s) == ("CANCELLED", 1001, 15, None)


def test_recorded_associations(recorded: Recorded) -> None:
    """The six associations of each version."""
    associations = parse_accounting.parse_associations(recorded("assoc.txt"))
    assert len(associations) == 6
    assert associations[-1] == Association(cluster="gamma", account="lab", user="root", qos=("high", "low", "normal"))


def test_recorded_qos(recorded: Recorded) -> None:
    """The three QOS of each version, the preempting one exactly."""
    normal, low, high = parse_accounting.parse_qos(recorded("qos.txt"))
    assert (normal.qos, low.qos) == ("normal", "low")
    assert high == Qos(
        qos="high",
        priority=100,
        preempt=("low",),
        grp_tres={"gres/gpu": "32"},
        max_wall_s=172800,
    )


def test_recorded_limits(repo: Path) -> None:
    """Every kind of limit that a policy of a real cluster had, of accounts, of users (with those above) and of QOS."""
    replay = repo / "tests/replay/slurm-22.05"
    rows = parse_accounting.parse_associations((replay / "assoc_limits.txt").read_text())
    user = next(row for row in rows if (row.account, row.user) == ("s5x05l", "www-data"))
    assert (user.qos, user.default_qos, user.grp_wall_s) == (("s5x05qa", "s5x05qb"), "s5x05qb", 7200)
    assert (user.max_tres, user.max_tres_mins) == ({"cpu": "64", "node": "1"}, {"cpu": "16000"})
    account = next(row for row in rows if (row.account, row.user) == ("s5x05m", ""))
    assert (account.parent, account.grp_tres_run_mins) == ("s5x05r", {"cpu": "7680", "gres/gpu": "480"})
    qos = {row.qos: row for row in parse_accounting.parse_qos((replay / "qos_limits.txt").read_text())}
    assert qos["s5x05qa"].grp_wall_s == 7200
    assert (qos["s5x05qa"].min_tres, qos["s5x05qa"].max_jobs_per_user) == ({"cpu": "8", "gres/gpu": "4"}, 5)
    assert qos["s5x05qa"].max_tres_per_account == {"gres/gpu": "8", "node": "4"}
    assert (qos["s5x05qb"].max_jobs_per_user, qos["s5x05qp"].max_tres_mins["node"]) == (3, "960")


def test_sacctmgr_rows_may_grow_but_not_shrink(recorded: Recorded) -> None:
    """More values than we asked for are left out; fewer are an error that shows the line."""
    assert parse_accounting.parse_qos(recorded("qos.txt").replace("\n", "|more\n")) == parse_accounting.parse_qos(
        recorded("qos.txt")
    )
    with pytest.raises(ClusterError, match=r"2 values \(expected 8\)") as caught:
        parse_accounting.parse_qos("normal|0\n")
    assert caught.value.where == "line: 'normal|0'"


@pytest.mark.parametrize("text", ["normal|x||||||1\n", "normal|0||soon||||1\n"])
def test_values_of_the_wrong_kind_are_refused(text: str) -> None:
    """A word where a number or a duration belongs is an error."""
    with pytest.raises(ClusterError, match="cannot parse"):
        parse_accounting.parse_qos(text)
