"""Shares and fair share that real sshares printed, parsed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pitools.core.errors import ClusterError
from pitools.slurm.parse_shares import FairShare, parse_shares


def read(repo: Path, name: str) -> dict[tuple[str, str], FairShare]:
    rows = parse_shares((repo / "tests/replay" / name).read_text())
    return {(row.account, row.user): row for row in rows}


@pytest.mark.parametrize("version", ["22.05", "23.11", "25.05"])
def test_each_version(repo: Path, version: str) -> None:
    """Accounts and users with their shares, below the account above; an unused level has no quotient."""
    rows = read(repo, f"slurm-{version}/sshare.txt")
    assert list(rows) == [
        ("root", ""),
        ("root", "root"),
        ("infra", ""),
        ("infra", "root"),
        ("lab", ""),
        ("lab", "root"),
    ]
    assert [row.parent for row in rows.values()] == ["", "root", "root", "infra", "root", "lab"]
    assert (rows["lab", ""].shares, rows["root", ""].shares, rows["lab", ""].level_fs) == (1, None, None)
    assert rows["lab", "root"].fair_share == 1.0


def test_budgets_and_deeper_accounts(repo: Path) -> None:
    """Limits of minutes and what is used of them; an account below another, and the next one above again."""
    rows = read(repo, "slurm-22.05/sshare_o.txt")
    assert rows["vision", ""].parent == "infra"
    assert rows["lab", ""].parent == "root"
    assert rows["vision", "bob"].parent == "vision"
    assert rows["vision", ""].grp_tres_mins == {"gres/gpu": "6000"}
    assert rows["infra", ""].usage > 0
    assert rows["infra", ""].tres_mins["cpu"] == "0"


def test_each_account_is_below_the_last_of_less_depth() -> None:
    """Also after a deeper one of another branch."""
    lines = ["root", " infra", "  vision", "   eyes", " lab", "  robots", "   arms", "other"]
    text = "".join(f"{line}||1|0\n" for line in lines)
    rows = parse_shares(f"Account|User|RawShares|RawUsage\n{text}")
    assert [row.parent for row in rows] == ["", "root", "infra", "vision", "root", "lab", "robots", ""]


def test_what_sshare_does_not_print() -> None:
    """A user may share what the account has; an unknown format is refused."""
    (row,) = parse_shares("Account|User|RawShares|RawUsage\nlab|ann|parent|7\n")
    assert (row.shares, row.usage, row.fair_share) == (None, 7.0, None)
    for text in ("", "Account|User\n", "Account|User|RawShares|RawUsage\nlab|ann|many|7\n"):
        with pytest.raises(ClusterError):
            parse_shares(text)
