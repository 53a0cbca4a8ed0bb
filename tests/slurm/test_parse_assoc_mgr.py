"""What slurmctld counts against limits, from a recorded answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from pitools.core.errors import ClusterError
from pitools.slurm.parse_assoc_mgr import parse_assoc_mgr


@pytest.fixture
def answer(repo: Path) -> str:
    """The answer of a cluster with jobs of two users in one partition."""
    return (repo / "tests/replay/slurm-22.05/assoc_mgr.txt").read_text()


def test_use_of_associations_and_qos(answer: str) -> None:
    """An association by account, user and partition; a QOS as a whole, and by account and user, who is a uid there."""
    rows = {(row.qos, row.account, row.user, row.partition): row for row in parse_assoc_mgr(answer)}
    whole = rows["s5x18qb", "", "", ""]
    assert (whole.jobs, whole.submitted) == (5, 5)
    assert whole.tres == {"cpu": 23, "mem": 23000, "node": 4, "billing": 23, "gres/gpu": 4}
    assert whole.tres_run_mins["gres/gpu"] == 240
    user = rows["s5x18qb", "", "www-data", ""]
    assert (user.jobs, user.submitted, user.tres["mem"]) == (3, 3, 16000)
    assert rows["s5x18qb", "s5x18l", "", ""].tres["cpu"] == 16
    account, above = rows["", "s5x18l", "", ""], rows["", "s5x18r", "", ""]
    assert (account.jobs, above.jobs) == (4, 7)
    assert rows["", "s5x18l", "news", ""].jobs == 4
    assert rows["", "s5x18r", "", ""].wall_s == 0


def test_an_empty_answer_is_no_error_but_another_text_is(answer: str) -> None:
    """No records give no rows; a text that does not begin like Slurm's is refused."""
    assert parse_assoc_mgr(answer.splitlines()[0] + "\n\nNo associations currently cached in Slurm.\n") == []
    with pytest.raises(ClusterError):
        parse_assoc_mgr("slurm_load_assoc_mgr_info error: Access/permission denied")


def test_an_answer_cut_short_gives_no_other_numbers(answer: str) -> None:
    """Of an answer cut at any line, each row is that of the whole answer or lacks numbers."""
    whole = {(row.qos, row.account, row.user): row for row in parse_assoc_mgr(answer)}
    lines = answer.splitlines(keepends=True)
    for end in range(1, len(lines), 7):
        for row in parse_assoc_mgr("".join(lines[:end])):
            assert row.jobs in (0, whole[row.qos, row.account, row.user].jobs)
